"""One run as the causes look at it: the accounts of its processes, its cores and its GPUs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property

import numpy as np

from stepscope.analysis.bottleneck.account import Account, Window, account_of, mean_in, reading_in
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
    """CPU cores over the stretch, means; None where not known."""

    def __init__(self, case: Case) -> None:
        roles = [entity for metric, entity in case.data.series if metric == "cpu"]
        training = [role for role in roles if role == "main" or role.startswith("rank")]
        waiting = case.mean("cpu_wait")
        host, watcher = case.mean("host_cpu", "host"), case.mean("watcher_cpu", "watcher")
        self.used = case.mean("cpu")  # by the run
        self.allowed = case.data.cpu_allowed
        self.machine = case.machine.cpu.logical
        self.throttled = case.mean("cgroup_throttled", "cgroup")
        self.wanted: float | None = None  # threads of the run that computed or were ready to
        if self.used is not None and waiting is not None:
            self.wanted = self.used + waiting
        self.others: float | None = None  # by everybody else
        if host is not None and self.used is not None:
            self.others = max(0.0, host - self.used - (watcher or 0.0))
        self.main: float | None = None  # by the training processes
        if training:
            self.main = sum(case.mean("cpu", role) or 0.0 for role in training)
        # Threads of the training processes that were ready and had no core.
        self.wait_main = sum(case.mean("cpu_wait", role) or 0.0 for role in training)

    @property
    def idle(self) -> float | None:
        """Of those that the run may use."""
        if self.allowed is None or self.used is None:
            return None
        free = self.allowed - self.used
        if self.machine is not None and self.allowed >= self.machine and self.others is not None:
            free -= self.others
        return max(0.0, free)

    @property
    def saturated(self) -> bool:
        """Whether the run has nearly all of its cores busy."""
        share = limit("cores_saturated")
        return bool(self.allowed and self.used is not None and self.used >= share * self.allowed)


class Device:
    """What the GPUs of the run did over the stretch, means over time and over them."""

    def __init__(self, case: Case) -> None:
        stretch, gpus = case.stretch, case.data.used_gpus

        def rate(metric: str) -> float | None:
            return _mean([mean_in(gpu.of(metric), stretch) for gpu in gpus])

        def gauge(metric: str) -> float | None:
            return _mean([reading_in(gpu.of(metric), stretch) for gpu in gpus])

        self.active = rate("gpu_active")
        self.sm = rate("gpu_sm")
        self.tensor = rate("gpu_tensor")
        self.fp32 = rate("gpu_fp32")
        self.dram = rate("gpu_dram")
        self.received = rate("gpu_pcie_received")
        self.others = gauge("gpu_others")
        self.slowed_power = gauge("gpu_slowed_power")
        self.slowed_heat = gauge("gpu_slowed_heat")
        self.power = gauge("gpu_power")
        self.clock = gauge("gpu_sm_clock")
        clocks = [clock for gpu in gpus if len(clock := gpu.of("gpu_sm_clock"))]
        self.clock_most = max((float(clock.value.max()) for clock in clocks), default=None)
        utilization = gauge("gpu_utilization")
        # Share of the time in which kernels ran: by GPM, else as NVML averages it.
        self.busy = self.active if self.active is not None else utilization

        self.ahead: float | None = None  # share of steps all queued before the device began them
        self.span: float | None = None  # seconds on it from batch to end of step, mean of the usual
        self.queueing: float | None = None  # seconds that the host takes to queue a step, median
        if case.lead is None:
            return
        steps = case.lead.trainer.device_steps
        steps = steps[(steps["t"] > stretch.begin_ns) & (steps["t"] <= stretch.end_ns)]
        if len(steps):
            spans = steps["a"]
            # A step with an evaluation in it is not like the others.
            usual = spans[spans <= limit("far_longer") * np.median(spans)]
            self.ahead = float((steps["flags"] & HOST_AHEAD).mean())
            self.span = float(usual.mean()) / 1e9
            self.queueing = float(np.median(steps["b"])) / 1e9


class Case:
    """What is judged, and over which stretch."""

    def __init__(self, data: RunData) -> None:
        self.data = data
        self.machine = data.facts.environment
        found = [account_of(trainer) for trainer in data.trainers]
        self.accounts: Sequence[Account] = [account for account in found if account is not None]

    @cached_property
    def lead(self) -> Account | None:
        """The process that took most steps; of several the one of the lowest rank."""
        return max(self.accounts, key=lambda account: account.steps, default=None)

    @property
    def account(self) -> Account:
        """The same, for causes that are asked only where steps were seen."""
        assert self.lead is not None
        return self.lead

    @property
    def loader_location(self) -> CodeLocation | None:
        return self.lead.loader_location if self.lead else None

    @cached_property
    def stretch(self) -> Window:
        if self.lead is not None:
            return self.lead.stretch
        return Window(self.data.begin_ns, self.data.end_ns)

    @cached_property
    def ranks(self) -> Sequence[Account]:
        """The processes that step together with the leading one."""
        lead = self.lead
        if lead is None:
            return ()
        return [a for a in self.accounts if a.trainer.rank is not None and a.steps * 2 > lead.steps]

    @cached_property
    def on_gpu(self) -> bool:
        return bool(self.data.used_gpus)

    def mean(self, metric: str, entity: str = "tree") -> float | None:
        return mean_in(self.data.of(metric, entity), self.stretch)

    def reading(
        self, metric: str, entity: str = "tree", pick: Callable[..., float] = np.mean
    ) -> float | None:
        return reading_in(self.data.of(metric, entity), self.stretch, pick)

    def highest_mean(self, *metrics: str) -> float | None:
        """Of these metrics, over all their entities."""
        means = [self.mean(*key) for key in self.data.series if key[0] in metrics]
        return max((mean for mean in means if mean is not None), default=None)

    @cached_property
    def samples(self) -> BatchTiming:
        return self.data.preparation.between(self.stretch.begin_ns, self.stretch.end_ns)

    @cached_property
    def collation(self) -> BatchTiming:
        return self.data.collation.between(self.stretch.begin_ns, self.stretch.end_ns)

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
    """A finding without the evidence and recommendations that are None.

    The key of an action alone is a recommendation, too.
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
    """A number of evidence beside its threshold; None where it is not known."""
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
