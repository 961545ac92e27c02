"""Stack dumps of the Python processes of a stalled trial.

Python's faulthandler writes them from a signal handler without the GIL, so it also works for a
process that is stuck in C code. The trial registers it at its start, and loader workers inherit it.
The runner signals one process after the other.
"""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import time
from collections.abc import Iterable
from pathlib import Path

from stepscope.sensors import procfs
from stepscope.sensors.tree import rank_in
from stepscope.trials.processes import trial_processes

SIGNAL = int(signal.SIGRTMAX) - 3
"""A real-time signal that other software is unlikely to use."""

_APPENDING = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
_QUIET_S = 0.05  # a dump that has not grown for this time is complete
_TIMEOUT_S = 1.0  # per process
_HEADER = re.compile(r"--- pid \d+ (.+) ---$")
_FRAME = re.compile(r'  File "(.+)", line (\d+) in (.+)')


def arm(path: Path) -> None:
    """Make this process and its forks append their stacks to a file on the signal."""
    descriptor = os.open(path, _APPENDING, 0o644)
    faulthandler.register(SIGNAL, file=descriptor, all_threads=True)


def dump(pids: Iterable[int], path: Path, patience_s: float = 10.0) -> int:
    """Request the stacks of all registered processes; return the number of dumps."""
    deadline = time.monotonic() + patience_s
    descriptor = os.open(path, _APPENDING, 0o644)
    dumps = 0
    try:
        for pid in pids:
            process = trial_processes.identify(pid)
            if process is None or not is_armed(pid):
                continue
            rank = rank_in(procfs.environ(pid))
            suffix = "" if rank is None else f" (rank{rank})"
            os.write(descriptor, f"--- PID {pid} {process.name}{suffix} ---\n".encode())
            if _request(process, descriptor, min(deadline, time.monotonic() + _TIMEOUT_S)):
                dumps += 1
            else:
                state = trial_processes.identify(pid) or "the process has exited"
                os.write(descriptor, f"no response: {state}\n".encode())
    finally:
        os.close(descriptor)
    return dumps


def stalled_at(path: Path, file: str) -> str | None:
    """Return the location in a user's file where the last process of a dump is, for example
    "train.py:6 in __getitem__ (pt_data_worker)". Workers come after the process that waits for
    them."""
    name, location, seen = "", None, False
    for line in path.read_text(errors="replace").splitlines():
        if header := _HEADER.match(line):
            name, seen = header[1], False
        elif not seen and (frame := _FRAME.match(line)) and Path(frame[1]).name == file:
            seen, location = True, f"{file}:{frame[2]} in {frame[3]} ({name})"
    return location


def is_armed(pid: int) -> bool:
    """Whether a process handles the signal, which would kill it otherwise."""
    status = procfs.status(pid)
    return status is not None and status.catches(SIGNAL)


def _request(process: trial_processes.TrialProcess, descriptor: int, deadline: float) -> bool:
    before = size = os.fstat(descriptor).st_size
    trial_processes.send(process, SIGNAL)
    quiet_since = time.monotonic()
    while (now := time.monotonic()) < deadline:
        if (grown := os.fstat(descriptor).st_size) > size:
            size, quiet_since = grown, now
        if size > before and now - quiet_since >= _QUIET_S:
            break
        time.sleep(0.005)
    return size > before
