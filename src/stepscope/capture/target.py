"""A process that stepscope did not start: its identity, when it exits, and its wait status.

Only a parent can wait for its child. But until the parent does so the process is a zombie, and
processes with permission can read its status; since Linux 6.15 a pidfd returns the status after
that too. If neither is possible, the exit code is reported as unknown.
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

from stepscope.errors import MonitorError
from stepscope.inject.events import FOLDER_VARIABLE
from stepscope.sensors import procfs

_LIST_PROCESSES = "List your processes with `ps -u $USER -o pid,etime,args`"

_INFO = struct.Struct("=QQ11Ii")
_INFO_EXIT = 1 << 3
_GET_INFO = 3 << 30 | _INFO.size << 16 | 0xFF << 8 | 11
"""PIDFD_GET_INFO with the first version of `struct pidfd_info`: mask, cgroup, 11 ids, exit code."""


@dataclass(frozen=True)
class Target:
    """A running process, identified by descriptors, so that a reused pid is not mistaken for it."""

    pid: int
    name: str
    command: list[str]
    cwd: Path
    owner: str | None
    """The user of the process, if stepscope may not read all of its files."""
    environment: dict[str, str]
    """The environment at its start; empty without permission."""
    stat: int
    """Descriptor of /proc/PID/stat."""
    pidfd: int | None
    """Readable after the process has exited; None if the kernel does not support it."""

    @property
    def reports_to(self) -> Path | None:
        """The run folder of another monitor that the process already reports to."""
        events = self.environment.get(FOLDER_VARIABLE)
        return Path(events).parent if events else None

    def has_exited(self) -> bool:
        if self.pidfd is not None:
            return bool(select.select([self.pidfd], [], [], 0)[0])
        stat = _read_stat(self.stat)
        return stat is None or stat.has_ended

    def status(self) -> int | None:
        """Return the wait status, or None if it is unknown. Call it immediately after the exit."""
        stat = _read_stat(self.stat)
        if stat is not None and stat.has_ended and (stat.exit_code or self.owner is None):
            return stat.exit_code
        if self.pidfd is None:
            return None
        # Since Linux 6.15 the kernel keeps the exit code of a process that was reaped.
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
    """Open a process for monitoring. Raises MonitorError if it cannot be monitored."""
    if pid == os.getpid():
        raise MonitorError(f"Process {pid} is stepscope itself", _LIST_PROCESSES)
    no_process = MonitorError(f"There is no process {pid}", _LIST_PROCESSES)
    with contextlib.ExitStack() as held:
        try:
            descriptor = procfs.open_file(pid, "stat")
        except PermissionError:
            raise MonitorError(
                f"Process {pid} belongs to another user and cannot be read", "Run with sudo"
            ) from None
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
        except OSError as error:  # otherwise an old kernel, or not permitted in this container
            if error.errno == errno.ESRCH:
                raise no_process from None
        stat = _read_stat(descriptor)  # still readable, so the pidfd is of the same process
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
        raise MonitorError(
            f"{pid} is a thread of process {leader} ({stat.name})",
            f"Use `stepscope watch {leader}`",
        )
    if stat.flags & procfs.KERNEL_THREAD:
        raise MonitorError(f"{pid} is a kernel thread ({stat.name})", _LIST_PROCESSES)
    if stat.has_ended:
        raise MonitorError(
            f"Process {pid} ({stat.name}) has already exited: it is a zombie that its parent "
            f"{stat.parent} has not reaped",
            _LIST_PROCESSES,
        )


def _read_stat(descriptor: int) -> procfs.ProcessStat | None:
    """Return the contents of the file, or None after the process was reaped."""
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
