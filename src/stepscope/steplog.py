"""How a trial's processes report their steps: 48-byte records appended with plain write().

    end_ns | step | wait_ns | copy_ns | compute_ns | stall_ns        (int64 each)

`end_ns` is when the step was complete, on CLOCK_MONOTONIC (of a GPU: when the device was done with
it, told by device events, without making anybody wait). `wait_ns` is how long the host waited for
the batch, `copy_ns` how long the batch took to the device, `compute_ns` forward, backward and
optimizer. `stall_ns` is how long the step was held up by missing data: all of the wait where the
host computes; on a GPU only what the device stood still of it. -1 is "not known".

Standard library only. What is written is there, whatever becomes of the process.
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
"""Steps may take microseconds: they are written together, this often."""


class Step(NamedTuple):
    """One optimizer step of one rank."""

    end_ns: int
    step: int
    wait_ns: int
    copy_ns: int = UNKNOWN
    compute_ns: int = UNKNOWN
    stall_ns: int = UNKNOWN


class StepLog:
    """Appends the steps of this process to a file."""

    def __init__(self, path: Path) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._descriptor = os.open(path, flags, 0o644)
        self._kept: list[bytes] = []
        self._flush_at = 0.0

    def add(self, step: Step) -> None:
        self._kept.append(RECORD.pack(*step))
        now = time.monotonic()
        if now >= self._flush_at:
            self._flush_at = now + _FLUSH_S
            self.flush()

    def flush(self) -> None:
        data, self._kept = b"".join(self._kept), []
        while data:  # a full disk is the trial's error, and named as such
            data = data[os.write(self._descriptor, data) :]

    def close(self) -> None:
        self.flush()
        os.close(self._descriptor)
