"""Reads each sensor when it is due, at a price that is kept low, and appends what it read."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from pathlib import Path

from stepscope.capture.schedule import BackgroundReader, Rates, ScheduledSensor, TakenReadings
from stepscope.metrics import SCOPES, Scope
from stepscope.records import Entity, Reading
from stepscope.records.facts import SensorCost, SensorFacts
from stepscope.runs.paths import RunPaths
from stepscope.runs.streams import StreamWriter, pack
from stepscope.sensors import procfs
from stepscope.sensors.contract import Sensor

FLUSH_EVERY_S = 0.9
"""A little under a second, so that with the time of a sample at most one second is in memory."""


class Sampler:
    """The sampling loop's body: call `tick` at every interval, `finish` at the end."""

    def __init__(self, paths: RunPaths, interval_s: float, trouble: Callable[[str], None]) -> None:
        self.interval_s = interval_s
        self.late_s = 0.0
        self._trouble = trouble
        self._scheduled: list[ScheduledSensor] = []
        self._readers: list[BackgroundReader] = []
        self._writers: dict[Scope, StreamWriter] = {s: StreamWriter(paths, s) for s in SCOPES}
        self._begun_ns = self._flush_ns = time.monotonic_ns()
        self._packers: list[threading.Thread] = []

    def add(self, sensor: Sensor, counts_from_ns: int | None = None) -> None:
        """Watch with a sensor. Its counters are 0 at `counts_from_ns`, or are read now."""
        rates = Rates(sensor.metrics, counts_from_ns)
        scheduled = ScheduledSensor(sensor, rates, self.interval_s, self._trouble)
        scheduled.due_ns = time.monotonic_ns() + int(sensor.first_after * 1e9)
        self._scheduled.append(scheduled)
        if counts_from_ns is None:
            self._write(scheduled.take())

    def add_reader(self, reader: BackgroundReader) -> None:
        """Take over what sensors read that must not be waited for."""
        self._readers.append(reader)
        reader.begin(self.interval_s)

    def tick(self, late_s: float = 0.0) -> None:
        """Read what is due, and write what was read about every second."""
        self.late_s = max(self.late_s, late_s)
        now = time.monotonic_ns()
        for scheduled in self._scheduled:
            if scheduled.is_due(now):
                self._write(scheduled.take())
        self._collect()
        if now - self._flush_ns >= FLUSH_EVERY_S * 1e9:
            self._flush_ns = now
            self.flush()

    def ask_for(self, sensor: Sensor, burst_s: float) -> None:
        """Read a sensor out of turn (PSS at the end of an epoch), as long as all its readings
        together cost less than this and its share of the time so far."""
        for scheduled in self._scheduled:
            if scheduled.sensor is sensor:
                elapsed = (time.monotonic_ns() - self._begun_ns) / 1e9
                allowed = burst_s + sensor.share * elapsed
                if scheduled.spent_s + scheduled.cost_s <= allowed:
                    scheduled.due_ns = 0

    def read_all(self, *sensors: Sensor) -> None:
        """Read these sensors now, due or not (the last sample)."""
        for scheduled in self._scheduled:
            if scheduled.sensor in sensors and not scheduled.failed:
                self._write(scheduled.take())

    def flush(self) -> None:
        """Append the rows of the last second; a full disk is told, and the rows are kept."""
        for writer in self._writers.values():
            try:
                writer.flush()
                closed = writer.roll()
            except OSError as error:
                why = error.strerror
                self._trouble(f"samples cannot be written ({why}): they are kept in memory")
                continue
            if closed is not None:
                thread = threading.Thread(target=_pack_quietly, args=(closed,), daemon=True)
                thread.start()
                self._packers.append(thread)

    def finish(self) -> None:
        """Write the rest and roll the streams to Parquet; what cannot be packed stays a stream."""
        for reader in self._readers:
            reader.finish()
        self._collect()
        self.flush()
        for scheduled in self._scheduled:
            scheduled.sensor.close()
        for thread in self._packers:
            thread.join()
        for writer in self._writers.values():
            try:
                writer.flush()
                pack(writer.finish())
            except OSError as error:
                self._trouble(f"samples could not all be written: {error.strerror}")

    def facts(self, missing: dict[str, str], hints: dict[str, str]) -> SensorFacts:
        """What run.json says of the sensors; `missing` and `hints` come from those not opened."""
        missing, hints = dict(missing), dict(hints)
        unset: list[str] = []
        estimated: dict[str, str] = {}
        remarks: list[str] = []
        costs: dict[str, SensorCost] = {}
        in_background = [each for reader in self._readers for each in list(reader.scheduled)]
        for scheduled in self._scheduled + in_background:
            sensor = scheduled.sensor
            missing |= sensor.missing
            if scheduled.failed:  # it lacks all it had
                missing |= dict.fromkeys(sensor.metrics, scheduled.failed)
            hints |= sensor.hints
            unset += sensor.unset
            estimated |= sensor.estimated
            remarks += sensor.remarks
            costs[sensor.name] = SensorCost(
                cpu_s=round(scheduled.cost_s, 6),
                period_s=round(max(sensor.period, self.interval_s), 3),
                slowed_to_s=round(scheduled.slowest_period_s, 3),
            )
        for reader in self._readers:
            remarks += reader.remarks()
        once = tuple(dict.fromkeys(remarks))
        dropped = sum(writer.rows_dropped for writer in self._writers.values())
        return SensorFacts(
            missing=missing,
            hints=hints,
            unset=tuple(unset),
            estimated=estimated,
            remarks=once,
            costs=costs,
            rows_dropped=dropped,
        )

    def _collect(self) -> None:
        for reader in self._readers:
            for taken in reader.collect():
                self._write(taken)

    def _write(self, taken: TakenReadings | None) -> None:
        if taken is not None:
            writer = self._writers[taken.sensor.scope]
            for window, reading in taken.rows:
                writer.append(taken.t_ns, window, reading.entity, reading.values)


def _pack_quietly(closed: Path) -> None:
    with contextlib.suppress(OSError):
        pack(closed)


class WatcherSensor(Sensor):
    """What watching itself costs."""

    name = "watcher"
    scope: Scope = "host"
    metrics = ("watcher_cpu", "watcher_rss", "watcher_late")
    period = 1.0

    def __init__(self, sampler: Sampler) -> None:
        super().__init__()
        self._sampler = sampler

    def read(self) -> list[Reading]:
        late, self._sampler.late_s = self._sampler.late_s, 0.0
        resident = procfs.statm("self")
        values: dict[str, float | None] = {
            "watcher_cpu": time.process_time(),
            "watcher_rss": float(resident.total) if resident else None,
            "watcher_late": late,
        }
        return [Reading(Entity("watcher"), values)]
