"""Tells whether a signal was sent to the whole process group, or to the watcher alone.

`timeout`, shells and schedulers signal groups: then the command has the signal already, and passing
it on would deliver it twice, which a script that saves on the first SIGTERM and gives up on the
second does not survive. The kernel does not say to whom else it delivered. So a small process sits
in our group with every signal blocked: what is pending there was sent to all.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass

_SETTLE_S = 0.02
"""Whoever signals many processes needs a moment to reach them all."""


@dataclass(frozen=True)
class Sentinel:
    """The process that sits there, and the pipe that tells it to forget, or (closed) to end."""

    pid: int
    control: int

    @classmethod
    def start(cls) -> Sentinel:
        """Fork it: before anything heavy is imported, and before there are threads."""
        source, control = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(control)
            _sit(source)
        os.close(source)
        return cls(pid, control)

    def group_had(self, number: int) -> bool:
        """Whether everybody in our group got a signal that we got."""
        time.sleep(_SETTLE_S)
        had = bool(_pending(self.pid) >> (number - 1) & 1)
        os.write(self.control, b"f")
        return had

    def end(self) -> None:
        os.close(self.control)
        os.waitpid(self.pid, 0)


def _sit(source: int) -> None:
    """Block everything, and forget what is pending whenever told to."""
    everything = signal.valid_signals()
    signal.pthread_sigmask(signal.SIG_BLOCK, everything)
    try:
        while os.read(source, 1):
            while signal.sigtimedwait(everything, 0) is not None:
                pass
    finally:
        os._exit(0)


def _pending(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            return int(file.read().partition(b"ShdPnd:")[2].split(None, 1)[0], 16)
    except (OSError, IndexError):
        return 0
