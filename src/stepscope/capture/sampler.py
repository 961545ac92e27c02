"""Reads each sensor when it is due, at a price that is kept low, and appends what it read."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from pathlib import Path

from stepscope.capture.aside import Aside
from stepscope.capture.rates import Rates
from stepscope.capture.slots import Slot, Taken
from stepscope.metrics import SCOPES, Scope
from stepscope.records import Entity, Reading
from stepscope.runs.paths import RunPaths
from stepscope.runs.streams import StreamWriter, pack
from stepscope.sensors.contract import Sensor
from stepscope.sensors.tree import PAGE

FLUSH_EVERY_S = 0.9
"""A little under a second, so that with the time of a sample at most one second is in memory."""


class Sampler:
    """The sampling loop's body: call `tick` at every interval, `finish` at the end."""

    def __init__(self, paths: RunPaths, interval_s: float, trouble: Callable[[str], None]) -> None:
        self.interval_s = interval_s
        self.late_s = 0.0
        self._trouble = trouble
        self._own_slots: list[Slot] = []
        self._asides: list[Aside] = []
        self._writers: dict[Scope, StreamWriter] = {s: StreamWriter(paths, s) for s in SCOPES}
        self._begun_ns = self._flush_ns = time.monotonic_ns()
        self._packers: list[threading.Thread] = []

    def add(self, sensor: Sensor, counts_from_ns: int | None = None) -> None:
        """Watch with a sensor. Its counters are 0 at `counts_from_ns`, or are read now."""
        rates = Rates(sensor.metrics, counts_from_ns)
        slot = Slot(sensor, rates, self.interval_s, self._trouble)
        slot.due_ns = time.monotonic_ns() + int(sensor.first_after * 1e9)
        self._own_slots.append(slot)
        if counts_from_ns is None:
            self._write(slot.take())

    def add_aside(self, aside: Aside) -> None:
        """Take over what sensors read that must not be waited for."""
        self._asides.append(aside)
        aside.begin(self.interval_s)

    def tick(self, late_s: float = 0.0) -> None:
        """Read what is due, and write what was read about every second."""
        self.late_s = max(self.late_s, late_s)
        now = time.monotonic_ns()
        for slot in self._own_slots:
            if slot.is_due(now):
                self._write(slot.take())
        self._collect()
        if now - self._flush_ns >= FLUSH_EVERY_S * 1e9:
            self._flush_ns = now
            self.flush()

    def ask_for(self, sensor: Sensor, burst_s: float) -> None:
        """Read a sensor out of turn (PSS at the end of an epoch), as long as all its readings
        together cost less than this and its share of the time so far."""
        for slot in self._own_slots:
            if slot.sensor is sensor:
                elapsed = (time.monotonic_ns() - self._begun_ns) / 1e9
                allowed = burst_s + sensor.share * elapsed
                if slot.spent_s + slot.cost_s <= allowed:
                    slot.due_ns = 0

    def read_all(self, *sensors: Sensor) -> None:
        """Read these sensors now, due or not (the last sample)."""
        for slot in self._own_slots:
            if slot.sensor in sensors and not slot.failed:
                self._write(slot.take())

    def flush(self) -> None:
        """Append the rows of the last second; a full disk is told, and the rows are kept."""
        for writer in self._writers.values():
            try:
                writer.flush()
                closed = writer.roll()
            except OSError as error:
                self._trouble(
                    f"samples cannot be written ({error.strerror}): they are kept in memory"
                )
                continue
            if closed is not None:
                self._pack_aside(closed)

    def finish(self) -> None:
        """Write the rest and roll the streams to Parquet; what cannot be packed stays a stream."""
        for aside in self._asides:
            aside.finish()
        self._collect()
        self.flush()
        for slot in self._own_slots:
            slot.sensor.close()
        for thread in self._packers:
            thread.join()
        for writer in self._writers.values():
            try:
                writer.flush()
                closed = writer.finish()
                pack(closed)
            except OSError as error:
                self._trouble(f"samples could not all be written: {error.strerror}")

    def missing(self) -> dict[str, str]:
        """Metric to the reason why it is missing; a sensor that failed lacks all it had."""
        found: dict[str, str] = {}
        for slot in self._slots:
            found.update(slot.sensor.missing)
            if slot.failed:
                found.update(dict.fromkeys(slot.sensor.metrics, slot.failed))
        return found

    def estimated(self) -> dict[str, str]:
        """Metric to how it was estimated, where it was."""
        found: dict[str, str] = {}
        for slot in self._slots:
            found.update(slot.sensor.estimated)
        return found

    def remarks(self) -> list[str]:
        """What sensors have to say about what happened to them."""
        told = [text for slot in self._slots for text in list(slot.sensor.remarks)]
        told += [text for aside in self._asides for text in aside.remarks()]
        return list(dict.fromkeys(told))

    def costs(self) -> dict[str, dict[str, float]]:
        """What each sensor costs: CPU seconds per reading, and the longest it was put off."""
        return {
            slot.sensor.name: {
                "cpu_s": round(slot.cost_s, 6),
                "period_s": round(max(slot.sensor.period, self.interval_s), 3),
                "slowed_to_s": round(slot.slowest_period_s, 3),
            }
            for slot in self._slots
        }

    def rows_dropped(self) -> int:
        return sum(writer.rows_dropped for writer in self._writers.values())

    @property
    def _slots(self) -> list[Slot]:
        return [*self._own_slots, *(slot for aside in self._asides for slot in list(aside.slots))]

    def _collect(self) -> None:
        for aside in self._asides:
            for taken in aside.collect():
                self._write(taken)

    def _write(self, taken: Taken | None) -> None:
        """Hand what was read to the stream of its scope."""
        if taken is not None:
            writer = self._writers[taken.sensor.scope]
            for window, reading in taken.rows:
                writer.append(taken.t_ns, window, reading.entity, reading.values)

    def _pack_aside(self, closed: Path) -> None:
        def run() -> None:
            with contextlib.suppress(OSError):
                pack(closed)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        self._packers.append(thread)


class WatcherSensor(Sensor):
    """What watching itself costs."""

    name = "watcher"
    scope: Scope = "host"
    metrics = ("watcher_cpu", "watcher_rss", "watcher_late")
    period = 1.0

    def __init__(self, sampler: Sampler) -> None:
        super().__init__()
        self._sampler = sampler
        self._entity = Entity("watcher")

    def read(self) -> list[Reading]:
        late, self._sampler.late_s = self._sampler.late_s, 0.0
        with open("/proc/self/statm", "rb") as file:
            rss = int(file.read().split()[1]) * PAGE
        values: dict[str, float | None] = {
            "watcher_cpu": time.process_time(),
            "watcher_rss": float(rss),
            "watcher_late": late,
        }
        return [Reading(self._entity, values)]
