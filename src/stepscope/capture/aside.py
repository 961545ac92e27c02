"""A thread for sensors that may have to wait for a driver: whatever it does, nobody waits for it.

A driver that sleeps takes seconds to wake up, one whose device has died may never answer. Neither
may hold up the command, the other sensors, or the end.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from stepscope.capture.rates import Rates
from stepscope.capture.slots import Slot, Taken
from stepscope.sensors.contract import Sensor

_LAST_S = 1.5
"""How long the end waits for the last readings."""
_LONG_S = 5.0


class Aside(threading.Thread):
    """Opens its sensors, waits for `begin`, and reads each when it is due until `finish`."""

    def __init__(
        self, name: str, make: Callable[[], Sequence[Sensor]], trouble: Callable[[str], None]
    ) -> None:
        super().__init__(name=f"stepscope-{name}", daemon=True)
        self.slots: list[Slot] = []
        self._what = name
        self._make = make
        self._trouble = trouble
        self._taken: deque[Taken] = deque()
        self._opened, self._begun, self._ending = (threading.Event() for _ in range(3))
        self._shortest_s = self._pace_s = 1.0
        self._busy_since: float | None = None
        self._longest_s = 0.0
        self._answered = True
        self.start()

    def wait_until_open(self, seconds: float) -> None:
        """Give the driver some time to answer."""
        self._opened.wait(seconds)

    @property
    def is_open(self) -> bool:
        return self._opened.is_set()

    def begin(self, interval_s: float) -> None:
        """Read from now on, if it is open; else as soon as it is."""
        self._shortest_s = interval_s
        self._begun.set()

    def collect(self) -> Iterator[Taken]:
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
        self._open()
        self._opened.set()
        if not self.slots:
            return
        self._begun.wait()
        self._settle_on_a_pace()
        while not self._ending.is_set():
            self._read(slot for slot in self.slots if slot.is_due(time.monotonic_ns()))
            self._ending.wait(self._pace_s)
        for slot in self.slots:
            time.sleep(slot.sensor.settles_in())
        self._read(slot for slot in self.slots if slot.sensor.counts)
        for slot in self.slots:
            slot.sensor.close()

    def _open(self) -> None:
        for sensor in self._make():
            with contextlib.suppress(Exception):
                sensor.read()  # the first time costs several times what it costs from then on
            slot = Slot(sensor, Rates(sensor.metrics), self._pace_s, self._trouble)
            self.slots.append(slot)

    def _settle_on_a_pace(self) -> None:
        """That of the most frequent: each waking up costs, so the others are read along with it."""
        most_often = min((slot.sensor.period for slot in self.slots), default=1.0)
        self._pace_s = max(self._shortest_s, most_often)
        for slot in self.slots:
            slot.interval_s = self._pace_s

    def _read(self, slots: Iterator[Slot]) -> None:
        for slot in slots:
            begun = self._busy_since = time.monotonic()
            taken = slot.take()
            self._busy_since = None
            self._longest_s = max(self._longest_s, time.monotonic() - begun)
            if taken is not None:
                self._taken.append(taken)
