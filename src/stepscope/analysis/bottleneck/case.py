"""The measurements of a run that the causes use: steps by process, CPU cores and GPUs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property

import numpy as np

from stepscope.analysis.bottleneck.breakdown import (
    StepBreakdown,
    Window,
    breakdown_of,
    mean_in,
    reading_in,
)
from stepscope.analysis.bottleneck.causes import CAUSES
from stepscope.analysis.bottleneck.thresholds import limit
from stepscope.analysis.run.data import BatchTiming, RunData
from stepscope.inject.events import HOST_AHEAD
from stepscope.records import (
    CodeLocation,
    Confidence,
    Evidence,
    Finding,
    FindingValue,
    Recommendation,
)


class Cores:
    """Mean numbers of CPU cores over the window; None if unknown."""

    def __init__(self, case: Case) -> None:
        roles = [entity for metric, entity in case.data.series if metric == "cpu"]
        training = [role for role in roles if role == "main" or role.startswith("rank")]
        waiting = case.mean("cpu_wait")
        host, monitor = case.mean("host_cpu", "host"), case.mean("monitor_cpu", "monitor")
        self.used = case.mean("cpu")  # by the run
        self.allowed = case.data.cpu_allowed
        self.machine = case.machine.cpu.logical
        self.throttled = case.mean("cgroup_throttled", "cgroup")
        self.runnable: float | None = None  # threads of the run that ran or were ready to run
        if self.used is not None and waiting is not None:
            self.runnable = self.used + waiting
        self.other_processes: float | None = None  # used outside the run
        if host is not None and self.used is not None:
            self.other_processes = max(0.0, host - self.used - (monitor or 0.0))
        self.training: float | None = None  # used by the training processes
        if training:
            self.training = sum(case.mean("cpu", role) or 0.0 for role in training)
        # Threads of the training processes that were ready to run but had no core.
        self.training_waiting = sum(case.mean("cpu_wait", role) or 0.0 for role in training)

    @property
    def idle(self) -> float | None:
        """Idle cores among those that the run may use."""
        if self.allowed is None or self.used is None:
            return None
        free = self.allowed - self.used
        has_whole_machine = self.machine is not None and self.allowed >= self.machine
        if has_whole_machine and self.other_processes is not None:
            free -= self.other_processes
        return max(0.0, free)

    @property
    def saturated(self) -> bool:
        """Whether nearly all allowed cores are busy."""
        share = limit("cores_saturated")
        return bool(self.allowed and self.used is not None and self.used >= share * self.allowed)


class Device:
    """Counters of the run's GPUs: means over the window and over the GPUs."""

    def __init__(self, case: Case) -> None:
        window, gpus = case.window, case.data.used_gpus

        def rate(metric: str) -> float | None:
            return _mean([mean_in(gpu.of(metric), window) for gpu in gpus])

        def gauge(metric: str) -> float | None:
            return _mean([reading_in(gpu.of(metric), window) for gpu in gpus])

        self.active = rate("gpu_active")
        self.sm = rate("gpu_sm")
        self.tensor = rate("gpu_tensor")
        self.fp32 = rate("gpu_fp32")
        self.dram = rate("gpu_dram")
        self.received = rate("gpu_pcie_received")
        self.other_processes = gauge("gpu_other_processes")
        self.throttled_power = gauge("gpu_throttled_power")
        self.throttled_thermal = gauge("gpu_throttled_thermal")
        self.power = gauge("gpu_power")
        self.clock = gauge("gpu_sm_clock")
        clocks = [clock for gpu in gpus if len(clock := gpu.of("gpu_sm_clock"))]
        self.clock_max = max((float(clock.value.max()) for clock in clocks), default=None)
        utilization = gauge("gpu_utilization")
        # Share of the time with kernels running: from GPM, else NVML's average.
        self.busy = self.active if self.active is not None else utilization

        # Share of steps that were fully queued before the device started them.
        self.queued_ahead: float | None = None
        # Mean seconds on the device from the batch to the end of the step, without outliers.
        self.step_span: float | None = None
        self.queueing: float | None = None  # median seconds that the host takes to queue a step
        if case.primary is None:
            return
        steps = case.primary.trainer.device_steps
        steps = steps[(steps["t"] > window.begin_ns) & (steps["t"] <= window.end_ns)]
        if len(steps):
            spans = steps["a"]
            # A step may include an evaluation.
            typical = spans[spans <= limit("long_step") * np.median(spans)]
            self.queued_ahead = float((steps["flags"] & HOST_AHEAD).mean())
            self.step_span = float(typical.mean()) / 1e9
            self.queueing = float(np.median(steps["b"])) / 1e9


class Case:
    """A run to diagnose, and the window of it that is analyzed."""

    def __init__(self, data: RunData) -> None:
        self.data = data
        self.machine = data.facts.environment
        self.breakdowns: Sequence[StepBreakdown] = [
            breakdown
            for trainer in data.trainers
            if (breakdown := breakdown_of(trainer)) is not None
        ]

    @cached_property
    def primary(self) -> StepBreakdown | None:
        """The process with the most steps; the lowest rank among equals."""
        return max(self.breakdowns, key=lambda breakdown: breakdown.steps, default=None)

    @property
    def breakdown(self) -> StepBreakdown:
        """The primary process, for causes that are only checked if steps were observed."""
        assert self.primary is not None
        return self.primary

    @property
    def loader_location(self) -> CodeLocation | None:
        return self.primary.loader_location if self.primary else None

    @cached_property
    def window(self) -> Window:
        if self.primary is not None:
            return self.primary.window
        return Window(self.data.begin_ns, self.data.end_ns)

    @cached_property
    def ranks(self) -> Sequence[StepBreakdown]:
        """The ranks that train together with the primary process."""
        primary = self.primary
        if primary is None:
            return ()
        return [
            each
            for each in self.breakdowns
            if each.trainer.rank is not None and each.steps * 2 > primary.steps
        ]

    @cached_property
    def on_gpu(self) -> bool:
        return bool(self.data.used_gpus)

    def mean(self, metric: str, entity: str = "tree") -> float | None:
        return mean_in(self.data.of(metric, entity), self.window)

    def reading(
        self, metric: str, entity: str = "tree", statistic: Callable[..., float] = np.mean
    ) -> float | None:
        return reading_in(self.data.of(metric, entity), self.window, statistic)

    def highest_mean(self, *metrics: str) -> float | None:
        """Return the highest mean of these metrics over all their entities."""
        means = [self.mean(*key) for key in self.data.series if key[0] in metrics]
        return max((mean for mean in means if mean is not None), default=None)

    @cached_property
    def samples(self) -> BatchTiming:
        return self.data.preparation.between(self.window.begin_ns, self.window.end_ns)

    @cached_property
    def collation(self) -> BatchTiming:
        return self.data.collation.between(self.window.begin_ns, self.window.end_ns)

    @cached_property
    def cores(self) -> Cores:
        return Cores(self)

    @cached_property
    def device(self) -> Device:
        return Device(self)


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def finding(
    cause: str,
    confidence: Confidence,
    speedup_bound: float | None,
    *,
    values: Mapping[str, FindingValue] | None = None,
    variant: str = "",
    reasons: Sequence[str] = (),
    evidence: Sequence[Evidence | None] = (),
    recommendations: Sequence[Recommendation | str | None] = (),
) -> Finding:
    """Build a finding; None is dropped from evidence and recommendations.

    A recommendation can also be given as the key of an action.
    """
    return Finding(
        cause=cause,
        confidence=confidence,
        speedup_bound=None if speedup_bound is None else max(1.0, speedup_bound),
        values=values or {},
        variant=variant,
        reasons=tuple(reasons),
        healthy=CAUSES[cause].kind == "healthy",
        evidence=tuple(each for each in evidence if each is not None),
        recommendations=tuple(
            Recommendation(each) if isinstance(each, str) else each
            for each in recommendations
            if each is not None
        ),
    )


def measured(
    metric: str, value: float | None, unit: str, threshold: str | None = None, source: str = ""
) -> Evidence | None:
    """Build evidence from a measurement and its threshold, or return None without a value."""
    if value is None:
        return None
    return Evidence(
        metric=metric,
        value=float(value),
        unit=unit,
        threshold=threshold,
        limit=limit(threshold) if threshold else None,
        source=source,
    )
