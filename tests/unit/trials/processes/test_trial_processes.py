"""Processes of a trial are found however they hide, and other processes are not affected."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from runners import IGNORES_SIGTERM, PYTHON, SLEEPS, exited_runner, hide_from_other_tests
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
    """Start a process as a runner does: with a token and in its own session."""
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
    assert trial_processes.runner_is_running(token) is True
    assert trial_processes.runner_is_running(trial_processes.runner_name()) is True
    assert trial_processes.runner_is_running(exited_runner()) is False


def test_runner_with_a_reused_pid_is_not_running() -> None:
    pid, started, home = trial_processes.runner_name().split(".")
    assert trial_processes.runner_is_running(f"{pid}.{int(started) - 1}.{home}.ab") is False


@pytest.mark.parametrize("token", ["", "1", "a.b.c", "1.2.00000000.ab", "-.-.-.-"])
def test_runner_of_another_boot_or_namespace_is_unknown(token: str) -> None:
    assert trial_processes.runner_is_running(token) is None


def test_zombie_is_not_running(spawn: Spawn) -> None:
    process = ready(spawn(SLEEPS))
    running = trial_processes.identify(process.pid)
    assert running is not None and running.name.startswith("python")
    process.kill()
    while trial_processes.identify(process.pid) is not None:
        time.sleep(0.01)
    assert os.path.exists(f"/proc/{process.pid}")  # not yet reaped
    assert not trial_processes.send(running, signal.SIGTERM)


def test_only_processes_of_the_trial_are_found(spawn: Spawn) -> None:
    token, other = trial_processes.new_token(), trial_processes.new_token()
    ready(spawn(SLEEPS))
    ready(spawn(SLEEPS, other))
    root = spawn(forks(), token)
    family = {root.pid, *lines(root, 3)}
    assert {each.pid for each in trial_processes.processes_of(token)} == family
    assert len(trial_processes.processes_of(trial_processes.runner_name())) == 5
    assert trial_processes.processes_of(token[:-1]) == []


def test_our_own_session_does_not_belong_to_the_trial(spawn: Spawn) -> None:
    token = trial_processes.new_token()
    process = ready(spawn(SLEEPS, token, session=False))
    ready(spawn(SLEEPS, session=False))
    assert [each.pid for each in trial_processes.processes_of(token)] == [process.pid]


def test_children_of_an_exited_parent_are_found(spawn: Spawn) -> None:
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


def test_known_processes_are_found_without_a_token(spawn: Spawn) -> None:
    process = ready(spawn(SLEEPS))
    seen = trial_processes.SeenProcesses()
    seen.add([process.pid, 2**22 + 1])
    seen.add([process.pid])
    [known] = seen
    assert [each.pid for each in trial_processes.processes_of("1.2.3.4", seen)] == [process.pid]
    assert (
        trial_processes.processes_of("1.2.3.4", [known._replace(started=known.started + 1)]) == []
    )


@pytest.mark.parametrize("has_pidfd", [True, False], ids=["pidfd", "pid"])
def test_reused_pid_is_not_signaled(
    spawn: Spawn, monkeypatch: pytest.MonkeyPatch, has_pidfd: bool
) -> None:
    if not has_pidfd:
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


def test_ignoring_stopped_and_hidden_processes_are_ended(spawn: Spawn) -> None:
    token = trial_processes.new_token()
    bystander = ready(spawn(SLEEPS))
    ignoring = ready(spawn(IGNORES_SIGTERM, token))
    stopped = ready(spawn(SLEEPS, token))
    os.kill(stopped.pid, signal.SIGSTOP)
    root = spawn(forks(), token)
    hidden = lines(root, 3)
    assert trial_processes.end_all(token, patience_s=1) == []
    assert ignoring.wait(20) == -signal.SIGKILL
    assert stopped.wait(20) == -signal.SIGTERM
    assert root.wait(20) == -signal.SIGTERM
    assert [pid for pid in hidden if trial_processes.identify(pid)] == []
    assert bystander.poll() is None


def test_stale_processes_belong_to_exited_runners(
    spawn: Spawn, monkeypatch: pytest.MonkeyPatch
) -> None:
    hide_from_other_tests(monkeypatch)
    own = ready(spawn(SLEEPS, trial_processes.new_token()))
    foreign = ready(spawn(SLEEPS, "1.2.00000000.ab"))
    stale = ready(spawn(SLEEPS, f"{exited_runner()}.ab"))
    assert stale.pid in {each.pid for each in trial_processes.stale_processes()}
    ended, remaining = trial_processes.end_stale_processes()
    assert stale.pid in {each.pid for each in ended} and remaining == []
    assert stale.wait(20) == -signal.SIGTERM
    assert own.poll() is None and foreign.poll() is None


def test_ending_nothing_does_not_wait() -> None:
    begun = time.monotonic()
    assert trial_processes.end_all(trial_processes.new_token()) == []
    assert time.monotonic() - begun < 2, "less than the patience for one process"
