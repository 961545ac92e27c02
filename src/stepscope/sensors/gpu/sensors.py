"""GPUs: one sensor for each price. What NVML knows cheaply is read often, what costs, rarely.

What a GPU does not support, may not tell or has lost is missing with a reason; a GPU that vanishes
takes only its own values with it.
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

_FIRST_PID_NAMESPACE = "pid:[4026531836]"
"""The kernel gives the machine's own namespace this number; a container has another."""


@dataclass
class MonitoredProcesses:
    """The watched processes, as far as the sensors of GPUs must know them."""

    pids: Callable[[], Collection[int]] = tuple
    ran_before: bool = False
    """Whether they may have been on a GPU before they were watched."""


class WatchedGpu:
    """A GPU as the sensors share it: once it is lost nobody asks it again."""

    def __init__(self, gpu: NvmlGpu) -> None:
        self.gpu = gpu
        self.facts = gpu.facts
        self.entity = Entity(gpu.facts.uuid)
        self.lost = ""


class GpuSensor(Sensor):
    """A sensor of all watched GPUs; subclasses say what they ask of one."""

    scope: Scope = "gpu"

    def __init__(self, gpus: Sequence[WatchedGpu]) -> None:
        super().__init__()
        self._gpus = tuple(gpus)
        self._unable: set[tuple[str, str]] = set()

    def read(self) -> list[Reading]:
        readings = []
        for watched in self._gpus:
            values = {} if watched.lost else self.values_of(watched)
            if values:
                readings.append(Reading(watched.entity, values))
            if watched.lost:
                for metric in self.metrics:
                    self.missing.setdefault(metric, f"{watched.facts.label}: {watched.lost}")
        return readings

    @abstractmethod
    def values_of(self, watched: WatchedGpu) -> Values:
        """What is known of one GPU now; nothing where it cannot be read."""

    def ask(self, watched: WatchedGpu, *metrics: str, by: Callable[[], Iterable[float]]) -> Values:
        """The values of some metrics from one question. One that was refused for good is not asked
        again; one that failed this once is, and its counters go on over the gap."""
        key = (watched.facts.uuid, metrics[0])
        if watched.lost or key in self._unable:
            return {}
        try:
            return dict(zip(metrics, by(), strict=True))
        except Unreadable as error:
            self.cannot_read(watched, error, *metrics)
            return {}

    def cannot_read(self, watched: WatchedGpu, error: Unreadable, *metrics: str) -> None:
        """Remember why, and not to ask again where that is of no use."""
        self.lacks(f"{watched.facts.label}: {error}", *metrics, hint=error.hint)
        if error.lost:
            watched.lost = str(error)
            self.remarks.append(
                f"{watched.facts.label} ({watched.facts.uuid}) was lost: {error}. "
                "Nothing was read of it from then on"
            )
        elif error.for_good:
            self._unable.add((watched.facts.uuid, metrics[0]))


class ActivitySensor(GpuSensor):
    """What the units of a GPU did: multiprocessors, tensor cores, memory, PCIe and NVLink.

    Differences of consecutive samples of the GPU's own counters (GPM), so that no time is missed.
    """

    name = "gpu activity"
    metrics = tuple(Performance.METRICS)
    period = 0.3
    share = 0.002

    def __init__(self, gpus: Sequence[WatchedGpu]) -> None:
        super().__init__(gpus)
        self._meters: dict[str, _Meter] = {}
        for watched in gpus:
            try:
                meter = _Meter(watched.gpu.performance())
                meter.performance.sample()  # refused here, it is refused always
            except Unreadable as error:
                self.cannot_read(watched, error, *self.metrics)
            else:
                self._meters[watched.facts.uuid] = meter

    def values_of(self, watched: WatchedGpu) -> Values:
        meter = self._meters.get(watched.facts.uuid)
        if meter is None:
            return {}
        try:
            advanced = meter.advance()
        except Unreadable as error:
            self.cannot_read(watched, error, *self.metrics)
            if error.for_good:
                del self._meters[watched.facts.uuid]
            return {}
        for metric, reason in meter.refused.items():
            self.lacks(f"{watched.facts.label}: {reason}", metric, hint=reason.hint)
        return dict(meter.totals) if advanced else {}

    def settles_in(self) -> float:
        return max((meter.settles_in() for meter in self._meters.values()), default=0.0)

    def covers(self, watched: WatchedGpu) -> bool:
        """Whether PCIe traffic of a GPU is known from here."""
        return watched.facts.uuid in self._meters

    def close(self) -> None:
        for meter in self._meters.values():
            meter.performance.close()
        self._meters.clear()


class _Meter:
    """Adds up what a GPU's units did: share times seconds, bytes."""

    def __init__(self, performance: Performance) -> None:
        self.performance = performance
        self.totals: Values = dict.fromkeys(Performance.METRICS, 0.0)
        self.refused: dict[str, Unreadable] = {}
        self._kept_at: float | None = None

    def advance(self) -> bool:
        """Go on to now; False where too little time has passed for the counters to have moved."""
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
        return max(0.0, self._kept_at + Performance.SHORTEST_S - time.monotonic())

    def _add(self, seconds: float) -> None:
        for metric, rate in self.performance.rates().items():
            total = self.totals[metric]
            if isinstance(rate, Unreadable):
                self.refused[metric] = rate
                self.totals[metric] = None
            elif total is not None:
                self.totals[metric] = total + rate * seconds


class QuestionSensor(GpuSensor):
    """A sensor whose metrics are the answer to one question."""

    question: ClassVar[Callable[[NvmlGpu], float | tuple[float, ...]]]

    def values_of(self, watched: WatchedGpu) -> Values:
        return self.ask(watched, *self.metrics, by=lambda: self._answer(watched.gpu))

    def _answer(self, gpu: NvmlGpu) -> tuple[float, ...]:
        answer = type(self).question(gpu)
        return answer if isinstance(answer, tuple) else (answer,)


class PowerSensor(QuestionSensor):
    """Power that is drawn at the moment."""

    name, period, share = "gpu power", 0.3, 0.0007
    metrics = ("gpu_power",)
    question = NvmlGpu.power


class GpuMemorySensor(QuestionSensor):
    """Device memory in use, by everybody."""

    name, period, share = "gpu memory", 0.3, 0.0007
    metrics = ("gpu_memory",)
    question = NvmlGpu.memory_used


class UtilisationSensor(QuestionSensor):
    """Utilisation as NVML has it: whether anything ran at all, on the device and on its memory."""

    name, period, share = "gpu utilisation", 0.5, 0.0003
    metrics = ("gpu_utilization", "gpu_memory_controller")
    question = NvmlGpu.utilisation


class EnergySensor(QuestionSensor):
    """The energy counter of a GPU: dear to read, so rarely."""

    name, period, share = "gpu energy", 10.0, 0.0006
    metrics = ("gpu_energy",)
    question = NvmlGpu.energy


class ErrorsSensor(QuestionSensor):
    """Errors of the device memory that its ECC found."""

    name, period, share = "gpu errors", 30.0, 0.0001
    metrics = ("gpu_ecc_corrected", "gpu_ecc_uncorrected")
    question = NvmlGpu.ecc_errors


class StateSensor(GpuSensor):
    """Clocks, temperature, and what holds the clocks down."""

    name, period, share = "gpu state", 1.0, 0.0004
    _clocks = ("gpu_sm_clock", "gpu_memory_clock")
    _slowed = ("gpu_slowed_power", "gpu_slowed_heat", "gpu_slowed_other")
    metrics = (*_clocks, "gpu_temperature", *_slowed)

    def values_of(self, watched: WatchedGpu) -> Values:
        gpu = watched.gpu
        values = self.ask(watched, *self._clocks, by=gpu.clocks)
        values |= self.ask(watched, "gpu_temperature", by=lambda: (gpu.temperature(),))
        values |= self.ask(watched, *self._slowed, by=lambda: map(float, gpu.slowed_by()))
        return values


def in_first_namespace() -> bool:
    """Whether process numbers here are the machine's own, and so the driver's."""
    return procfs.pid_namespace() == _FIRST_PID_NAMESPACE
