"""GPU sensors, grouped by cost: cheap values are read often, expensive ones rarely.

Values that a GPU does not support or does not permit to read are missing with a reason. A lost GPU
affects only its own values.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from stepscope.metrics import Scope
from stepscope.records import Entity, Reading
from stepscope.sensors import procfs
from stepscope.sensors.contract import Sensor
from stepscope.sensors.gpu.nvml import NvmlGpu, Performance, Unreadable

Values = dict[str, float | None]

_INITIAL_PID_NAMESPACE = "pid:[4026531836]"
"""The fixed inode of the host's PID namespace; containers have others."""


@dataclass
class MonitoredProcesses:
    """The monitored processes, for the GPU sensors."""

    pids: Callable[[], Collection[int]] = tuple
    ran_before: bool = False
    """Whether they may have used a GPU before monitoring started."""


class MonitoredGpu:
    """A GPU shared by the sensors: once lost, it is not queried again."""

    def __init__(self, gpu: NvmlGpu) -> None:
        self.gpu = gpu
        self.facts = gpu.facts
        self.entity = Entity(gpu.facts.uuid)
        self.lost = ""


class GpuSensor(Sensor):
    """A sensor of all monitored GPUs; subclasses define the query for one GPU."""

    scope: Scope = "gpu"

    def __init__(self, gpus: Sequence[MonitoredGpu]) -> None:
        super().__init__()
        self._gpus = tuple(gpus)
        self._unable: set[tuple[str, str]] = set()

    def read(self) -> list[Reading]:
        readings = []
        for monitored in self._gpus:
            values = {} if monitored.lost else self.values_of(monitored)
            if values:
                readings.append(Reading(monitored.entity, values))
            if monitored.lost:
                for metric in self.metrics:
                    self.missing.setdefault(metric, f"{monitored.facts.label}: {monitored.lost}")
        return readings

    @abstractmethod
    def values_of(self, monitored: MonitoredGpu) -> Values:
        """Return the current values of one GPU; empty if it cannot be read."""

    def query(
        self, monitored: MonitoredGpu, *metrics: str, by: Callable[[], Iterable[float]]
    ) -> Values:
        """Return the values of some metrics from one query. After a permanent error the query is
        not repeated; after a temporary one it is, and counters continue across the gap."""
        key = (monitored.facts.uuid, metrics[0])
        if monitored.lost or key in self._unable:
            return {}
        try:
            return dict(zip(metrics, by(), strict=True))
        except Unreadable as error:
            self.cannot_read(monitored, error, *metrics)
            return {}

    def cannot_read(self, monitored: MonitoredGpu, error: Unreadable, *metrics: str) -> None:
        """Record the reason, and stop querying if the error is permanent."""
        self.mark_missing(f"{monitored.facts.label}: {error}", *metrics, hint=error.hint)
        if error.lost:
            monitored.lost = str(error)
            self.notes.append(
                f"{monitored.facts.label} ({monitored.facts.uuid}) was lost: {error}. "
                "It was not read after that"
            )
        elif error.permanent:
            self._unable.add((monitored.facts.uuid, metrics[0]))


class ActivitySensor(GpuSensor):
    """Activity of the units of a GPU: multiprocessors, tensor cores, memory, PCIe and NVLink.

    Computed from consecutive samples of the GPU's own counters (GPM), without gaps.
    """

    name = "gpu activity"
    metrics = tuple(Performance.METRICS)
    period = 0.3
    share = 0.002

    def __init__(self, gpus: Sequence[MonitoredGpu]) -> None:
        super().__init__(gpus)
        self._meters: dict[str, _Meter] = {}
        for monitored in gpus:
            try:
                meter = _Meter(monitored.gpu.performance())
                meter.performance.sample()  # if this fails, it always fails
            except Unreadable as error:
                self.cannot_read(monitored, error, *self.metrics)
            else:
                self._meters[monitored.facts.uuid] = meter

    def values_of(self, monitored: MonitoredGpu) -> Values:
        meter = self._meters.get(monitored.facts.uuid)
        if meter is None:
            return {}
        try:
            advanced = meter.advance()
        except Unreadable as error:
            self.cannot_read(monitored, error, *self.metrics)
            if error.permanent:
                del self._meters[monitored.facts.uuid]
            return {}
        for metric, reason in meter.refused.items():
            self.mark_missing(f"{monitored.facts.label}: {reason}", metric, hint=reason.hint)
        return dict(meter.totals) if advanced else {}

    def settles_in(self) -> float:
        return max((meter.settles_in() for meter in self._meters.values()), default=0.0)

    def covers(self, monitored: MonitoredGpu) -> bool:
        """Whether this sensor measures the PCIe traffic of a GPU."""
        return monitored.facts.uuid in self._meters

    def close(self) -> None:
        for meter in self._meters.values():
            meter.performance.close()
        self._meters.clear()


class _Meter:
    """Accumulates the activity of a GPU: fraction times seconds, and bytes."""

    def __init__(self, performance: Performance) -> None:
        self.performance = performance
        self.totals: Values = dict.fromkeys(Performance.METRICS, 0.0)
        self.refused: dict[str, Unreadable] = {}
        self._kept_at: float | None = None

    def advance(self) -> bool:
        """Advance to now; return False if the counters cannot have changed yet."""
        if self.settles_in() > 0:
            return False
        self.performance.sample()
        now = time.monotonic()
        if self._kept_at is not None:
            self._add(now - self._kept_at)
        self._kept_at = now
        self.performance.keep()
        return True

    def settles_in(self) -> float:
        if self._kept_at is None:
            return 0.0
        return max(0.0, self._kept_at + Performance.MIN_INTERVAL_S - time.monotonic())

    def _add(self, seconds: float) -> None:
        for metric, rate in self.performance.rates().items():
            total = self.totals[metric]
            if isinstance(rate, Unreadable):
                self.refused[metric] = rate
                self.totals[metric] = None
            elif total is not None:
                self.totals[metric] = total + rate * seconds


class QuerySensor(GpuSensor):
    """A sensor whose metrics come from one query."""

    method: ClassVar[Callable[[NvmlGpu], float | tuple[float, ...]]]

    def values_of(self, monitored: MonitoredGpu) -> Values:
        return self.query(monitored, *self.metrics, by=lambda: self._values(monitored.gpu))

    def _values(self, gpu: NvmlGpu) -> tuple[float, ...]:
        result = type(self).method(gpu)
        return result if isinstance(result, tuple) else (result,)


class PowerSensor(QuerySensor):
    """Current power draw."""

    name, period, share = "gpu power", 0.3, 0.0007
    metrics = ("gpu_power",)
    method = NvmlGpu.power


class GpuMemorySensor(QuerySensor):
    """Device memory in use by all processes."""

    name, period, share = "gpu memory", 0.3, 0.0007
    metrics = ("gpu_memory",)
    method = NvmlGpu.memory_used


class UtilizationSensor(QuerySensor):
    """NVML utilization of the device and of its memory controller."""

    name, period, share = "gpu utilization", 0.5, 0.0003
    metrics = ("gpu_utilization", "gpu_memory_controller")
    method = NvmlGpu.utilization


class EnergySensor(QuerySensor):
    """The energy counter of a GPU; expensive, therefore read rarely."""

    name, period, share = "gpu energy", 10.0, 0.0006
    metrics = ("gpu_energy",)
    method = NvmlGpu.energy


class ErrorsSensor(QuerySensor):
    """ECC errors of the device memory."""

    name, period, share = "gpu errors", 30.0, 0.0001
    metrics = ("gpu_ecc_corrected", "gpu_ecc_uncorrected")
    method = NvmlGpu.ecc_errors


class StateSensor(GpuSensor):
    """Clocks, temperature and throttling."""

    name, period, share = "gpu state", 1.0, 0.0004
    _clocks = ("gpu_sm_clock", "gpu_memory_clock")
    _throttled = ("gpu_throttled_power", "gpu_throttled_thermal", "gpu_throttled_other")
    metrics = (*_clocks, "gpu_temperature", *_throttled)

    def values_of(self, monitored: MonitoredGpu) -> Values:
        gpu = monitored.gpu
        values = self.query(monitored, *self._clocks, by=gpu.clocks)
        values |= self.query(monitored, "gpu_temperature", by=lambda: (gpu.temperature(),))
        values |= self.query(monitored, *self._throttled, by=lambda: map(float, gpu.throttled_by()))
        return values


def in_initial_pid_namespace() -> bool:
    """Whether pids in this namespace are the host's, as the driver reports them."""
    return procfs.pid_namespace() == _INITIAL_PID_NAMESPACE
