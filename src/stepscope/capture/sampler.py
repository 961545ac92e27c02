"""Read each sensor when it is due, within a cost limit, and append the readings to the streams."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from pathlib import Path

# For `pack` at the end: pyarrow may be upgraded or removed during a long run.
import pyarrow.parquet  # noqa: F401

import stepscope.runs.segments  # noqa: F401
from stepscope.capture.schedule import BackgroundReader, Rates, ScheduledSensor, TakenReadings
from stepscope.capture.startup import reason_of
from stepscope.metrics import SCOPES, Scope
from stepscope.records import Entity, Reading
from stepscope.records.facts import SensorCost, SensorFacts
from stepscope.runs.paths import RunPaths
from stepscope.runs.streams import StreamWriter, pack
from stepscope.sensors import procfs
from stepscope.sensors.contract import Sensor

FLUSH_EVERY_S = 0.9
"""Slightly less than a second, so that at most one second of samples is lost in a crash."""


class Sampler:
    """The body of the sampling loop: call `tick` at every interval and `finish` at the end."""

    def __init__(
        self, paths: RunPaths, interval_s: float, report_problem: Callable[[str], None]
    ) -> None:
        self.interval_s = interval_s
        self.late_s = 0.0
        self._report_problem = report_problem
        self._scheduled: list[ScheduledSensor] = []
        self._readers: list[BackgroundReader] = []
        self._writers: dict[Scope, StreamWriter] = {s: StreamWriter(paths, s) for s in SCOPES}
        self._begun_ns = self._flush_ns = time.monotonic_ns()
        self._packers: list[threading.Thread] = []

    def add(self, sensor: Sensor, counts_from_ns: int | None = None) -> None:
        """Add a sensor. Its counters are 0 at `counts_from_ns`, or are read now."""
        rates = Rates(sensor.metrics, counts_from_ns)
        scheduled = ScheduledSensor(sensor, rates, self.interval_s, self._report_problem)
        scheduled.due_ns = time.monotonic_ns() + int(sensor.first_after * 1e9)
        self._scheduled.append(scheduled)
        if counts_from_ns is None:
            self._write(scheduled.take())

    def add_reader(self, reader: BackgroundReader) -> None:
        """Collect the readings of sensors that may block and run in their own thread."""
        self._readers.append(reader)
        reader.begin(self.interval_s)

    def tick(self, late_s: float = 0.0) -> None:
        """Read the sensors that are due, and write the readings about every second."""
        self.late_s = max(self.late_s, late_s)
        now = time.monotonic_ns()
        for scheduled in self._scheduled:
            if scheduled.is_due(now):
                self._write(scheduled.take())
        self._collect()
        if now - self._flush_ns >= FLUSH_EVERY_S * 1e9:
            self._flush_ns = now
            self.flush()

    def read_soon(self, sensor: Sensor, burst_s: float) -> None:
        """Make a sensor due (PSS at the end of an epoch), unless its total cost exceeds its share
        of the elapsed time by more than `burst_s`."""
        for scheduled in self._scheduled:
            if scheduled.sensor is sensor:
                elapsed = (time.monotonic_ns() - self._begun_ns) / 1e9
                allowed = burst_s + sensor.share * elapsed
                if scheduled.spent_s + scheduled.cost_s <= allowed:
                    scheduled.due_ns = 0

    def read_all(self, *sensors: Sensor | None) -> None:
        """Read these sensors now, due or not (the last sample)."""
        for scheduled in self._scheduled:
            if scheduled.sensor in sensors and not scheduled.failed:
                self._write(scheduled.take())

    def flush(self) -> None:
        """Append the rows of the last second. If the disk is full, report it and keep the rows."""
        for writer in self._writers.values():
            try:
                writer.flush()
                closed = writer.roll()
            except OSError as error:
                self._report_problem(
                    f"samples cannot be written ({error.strerror}) and are kept in memory"
                )
                continue
            if closed is not None:
                thread = threading.Thread(target=_pack_quietly, args=(closed,), daemon=True)
                with contextlib.suppress(RuntimeError):  # no more threads: it stays a stream
                    thread.start()
                    self._packers.append(thread)

    def finish(self) -> None:
        """Write the remaining rows and convert the streams to Parquet. A stream that cannot be
        converted stays as it is."""
        for reader in self._readers:
            reader.finish()
        self._collect()
        for scheduled in self._scheduled:
            with contextlib.suppress(OSError):
                scheduled.sensor.close()
        for thread in self._packers:
            thread.join()
        for writer in self._writers.values():
            try:
                writer.flush()
                pack(writer.finish())
            except Exception as error:
                reason = getattr(error, "strerror", None) or reason_of(error)
                self._report_problem(f"some samples could not be written: {reason}")

    def facts(self, missing: dict[str, str], hints: dict[str, str]) -> SensorFacts:
        """Return the facts for run.json. `missing` and `hints` are those of sensors that were not
        opened."""
        missing, hints = dict(missing), dict(hints)
        not_configured: list[str] = []
        estimated: dict[str, str] = {}
        notes: list[str] = []
        costs: dict[str, SensorCost] = {}
        in_background = [each for reader in self._readers for each in list(reader.scheduled)]
        for scheduled in self._scheduled + in_background:
            sensor = scheduled.sensor
            missing |= sensor.missing
            if scheduled.failed:
                missing |= dict.fromkeys(sensor.metrics, scheduled.failed)
            hints |= sensor.hints
            not_configured += sensor.not_configured
            estimated |= sensor.estimated
            notes += sensor.notes
            costs[sensor.name] = SensorCost(
                cpu_s=round(scheduled.cost_s, 6),
                period_s=round(max(sensor.period, self.interval_s), 3),
                backoff_period_s=round(scheduled.slowest_period_s, 3),
            )
        for reader in self._readers:
            notes += reader.notes()
        dropped = sum(writer.rows_dropped for writer in self._writers.values())
        return SensorFacts(
            missing=missing,
            hints=hints,
            not_configured=tuple(not_configured),
            estimated=estimated,
            notes=tuple(dict.fromkeys(notes)),
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
    with contextlib.suppress(Exception):
        pack(closed)


class MonitorSensor(Sensor):
    """The overhead of monitoring: CPU, memory and delay of the monitor."""

    name = "monitor"
    scope: Scope = "host"
    metrics = ("monitor_cpu", "monitor_rss", "monitor_late")
    period = 1.0

    def __init__(self, sampler: Sampler) -> None:
        super().__init__()
        self._sampler = sampler

    def read(self) -> list[Reading]:
        late, self._sampler.late_s = self._sampler.late_s, 0.0
        resident = procfs.statm("self")
        values: dict[str, float | None] = {
            "monitor_cpu": time.process_time(),
            "monitor_rss": float(resident.total) if resident else None,
            "monitor_late": late,
        }
        return [Reading(Entity("monitor"), values)]
