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
from stepscope.sensors import procfs

_LIST_THEM = "List yours with: ps -u $USER -o pid,etime,args"

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
        return stat is None or stat.has_ended

    def status(self) -> int | None:
        """Its wait status, as far as it can be learnt: ask as soon as it has ended."""
        stat = _read_stat(self.stat)
        if stat is not None and stat.has_ended and (stat.exit_code or self.owner is None):
            return stat.exit_code
        if self.pidfd is None:
            return None
        # What the kernel keeps of a process that was waited for, since Linux 6.15.
        info = bytearray(_INFO.pack(_INFO_EXIT, *[0] * 13))
        try:
            fcntl.ioctl(self.pidfd, _GET_INFO, info)
        except OSError:
            return None
        mask, *_, exit_code = _INFO.unpack(info)
        return exit_code if mask & _INFO_EXIT else None

    def close(self) -> None:
        os.close(self.stat)
        if self.pidfd is not None:
            os.close(self.pidfd)


def find_target(pid: int) -> Target:
    """Take hold of a process, or say why it cannot be watched."""
    if pid == os.getpid():
        raise CannotWatch(f"Process {pid} is this stepscope itself", _LIST_THEM)
    no_process = CannotWatch(f"There is no process {pid}", _LIST_THEM)
    with contextlib.ExitStack() as held:
        try:
            descriptor = procfs.open_file(pid, "stat")
        except PermissionError:
            belongs = f"Process {pid} cannot be looked at: it belongs to another user"
            raise CannotWatch(belongs, "Try with sudo") from None
        except OSError:
            raise no_process from None
        held.callback(os.close, descriptor)
        stat = _read_stat(descriptor)
        if stat is None:
            raise no_process
        _check_kind(pid, stat)
        pidfd = None
        try:
            pidfd = os.pidfd_open(pid)
            held.callback(os.close, pidfd)
        except OSError as error:  # else an old kernel, or a container that does not allow it
            if error.errno == errno.ESRCH:
                raise no_process from None
        stat = _read_stat(descriptor)  # readable still: so the pidfd is of the same process
        if stat is None or stat.has_ended:
            raise no_process
        command = procfs.command_line(pid) or [stat.name]
        cwd = Path(procfs.working_directory(pid) or "/")
        owner = _owner_of(pid) if stat.code_begins == procfs.HIDDEN_ADDRESS else None
        environment = procfs.environ(pid)
        held.pop_all()
    return Target(pid, stat.name, command, cwd, owner, environment, descriptor, pidfd)


def _check_kind(pid: int, stat: procfs.ProcessStat) -> None:
    status = procfs.status(pid)
    leader = status and status.thread_group
    if leader not in (pid, None):
        raise CannotWatch(
            f"{pid} is a thread of process {leader} ({stat.name})",
            f"Watch the process: stepscope watch {leader}",
        )
    if stat.flags & procfs.KERNEL_THREAD:
        raise CannotWatch(f"{pid} is a thread of the kernel ({stat.name})", _LIST_THEM)
    if stat.has_ended:
        waits = f"it waits for its parent, {stat.parent}, to take notice"
        raise CannotWatch(f"Process {pid} ({stat.name}) has ended already: {waits}", _LIST_THEM)


def _read_stat(descriptor: int) -> procfs.ProcessStat | None:
    """None once the process was waited for."""
    try:
        return procfs.ProcessStat(os.pread(descriptor, procfs.STAT_BYTES, 0))
    except ProcessLookupError:
        return None


def _owner_of(pid: int) -> str:
    user = procfs.owner(pid)
    try:
        return "another user" if user is None else pwd.getpwuid(user).pw_name
    except KeyError:
        return "another user"
