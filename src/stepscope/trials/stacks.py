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

from stepscope.sensors.roles import rank_in
from stepscope.trials import kin

SIGNAL = int(signal.SIGRTMAX) - 3
"""One that nobody else uses: of those for programs, the last few are the least popular."""

_APPENDING = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
_QUIET_S = 0.05
"""A stack is complete when nothing was added to it for so long."""
_LONGEST_S = 1.0
"""For a single process: one that does not answer by then will not."""


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
            process = kin.identify(pid)
            if process is None or not is_armed(pid):
                continue
            os.write(descriptor, f"--- pid {pid} {process.name}{_rank(pid)} ---\n".encode())
            if _ask(process, descriptor, min(deadline, time.monotonic() + _LONGEST_S)):
                answers += 1
            else:
                os.write(descriptor, f"no answer: {kin.identify(pid) or 'it has ended'}\n".encode())
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
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            caught = file.read().partition(b"\nSigCgt:")[2].split(None, 1)[0]
    except (OSError, IndexError):
        return False
    return bool(int(caught, 16) >> (SIGNAL - 1) & 1)


def _rank(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            rank = rank_in(file.read())
    except OSError:
        rank = None
    return "" if rank is None else f" (rank{rank})"


def _ask(process: kin.Kin, descriptor: int, deadline: float) -> bool:
    """Signal it, and wait until it has written all that it has to say."""
    before = size = os.fstat(descriptor).st_size
    kin.send(process, SIGNAL)
    quiet_since = time.monotonic()
    while (now := time.monotonic()) < deadline:
        if (grown := os.fstat(descriptor).st_size) > size:
            size, quiet_since = grown, now
        if size > before and now - quiet_since >= _QUIET_S:
            break
        time.sleep(0.005)
    return size > before
