"""The guard ends all processes of a killed runner, and no other processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from runners import IGNORES_SIGTERM, PYTHON, SLEEPS, SOURCE
from stepscope.trials.processes import trial_processes

RUNNER = f"""
import json, os, signal, subprocess, sys, time
sys.path.insert(0, {SOURCE!r})
from stepscope.trials.processes import trial_processes
from stepscope.trials.processes.guard import Guard
guard = Guard(trial_processes.runner_name())
print(trial_processes.runner_name(), guard.process.pid, flush=True)
groups, holds_pipe, end = json.loads(sys.argv[1])
for group in groups: guard.add_group(group)
def start(code, **more):
    environment = {{**os.environ, trial_processes.VARIABLE: trial_processes.new_token()}}
    process = subprocess.Popen([*{PYTHON!r}, code], stdout=subprocess.PIPE, env=environment,
        **{{"start_new_session": True, **more}})
    process.stdout.readline()
    return process.pid
plain = start({SLEEPS!r})
elsewhere = start("import os; os.setsid();" + {SLEEPS!r}, start_new_session=False)
ignoring = start({IGNORES_SIGTERM!r})
stopped = start({SLEEPS!r})
os.kill(stopped, signal.SIGSTOP)
if holds_pipe and os.fork() == 0:
    time.sleep(20)
    os._exit(0)
for group in groups: open(group + "/cgroup.procs", "w").write(str(plain))
print(plain, elsewhere, ignoring, stopped, flush=True)
if end == "killed":
    os.kill(guard.process.pid, signal.SIGKILL)
    os.waitid(os.P_PID, guard.process.pid, os.WEXITED | os.WNOWAIT)
    guard.add_group("/nowhere")
if end:
    guard.dismiss()
    print("dismissed", flush=True)
time.sleep(60)
"""


@dataclass(frozen=True)
class Running:
    process: subprocess.Popen[str]
    name: str
    guard: int
    trial: list[int]

    def running(self) -> list[int]:
        return [pid for pid in self.trial if trial_processes.identify(pid)]


Run = Callable[..., Running]


@pytest.fixture
def run() -> Iterator[Run]:
    """A runner with a guard and four trial processes."""
    running: list[Running] = []

    def begin(groups: tuple[str, ...] = (), holds_pipe: bool = False, end: str = "") -> Running:
        process = subprocess.Popen(
            [sys.executable, "-c", RUNNER, json.dumps([groups, holds_pipe, end])],
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert process.stdout is not None
        name, guard = process.stdout.readline().split()
        trial = list(map(int, process.stdout.readline().split()))
        running.append(Running(process, name, int(guard), trial))
        assert running[-1].running() == trial
        return running[-1]

    yield begin
    for each in running:
        os.killpg(each.process.pid, signal.SIGKILL)
        each.process.wait()
        trial_processes.end_all(each.name, patience_s=0)


def gone_within(seconds: float, find: Callable[[], object]) -> bool:
    deadline = time.monotonic() + seconds
    while find():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


@pytest.mark.parametrize("holds_pipe", [False, True], ids=["alone", "with a fork"])
def test_processes_of_a_killed_runner_are_ended(run: Run, holds_pipe: bool) -> None:
    bystander = run()
    running = run(holds_pipe=holds_pipe)
    running.process.kill()
    assert gone_within(20, running.running), running.running()
    assert gone_within(20, lambda: trial_processes.identify(running.guard))
    assert bystander.running() == bystander.trial and trial_processes.identify(bystander.guard)


def test_control_groups_are_removed(run: Run) -> None:
    from stepscope.trials.limits.cgroups import PREFIX, Refused, make_group

    group = make_group(f"{PREFIX}{trial_processes.new_token()}", 256 << 20, None)
    if isinstance(group, Refused):
        pytest.skip(f"cannot create a cgroup: {group.reason}")
    folders = tuple(map(str, group.folders))
    try:
        running = run(folders)
        running.process.kill()
        assert gone_within(20, lambda: any(map(os.path.exists, folders)))
        assert running.running() == []
    finally:
        group.kill_all()
        assert group.remove() == []


def test_dismissed_guard_exits_without_effect(run: Run) -> None:
    running = run(end="dismiss")
    assert running.process.stdout is not None
    assert running.process.stdout.readline() == "dismissed\n"
    assert not os.path.exists(f"/proc/{running.guard}")
    assert running.running() == running.trial


def test_guard_ignores_signals_of_schedulers(run: Run) -> None:
    running = run()
    time.sleep(0.1)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        os.kill(running.guard, number)
    running.process.kill()
    assert gone_within(20, running.running)


def test_killed_guard_does_not_affect_the_runner(run: Run) -> None:
    running = run(end="killed")
    assert running.process.stdout is not None
    assert running.process.stdout.readline() == "dismissed\n"
    assert running.running() == running.trial
