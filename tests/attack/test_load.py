"""Commands that put a load on the monitor: nothing is lost, and the command is not held up."""

from __future__ import annotations

import re
import subprocess
import sys
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from attack_runs import start_run
from attack_trials import until
from conftest import STEPSCOPE, Finished
from stepscope.opened_run import open_run
from stepscope.records import Outcome

Watch = Callable[..., Finished]
PythonFile = Callable[[str], str]

CHILDREN = """
import os, sys
for _ in range(int(sys.argv[1])):
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
"""
PROCESSES = """
import os, signal, sys, time
children = []
for _ in range(int(sys.argv[1])):
    children.append(os.fork())
    if children[-1] == 0:
        time.sleep(100)
        os._exit(0)
os.read(0, 1)
for child in children:
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
"""
DEPTH = """
import os, sys, time
depth = int(sys.argv[1])
while depth:
    pid = os.fork()
    if pid:
        os.waitpid(pid, 0)
        os._exit(0)
    depth -= 1
end = time.process_time() + 0.5
while time.process_time() < end:
    pass
"""
MARKS = """
import sys, time, stepscope
end, count = time.monotonic() + float(sys.argv[1]), 0
while time.monotonic() < end:
    for _ in range(1000):
        stepscope.mark("step")
    count += 1000
print(count)
"""
OUTPUT = """
import os, sys, zlib
lines = (f"[13:05:{n % 60:02}] step {n} loss={1 / (n + 1):.5f} lr=1e-3\\n" for n in range(9999))
block, sent, checksum = "".join(lines).encode() + b"Epoch 1 done\\n", 0, 0
while sent < int(sys.argv[1]) * 10**6:
    written = os.write(1, block)
    assert written == len(block)
    sent, checksum = sent + written, zlib.crc32(block, checksum)
os.write(2, b"sent %d %d %d\\n" % (sent, checksum, sent // len(block)))
"""


def sizes(short: int, long: int) -> Any:
    """Run a test with a small number, and with a large one in `make test-long`."""
    return pytest.mark.parametrize("size", [short, pytest.param(long, marks=pytest.mark.long)])


def check(done: Finished) -> None:
    assert (done.code, done.run.exit_status.outcome) == (0, Outcome.OK), done.err
    assert "failed" not in done.err and not done.run.facts.problems, done.err


@sizes(200, 2000)
def test_short_children(watch: Watch, python_file: PythonFile, size: int) -> None:
    check(watch(sys.executable, python_file(CHILDREN), str(size)))


@sizes(100, 500)
def test_many_processes(tmp_path: Path, python_file: PythonFile, size: int) -> None:
    """All are found, in a limited time per second: not all at once."""
    started = start_run(tmp_path / "runs", sys.executable, python_file(PROCESSES), str(size))
    started.wait_for_begin()

    def most() -> float:
        counted = started.run.samples("process", ["processes"]).column("processes").to_pylist()
        return max(filter(None, counted), default=0)

    assert until(lambda: most() == size + 1)
    code, _, err = started.finish()
    assert code == 0 and not started.run.facts.problems, err


@sizes(50, 200)
def test_deep_tree(watch: Watch, python_file: PythonFile, size: int) -> None:
    """The process at the bottom uses CPU time, which is counted."""
    done = watch(sys.executable, python_file(DEPTH), str(size))
    check(done)
    assert done.run.summary().core_seconds >= 0.45


@sizes(1, 10)
def test_marks_as_fast_as_possible(watch: Watch, python_file: PythonFile, size: int) -> None:
    done = watch(sys.executable, python_file(MARKS), str(size))
    check(done)
    assert done.run.marks().num_rows == int(done.out)


@sizes(50, 1000)
def test_output(tmp_path: Path, python_file: PythonFile, size: int) -> None:
    """Megabytes that are searched for epochs, forwarded and stored."""
    command = (sys.executable, python_file(OUTPUT), str(size))
    started = start_run(tmp_path / "runs", *command, options=("--epoch-pattern", r"Epoch (\d+)"))
    process, checksum = started.process, 0
    assert process.stdout is not None and process.stderr is not None
    while data := process.stdout.read(1 << 20):
        checksum = zlib.crc32(data, checksum)
    err = process.stderr.read().decode()
    assert process.wait(100) == 0 and not started.run.facts.problems, err
    sent, expected, epochs = map(int, re.findall(r"sent (\d+) (\d+) (\d+)", err)[0])
    assert checksum == expected
    assert (started.folder / "stdout.log").stat().st_size == sent
    assert started.run.marks().num_rows == epochs


@sizes(8, 50)
def test_runs_at_once(tmp_path: Path, size: int) -> None:
    def run(number: int) -> int:
        out = tmp_path / "runs"
        command = [*STEPSCOPE, "run", "-q", "--out", str(out), "--", "sleep", "1"]
        return subprocess.run(command, timeout=300).returncode

    with ThreadPoolExecutor(size) as pool:
        assert set(pool.map(run, range(size))) == {0}
    runs = [open_run(folder) for folder in (tmp_path / "runs").iterdir()]
    assert [run.exit_status.outcome for run in runs] == [Outcome.OK] * size
