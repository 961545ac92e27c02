"""A guard that is killed is replaced, so that a killed runner still leaves nothing behind."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from attack_trials import Trials, guards, until
from stepscope.trials.processes import trial_processes
from stepscope.trials.processes.guard import Guard


@pytest.fixture(params=[True, False], ids=["groups", "no groups"])
def trials(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Trials]:
    trials = Trials(tmp_path, has_groups=request.param)
    yield trials
    trials.kill_all()


def test_killed_guard_is_replaced_and_knows_the_trial(trials: Trials) -> None:
    runner = trials.start(leaves="orphan workers", real_s=60)
    assert until(lambda: trials.left("rank") and trials.knows_orphan())
    before: set[int] = set()
    for _ in range(2):
        assert until(lambda: set(guards(runner.pid)) - before)
        (guard,) = guards(runner.pid)
        before.add(guard)
        os.kill(guard, signal.SIGKILL)
    assert until(lambda: set(guards(runner.pid)) - before)
    runner.kill()
    _, err = runner.communicate()
    assert " ".join(err.split()).count("was killed and has been restarted") == 1
    assert until(lambda: not trials.leftovers(), 20), trials.leftovers()


def test_runner_continues_if_the_guard_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    guard = Guard(trial_processes.runner_name())
    guard.process.kill()
    guard.process.wait()
    messages: list[str] = []

    def refuse(*_: object, **__: object) -> None:
        raise BlockingIOError(errno.EAGAIN, "too many processes")

    with monkeypatch.context() as patched:
        patched.setattr(subprocess, "Popen", refuse)
        guard.keep_running(messages.append)
        guard.add_group("/nowhere")
        assert guard.process.poll() is not None
    assert until(lambda: guard.keep_running(messages.append) or guard.process.poll() is None, 20)
    assert len(messages) == 1 and "cannot be restarted: too many processes" in messages[0]
    guard.dismiss()
    assert guard.process.returncode == 0
