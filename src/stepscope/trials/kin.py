"""The processes of a trial: how they are told from all others, found, and ended.

Each carries the trial's token in its environment, and the token names the runner:

    <pid>.<start ticks>.<home>.<random>      home: this boot and this PID namespace, 8 characters

So anybody can tell, later, whose a process was and whether its runner is still there. One that
wiped its environment is found as a descendant of one that did not, or in its session.

Standard library only, and nothing of ours: the guard imports it alone.
"""

from __future__ import annotations

import os
import signal
import time
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import NamedTuple

VARIABLE = "STEPSCOPE_TRIAL"

_VARIABLE = VARIABLE.encode() + b"="
_KILL_S = 2.0
"""How long the kernel has for those that were killed; who is left then is stuck in it."""
_SHORTEST_NAP_S, _LONGEST_NAP_S = 0.005, 0.1


class Kin(NamedTuple):
    """A process of a trial. Its number may be another's later: `started` tells them apart."""

    pid: int
    name: str
    state: str
    started: int
    """Clock ticks since boot."""
    session: int

    def __str__(self) -> str:
        return f"{self.name} (pid {self.pid}, state {self.state})"


def runner_name() -> str:
    """What the tokens of all trials of this process begin with."""
    myself = _stat(os.getpid())
    assert myself is not None
    return f"{os.getpid()}.{myself.kin.started}.{_home()}"


def new_token() -> str:
    """The token of a trial that this process is about to run."""
    return f"{runner_name()}.{os.urandom(4).hex()}"


def runner_lives(token: str) -> bool | None:
    """Whether the runner that a token names is there; None where that cannot be told from here."""
    try:
        pid, started, home = token.split(".")[:3]
        if home != _home():
            return None
        runner = _stat(int(pid))
        return runner is not None and runner.lives and runner.kin.started == int(started)
    except ValueError:
        return None


def identify(pid: int) -> Kin | None:
    """A process that lives now, so that it can be told from a later one of the same number."""
    found = _stat(pid)
    return found.kin if found is not None and found.lives else None


class Roll:
    """Everybody who was ever seen in a trial: known even once nothing ties them to it."""

    def __init__(self) -> None:
        self._seen: dict[tuple[int, int], Kin] = {}
        self._living: set[int] = set()

    def meet(self, pids: Collection[int]) -> list[int]:
        """Take note of all processes of the trial as they are now; returns the new ones."""
        new = [pid for pid in pids if pid not in self._living]
        self._living = set(pids)
        for kin in filter(None, map(identify, new)):
            self._seen[kin.pid, kin.started] = kin
        return new

    def __iter__(self) -> Iterator[Kin]:
        return iter(self._seen.values())


def belongs(pid: int, name: str, known: Iterable[Kin] = ()) -> bool:
    """Whether a process is of a trial: it carries its token, or is in a session of its own."""
    token, stat = _token_of(pid), _stat(pid)
    if token is not None:
        return _of(name)(token)
    return stat is not None and stat.kin.session in {kin.session for kin in known}


def kin_of(name: str, known: Iterable[Kin] = ()) -> list[Kin]:
    """The living processes of a trial, by its token, or of all trials of a runner, by its name.

    `known` are processes that were seen in it before.
    """
    return _kin(_of(name), known)


def strays() -> list[Kin]:
    """Processes of trials whose runner is dead."""
    return _kin(_is_stray)


def end_all(name: str, known: Iterable[Kin] = (), patience_s: float = 2.0) -> list[Kin]:
    """Ask all processes of a trial to end, kill those that have not after a while.

    Returns who is still there: stuck in the kernel, usually.
    """
    return _end(_of(name), known, patience_s)


def end_strays(patience_s: float = 1.0) -> tuple[list[Kin], list[Kin]]:
    """End the processes of trials whose runner is dead: those there were, and those that stay."""
    found = strays()
    return found, _end(_is_stray, found, patience_s) if found else []


def send(kin: Kin, number: int) -> bool:
    """Signal a process if it still is the one that was meant."""
    try:
        descriptor = os.pidfd_open(kin.pid)
    except ProcessLookupError:
        return False
    except (OSError, AttributeError):  # a kernel before 5.3, a sandbox, a Python built on old ones
        return _send_by_number(kin, number)
    try:
        # It was there before, and still is: then it is the one that the descriptor holds.
        if not _is_same(kin):
            return False
        signal.pidfd_send_signal(descriptor, number)
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)


def members(group: str) -> list[Kin]:
    """The living processes in a control group and in those below it."""
    found = [identify(pid) for pid in _pids_in(group)]
    still = set(_pids_in(group))  # who was there before and after is the one we identified
    return [kin for kin in found if kin is not None and kin.pid in still]


def remove_group(group: str, patience_s: float = 2.0) -> bool:
    """Remove a control group and those below it, as soon as all in it have ended."""
    deadline = time.monotonic() + patience_s
    nap = _SHORTEST_NAP_S
    while os.path.isdir(group):
        for folder, _, _ in os.walk(group, topdown=False):
            try:
                os.rmdir(folder)
            except OSError:  # busy: a process that was killed takes its time
                break
        else:
            return True
        if time.monotonic() >= deadline:
            return False
        time.sleep(nap)
        nap = min(2 * nap, _LONGEST_NAP_S)
    return True


class _Stat(NamedTuple):
    """What /proc/PID/stat tells of a process."""

    kin: Kin
    parent: int
    threads: int

    @property
    def lives(self) -> bool:
        """A zombie does not, unless it is only the first thread that has ended."""
        return self.kin.state not in "ZX" or self.threads > 1


def _stat(pid: int) -> _Stat | None:
    data = _read(f"/proc/{pid}/stat")
    if not data:
        return None
    name, _, rest = data.partition(b"(")[2].rpartition(b")")
    fields = rest.split()
    state, parent, session, threads, started = (fields[place] for place in (0, 1, 3, 17, 19))
    text = name.decode("utf-8", "replace")
    kin = Kin(pid, text, state.decode(), int(started), int(session))
    return _Stat(kin, int(parent), int(threads))


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return b""


def _home() -> str:
    """This boot, and the namespace in which a process number means what it does here."""
    boot = _read("/proc/sys/kernel/random/boot_id")
    try:
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        namespace = ""
    return f"{zlib.crc32(boot + namespace.encode()):08x}"


def _of(name: str) -> Callable[[str], bool]:
    return lambda token: token == name or token.startswith(f"{name}.")


def _is_stray(token: str) -> bool:
    return runner_lives(token) is False


def _kin(is_meant: Callable[[str], bool], known: Iterable[Kin] = ()) -> list[Kin]:
    """All that carry a token that is meant or are known, and who belongs to them."""
    known = list(known)
    processes = _processes()
    found = {kin.pid for kin in known if _is_in(processes, kin)}
    for pid in processes:
        token = _token_of(pid)
        if token is not None and is_meant(token):
            found.add(pid)
    _add_relatives(found, processes, {kin.session for kin in known})
    return [processes[pid].kin for pid in sorted(found)]


def _is_in(processes: dict[int, _Stat], kin: Kin) -> bool:
    return kin.pid in processes and processes[kin.pid].kin.started == kin.started


def _processes() -> dict[int, _Stat]:
    """The living processes of this user, but for ourselves and those we come from."""
    mine = os.geteuid()
    found = {}
    for entry in os.scandir("/proc"):
        try:
            ours = entry.name.isdigit() and entry.stat().st_uid == mine
        except OSError:
            continue
        stat = _stat(int(entry.name)) if ours else None
        if stat is not None and stat.lives:
            found[stat.kin.pid] = stat
    pid = os.getpid()
    while pid in found:
        pid = found.pop(pid).parent
    return found


def _token_of(pid: int) -> str | None:
    _, there, rest = (b"\0" + _read(f"/proc/{pid}/environ")).partition(b"\0" + _VARIABLE)
    return rest.partition(b"\0")[0].decode("utf-8", "replace") if there else None


def _add_relatives(found: set[int], processes: dict[int, _Stat], sessions: set[int]) -> None:
    """Descendants, and whoever is in a session that one of them leads, or led until it ended.

    `sessions` are those of processes that may be gone.
    """
    size = -1
    while size != len(found):
        size = len(found)
        sessions = sessions | {processes[pid].kin.session for pid in found}
        theirs = {session for session in sessions if _is_theirs(session, found)}
        found |= {
            pid
            for pid, stat in processes.items()
            if stat.parent in found or stat.kin.session in theirs
        }


def _is_theirs(session: int, found: set[int]) -> bool:
    return session in found or (session != os.getsid(0) and identify(session) is None)


def _is_same(kin: Kin) -> bool:
    now = _stat(kin.pid)
    return now is not None and now.lives and now.kin.started == kin.started


def _send_by_number(kin: Kin, number: int) -> bool:
    try:
        if not _is_same(kin):
            return False
        os.kill(kin.pid, number)
        return True
    except OSError:
        return False


def _end(is_meant: Callable[[str], bool], known: Iterable[Kin], patience_s: float) -> list[Kin]:
    left: list[Kin] = []
    for number, seconds in ((signal.SIGTERM, patience_s), (signal.SIGKILL, _KILL_S)):
        deadline = time.monotonic() + seconds
        nap = _SHORTEST_NAP_S
        told: set[tuple[int, int]] = set()
        while left := _kin(is_meant, known):
            known = {*known, *left}  # with its parent gone nothing may tie one to the trial
            for kin in left:
                if (kin.pid, kin.started) not in told:
                    told.add((kin.pid, kin.started))
                    _ask_to_end(kin, number)
            if time.monotonic() >= deadline:
                break
            time.sleep(nap)
            nap = min(2 * nap, _LONGEST_NAP_S)
        if not left:
            break
    return left


def _ask_to_end(kin: Kin, number: int) -> None:
    send(kin, number)
    if number != signal.SIGKILL:  # one that is stopped does not hear anything else
        send(kin, signal.SIGCONT)


def _pids_in(group: str) -> list[int]:
    found: list[int] = []
    for folder, _, _ in os.walk(group):
        found += map(int, _read(os.path.join(folder, "cgroup.procs")).split())
    return [pid for pid in found if pid]  # 0: a process of another PID namespace
