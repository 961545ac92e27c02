"""The contract of a sensor.

A sensor reads one source, cheaply, again and again. It never raises for what the machine lacks: a
value that cannot be read is None, and `missing` says why. Counters are given as cumulative totals;
the sampler turns them into rates over the true window. `tests/contract/` holds the suite that every
sensor passes.
"""

from __future__ import annotations

import errno
from abc import ABC, abstractmethod

from stepscope.metrics import Scope, is_counter
from stepscope.records import Reading


class Sensor(ABC):
    """One source. `period` 0 means with every sample; `share` is the most of a core it may cost.

    A sensor whose reading costs more than `share` of its period is read less often.
    """

    name: str
    scope: Scope
    metrics: tuple[str, ...]
    period: float = 1.0
    share: float = 0.002
    first_after: float = 0.0
    """Seconds after the start before which a reading would tell nothing."""

    def __init__(self) -> None:
        self.missing: dict[str, str] = {}
        """Metric to the reason why it has no value here."""
        self.hints: dict[str, str] = {}
        """Metric to what would make it readable, where that is known."""
        self.unset: set[str] = set()
        """Metrics that are missing because nothing is set: no loss."""
        self.estimated: dict[str, str] = {}
        """Metric to how it was estimated, where it could not be read as its description says."""
        self.remarks: list[str] = []
        """What happened that a reader of the run must know: "GPU 1 was lost"."""

    @abstractmethod
    def read(self) -> list[Reading]:
        """The values now; every key is one of `metrics`."""

    def close(self) -> None:
        """Give back what is held open."""

    def settles_in(self) -> float:
        """Seconds until a reading would tell something new."""
        return 0.0

    @property
    def counts(self) -> bool:
        """Whether it reads counters, of which the last reading must not be missed."""
        return any(is_counter(metric) for metric in self.metrics)

    def lacks(self, reason: str | OSError, *metrics: str, hint: str = "") -> None:
        """Note why metrics (all, if none is named) are missing, and what would help."""
        if isinstance(reason, OSError):
            if reason.errno in (errno.EACCES, errno.EPERM):
                hint = "run stepscope as the user of the processes, or with sudo"
            reason = why(reason)
        for metric in metrics or self.metrics:
            self.missing[metric] = reason
            if hint:
                self.hints[metric] = hint


def why(error: OSError) -> str:
    """An error as a reason a person can read."""
    return f"{error.filename or 'source'}: {error.strerror or error}"
