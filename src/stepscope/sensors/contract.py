"""The interface of a sensor.

A sensor reads one source, cheaply and repeatedly. It does not raise if the machine lacks a source:
the value is None and `missing` holds the reason. Counters are returned as cumulative totals; the
sampler turns them into rates over the actual window. `tests/contract/` contains the test suite that
every sensor passes.
"""

from __future__ import annotations

import errno
from abc import ABC, abstractmethod

from stepscope.metrics import Scope, is_counter
from stepscope.records import Reading


class Sensor(ABC):
    """One source of readings.

    `period` is the time between readings in seconds; 0 means every sample. `share` is the maximum
    cost as a fraction of one core: a sensor that costs more is read less often.
    """

    name: str
    scope: Scope
    metrics: tuple[str, ...]
    period: float = 1.0
    share: float = 0.002
    first_after: float = 0.0
    """Seconds after the start of the run until the first useful reading."""

    def __init__(self) -> None:
        self.missing: dict[str, str] = {}
        """Metric to the reason why it has no value."""
        self.hints: dict[str, str] = {}
        """Metric to the action that makes it readable, where one is known."""
        self.not_configured: set[str] = set()
        """Metrics without a value because nothing is configured, such as a limit. They do not count
        as missing."""
        self.estimated: dict[str, str] = {}
        """Metric to the estimation method, where the metric cannot be measured directly."""
        self.notes: list[str] = []
        """Events that the report must mention, such as "GPU 1 was lost"."""

    @abstractmethod
    def read(self) -> list[Reading]:
        """Return the current values; every key is one of `metrics`."""

    def close(self) -> None:
        """Release open files and handles."""

    def settles_in(self) -> float:
        """Return the seconds until a reading can return new values."""
        return 0.0

    @property
    def counts(self) -> bool:
        """Whether the sensor reads counters, which need a final reading at the end of a run."""
        return any(is_counter(metric) for metric in self.metrics)

    def mark_missing(self, reason: str | OSError, *metrics: str, hint: str = "") -> None:
        """Record why metrics (default: all) are missing, and a hint."""
        if isinstance(reason, OSError):
            if reason.errno in (errno.EACCES, errno.EPERM):
                hint = "Run stepscope as the owner of the processes or with sudo"
            reason = error_reason(reason)
        for metric in metrics or self.metrics:
            self.missing[metric] = reason
            if hint:
                self.hints[metric] = hint


def error_reason(error: OSError) -> str:
    """Return a readable reason for an error."""
    return f"{error.filename or 'source'}: {error.strerror or error}"
