"""A study that is killed at random moments has the same results as one that is not."""

from __future__ import annotations

import csv
import os
import random
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path

import pytest

from stepscope.runs.facts import exit_status_of, read_facts
from stepscope.trials.processes import trial_processes
from studies import STUDY, design, planted_environment, study

DESIGN = """
factors:
  batch_size: [16, 32, 64, 128]
  workers: [0, 1, 2]
  prefetch: [2, 4]
  momentum: [0.0, 0.9]
skip: workers == 0 and prefetch > 2 and momentum > 0.5 and batch_size < 128
repeats: 2
blocks: {size: 10, reruns: 0}
oom: {skip: false}
choose: {random: POINTS}
"""
FORMULA = (
    "1000 * (1 + 0.2 * log(batch_size / 16)) * (1 + 0.3 * min(workers, 1)) * exp(0.03 * noise)"
)
OOM = "batch_size == 128 and workers == 2"
MEMORY = "1e9 + 1e7 * batch_size"
SAME_TABLES = (
    "configurations.csv",
    "effects.csv",
    "interactions.csv",
    "sensitivity.csv",
    "scaling.csv",
    "pareto.csv",
    "skipped.csv",
)
MACHINE_DEPENDENT = ("host_memory", "cpu", "data_wait")
"""The monitor measures these on the real process, so they differ from run to run."""


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    planted = {"formula": FORMULA, "oom": OOM, "memory": MEMORY, "real_s": 0.03}
    return planted_environment(tmp_path, **planted, diary=tmp_path / "diary")


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("kills", "points"), [(8, 15), pytest.param(20, 30, marks=pytest.mark.long)]
)
def test_killed_at_random_moments(
    tmp_path: Path, env: dict[str, str], kills: int, points: int
) -> None:
    text = DESIGN.replace("POINTS", str(points))
    uninterrupted = run_to_the_end(tmp_path / "uninterrupted", text, env)
    diary = tmp_path / "diary"
    diary.unlink()
    chaos = tmp_path / "chaos"
    chaos.mkdir()
    file = design(chaos, text)
    generator = random.Random(6)
    for kill in range(kills):
        # Some kills hit the start, most of them a random moment during or between trials.
        started = 0 if kill % 5 == 0 else started_in(diary) + generator.randint(1, 3)
        run_and_kill(file, chaos, env, diary, started, generator.uniform(0.0, 0.4))
    done = study("run", file, "--out", chaos, env=env)
    assert done.returncode == 0, done.stderr

    folder = chaos / "planted"
    answers = Counter(
        (path.parent.name, path.name.partition("a")[0])
        for path, outcome in outcomes(folder)
        if outcome in ("ok", "gpu_oom")
    )
    trials = {which: count for which, count in answers.items() if which[1].startswith("r")}
    assert len(trials) == 2 * points
    assert set(trials.values()) == {1}, "a trial has more than one result"
    assert sum(outcome == "lost" for _, outcome in outcomes(folder)) > kills / 4
    assert no_leftovers(), "a process of a trial is left"
    for name in SAME_TABLES:
        assert table(folder, name) == table(uninterrupted, name), name


def started_in(diary: Path) -> int:
    return diary.read_text().count(" begin ") if diary.exists() else 0


def run_and_kill(
    file: Path, out: Path, env: dict[str, str], diary: Path, started: int, then_s: float
) -> None:
    """Kill a run of the study `then_s` seconds after this number of trials has started."""
    runner = subprocess.Popen(
        [*STUDY, "run", str(file), "--out", str(out)],
        env=env,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    while started_in(diary) < started and runner.poll() is None:
        time.sleep(0.005)
    time.sleep(then_s)
    assert runner.poll() is None, runner.stderr and runner.stderr.read()
    os.kill(runner.pid, signal.SIGKILL)
    runner.wait()


def run_to_the_end(folder: Path, text: str, env: dict[str, str]) -> Path:
    folder.mkdir()
    done = study("run", design(folder, text), "--out", folder, env=env)
    assert done.returncode == 0, done.stderr
    return folder / "planted"


def outcomes(folder: Path) -> list[tuple[Path, str]]:
    found = []
    for facts in sorted(folder.glob("*/*/run.json")):
        found.append(
            (facts.parent, exit_status_of(read_facts(facts.parent), facts.parent).outcome.value)
        )
    return found


def no_leftovers() -> bool:
    """Wait for the guard, which ends the leftover processes of a killed runner."""
    until = time.monotonic() + 20
    while trial_processes.stale_processes() and time.monotonic() < until:
        time.sleep(0.1)
    return not trial_processes.stale_processes()


def table(study_folder: Path, name: str) -> list[dict[str, str]]:
    """Read a table without the values that depend on the machine."""
    with (study_folder / "derived" / name).open(newline="") as file:
        rows = list(csv.DictReader(file))
    return [
        {key: value for key, value in row.items() if not key.startswith(MACHINE_DEPENDENT)}
        for row in rows
        if not str(row.get("response", "")).startswith(MACHINE_DEPENDENT)
    ]
