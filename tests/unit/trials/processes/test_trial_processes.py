"""The processes of a trial are found however they hide, and nobody else is touched."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from runners import DEAF, PYTHON, SLEEPS, dead_runner, hide_from_other_tests
from stepscope.trials.processes import trial_processes

Spawn = Callable[..., "subprocess.Popen[str]"]

FORKS = """
import os, time
def child(hide):
    pid = os.fork()
    if pid == 0:
        hide()
        print(os.getpid(), flush=True)
        time.sleep(60)
        os._exit(0)
def wipe(): os.execve({python!r}, [{python!r}, "-I", "-S", "-c", {show!r}], {{}})
def leave(): os.setsid()
def orphaned():
    if os.fork(): os._exit(0)
    wipe()
child(wipe); child(leave); child(orphaned)
time.sleep(60)
"""
SHOW = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"


def forks() -> str:
    return FORKS.format(python=sys.executable, show=SHOW)


@pytest.fixture
def spawn() -> Iterator[Spawn]:
    """Start a process as a runner does: with a token, and in a session of its own."""
    started: list[subprocess.Popen[str]] = []

    def begin(code: str, token: str = "", session: bool = True) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [*PYTHON, code],
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=session,
            env={**os.environ, trial_processes.VARIABLE: token} if token else None,
        )
        started.append(process)
        return process

    yield begin
    trial_processes.end_all(trial_processes.runner_name(), patience_s=0)
    for process in started:
        process.kill()
        process.wait()


def ready(process: subprocess.Popen[str]) -> subprocess.Popen[str]:
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def lines(process: subprocess.Popen[str], count: int) -> list[int]:
    assert process.stdout is not None
    return [int(process.stdout.readline()) for _ in range(count)]


def test_a_token_names_its_runner() -> None:
    token = trial_processes.new_token()
    assert (
        token.startswith(f"{trial_processes.runner_name()}.")
        and token != trial_processes.new_token()
    )
    assert trial_processes.runner_lives(token) is True
    assert trial_processes.runner_lives(trial_processes.runner_name()) is True
    assert trial_processes.runner_lives(dead_runner()) is False


def test_a_runner_whose_number_was_used_again_is_dead() -> None:
    pid, started, home = trial_processes.runner_name().split(".")
    assert trial_processes.runner_lives(f"{pid}.{int(started) - 1}.{home}.ab") is False


@pytest.mark.parametrize("token", ["", "1", "a.b.c", "1.2.00000000.ab", "-.-.-.-"])
def test_of_others_nothing_is_said(token: str) -> None:
    """Another boot, another container: its numbers mean nothing here."""
    assert trial_processes.runner_lives(token) is None


def test_a_zombie_runs_nothing(spawn: Spawn) -> None:
    process = ready(spawn(SLEEPS))
    found = trial_processes.identify(process.pid)
    assert found is not None and found.name.startswith("python")
    process.kill()
    while trial_processes.identify(process.pid) is not None:
        time.sleep(0.01)
    assert os.path.exists(f"/proc/{process.pid}")  # nobody has waited for it yet
    assert not trial_processes.send(found, signal.SIGTERM)


def test_all_of_a_trial_and_nobody_else_is_found(spawn: Spawn) -> None:
    token, other = trial_processes.new_token(), trial_processes.new_token()
    ready(spawn(SLEEPS))
    ready(spawn(SLEEPS, other))
    root = spawn(forks(), token)
    family = {root.pid, *lines(root, 3)}
    assert {each.pid for each in trial_processes.processes_of(token)} == family
    assert len(trial_processes.processes_of(trial_processes.runner_name())) == 5
    assert trial_processes.processes_of(token[:-1]) == []


def test_a_process_in_our_own_session_does_not_make_us_kin(spawn: Spawn) -> None:
    token = trial_processes.new_token()
    process = ready(spawn(SLEEPS, token, session=False))
    ready(spawn(SLEEPS, session=False))
    assert [each.pid for each in trial_processes.processes_of(token)] == [process.pid]


def test_children_are_found_when_their_parent_is_gone(spawn: Spawn) -> None:
    token = trial_processes.new_token()
    root = spawn(forks(), token)
    children = set(lines(root, 3))
    seen = trial_processes.SeenProcesses()
    seen.add([root.pid])
    root.kill()
    root.wait()
    assert {each.pid for each in trial_processes.processes_of(token, seen)} == children
    assert trial_processes.end_all(token, seen, patience_s=1) == []
    assert [pid for pid in children if trial_processes.identify(pid)] == []


def test_those_known_before_are_found_without_any_tie(spawn: Spawn) -> None:
    process = ready(spawn(SLEEPS))
    seen = trial_processes.SeenProcesses()
    seen.add([process.pid, 2**22 + 1])
    seen.add([process.pid])
    [known] = seen
    assert [each.pid for each in trial_processes.processes_of("1.2.3.4", seen)] == [process.pid]
    assert (
        trial_processes.processes_of("1.2.3.4", [known._replace(started=known.started + 1)]) == []
    )


@pytest.mark.parametrize("kept", [True, False], ids=["by descriptor", "by number"])
def test_a_number_that_was_used_again_is_not_signalled(
    spawn: Spawn, monkeypatch: pytest.MonkeyPatch, kept: bool
) -> None:
    if not kept:
        monkeypatch.delattr(os, "pidfd_open", raising=False)
    process = ready(spawn(SLEEPS))
    now = trial_processes.identify(process.pid)
    assert now is not None
    before = now._replace(started=now.started - 1)
    assert not trial_processes.send(before, signal.SIGKILL)
    assert trial_processes.end_all("1.2.3.4", [before]) == []
    assert process.poll() is None
    assert trial_processes.send(now, signal.SIGKILL)
    assert process.wait(20) == -signal.SIGKILL


def test_all_are_ended_the_deaf_the_stopped_and_the_hidden(spawn: Spawn) -> None:
    token = trial_processes.new_token()
    bystander = ready(spawn(SLEEPS))
    deaf = ready(spawn(DEAF, token))
    stopped = ready(spawn(SLEEPS, token))
    os.kill(stopped.pid, signal.SIGSTOP)
    root = spawn(forks(), token)
    hidden = lines(root, 3)
    assert trial_processes.end_all(token, patience_s=1) == []
    assert deaf.wait(20) == -signal.SIGKILL
    assert stopped.wait(20) == -signal.SIGTERM
    assert root.wait(20) == -signal.SIGTERM
    assert [pid for pid in hidden if trial_processes.identify(pid)] == []
    assert bystander.poll() is None


def test_strays_are_those_of_dead_runners_only(
    spawn: Spawn, monkeypatch: pytest.MonkeyPatch
) -> None:
    hide_from_other_tests(monkeypatch)
    ours = ready(spawn(SLEEPS, trial_processes.new_token()))
    foreign = ready(spawn(SLEEPS, "1.2.00000000.ab"))
    stray = ready(spawn(SLEEPS, f"{dead_runner()}.ab"))
    assert stray.pid in {each.pid for each in trial_processes.strays()}
    found, stay = trial_processes.end_strays()
    assert stray.pid in {each.pid for each in found} and stay == []
    assert stray.wait(20) == -signal.SIGTERM
    assert ours.poll() is None and foreign.poll() is None


def test_ending_nothing_takes_no_time() -> None:
    begun = time.monotonic()
    assert trial_processes.end_all(trial_processes.new_token()) == []
    assert time.monotonic() - begun < 2, "as long as it would wait for one"
