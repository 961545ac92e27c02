"""The measurements of a process tree, compared with those of its processes."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from conftest import Finished

Watch = Callable[..., Finished]
PythonFile = Callable[[str], str]

pytestmark = pytest.mark.quiet

REPORTING = """
import json, os, sys, time
FOLDER = {folder!r}

def burn(seconds):
    while time.process_time() < seconds:
        pass

def report(**more):
    # The last action of a process: os._exit skips everything that would still take CPU time.
    with open(os.path.join(FOLDER, str(os.getpid())), "w") as file:
        json.dump(dict(cpu=time.process_time(), **more), file)

def child(seconds):
    pid = os.fork()
    if pid:
        return pid
    burn(seconds)
    report()
    os._exit(0)
"""


def reported(folder: Path, key: str) -> float:
    return sum(json.loads(path.read_text()).get(key, 0) for path in folder.iterdir())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "reports"
    path.mkdir()
    return path


CPU_TREES = {
    # Most of them start and exit between two samples.
    "short-lived": "for _ in range(60): os.waitpid(child(0.03), 0)",
    "parallel": "[child(0.6) for _ in range(3)]\nfor _ in range(3): os.wait()",
    "grandchildren": """
for _ in range(3):
    if os.fork() == 0:
        for _ in range(5): os.waitpid(child(0.08), 0)
        report()
        os._exit(0)
    os.wait()
""",
    # Orphans: no process of the tree reaps them, the monitor does.
    "double-forked": """
for _ in range(12):
    if os.fork() == 0:
        os.setsid()
        child(0.12)
        report()
        os._exit(0)
    os.wait()
burn(0.4)
""",
    # Their parent reaps them late: they stay zombies for some time.
    "zombies kept": """
for _ in range(4): child(0.2)
time.sleep(0.6)
burn(0.3)
for _ in range(4): os.wait()
""",
}


@pytest.mark.parametrize("tree", CPU_TREES)
def test_cpu_of_a_tree_within_two_percent(
    watch: Watch, python_file: PythonFile, folder: Path, tree: str
) -> None:
    script = python_file(REPORTING.format(folder=str(folder)) + CPU_TREES[tree] + "\nreport()\n")

    done = watch(sys.executable, "-S", script, options=["--wait-tree", "--no-hook"])

    expected = reported(folder, "cpu")
    measured = done.run.summary().core_seconds
    # Processes do not report the time that they spend after their report (writing it, exiting),
    # about a millisecond each.
    unreported = 0.001 * len(list(folder.iterdir())) + 0.01
    assert measured is not None
    assert expected * 0.98 <= measured <= expected * 1.02 + unreported, (expected, measured)


def test_cpu_by_role_adds_up_to_the_tree(
    watch: Watch, python_file: PythonFile, folder: Path
) -> None:
    script = python_file(
        REPORTING.format(folder=str(folder)) + CPU_TREES["parallel"] + "\nreport()\n"
    )

    done = watch(sys.executable, script, options=["--wait-tree"])

    run = done.run
    recorded = run.data
    by_role = {
        role: float((recorded.of("cpu", role).value * recorded.of("cpu", role).window).sum())
        for role in run.summary().roles
    }
    assert sum(by_role.values()) == pytest.approx(run.summary().core_seconds, rel=0.001)
    assert by_role["other"] == pytest.approx(1.8, rel=0.05), "the children are not counted as main"


def test_forked_data_set_is_not_counted_once_per_worker(
    watch: Watch, python_file: PythonFile
) -> None:
    size = 200_000_000
    script = python_file(f"""
import os, time
data = bytearray({size})
for i in range(0, {size}, 4096): data[i] = 1
for _ in range(4):
    if os.fork() == 0:
        total = sum(data[::4096])
        time.sleep(2.2)
        os._exit(0)
for _ in range(4): os.wait()
""")

    summary = watch(sys.executable, script).run.summary()

    by_metric = {s.metric: s.max for s in summary.statistics if s.entity == "tree"}
    assert by_metric["rss"] > 4.5 * size, "the RSS of every process includes the shared pages"
    assert 0.95 * size < by_metric["pss"] < 1.4 * size
    assert 0.95 * size < by_metric["memory"] < 1.6 * size


@pytest.mark.parametrize("where", ["itself", "in short-lived children", "in orphans"])
def test_disk_writes_within_five_percent(
    watch: Watch, python_file: PythonFile, tmp_path: Path, where: str
) -> None:
    pieces, size = 20, 4_000_000
    write = f"""
def write(i):
    with open({str(tmp_path)!r} + f"/piece{{i}}", "wb") as file:
        file.write(b"x" * {size})
"""
    body = {
        "itself": f"for i in range({pieces}): write(i); time.sleep(0.03)",
        "in short-lived children": f"""
for i in range({pieces}):
    if os.fork() == 0: write(i); os._exit(0)
    os.wait()
    time.sleep(0.03)
""",
        "in orphans": f"""
for i in range({pieces}):
    if os.fork() == 0:
        if os.fork() == 0: write(i); os._exit(0)
        os._exit(0)
    os.wait()
    time.sleep(0.03)
""",
    }[where]
    script = python_file("import os, time\n" + write + body)

    done = watch(sys.executable, "-S", script, options=["--wait-tree", "--no-hook"])

    totals = done.run.summary().totals
    assert totals["write"] == pytest.approx(pieces * size, rel=0.05)
    assert totals["write_calls"] == pytest.approx(pieces * size, rel=0.05)


def test_marks_and_phases_are_exact(watch: Watch, python_file: PythonFile) -> None:
    script = python_file("""
import time, stepscope
for epoch in range(4):
    stepscope.mark("epoch", epoch)
    for step in range(25):
        stepscope.mark("step", step)
        time.sleep(0.004)
    with stepscope.phase("eval"):
        time.sleep(0.05)
""")

    run = watch(sys.executable, script).run
    summary = run.summary()

    assert summary.epoch_source == "marks"
    assert [row.index for row in summary.epochs] == [0, 1, 2, 3]
    assert [row.steps for row in summary.epochs] == [25] * 4
    (phase,) = summary.phases
    assert phase[:2] == ("eval", 4)
    assert phase[2] == pytest.approx(0.2, abs=0.05)
    assert len(run.marks()) == 4 + 100 + 8
