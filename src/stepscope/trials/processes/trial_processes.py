"""The processes of a trial: how to identify, find and end them.

Each process has the token of the trial in its environment, and the token names the runner:

    <pid>.<start ticks>.<home>.<random>      home: this boot and PID namespace, 8 characters

The token shows which trial a process belongs to and whether its runner is still running. A process
that has cleared its environment is found by its ancestors or its session, and in the cgroup of the
trial.

Imports only the standard library and `procfs`: the guard runs it in a bare interpreter.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import NamedTuple

from stepscope.sensors import procfs

VARIABLE = "STEPSCOPE_TRIAL"

owns_all_children = False
"""Whether all children of this process belong to trials. The command line sets it: in other
programs, any thread may start processes."""

_KILL_S = 2.0
"""Time for killed processes to exit; those that remain are stuck in the kernel."""


class TrialProcess(NamedTuple):
    """A process of a trial. `started` distinguishes it from a later process with the same pid."""

    pid: int
    name: str
    state: str
    started: int  # clock ticks since boot
    session: int
    parent: int = 0

    def __str__(self) -> str:
        return f"{self.name} (PID {self.pid}, state {self.state})"


def runner_name() -> str:
    """Return the common prefix of the tokens of all trials of this process."""
    myself = identify(os.getpid())
    assert myself is not None
    return f"{os.getpid()}.{myself.started}.{procfs.pid_home()}"


def new_token() -> str:
    return f"{runner_name()}.{os.urandom(4).hex()}"


def runner_is_running(token: str) -> bool | None:
    """Whether the runner of a token is running; None if it is in another boot or namespace."""
    try:
        pid, started, home = token.split(".")[:3]
        if home != procfs.pid_home():
            return None
        runner = identify(int(pid))
        return runner is not None and runner.started == int(started)
    except ValueError:
        return None


def identify(pid: int) -> TrialProcess | None:
    """Return a running process. A zombie counts only if other threads are still running."""
    stat = procfs.stat(pid)
    if stat is None or stat.has_ended:
        return None
    return TrialProcess(pid, stat.name, stat.state, stat.started_ticks, stat.session, stat.parent)


def identify_same(pid: int, started: int) -> TrialProcess | None:
    """Return a running process unless its pid has been reused."""
    process = identify(pid)
    return process if process is not None and process.started == started else None


Find = Callable[[], Iterable[TrialProcess]]
"""Returns further processes of a trial, such as those in its cgroup."""


class SeenProcesses:
    """All processes seen in a trial, including those that can no longer be linked to it."""

    def __init__(self) -> None:
        self._seen: dict[tuple[int, int], TrialProcess] = {}
        self._running: set[int] = set()

    def add(self, pids: Collection[int]) -> None:
        new = [pid for pid in pids if pid not in self._running]
        self._running = set(pids)
        self.remember(filter(None, map(identify, new)))

    def remember(self, processes: Iterable[TrialProcess]) -> None:
        self._seen |= {(process.pid, process.started): process for process in processes}

    def __iter__(self) -> Iterator[TrialProcess]:
        return iter(self._seen.values())


def belongs(pid: int, name: str, known: Iterable[TrialProcess] = ()) -> bool:
    """Whether a process belongs to a trial: by its token or by its session."""
    token, process = procfs.environ_value(pid, VARIABLE), identify(pid)
    if token is not None:
        return _is_of(token, name)
    return process is not None and process.session in {each.session for each in known}


def processes_of(
    name: str | None, known: Iterable[TrialProcess] = (), more: Find = tuple
) -> list[TrialProcess]:
    """Return the running processes of a trial (by token), of all trials of a runner (by name), or
    of all trials whose runner has exited (None). `known` are processes seen before.

    These are the processes with a matching token, the known ones, those that `more` finds, their
    descendants, and all processes in sessions that one of them leads or has led.
    """
    known = list(known)
    running = map(identify, procfs.pids_of_user(os.geteuid()))
    processes = {process.pid: process for process in running if process is not None}
    extra = {process.pid: process for process in more()}  # may have changed their user
    processes |= extra
    pid = os.getpid()
    while pid in processes:  # exclude this process and its ancestors
        pid = processes.pop(pid).parent
    found = processes.keys() & extra.keys() | {
        each.pid
        for each in known
        if each.pid in processes and processes[each.pid].started == each.started
    }
    for pid in processes:
        token = procfs.environ_value(pid, VARIABLE)
        if token is not None and _is_of(token, name):
            found.add(pid)
    sessions = {each.session for each in known}  # leaders may have exited
    size = -1
    while size != len(found):
        size = len(found)
        sessions |= {processes[pid].session for pid in found}
        trial_sessions = {
            session
            for session in sessions
            if session in found or (session != os.getsid(0) and identify(session) is None)
        }
        found |= {
            pid
            for pid, each in processes.items()
            if each.parent in found or each.session in trial_sessions
        }
    return [processes[pid] for pid in sorted(found)]


def stale_processes() -> list[TrialProcess]:
    """Return the processes of trials whose runner has exited."""
    return processes_of(None)


def end_all(
    name: str | None,
    known: Iterable[TrialProcess] = (),
    patience_s: float = 2.0,
    more: Find = tuple,
) -> list[TrialProcess]:
    """Terminate all processes of `processes_of`, and kill those that remain after a while.

    Returns the processes that are still running, usually because they are stuck in the kernel.
    """
    remaining: list[TrialProcess] = []
    for number, seconds in ((signal.SIGTERM, patience_s), (signal.SIGKILL, _KILL_S)):
        signaled: set[tuple[int, int]] = set()
        for _ in _attempts(seconds):
            remaining = processes_of(name, known, more)
            if not remaining:
                return []
            known = {*known, *remaining}  # an orphan may no longer be linked to the trial
            for process in remaining:
                if (process.pid, process.started) not in signaled:
                    signaled.add((process.pid, process.started))
                    send(process, number)
                    if number != signal.SIGKILL:  # a stopped process must continue to handle it
                        send(process, signal.SIGCONT)
    return remaining


def end_stale_processes(
    patience_s: float = 1.0, more: Find = tuple
) -> tuple[list[TrialProcess], list[TrialProcess]]:
    """End the processes of trials whose runner has exited; return them and those that remain."""
    found = processes_of(None, (), more)
    return found, end_all(None, found, patience_s, more) if found else []


def send(process: TrialProcess, number: int) -> bool:
    """Send a signal to a process unless its pid has been reused."""
    descriptor = None
    try:
        try:
            descriptor = os.pidfd_open(process.pid)
        except ProcessLookupError:
            return False
        except (OSError, AttributeError):
            pass  # a kernel before 5.3, a sandbox, a Python built on old headers
        # Still the same process after opening: the descriptor refers to it.
        if identify_same(process.pid, process.started) is None:
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


def members(group: str | os.PathLike[str]) -> list[TrialProcess]:
    """Return the running processes in a cgroup and its descendants."""

    def pids() -> list[int]:
        found: list[int] = []
        for folder, _, _ in os.walk(group):
            with contextlib.suppress(OSError), open(f"{folder}/cgroup.procs", "rb") as file:
                found += map(int, file.read().split())
        return [pid for pid in found if pid]  # 0: a process in another PID namespace

    processes = [identify(pid) for pid in pids()]
    still = set(pids())  # a pid listed before and after is the process that was identified
    return [process for process in processes if process is not None and process.pid in still]


def remove_group(group: str, patience_s: float = 2.0) -> bool:
    """Remove a cgroup and its descendants, once their processes have exited."""
    for _ in _attempts(patience_s):
        for folder, _, _ in os.walk(group, topdown=False):
            try:
                os.rmdir(folder)
            except OSError:  # busy: a killed process is still exiting
                break
        if not os.path.isdir(group):
            return True
    return False


def _attempts(seconds: float) -> Iterator[None]:
    """Yield at least once, then with growing pauses until the time is over."""
    deadline = time.monotonic() + seconds
    pause = 0.005
    while True:
        yield
        if time.monotonic() >= deadline:
            return
        time.sleep(pause)
        pause = min(2 * pause, 0.1)


def _is_of(token: str, name: str | None) -> bool:
    if name is None:
        return runner_is_running(token) is False
    return token == name or token.startswith(f"{name}.")
