"""A trial leaves nothing behind, however its processes hide and whatever part of it is killed."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from attack_trials import NO_GROUPS, Trials, children, guards, kill_together, marked, until
from runners import exited_runner
from stepscope.opened_run import open_run
from stepscope.sensors import procfs
from stepscope.trials.processes import trial_processes

RARE = ("--interval", "5")
"""Too rare to see the parent of an orphan."""
API = """
import json, os, subprocess, threading, time
import stepscope
from stepscope.sensors import procfs

def start_own():
    while not os.path.exists(os.environ["PLANTED_LEFT"]):
        time.sleep(0.01)
    global own
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    own = subprocess.Popen(["sleep", "300"], start_new_session=True, **quiet)

thread = threading.Thread(target=start_own)
thread.start()
options = {"framework": "made_up.leaves", "data": "random", "interval": 5}
(view,) = stepscope.trial("cnn", out=OUT, **options)
thread.join()
print(json.dumps([own.pid, procfs.children(), view.record.trial.leftovers]))
"""


@pytest.fixture(params=[True, False], ids=["groups", "no groups"])
def trials(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Trials]:
    trials = Trials(tmp_path, has_groups=request.param)
    yield trials
    trials.kill_all()


def nothing_is_left(trials: Trials) -> bool:
    """Whether everything is gone, soon: the guard and the kernel need a moment."""
    return until(lambda: not trials.leftovers(), 20)


def test_orphan_with_an_empty_environment_is_ended(trials: Trials) -> None:
    trials.run(*RARE, leaves="orphan workers shm")
    assert trials.left("orphan") and not trials.leftovers()
    assert trials.records == []
    (run,) = trials.runs.iterdir()
    assert open_run(run).json["trial"].get("leftovers", []) == []


def test_orphan_of_a_killed_runner_is_ended(trials: Trials) -> None:
    runner = trials.start(leaves="orphan workers", real_s=60)
    assert until(lambda: trials.left("rank") and trials.knows_orphan())
    runner.kill()
    runner.wait()
    assert nothing_is_left(trials), trials.leftovers()


def test_next_trial_cleans_up_after_a_killed_runner_and_guard(trials: Trials) -> None:
    runner = trials.start(leaves="orphan workers shm", real_s=60)
    assert until(lambda: trials.left("shm") and trials.knows_orphan())
    kill_together(runner)
    assert len(trials.records) == 1
    trials.run()
    assert nothing_is_left(trials), trials.leftovers()
    assert trials.records == []


def test_api_ends_only_what_certainly_belongs_to_the_trial(trials: Trials) -> None:
    """Other threads of the program may start processes. Without a cgroup, they look the same."""
    code = f"{'' if trials.has_groups else NO_GROUPS}\n{API.replace('OUT', repr(str(trials.runs)))}"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=trials.environment("orphan"),
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    own, remaining, leftovers = json.loads(done.stdout)
    (orphan,) = map(int, trials.left("orphan"))
    try:
        assert trial_processes.identify(own)
        if trials.has_groups:
            assert remaining == [own] and leftovers == []
            assert trial_processes.identify(orphan) is None
        else:
            assert set(remaining) == {own, orphan} and len(leftovers) == 2
            assert all("(may belong to your program)" in text for text in leftovers)
            assert any(f"PID {orphan}," in text for text in leftovers)
    finally:
        os.kill(own, signal.SIGKILL)


def test_trial_process_exits_if_its_runner_was_killed_before_it_started(tmp_path: Path) -> None:
    environment = {**os.environ, trial_processes.VARIABLE: f"{exited_runner()}.ab.1"}
    command = [sys.executable, "-m", "stepscope.trials.child", str(tmp_path / "spec.json")]
    done = subprocess.run(command, env=environment, capture_output=True, timeout=100)
    # A trial of another test may have ended it.
    assert done.returncode in (-signal.SIGKILL, -signal.SIGTERM), done.stderr


OUTCOMES = {
    "runner": {"lost"},
    "runner and guard": {"lost"},
    "guard": {"ok"},
    "main": {"crashed"},
    "worker": {"ok"},
    "rank": {"ok"},
    "orphan": {"ok"},
}
"""The outcomes besides `ok`, for a trial that ended before."""
REAL_OUTCOMES = {**OUTCOMES, "worker": {"crashed"}, "rank": {"crashed"}}
"""With PyTorch: the training needs its loader workers and ranks."""


def find(part: str, runner: int, trials: Trials) -> list[int]:
    """Return the running processes of a part of a trial."""
    if part == "guard":
        return guards(runner)
    mains = children(runner, "stepscope.trials.child") or children(runner, "torch")
    if part == "main":
        return mains
    if part == "orphan":
        return [pid for pid in map(int, trials.left("orphan")) if procfs.name(pid) == "sleep"]
    processes = [each for each in marked(f"{runner}.") if each.pid not in mains]
    if part == "rank":
        return [p.pid for p in processes if p.name == "rank" or procfs.environ_value(p.pid, "RANK")]
    return [p.pid for p in processes if p.name.startswith("pt_data_worker")]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("framework", "seed", "kills"),
    [
        ("made_up.leaves", 1, 7),
        pytest.param("made_up.leaves", 2, 100, marks=pytest.mark.long),
        pytest.param("torch", 3, 25, marks=pytest.mark.long),
    ],
)
def test_part_that_is_killed_at_a_random_moment(
    tmp_path: Path, framework: str, seed: int, kills: int
) -> None:
    generator = random.Random(seed)
    is_real = framework == "torch"
    options = ["--framework", framework]
    if is_real:
        options += ["--ranks", "2", "--workers", "1", "--steps", "300"]
    outcomes = REAL_OUTCOMES if is_real else OUTCOMES
    parts = [part for part in outcomes if part != "orphan" or not is_real]
    trials, hits = Trials(tmp_path), 0
    try:
        for number in range(kills):
            part = parts[number % len(parts)]
            # Without a group, an orphan is lost if the runner is killed before it has seen it.
            trials.has_groups = part.startswith("runner") or generator.random() < 0.7
            before = set(trials.runs.glob("*"))
            runner = trials.start(*options, leaves="orphan workers shm", real_s=0.4)
            moment_s = generator.uniform(0, 20 if is_real else 1.2)
            hits += kill_at(runner, part, moment_s, trials)
            _, err = runner.communicate(timeout=100)
            for folder in set(trials.runs.glob("*")) - before:
                if not (folder / "run.json").exists():
                    assert part.startswith("runner"), err
                    continue
                outcome = open_run(folder).exit_status.outcome.value
                assert outcome in {"ok", *outcomes[part]}, (part, moment_s, outcome, err)
                assert outcome != "lost" or runner.returncode == -signal.SIGKILL, (part, err)
        assert hits >= 0.7 * kills, "the others ended before"
        trials.has_groups = True
        trials.run()
        assert until(lambda: not trials.leftovers(), 20), trials.leftovers()
        assert trials.records == []
    finally:
        trials.kill_all()


def kill_at(runner: subprocess.Popen[str], part: str, moment_s: float, trials: Trials) -> bool:
    """Kill a part of a trial after some time; if it does not exist then, as soon as it does. Return
    whether it was still running."""
    time.sleep(moment_s)
    if part.startswith("runner"):
        if runner.poll() is not None:
            return False
        runner.kill() if part == "runner" else kill_together(runner)
        return True
    while runner.poll() is None:
        if pids := find(part, runner.pid, trials):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pids[0], signal.SIGKILL)
                return True
        time.sleep(0.005)
    return False
