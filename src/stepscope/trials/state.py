"""What outlives a run on this machine: the folder for it, and locks between our processes."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from stepscope.errors import CannotTry

STATE_VARIABLE = "STEPSCOPE_STATE"
_ATTEMPTS, _RETRY_S = 100, 0.02


def state_folder() -> Path:
    """`$STEPSCOPE_STATE`, `$XDG_STATE_HOME/stepscope` or `~/.local/state/stepscope`."""
    if named := os.environ.get(STATE_VARIABLE):
        return Path(named)
    home = os.path.expanduser("~")
    if home == "~":  # this user has no home
        home = "/nonexistent"
    return Path(os.environ.get("XDG_STATE_HOME") or f"{home}/.local/state") / "stepscope"


@contextlib.contextmanager
def locked(path: Path, wait: Callable[[], None] | None = None) -> Iterator[None]:
    """Hold a lock file exclusively; the kernel releases the lock of a process that dies.

    After a moment, `wait` is called once and the lock is waited for; without it, BlockingIOError.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        for _ in range(_ATTEMPTS):
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(_RETRY_S)
        else:
            if wait is not None:
                wait()
            # In the kernel's queue, we are next however soon the holder wants its next turn.
            fcntl.flock(lock, fcntl.LOCK_EX | (fcntl.LOCK_NB if wait is None else 0))
        yield
    finally:
        os.close(lock)


def machine_lock() -> Path:
    return state_folder() / "machine.lock"


@contextlib.contextmanager
def machine_turn(tell: Callable[[str], None], path: Path) -> Iterator[None]:
    """Be the only one that runs a trial on this machine: trials at the same time disturb each
    other, those of other studies included."""
    waiting = "another study runs a trial on this machine: waiting for its turn"
    with contextlib.ExitStack() as turn:
        try:
            turn.enter_context(locked(path, lambda: tell(waiting)))
        except OSError as error:
            hint = f"Set {STATE_VARIABLE} to a folder that can be"
            raise CannotTry(f"{path} cannot be written: {error.strerror}", hint) from None
        yield
