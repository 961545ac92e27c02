"""When sensors are read: each as often as it is worth, in the sampling loop or in a thread.

A sensor costs a share of its period at most; one that turns out dearer is read less often. Sensors
that may have to wait for a driver have a thread of their own, and whatever happens in it nobody
waits for it: a driver that sleeps takes seconds to wake up, one whose device has died may never
answer. Neither may hold up the command, the other sensors, or the end.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from stepscope.metrics import is_counter
from stepscope.records import Reading
from stepscope.sensors.contract import Sensor

_FAILURES_BEFORE_OFF = 5
_NEWS, _MOST_TIMES_USUAL = 0.2, 4.0
"""How much a reading changes what is taken for its usual cost, and how dear it may seem at most."""
_LAST_S = 1.5
"""How long the end waits for the last readings of a thread."""
_LONG_S = 5.0
_FORGET_ABOVE = 100
"""Entities that are gone and still remembered: processes come and go."""


class Rates:
    """Turns the cumulative counters of one sensor into rates over their true window."""

    def __init__(self, metrics: tuple[str, ...], from_zero_ns: int | None = None) -> None:
        """With `from_zero_ns`, an entity not seen before had counted nothing until the last reading
        (or until that time): true of processes that are born under watch."""
        self._counters = tuple(key for key in metrics if is_counter(key))
        self._last: dict[str | int, tuple[int, dict[str, float | None]]] = {}
        self._read_before_ns = from_zero_ns
        self._from_zero = from_zero_ns is not None

    def convert(self, t_ns: int, readings: list[Reading]) -> list[tuple[float | None, Reading]]:
        """Each reading with the seconds its rates are over (None for the first)."""
        rows = [self._convert_one(t_ns, reading) for reading in readings]
        self._read_before_ns = t_ns
        if len(self._last) > 2 * len(readings) + _FORGET_ABOVE:
            self._last = {key: last for key, last in self._last.items() if last[0] == t_ns}
        return rows

    def _convert_one(self, t_ns: int, reading: Reading) -> tuple[float | None, Reading]:
        entity = reading.entity
        key = entity.name if entity.pid is None else entity.pid  # a process may change its role
        before = self._last.get(key)
        self._last[key] = (t_ns, reading.values)
        if before is None and self._from_zero and self._read_before_ns is not None:
            before = (self._read_before_ns, dict.fromkeys(self._counters, 0.0))
        if before is None or t_ns <= before[0]:
            values = {k: v for k, v in reading.values.items() if k not in self._counters}
            return None, Reading(reading.entity, values)
        window = (t_ns - before[0]) / 1e9
        values = dict(reading.values)
        for counter in self._counters:
            if counter in values:
                then, now = before[1].get(counter), values[counter]
                if then is None or now is None or now < then:  # the last: it was reset
                    values[counter] = None
                else:
                    values[counter] = (now - then) / window
        return window, Reading(reading.entity, values)


@dataclass(frozen=True)
class TakenReadings:
    """What one reading of a sensor gave: rows with the seconds that their rates are over."""

    sensor: Sensor
    t_ns: int
    rows: list[tuple[float | None, Reading]]


@dataclass
class ScheduledSensor:
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

    def take(self) -> TakenReadings | None:
        """Read now; None where the sensor failed, which must never end a run."""
        before = time.thread_time()
        began = time.monotonic_ns()
        try:
            readings = self.sensor.read()
        except Exception as error:
            self.failures += 1
            self.due_ns = began + 10**9
            if self.failures >= _FAILURES_BEFORE_OFF:
                self.failed = f"the sensor failed: {type(error).__name__}: {error}"
                self.trouble(f"sensor '{self.sensor.name}' is off: {error}")
            return None
        self.failures = 0
        now = (began + time.monotonic_ns()) // 2  # nobody knows better when it was read
        taken = TakenReadings(self.sensor, now, self.rates.convert(now, readings))
        self._account(time.thread_time() - before, now)
        return taken

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


class BackgroundReader(threading.Thread):
    """Opens its sensors, waits for `begin`, and reads each when it is due until `finish`."""

    def __init__(
        self, name: str, make: Callable[[], Sequence[Sensor]], trouble: Callable[[str], None]
    ) -> None:
        super().__init__(name=f"stepscope-{name}", daemon=True)
        self.scheduled: list[ScheduledSensor] = []
        self._what = name
        self._make = make
        self._trouble = trouble
        self._taken: deque[TakenReadings] = deque()
        self._opened = threading.Event()
        self._begun = threading.Event()
        self._ending = threading.Event()
        self._shortest_s = self._pace_s = 1.0
        self._busy_since: float | None = None
        self._longest_s = 0.0
        self._answered = True
        self.start()

    def wait_until_open(self, seconds: float) -> bool:
        """Give the driver some time to answer; whether it has."""
        return self._opened.wait(seconds)

    def begin(self, interval_s: float) -> None:
        """Read from now on, if it is open; else as soon as it is."""
        self._shortest_s = interval_s
        self._begun.set()

    def collect(self) -> Iterator[TakenReadings]:
        """What was read since the last time, in the order in which it was read."""
        while self._taken:
            yield self._taken.popleft()

    def finish(self) -> bool:
        """Read once more what counts, and end; False where the driver does not answer."""
        self._ending.set()
        self._begun.set()
        if self._opened.is_set():
            self.join(_LAST_S)
        self._answered = not self.is_alive()
        return self._answered

    def remarks(self) -> list[str]:
        """What a reader of the run must know of a driver that kept us waiting."""
        now = self._busy_since
        longest = max(self._longest_s, 0.0 if now is None else time.monotonic() - now)
        found = []
        if self._opened.is_set() and longest > _LONG_S:
            found.append(f"{self._what} did not answer for {longest:.0f} s, and was not read then")
        if self._opened.is_set() and not self._answered:
            found.append(f"{self._what} did not answer at the end: its last readings are missing")
        return found

    def run(self) -> None:
        for sensor in self._make():
            with contextlib.suppress(Exception):
                sensor.read()  # the first time costs several times what it costs from then on
            rates = Rates(sensor.metrics)
            self.scheduled.append(ScheduledSensor(sensor, rates, self._pace_s, self._trouble))
        self._opened.set()
        if not self.scheduled:
            return
        self._begun.wait()
        # At the pace of the most frequent: each waking up costs, so the others are read with it.
        most_often = min(each.sensor.period for each in self.scheduled)
        self._pace_s = max(self._shortest_s, most_often)
        for each in self.scheduled:
            each.interval_s = self._pace_s
        while not self._ending.is_set():
            self._read(each for each in self.scheduled if each.is_due(time.monotonic_ns()))
            self._ending.wait(self._pace_s)
        for each in self.scheduled:
            time.sleep(each.sensor.settles_in())
        self._read(each for each in self.scheduled if each.sensor.counts)
        for each in self.scheduled:
            each.sensor.close()

    def _read(self, due: Iterator[ScheduledSensor]) -> None:
        for each in due:
            begun = self._busy_since = time.monotonic()
            taken = each.take()
            self._busy_since = None
            self._longest_s = max(self._longest_s, time.monotonic() - begun)
            if taken is not None:
                self._taken.append(taken)


def sample_times(sample: Callable[[float], None], interval_s: float) -> Iterator[float]:
    """Call `sample` with its delay whenever one is due, and yield when the next one will be.

    Whoever iterates waits until then, or is woken up before. Samples that are past are left out.
    """
    planned = time.monotonic()
    while True:
        now = time.monotonic()
        if now >= planned:
            sample(now - planned)
            elapsed = time.monotonic() - planned
            planned += interval_s * max(1, int(elapsed / interval_s) + 1)
        yield planned
