"""Persistent state of this machine: its folder, and locks between stepscope processes."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from stepscope.errors import TrialError
from stepscope.trials.processes import trial_processes

STATE_VARIABLE = "STEPSCOPE_STATE"
_ATTEMPTS, _RETRY_S = 100, 0.02


def state_folder() -> Path:
    """Return `$STEPSCOPE_STATE`, `$XDG_STATE_HOME/stepscope` or `~/.local/state/stepscope`."""
    if folder := os.environ.get(STATE_VARIABLE):
        return Path(folder)
    home = os.path.expanduser("~")
    if home == "~":  # the user does not have a home directory
        home = "/nonexistent"
    return Path(os.environ.get("XDG_STATE_HOME") or f"{home}/.local/state") / "stepscope"


@contextlib.contextmanager
def locked(path: Path, wait: Callable[[], None] | None = None) -> Iterator[None]:
    """Hold a lock file exclusively; the kernel releases the lock of a process that exits.

    If the lock stays taken, call `wait` once and wait for the lock; without `wait`, raise
    BlockingIOError.
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
            # A blocking call queues us, even if the holder soon takes the lock again.
            fcntl.flock(lock, fcntl.LOCK_EX | (fcntl.LOCK_NB if wait is None else 0))
        yield
    finally:
        os.close(lock)


def machine_lock() -> Path:
    return state_folder() / "machine.lock"


@contextlib.contextmanager
def machine_turn(notify: Callable[[str], None], path: Path, command: str) -> Iterator[None]:
    """Hold the lock for trials on this machine: concurrent trials interfere with each other.

    `command` is what the holder runs, such as "fit". The lock file stores it for the message of
    waiting processes.
    """
    with contextlib.ExitStack() as turn:
        try:
            turn.enter_context(locked(path, lambda: notify(_waiting_text(path))))
        except OSError as error:
            hint = f"Set {STATE_VARIABLE} to a writable folder"
            raise TrialError(f"Cannot write {path}: {error.strerror}", hint) from None
        with contextlib.suppress(OSError):
            path.write_text(f"{command} {trial_processes.runner_name()}\n")
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                path.write_text("")


def _waiting_text(path: Path) -> str:
    """Describe the holder of a lock. A file that is unreadable, or that a killed process left
    behind, does not name one."""
    holder = ""
    with contextlib.suppress(OSError, ValueError):
        command, process = path.read_text().split()
        if trial_processes.runner_is_running(process):
            holder = f" ({command}, PID {process.partition('.')[0]})"
    return f"waiting for another stepscope process on this machine{holder} to finish"
