"""What the runner does with processes and descriptors of its own, and nothing of a trial's."""

from __future__ import annotations

import contextlib
import os
import resource
import select
import time
from collections.abc import Callable, Iterator
from pathlib import Path

_TAIL_BYTES = 65536
_FULL_BYTES = 16384
"""With less than a few blocks left not even a small file can be replaced."""


@contextlib.contextmanager
def own_descriptors() -> Iterator[None]:
    """We may need many; the next trial gets the limit that this one got."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        yield
    finally:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, before)


def wait_until(happened: Callable[[], bool], seconds: float) -> None:
    until = time.monotonic() + seconds
    while not happened() and time.monotonic() < until:
        time.sleep(0.02)


@contextlib.contextmanager
def end_of(pid: int) -> Iterator[select.poll]:
    """What wakes us when a process ends; where the kernel cannot tell, only the time-out does."""
    poll, pidfd = select.poll(), None
    with contextlib.suppress(OSError, AttributeError):
        pidfd = os.pidfd_open(pid)
        poll.register(pidfd, select.POLLIN)
    try:
        yield poll
    finally:
        if pidfd is not None:
            os.close(pidfd)


def own_children() -> list[int]:
    """Whom we have already, the guard and what else: none of them is of the trial."""
    found: list[int] = []
    for listed in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += map(int, listed.read_text().split())
    return found


def tail_of(path: Path) -> str:
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            return file.read().decode("utf-8", "replace")
    except OSError:
        return ""


def is_full(folder: Path) -> bool:
    """Whether the disk of a folder has no room for us."""
    try:
        disk = os.statvfs(folder)
    except OSError:
        return False
    return disk.f_bavail * disk.f_frsize < _FULL_BYTES
