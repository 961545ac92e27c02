"""A sensor with its schedule: when it is due, what it costs, and when it can be afforded again."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from stepscope.capture.rates import Rates
from stepscope.records import Reading
from stepscope.sensors.contract import Sensor

_FAILURES_BEFORE_OFF = 5
_NEWS, _MOST_TIMES_USUAL = 0.2, 4.0
"""How much a reading changes what is taken for its usual cost, and how dear it may seem at most."""


@dataclass(frozen=True)
class Taken:
    """What one reading of a sensor gave: rows with the seconds that their rates are over."""

    sensor: Sensor
    t_ns: int
    rows: list[tuple[float | None, Reading]]


@dataclass
class Slot:
    """Read by one thread only; what it has cost may be looked at by others."""

    sensor: Sensor
    rates: Rates
    interval_s: float
    trouble: Callable[[str], None]
    due_ns: int = 0
    read_ns: int = 0
    cost_s: float = 0.0
    spent_s: float = 0.0
    failures: int = 0
    failed: str = ""
    slowest_period_s: float = 0.0

    def is_due(self, now_ns: int) -> bool:
        return now_ns >= self.due_ns and not self.failed

    def take(self) -> Taken | None:
        """Read now; None where the sensor failed, which must never end a run."""
        before = time.thread_time()
        began = time.monotonic_ns()
        try:
            readings = self.sensor.read()
        except Exception as error:
            self._fail(error, began)
            return None
        self.failures = 0
        now = (began + time.monotonic_ns()) // 2  # nobody knows better when it was read
        taken = Taken(self.sensor, now, self.rates.convert(now, readings))
        self._account(time.thread_time() - before, now)
        return taken

    def _fail(self, error: Exception, began_ns: int) -> None:
        self.failures += 1
        self.due_ns = began_ns + 10**9
        if self.failures >= _FAILURES_BEFORE_OFF:
            self.failed = f"the sensor failed: {type(error).__name__}: {error}"
            self.trouble(f"sensor '{self.sensor.name}' is off: {error}")

    def _account(self, cost: float, now_ns: int) -> None:
        """Note what it cost, and when it can be afforded again.

        One reading that cost a hundred times as much (a driver was busy with somebody else) says
        little of the next. So a reading counts as a few times what is usual at most; if it goes on
        like that, the usual grows fast enough.
        """
        if not self.read_ns:
            self.cost_s = cost
        else:
            self.cost_s += _NEWS * (min(cost, _MOST_TIMES_USUAL * self.cost_s) - self.cost_s)
        self.spent_s += cost
        self.read_ns = now_ns
        affordable = self.cost_s / self.sensor.share
        if affordable > max(self.sensor.period, self.interval_s):
            self.slowest_period_s = max(self.slowest_period_s, affordable)
        if self.sensor.period or affordable > self.interval_s:
            # Half an interval early is on time: a tick is never exactly where it was planned.
            slack = self.interval_s / 2
            self.due_ns = now_ns + int((max(self.sensor.period, affordable) - slack) * 1e9)
