"""The step log of a trial's rank: 48-byte records, appended with plain write().

    end_ns | step | wait_ns | copy_ns | compute_ns | stall_ns        (int64 each)

`end_ns` is when the step was complete, on CLOCK_MONOTONIC. On a GPU it comes from device events,
without synchronization. `wait_ns` is how long the host waited for the batch, `copy_ns` how long the
copy to the device took, `compute_ns` the time of forward, backward and optimizer. `stall_ns` is how
long missing data delayed the step: the whole wait on a CPU, and on a GPU only the part in which the
device was idle. -1 means unknown.

Standard library only. Records that were written survive a crash of the process.
"""

from __future__ import annotations

import os
import struct
import time
from pathlib import Path
from typing import NamedTuple

RECORD = struct.Struct("<6q")
FIELDS = ("end_ns", "step", "wait_ns", "copy_ns", "compute_ns", "stall_ns")
UNKNOWN = -1
_FLUSH_S = 0.2
"""A step may take only microseconds, so records are buffered and written at this interval."""


class Step(NamedTuple):
    """One optimizer step of one rank."""

    end_ns: int
    step: int
    wait_ns: int
    copy_ns: int = UNKNOWN
    compute_ns: int = UNKNOWN
    stall_ns: int = UNKNOWN


class StepLog:
    """Appends the steps of one rank to a file."""

    def __init__(self, path: Path) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._descriptor = os.open(path, flags, 0o644)
        self._buffer: list[bytes] = []
        self._flush_at = 0.0

    def add(self, step: Step) -> None:
        self._buffer.append(RECORD.pack(*step))
        now = time.monotonic()
        if now >= self._flush_at:
            self._flush_at = now + _FLUSH_S
            self.flush()

    def flush(self) -> None:
        data, self._buffer = b"".join(self._buffer), []
        while data:  # a full disk raises here and is reported as the trial's error
            data = data[os.write(self._descriptor, data) :]

    def close(self) -> None:
        self.flush()
        os.close(self._descriptor)
