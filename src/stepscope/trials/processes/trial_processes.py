"""The processes of a trial: how they are told from all others, found, and ended.

Each carries the trial's token in its environment, and the token names the runner:

    <pid>.<start ticks>.<home>.<random>      home: this boot and this PID namespace, 8 characters

So anybody can tell, later, to which trial a process belongs and whether its runner still lives. A
process that wiped its environment is found as a descendant of one that did not, or in its session.

Standard library and `procfs` only: the guard imports it in a bare interpreter.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

from stepscope.sensors import procfs

VARIABLE = "STEPSCOPE_TRIAL"

_KILL_S = 2.0
"""How long the kernel has for those that were killed; what is left then is stuck in it."""


class TrialProcess(NamedTuple):
    """A process of a trial. Its number may be another's later: `started` tells them apart."""

    pid: int
    name: str
    state: str
    started: int  # clock ticks since boot
    session: int
    parent: int = 0

    def __str__(self) -> str:
        return f"{self.name} (pid {self.pid}, state {self.state})"


def runner_name() -> str:
    """What the tokens of all trials of this process begin with."""
    myself = identify(os.getpid())
    assert myself is not None
    return f"{os.getpid()}.{myself.started}.{procfs.pid_home()}"


def new_token() -> str:
    return f"{runner_name()}.{os.urandom(4).hex()}"


def runner_lives(token: str) -> bool | None:
    """Whether the runner that a token names is there; None where that cannot be told from here."""
    try:
        pid, started, home = token.split(".")[:3]
        if home != procfs.pid_home():
            return None
        runner = identify(int(pid))
        return runner is not None and runner.started == int(started)
    except ValueError:
        return None


def identify(pid: int) -> TrialProcess | None:
    """A process that lives now. A zombie does not, unless only its first thread has ended."""
    stat = procfs.stat(pid)
    if stat is None or stat.has_ended:
        return None
    return TrialProcess(pid, stat.name, stat.state, stat.started_ticks, stat.session, stat.parent)


class SeenProcesses:
    """Every process that was ever seen in a trial: known even once nothing ties it to the trial."""

    def __init__(self) -> None:
        self._seen: dict[tuple[int, int], TrialProcess] = {}
        self._living: set[int] = set()

    def add(self, pids: Collection[int]) -> None:
        new = [pid for pid in pids if pid not in self._living]
        self._living = set(pids)
        for process in filter(None, map(identify, new)):
            self._seen[process.pid, process.started] = process

    def __iter__(self) -> Iterator[TrialProcess]:
        return iter(self._seen.values())


def belongs(pid: int, name: str, known: Iterable[TrialProcess] = ()) -> bool:
    """Whether a process is of a trial: it carries its token, or is in a session of its own."""
    token, process = procfs.environ_value(pid, VARIABLE), identify(pid)
    if token is not None:
        return _is_of(token, name)
    return process is not None and process.session in {each.session for each in known}


def processes_of(name: str | None, known: Iterable[TrialProcess] = ()) -> list[TrialProcess]:
    """The living processes of a trial, by its token, or of all trials of a runner, by its name;
    None means all trials whose runner is dead. `known` are processes that were seen before.

    They are all that carry such a token or are known, their descendants, and all that are in a
    session that one of them leads, or led until it ended.
    """
    known = list(known)
    living = map(identify, procfs.pids_of_user(os.geteuid()))
    processes = {process.pid: process for process in living if process is not None}
    pid = os.getpid()
    while pid in processes:  # neither ourselves nor our ancestors
        pid = processes.pop(pid).parent
    found = {
        each.pid
        for each in known
        if each.pid in processes and processes[each.pid].started == each.started
    }
    for pid in processes:
        token = procfs.environ_value(pid, VARIABLE)
        if token is not None and _is_of(token, name):
            found.add(pid)
    sessions = {each.session for each in known}  # leaders may be gone
    size = -1
    while size != len(found):
        size = len(found)
        sessions |= {processes[pid].session for pid in found}
        theirs = {
            session
            for session in sessions
            if session in found or (session != os.getsid(0) and identify(session) is None)
        }
        found |= {
            pid for pid, each in processes.items() if each.parent in found or each.session in theirs
        }
    return [processes[pid] for pid in sorted(found)]


def strays() -> list[TrialProcess]:
    """Processes of trials whose runner is dead."""
    return processes_of(None)


def end_all(
    name: str | None, known: Iterable[TrialProcess] = (), patience_s: float = 2.0
) -> list[TrialProcess]:
    """Ask all that `processes_of` finds to end, kill those that have not after a while.

    Returns those that are still there: stuck in the kernel, usually.
    """
    remaining: list[TrialProcess] = []
    for number, seconds in ((signal.SIGTERM, patience_s), (signal.SIGKILL, _KILL_S)):
        asked: set[tuple[int, int]] = set()
        for _ in _attempts(seconds):
            remaining = processes_of(name, known)
            if not remaining:
                return []
            known = {*known, *remaining}  # with its parent gone nothing may tie one to the trial
            for process in remaining:
                if (process.pid, process.started) not in asked:
                    asked.add((process.pid, process.started))
                    send(process, number)
                    if number != signal.SIGKILL:  # one that is stopped hears nothing else
                        send(process, signal.SIGCONT)
    return remaining


def end_strays(patience_s: float = 1.0) -> tuple[list[TrialProcess], list[TrialProcess]]:
    """End the processes of trials whose runner is dead: those there were, and those that stay."""
    found = strays()
    return found, end_all(None, found, patience_s) if found else []


def send(process: TrialProcess, number: int) -> bool:
    """Signal a process if it still is the one that was meant."""
    descriptor = None
    try:
        try:
            descriptor = os.pidfd_open(process.pid)
        except ProcessLookupError:
            return False
        except (OSError, AttributeError):
            pass  # a kernel before 5.3, a sandbox, a Python built on old headers
        # It was there before, and still is: then it is the one that the descriptor holds.
        now = identify(process.pid)
        if now is None or now.started != process.started:
            return False
        if descriptor is None:
            os.kill(process.pid, number)
        else:
            signal.pidfd_send_signal(descriptor, number)
        return True
    except OSError:
        return False
    finally:
        if descriptor is not None:
            os.close(descriptor)


def members(group: str) -> list[TrialProcess]:
    """The living processes in a control group and in those below it."""

    def pids() -> list[int]:
        found: list[int] = []
        for folder, _, _ in os.walk(group):
            with contextlib.suppress(OSError), open(f"{folder}/cgroup.procs", "rb") as file:
                found += map(int, file.read().split())
        return [pid for pid in found if pid]  # 0: a process of another PID namespace

    found = [identify(pid) for pid in pids()]
    still = set(pids())  # a number that was there before and after is the process we identified
    return [process for process in found if process is not None and process.pid in still]


def remove_group(group: str, patience_s: float = 2.0) -> bool:
    """Remove a control group and those below it, as soon as all in it have ended."""
    for _ in _attempts(patience_s):
        for folder, _, _ in os.walk(group, topdown=False):
            try:
                os.rmdir(folder)
            except OSError:  # busy: a process that was killed takes its time
                break
        if not os.path.isdir(group):
            return True
    return False


def _attempts(seconds: float) -> Iterator[None]:
    """At least one, then more and more rarely, until the time is over."""
    deadline = time.monotonic() + seconds
    nap = 0.005
    while True:
        yield
        if time.monotonic() >= deadline:
            return
        time.sleep(nap)
        nap = min(2 * nap, 0.1)


def _is_of(token: str, name: str | None) -> bool:
    if name is None:
        return runner_lives(token) is False
    return token == name or token.startswith(f"{name}.")
