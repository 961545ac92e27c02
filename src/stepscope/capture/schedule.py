"""Schedule the readings of sensors, in the sampling loop or in a background thread.

A sensor may cost a fixed share of its period at most; a more expensive one is read less often.
Sensors that may block in a driver run in their own thread, and nothing waits for it indefinitely: a
sleeping driver takes seconds to wake up, and the driver of a failed device may never answer. This
must not delay the command, the other sensors or the end of the run.
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
_COST_WEIGHT, _MAX_COST_FACTOR = 0.2, 4.0
"""Weight of a reading in the moving average of the cost, and the largest multiple of the average
that one reading counts as."""
_FINISH_S = 1.5
"""How long `finish` waits for the last readings of a thread."""
_LONG_S = 5.0
_FORGET_ABOVE = 100
"""Number of remembered entities that no longer exist (exited processes) before they are dropped."""


class Rates:
    """Converts the cumulative counters of one sensor into rates over their actual window."""

    def __init__(self, metrics: tuple[str, ...], from_zero_ns: int | None = None) -> None:
        """With `from_zero_ns`, the counters of a new entity were 0 at the previous reading (or at
        that time), as for processes that start while they are monitored."""
        self._counters = tuple(key for key in metrics if is_counter(key))
        self._last: dict[str | int, tuple[int, dict[str, float | None]]] = {}
        self._read_before_ns = from_zero_ns
        self._from_zero = from_zero_ns is not None

    def convert(self, t_ns: int, readings: list[Reading]) -> list[tuple[float | None, Reading]]:
        """Return each reading with the window of its rates in seconds (None for the first)."""
        rows = [self._convert_one(t_ns, reading) for reading in readings]
        self._read_before_ns = t_ns
        if len(self._last) > 2 * len(readings) + _FORGET_ABOVE:
            self._last = {key: last for key, last in self._last.items() if last[0] == t_ns}
        return rows

    def _convert_one(self, t_ns: int, reading: Reading) -> tuple[float | None, Reading]:
        entity = reading.entity
        key = entity.name if entity.pid is None else entity.pid  # the role of a pid may change
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
                if then is None or now is None or now < then:  # `now < then`: it was reset
                    values[counter] = None
                else:
                    values[counter] = (now - then) / window
        return window, Reading(reading.entity, values)


@dataclass(frozen=True)
class TakenReadings:
    """The rows of one reading of a sensor, each with the window of its rates in seconds."""

    sensor: Sensor
    t_ns: int
    rows: list[tuple[float | None, Reading]]


@dataclass
class ScheduledSensor:
    """A sensor with its schedule. One thread reads it; other threads may read its cost."""

    sensor: Sensor
    rates: Rates
    interval_s: float
    report_problem: Callable[[str], None]
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
        """Read the sensor now. Return None if it failed, which must not end the run."""
        before = time.thread_time()
        began = time.monotonic_ns()
        try:
            readings = self.sensor.read()
        except Exception as error:
            self.failures += 1
            self.due_ns = began + 10**9
            if self.failures >= _FAILURES_BEFORE_OFF:
                self.failed = f"the sensor failed: {type(error).__name__}: {error}"
                self.report_problem(
                    f"sensor '{self.sensor.name}' failed repeatedly and is disabled: {error}"
                )
            return None
        self.failures = 0
        now = (began + time.monotonic_ns()) // 2  # the best estimate of the time of reading
        taken = TakenReadings(self.sensor, now, self.rates.convert(now, readings))
        self._account(time.thread_time() - before, now)
        return taken

    def _account(self, cost: float, now_ns: int) -> None:
        """Update the average cost and the time of the next reading.

        A single reading may cost a hundred times the average, for example because the driver was
        busy, and says little about the next one. It therefore counts as a small multiple of the
        average at most; if the cost stays high, the average still grows quickly.
        """
        if not self.read_ns:
            self.cost_s = cost
        else:
            limited = min(cost, _MAX_COST_FACTOR * self.cost_s)
            self.cost_s += _COST_WEIGHT * (limited - self.cost_s)
        self.spent_s += cost
        self.read_ns = now_ns
        affordable = self.cost_s / self.sensor.share
        if affordable > max(self.sensor.period, self.interval_s):
            self.slowest_period_s = max(self.slowest_period_s, affordable)
        if self.sensor.period or affordable > self.interval_s:
            # Half an interval early counts as due: a tick never comes exactly on time.
            slack = self.interval_s / 2
            self.due_ns = now_ns + int((max(self.sensor.period, affordable) - slack) * 1e9)


class BackgroundReader(threading.Thread):
    """A thread that opens its sensors, waits for `begin`, and reads each when it is due until
    `finish`."""

    def __init__(
        self,
        name: str,
        open_sensors: Callable[[], Sequence[Sensor]],
        report_problem: Callable[[str], None],
    ) -> None:
        super().__init__(name=f"stepscope-{name}", daemon=True)
        self.scheduled: list[ScheduledSensor] = []
        self._source = name
        self._open_sensors = open_sensors
        self._report_problem = report_problem
        self._taken: deque[TakenReadings] = deque()
        self._opened = threading.Event()
        self._begun = threading.Event()
        self._finishing = threading.Event()
        self._shortest_s = self._interval_s = 1.0
        self._busy_since: float | None = None
        self._longest_s = 0.0
        self._answered = True
        self.start()

    def wait_until_open(self, seconds: float) -> bool:
        """Wait for the driver, and return whether it answered."""
        return self._opened.wait(seconds)

    def begin(self, interval_s: float) -> None:
        """Start reading, as soon as the sensors are open."""
        self._shortest_s = interval_s
        self._begun.set()

    def collect(self) -> Iterator[TakenReadings]:
        """Yield the readings since the last call, in order."""
        while self._taken:
            yield self._taken.popleft()

    def finish(self) -> bool:
        """Read all counters once more and stop. Return False if the driver does not answer."""
        self._finishing.set()
        self._begun.set()
        if self._opened.is_set():
            self.join(_FINISH_S)
        self._answered = not self.is_alive()
        return self._answered

    def notes(self) -> list[str]:
        """Return notes for the report if the driver did not respond for some time."""
        busy_since = self._busy_since
        waiting_s = 0.0 if busy_since is None else time.monotonic() - busy_since
        longest = max(self._longest_s, waiting_s)
        notes = []
        if self._opened.is_set() and longest > _LONG_S:
            notes.append(
                f"{self._source} did not respond for {longest:.0f} s; samples from that "
                "period are missing"
            )
        if self._opened.is_set() and not self._answered:
            notes.append(
                f"{self._source} did not respond at the end: the last readings are missing"
            )
        return notes

    def run(self) -> None:
        for sensor in self._open_sensors():
            with contextlib.suppress(Exception):
                sensor.read()  # the first reading costs several times as much as later ones
            rates = Rates(sensor.metrics)
            self.scheduled.append(
                ScheduledSensor(sensor, rates, self._interval_s, self._report_problem)
            )
        self._opened.set()
        if not self.scheduled:
            return
        self._begun.wait()
        # Each wake-up costs, so all sensors are read in the rhythm of the most frequent one.
        shortest_period = min(each.sensor.period for each in self.scheduled)
        self._interval_s = max(self._shortest_s, shortest_period)
        for each in self.scheduled:
            each.interval_s = self._interval_s
        while not self._finishing.is_set():
            self._read(each for each in self.scheduled if each.is_due(time.monotonic_ns()))
            self._finishing.wait(self._interval_s)
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
    """Call `sample` with its delay whenever it is due, and yield the time of the next sample.

    The caller waits until then, and may continue the iteration earlier. Missed samples are skipped.
    """
    planned = time.monotonic()
    while True:
        now = time.monotonic()
        if now >= planned:
            sample(now - planned)
            elapsed = time.monotonic() - planned
            planned += interval_s * max(1, int(elapsed / interval_s) + 1)
        yield planned
