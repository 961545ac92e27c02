"""The soft limit of host memory, where no control group can be had.

It adds up what the processes of a trial hold, several times a second, and says when that is too
much. It is late by nature, and cannot see the page cache or files in /dev/shm that nobody has
mapped.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from stepscope.trials.limits import size_text

_PAGE = os.sysconf("SC_PAGE_SIZE")
_MOST_SHARE = 0.05
"""PSS costs some 15 ms per gigabyte and process: reading it may take this part of the time."""
_NAMED = 5


@dataclass(frozen=True)
class Breach:
    """A limit that was not kept."""

    reason: str
    evidence: dict[str, Any] = field(default_factory=dict)


class Watchdog:
    """Compares the memory of some processes with a limit.

    Resident memory is read first: it counts shared pages once for each process, so that a sum
    within the limit is proof. Only beyond it proportional memory (PSS) is read, and again only
    once resident memory has grown by what was left.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._within_until = limit
        """Resident bytes up to which the limit is known to be kept."""
        self._next_pss = 0.0

    def inspect(self, pids: Collection[int]) -> Breach | None:
        resident = sum(_resident(pid) for pid in pids)
        begun = time.monotonic()
        if resident <= max(self._limit, self._within_until) or begun < self._next_pss:
            return None
        shares = {pid: _proportional(pid) for pid in pids}
        used = sum(shares.values())
        now = time.monotonic()
        self._next_pss = now + (now - begun) / _MOST_SHARE
        self._within_until = resident + self._limit - used
        return self._breach(used, resident, shares) if used > self._limit else None

    def _breach(self, used: int, resident: int, shares: dict[int, int]) -> Breach:
        largest = sorted(shares, key=shares.__getitem__, reverse=True)[:_NAMED]
        return Breach(
            f"its processes held {size_text(used)}, and {size_text(self._limit)} are allowed",
            {
                "limit": self._limit,
                "pss": used,
                "rss": resident,
                "largest": {str(pid): shares[pid] for pid in largest},
            },
        )


def _resident(pid: int) -> int:
    return _statm(pid)[0]


def _statm(pid: int) -> tuple[int, int]:
    """Bytes that are resident, and how many of them are of files or shared memory."""
    try:
        descriptor = os.open(f"/proc/{pid}/statm", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return 0, 0
    try:
        _, resident, shared, *_ = os.read(descriptor, 128).split()
        return int(resident) * _PAGE, int(shared) * _PAGE
    except (OSError, ValueError):
        return 0, 0
    finally:
        os.close(descriptor)


def _proportional(pid: int) -> int:
    """Its memory, with what it shares divided by those who share it."""
    try:
        with open(f"/proc/{pid}/smaps_rollup", "rb") as file:
            pss = file.read().partition(b"\nPss:")[2].split(None, 1)
        return int(pss[0]) * 1024
    except (OSError, IndexError):  # it has ended, or this kernel does not tell
        resident, shared = _statm(pid)
        return resident - shared
