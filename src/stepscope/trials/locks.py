"""Locks between stepscope processes, as files in the state folder or in the folder of a study."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from stepscope.errors import TrialError
from stepscope.runs.files import UnsafeFile, open_own, read_regular
from stepscope.state import STATE_VARIABLE, state_folder
from stepscope.trials.processes import trial_processes

_ATTEMPTS, _RETRY_S = 100, 0.02
_HOLDER_BYTES = 4096


@contextlib.contextmanager
def locked(path: Path, wait: Callable[[], None] | None = None) -> Iterator[int]:
    """Hold a lock file exclusively; the kernel releases the lock of a process that exits.

    If the lock stays taken, call `wait` once and wait for the lock; without `wait`, raise
    BlockingIOError. Raises UnsafeFile if the file is a link or not a regular file. Yields the
    descriptor of the file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = open_own(path, os.O_RDWR)
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
        yield lock
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
            lock = turn.enter_context(locked(path, lambda: notify(_waiting_text(path))))
        except UnsafeFile as error:
            hint = f"Remove it, or set {STATE_VARIABLE} to another folder"
            raise TrialError(error.message, hint) from None
        except OSError as error:
            hint = f"Set {STATE_VARIABLE} to a writable folder"
            raise TrialError(f"Cannot write {path}: {error.strerror}", hint) from None
        with contextlib.suppress(OSError):
            os.ftruncate(lock, 0)
            os.pwrite(lock, f"{command} {trial_processes.runner_name()}\n".encode(), 0)
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                os.ftruncate(lock, 0)


def _waiting_text(path: Path) -> str:
    """Describe the holder of a lock. A file that is unreadable, or that a killed process left
    behind, does not name one."""
    with contextlib.suppress(OSError, ValueError, UnsafeFile):
        command, process = read_regular(path, _HOLDER_BYTES).decode().split()
        if trial_processes.runner_is_running(process):
            pid = process.partition(".")[0]
            return (
                f"waiting for another stepscope process on this machine ({command}, PID {pid}) "
                "to finish"
            )
    return f"waiting for another process to release {path}"
