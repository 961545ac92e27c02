"""One trial at a time on a machine: trials that run at once disturb each other.

A lock in the state folder gives turns, to studies and to whoever else tries something here.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from stepscope.errors import CannotTry
from stepscope.trials.spread import state_folder

_LOOK_S = 0.2
_WORTH_TELLING_S = 1.0


def lock_of_this_machine() -> Path:
    return state_folder() / "machine.lock"


@contextlib.contextmanager
def turn(tell: Callable[[str], None], path: Path) -> Iterator[None]:
    """Be the only one who tries something on this machine. Who dies lets go of it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise CannotTry(
            f"{path} cannot be written: {error.strerror}",
            "Set STEPSCOPE_STATE to a folder that can be",
        ) from None
    try:
        _wait_for(lock, tell)
        yield
    finally:
        os.close(lock)


def _wait_for(lock: int, tell: Callable[[str], None]) -> None:
    """Who waits in the kernel is next, however soon the other wants its next turn."""
    until = time.monotonic() + _WORTH_TELLING_S
    while time.monotonic() < until:
        try:
            return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(_LOOK_S)
    tell("another study runs a trial on this machine: waiting for its turn")
    fcntl.flock(lock, fcntl.LOCK_EX)
