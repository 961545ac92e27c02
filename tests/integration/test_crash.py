"""Killed at random times: no step and at most a second of samples is lost."""

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
from itertools import pairwise
from pathlib import Path

from conftest import STEPSCOPE
from stepscope.opened_run import OpenedRun, open_run
from stepscope.report.run.derive import derive
from stepscope.runs.reader import latest_run

KILLS = 30
AT_ONCE = 6
SECONDS_LOST = 1.0
LATE_S = 0.25
"""With several runs on few cores, the test and the monitor may wait for a core. The longest wait
of the monitor is the longest gap between its samples."""

STEPS = """
import os, sys, time, stepscope
counted = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
step = 0
while time.monotonic() < float(sys.argv[2]):
    stepscope.mark("step", step)
    os.write(counted, b".")
    step += 1
    time.sleep(0.002)
"""


@dataclass(frozen=True)
class Killed:
    victim: str
    run: OpenedRun
    steps_counted: int
    killed_ns: int


def kill_one(number: int, folder: Path, script: str) -> Killed:
    victim = ("training", "stepscope", "both")[number % 3]
    chance = random.Random(number)
    runs, counted = folder / f"runs{number}", folder / f"counted{number}"
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
            str(counted),
            str(deadline),
        ],
        stdin=subprocess.DEVNULL,
    )
    while not counted.exists():
        time.sleep(0.01)
    time.sleep(chance.uniform(0, 2.5))
    training = json.loads((latest_run(runs) / "run.json").read_text())["root"]["pid"]
    if victim != "training":
        process.kill()
    killed_ns = time.monotonic_ns()
    if victim == "stepscope":
        time.sleep(
            chance.uniform(0, 0.3)
        )  # the training continues, and its steps are still recorded
    os.kill(training, signal.SIGKILL)
    process.wait(30)
    time.sleep(0.05)
    return Killed(victim, open_run(latest_run(runs)), counted.stat().st_size, killed_ns)


def test_killed_at_random_times(tmp_path: Path) -> None:
    script = tmp_path / "steps.py"
    script.write_text(STEPS)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        killed = list(pool.map(lambda n: kill_one(n, tmp_path, str(script)), range(KILLS)))
    for each in killed:
        check_steps(each)
        check_samples(each)
        check_outcome(each)
        derive(each.run)
        assert each.run.exit_status.outcome.value in each.run.paths.report_html.read_text()


def check_steps(each: Killed) -> None:
    # One more step may have been marked but not counted when the process was killed.
    assert each.run.summary().steps - each.steps_counted in (0, 1), each.victim


def check_samples(each: Killed) -> None:
    times = each.run.samples("process", ["t_ns"]).column("t_ns").to_pylist()
    times = sorted({each.run.begin_ns, *times})
    late_s = LATE_S + max((b - a for a, b in pairwise(times)), default=0) / 1e9
    assert (each.killed_ns - times[-1]) / 1e9 <= SECONDS_LOST + late_s, each.victim


def check_outcome(each: Killed) -> None:
    exit_status = each.run.exit_status
    if each.victim == "training":
        assert (exit_status.outcome, exit_status.signal) == ("crashed", "SIGKILL")
        assert "another process probably sent the signal" in exit_status.reason
    else:
        assert exit_status.outcome == "lost"
        assert "monitor was killed" in exit_status.reason


def test_run_can_be_read_while_it_is_written(tmp_path: Path) -> None:
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
            outcomes.append(run.exit_status.outcome.value)
    process.communicate(timeout=60)
    assert rows == sorted(rows) and rows[-1] > rows[0]
    assert set(outcomes) == {"running"}
    assert open_run(latest_run(tmp_path)).exit_status.outcome == "ok"
