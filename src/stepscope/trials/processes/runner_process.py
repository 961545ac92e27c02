"""The runner's own process: its signals, descriptors and children."""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

_TAIL_BYTES = 65536
_FULL_BYTES = 16384
"""With less than a few blocks left not even a small file can be replaced."""
_END_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def uninterrupted() -> Iterator[list[int]]:
    """Collect signals that ask us to end instead of obeying: neither a second Ctrl-C nor a closed
    terminal cuts cleaning up short. Python delivers signals to the main thread only."""
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    before = {number: signal.getsignal(number) for number in _END_SIGNALS}
    for number in _END_SIGNALS:
        if before[number] not in (signal.SIG_IGN, None):
            signal.signal(number, lambda number, frame: received.append(number))
    try:
        yield received
    finally:
        for number, handler in before.items():
            if handler is not None:
                signal.signal(number, handler)


@contextlib.contextmanager
def own_descriptors() -> Iterator[None]:
    """Monitoring raises the limit of open files; the next trial gets the one that this one got."""
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
    """A poll that wakes up when a process ends; without pidfd (Linux 5.3) only its timeout does."""
    poll, pidfd = select.poll(), None
    with contextlib.suppress(OSError, AttributeError):
        pidfd = os.pidfd_open(pid)
        poll.register(pidfd, select.POLLIN)
    try:
        yield poll
    finally:
        if pidfd is not None:
            os.close(pidfd)


def tail_of(path: Path) -> str:
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            return file.read().decode("utf-8", "replace")
    except OSError:
        return ""


def is_full(folder: Path) -> bool:
    try:
        disk = os.statvfs(folder)
    except OSError:
        return False
    return disk.f_bavail * disk.f_frsize < _FULL_BYTES
