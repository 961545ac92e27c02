"""A process that somebody else started: who it is, when it ends, and how.

Only a parent can wait for its child. But until the parent has done so the process stays as a
zombie, which shows its status to whoever may look into it; and since Linux 6.15 a pidfd tells the
status after that, too. Where neither helps, how it ended is not known, and we say so.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import pwd
import select
import struct
from dataclasses import dataclass
from pathlib import Path

from stepscope.errors import CannotWatch
from stepscope.inject.events import FOLDER_VARIABLE

_LIST_THEM = "List yours with: ps -u $USER -o pid,etime,args"
_STAT_BYTES = 1024
_KERNEL_THREAD = 0x00200000
"""PF_KTHREAD among the flags of a process."""
_HIDDEN_ADDRESS = 1
"""What the kernel shows for the start of the code of a process that we may not look into."""

_INFO = struct.Struct("=QQ11Ii")
_INFO_EXIT = 1 << 3
_GET_INFO = 3 << 30 | _INFO.size << 16 | 0xFF << 8 | 11
"""PIDFD_GET_INFO, with `struct pidfd_info` as it was first: mask, cgroup, 11 ids, exit code."""


@dataclass(frozen=True)
class Target:
    """A running process, held by descriptors: another one with the same number is not mistaken."""

    pid: int
    name: str
    command: list[str]
    cwd: Path
    owner: str | None
    """Whose it is, where it is not ours and we may not look into it."""
    environment: dict[str, str]
    """As it was when the process was started; empty where it may not be read."""
    stat: int
    pidfd: int | None
    """Readable once it has ended; None where the kernel has no such thing."""

    @property
    def reports_to(self) -> Path | None:
        """The folder of the run that it reports to already."""
        events = self.environment.get(FOLDER_VARIABLE)
        return Path(events).parent if events else None

    def has_ended(self) -> bool:
        if self.pidfd is not None:
            return bool(select.select([self.pidfd], [], [], 0)[0])
        stat = _read_stat(self.stat)
        return stat is None or stat.is_zombie

    def status(self) -> int | None:
        """Its wait status, as far as it can be learnt: ask as soon as it has ended."""
        stat = _read_stat(self.stat)
        if stat is not None and stat.is_zombie and (stat.exit_code or self.owner is None):
            return stat.exit_code
        return None if self.pidfd is None else _status_by_pidfd(self.pidfd)

    def close(self) -> None:
        os.close(self.stat)
        if self.pidfd is not None:
            os.close(self.pidfd)


def find_target(pid: int) -> Target:
    """Take hold of a process, or say why it cannot be watched."""
    if pid == os.getpid():
        raise CannotWatch(f"Process {pid} is this stepscope itself", _LIST_THEM)
    try:
        descriptor = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
    except PermissionError:
        raise CannotWatch(
            f"Process {pid} cannot be looked at: it belongs to another user", "Try with sudo"
        ) from None
    except OSError:
        raise _no_process(pid) from None
    pidfd = None
    try:
        _check_kind(pid, descriptor)
        pidfd = _open_pidfd(pid)
        stat = _read_stat(descriptor)  # readable still: so the pidfd is of the same process
        if stat is None or stat.is_zombie:
            raise _no_process(pid)
        return _described(pid, stat, descriptor, pidfd)
    except BaseException:
        os.close(descriptor)
        if pidfd is not None:
            os.close(pidfd)
        raise


def _no_process(pid: int) -> CannotWatch:
    return CannotWatch(f"There is no process {pid}", _LIST_THEM)


def _check_kind(pid: int, descriptor: int) -> None:
    """CannotWatch for what is no process of somebody, or is one no more."""
    stat = _read_stat(descriptor)
    if stat is None:
        raise _no_process(pid)
    leader = _leader_of(pid)
    if leader not in (pid, None):
        raise CannotWatch(
            f"{pid} is a thread of process {leader} ({stat.name})",
            f"Watch the process: stepscope watch {leader}",
        )
    if stat.flags & _KERNEL_THREAD:
        raise CannotWatch(f"{pid} is a thread of the kernel ({stat.name})", _LIST_THEM)
    if stat.is_zombie:
        raise CannotWatch(
            f"Process {pid} ({stat.name}) has ended already: it waits for its parent, "
            f"{stat.parent}, to take notice",
            _LIST_THEM,
        )


def _described(pid: int, stat: _Stat, descriptor: int, pidfd: int | None) -> Target:
    hidden = stat.code_begins == _HIDDEN_ADDRESS
    return Target(
        pid,
        stat.name,
        _command_of(pid) or [stat.name],
        _folder_of(pid),
        _owner_of(pid) if hidden else None,
        _environment_of(pid),
        descriptor,
        pidfd,
    )


@dataclass(frozen=True)
class _Stat:
    """What is needed of /proc/PID/stat."""

    name: str
    state: str
    parent: int
    flags: int
    threads: int
    code_begins: int
    exit_code: int

    @property
    def is_zombie(self) -> bool:
        """A main thread that has ended leaves a `Z`, too, while other threads go on."""
        return self.state in "ZX" and self.threads <= 1


def _read_stat(descriptor: int) -> _Stat | None:
    """None once the process was waited for."""
    try:
        data = os.pread(descriptor, _STAT_BYTES, 0)
    except ProcessLookupError:
        return None
    name = data[data.index(b"(") + 1 : data.rindex(b")")].decode("utf-8", "replace")
    words = data[data.rindex(b")") + 2 :].split()
    return _Stat(
        name,
        words[0].decode(),
        int(words[1]),
        int(words[6]),
        int(words[17]),
        int(words[23]),
        int(words[49]),
    )


def _open_pidfd(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except OSError as error:
        if error.errno == errno.ESRCH:
            raise _no_process(pid) from None
        return None  # an old kernel, or a container that does not allow it


def _status_by_pidfd(pidfd: int) -> int | None:
    """What the kernel keeps of a process that was waited for, since Linux 6.15."""
    info = bytearray(_INFO.pack(_INFO_EXIT, *[0] * 13))
    try:
        fcntl.ioctl(pidfd, _GET_INFO, info)
    except OSError:
        return None
    mask, *_, exit_code = _INFO.unpack(info)
    return exit_code if mask & _INFO_EXIT else None


def _leader_of(pid: int) -> int | None:
    with contextlib.suppress(OSError, IndexError), open(f"/proc/{pid}/status", "rb") as file:
        return int(file.read().partition(b"\nTgid:")[2].split(None, 1)[0])
    return None


def _command_of(pid: int) -> list[str]:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
        return [word for word in os.fsdecode(file.read()).rstrip("\0").split("\0") if word]
    return []


def _folder_of(pid: int) -> Path:
    with contextlib.suppress(OSError):
        return Path(os.readlink(f"/proc/{pid}/cwd"))
    return Path("/")


def _environment_of(pid: int) -> dict[str, str]:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/environ", "rb") as file:
        pairs = (entry.partition("=") for entry in os.fsdecode(file.read()).split("\0"))
        return {name: value for name, _, value in pairs}
    return {}


def _owner_of(pid: int) -> str:
    try:
        user = os.stat(f"/proc/{pid}").st_uid
        return pwd.getpwuid(user).pw_name
    except (OSError, KeyError):
        return "another user"
