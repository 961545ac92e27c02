"""What must hold before monitoring starts. A failure is a message with an exit code."""

from __future__ import annotations

import _thread
import errno
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from stepscope.errors import MonitorError, StepscopeError

_MORE_PROCESSES = "Raise the process limit: `ulimit -u`, or pids.max of the cgroup"
_HINTS = {
    errno.EAGAIN: _MORE_PROCESSES,
    errno.EMFILE: "Raise the limit on open files, for example with `ulimit -n 1024`",
    errno.ENOSPC: "Free some space, or choose another folder with --out DIR",
}
_THREADS = 3
"""Threads of the monitor: the allocator of pyarrow, the GPU reader, and closed streams."""


def reason_of(error: BaseException) -> str:
    """Return the reason of an error in one line."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return " ".join(f"{type(error).__name__}: {error}".split()).rstrip(":")


def start_error(
    what: str, error: Exception, kind: type[StepscopeError] = MonitorError
) -> StepscopeError:
    """Return the error of this kind for any error before the start; `what` says what did not
    start."""
    if isinstance(error, StepscopeError):
        return error
    hint = _HINTS.get(error.errno or 0, "") if isinstance(error, OSError) else ""
    return kind(f"{what}: {reason_of(error)}", hint)


def check_threads(count: int, kind: type[StepscopeError] = MonitorError) -> None:
    """Raise an error of this kind if this process cannot start this many threads at once. Without
    them, numpy interrupts the process, and pyarrow waits forever or aborts."""
    end = threading.Event()
    try:
        for _ in range(count):
            # Without memory, `threading.Thread.start` waits forever.
            _thread.start_new_thread(end.wait, ())
    except RuntimeError:
        raise kind("No more threads can be started", _MORE_PROCESSES) from None
    finally:
        end.set()


@contextmanager
def loading(kind: type[StepscopeError] = MonitorError) -> Iterator[None]:
    """Import the modules of the monitor in this block, with a single OpenBLAS thread (by default it
    starts one per CPU). Raises an error of this kind."""
    variable = "OPENBLAS_NUM_THREADS"
    chosen = variable in os.environ
    os.environ.setdefault(variable, "1")
    try:
        check_threads(_THREADS, kind)
        yield
    except Exception as error:
        raise start_error("Monitoring cannot start", error, kind) from None
    finally:
        if not chosen:
            del os.environ[variable]
