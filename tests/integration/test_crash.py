"""Killed at random times: no step and at most a second of samples is lost, and the end is named."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from conftest import STEPSCOPE
from stepscope.opened_run import OpenedRun, open_run
from stepscope.report.run.derive import derive
from stepscope.runs.reader import latest_run

KILLS = 51
AT_ONCE = 6
SECONDS_LOST = 1.0
LATE_S = 0.25
"""With so many at once on few cores, a watcher or we may be waiting for a core."""

STEPS = """
import os, sys, time, stepscope
told = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
step = 0
while time.monotonic() < float(sys.argv[2]):
    stepscope.mark("step", step)
    os.write(told, b".")
    step += 1
    time.sleep(0.002)
"""


@dataclass(frozen=True)
class Killed:
    victim: str
    run: OpenedRun
    steps_told: int
    killed_ns: int


def kill_one(number: int, folder: Path, script: str) -> Killed:
    victim = ("training", "stepscope", "both")[number % 3]
    chance = random.Random(number)
    runs, told = folder / f"runs{number}", folder / f"told{number}"
    deadline = time.monotonic() + 30
    process = subprocess.Popen(
        [
            *STEPSCOPE,
            "run",
            "-q",
            "--out",
            str(runs),
            "--",
            sys.executable,
            script,
            str(told),
            str(deadline),
        ],
        stdin=subprocess.DEVNULL,
    )
    while not told.exists():
        time.sleep(0.01)
    time.sleep(chance.uniform(0, 2.5))
    training = json.loads((latest_run(runs) / "run.json").read_text())["root"]["pid"]
    if victim != "training":
        process.kill()
    killed_ns = time.monotonic_ns()
    if victim == "stepscope":
        time.sleep(chance.uniform(0, 0.3))  # it runs on, and its steps are still recorded
    os.kill(training, signal.SIGKILL)
    process.wait(30)
    time.sleep(0.05)
    return Killed(victim, open_run(latest_run(runs)), told.stat().st_size, killed_ns)


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> list[Killed]:
    folder = tmp_path_factory.mktemp("killed")
    script = folder / "steps.py"
    script.write_text(STEPS)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(lambda n: kill_one(n, folder, str(script)), range(KILLS)))


def test_no_step_is_lost(killed: list[Killed]) -> None:
    for each in killed:
        # The step that was marked but not yet told when it died makes one more.
        assert each.run.summary().steps - each.steps_told in (0, 1), each.victim


def test_at_most_a_second_of_samples_is_lost(killed: list[Killed]) -> None:
    for each in killed:
        times = each.run.samples("process", ["t_ns"]).column("t_ns").to_pylist()
        last = times[-1] if times else each.run.begin_ns
        assert (each.killed_ns - last) / 1e9 <= SECONDS_LOST + LATE_S, each.victim


def test_the_outcome_is_named(killed: list[Killed]) -> None:
    for each in killed:
        ending = each.run.ending
        if each.victim == "training":
            assert (ending.outcome, ending.signal) == ("crashed", "SIGKILL")
            assert "somebody sent it" in ending.reason
        else:
            assert ending.outcome == "lost"
            assert "watcher was killed" in ending.reason


def test_the_report_renders(killed: list[Killed]) -> None:
    for each in killed:
        derive(each.run)
        page = each.run.paths.report_html.read_text()
        assert each.run.ending.outcome.value in page


def test_a_run_can_be_read_while_it_is_written(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [*STEPSCOPE, "run", "-q", "--out", str(tmp_path), "--", "cat"], stdin=subprocess.PIPE
    )
    rows: list[int] = []
    outcomes = []
    end = time.monotonic() + 60
    while time.monotonic() < end and len(set(rows)) < 4:
        time.sleep(0.1)
        if list(tmp_path.glob("*/run.json")):
            run = open_run(latest_run(tmp_path))
            rows.append(run.samples().num_rows)
            outcomes.append(run.ending.outcome.value)
    process.communicate(timeout=60)
    assert rows == sorted(rows) and rows[-1] > rows[0]
    assert set(outcomes) == {"running"}
    assert open_run(latest_run(tmp_path)).ending.outcome == "ok"
