"""Where each Python process of a trial is when the trial hangs.

Python's own faulthandler writes it, from within a signal's handler: it needs no lock of the
interpreter, and so answers also for a process that is stuck in C code. The trial arms it at its
start, and loader workers inherit it. The runner asks one process after the other.
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
"""One that nobody else uses: of those for programs, the last few are the least popular."""

_APPENDING = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
_QUIET_S = 0.05  # a stack to which nothing was added for so long is complete
_LONGEST_S = 1.0  # for a single process: one that does not answer by then will not


_HEADER = re.compile(r"--- pid \d+ (.+) ---$")
_FRAME = re.compile(r'  File "(.+)", line (\d+) in (.+)')


def arm(path: Path) -> None:
    """From now on the signal makes this process, and those it forks, append their stacks."""
    descriptor = os.open(path, _APPENDING, 0o644)
    faulthandler.register(SIGNAL, file=descriptor, all_threads=True)


def dump(pids: Iterable[int], path: Path, patience_s: float = 10.0) -> int:
    """Ask processes for their stacks, those that can tell them; returns how many have."""
    deadline = time.monotonic() + patience_s
    descriptor = os.open(path, _APPENDING, 0o644)
    answers = 0
    try:
        for pid in pids:
            process = trial_processes.identify(pid)
            if process is None or not is_armed(pid):
                continue
            rank = rank_in(procfs.environ(pid))
            of_rank = "" if rank is None else f" (rank{rank})"
            os.write(descriptor, f"--- pid {pid} {process.name}{of_rank} ---\n".encode())
            if _ask(process, descriptor, min(deadline, time.monotonic() + _LONGEST_S)):
                answers += 1
            else:
                now = trial_processes.identify(pid) or "it has ended"
                os.write(descriptor, f"no answer: {now}\n".encode())
    finally:
        os.close(descriptor)
    return answers


def stood_at(path: Path, file: str) -> str | None:
    """Where in a user's file the last process stood that stood in it: "train.py:6 in __getitem__
    (pt_data_worker)". Workers come after who waits for them."""
    name, found, seen = "", None, False
    for line in path.read_text(errors="replace").splitlines():
        if header := _HEADER.match(line):
            name, seen = header[1], False
        elif not seen and (frame := _FRAME.match(line)) and Path(frame[1]).name == file:
            seen, found = True, f"{file}:{frame[2]} in {frame[3]} ({name})"
    return found


def is_armed(pid: int) -> bool:
    """Whether a process handles the signal; any other would die of it."""
    status = procfs.status(pid)
    return status is not None and status.catches(SIGNAL)


def _ask(process: trial_processes.TrialProcess, descriptor: int, deadline: float) -> bool:
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
