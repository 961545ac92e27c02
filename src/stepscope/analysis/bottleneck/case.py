"""One run as the causes look at it: the accounts of its processes, its cores and its GPUs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from stepscope.analysis.bottleneck.account import Account, Window, account_of, mean_in, reading_in
from stepscope.analysis.bottleneck.causes import CAUSES
from stepscope.analysis.bottleneck.thresholds import limit
from stepscope.analysis.run.data import BatchTiming, RunData
from stepscope.inject.events import HOST_AHEAD
from stepscope.records import Confidence, Evidence, Finding, FindingValue, Recommendation


@dataclass(frozen=True)
class Cores:
    """CPU cores over the stretch, means; None where not known."""

    used: float | None  # by the run
    wanted: float | None  # threads of the run that computed or were ready to
    allowed: float | None
    machine: int | None
    others: float | None  # by everybody else
    throttled: float | None
    main: float | None  # by the training processes
    wait_main: float | None  # threads of the training processes that were ready and had no core

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


@dataclass(frozen=True)
class Device:
    """What the GPUs of the run did over the stretch, means over time and over them."""

    active: float | None
    sm: float | None
    tensor: float | None
    fp32: float | None
    dram: float | None
    utilization: float | None
    received: float | None  # bytes a second to the device
    others: float | None
    slowed_power: float | None
    slowed_heat: float | None
    power: float | None
    clock: float | None
    clock_most: float | None
    ahead: float | None = None
    """Share of measured steps that were all queued before the device began them."""
    span: float | None = None
    """Seconds on the device from the batch to the end of the step, mean of the usual ones."""
    queueing: float | None = None  # seconds that the host takes to queue a step, median

    @property
    def busy(self) -> float | None:
        """Share of the time in which kernels ran: by GPM, else as NVML averages it."""
        return self.active if self.active is not None else self.utilization


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
        used, waiting = self.mean("cpu"), self.mean("cpu_wait")
        host, watcher = self.mean("host_cpu", "host"), self.mean("watcher_cpu", "watcher")
        roles = [entity for metric, entity in self.data.series if metric == "cpu"]
        training = [role for role in roles if role == "main" or role.startswith("rank")]
        others = None
        if host is not None and used is not None:
            others = max(0.0, host - used - (watcher or 0.0))
        return Cores(
            used=used,
            wanted=None if used is None or waiting is None else used + waiting,
            allowed=self.data.cpu_allowed,
            machine=self.machine.cpu.logical,
            others=others,
            throttled=self.mean("cgroup_throttled", "cgroup"),
            main=sum(self.mean("cpu", role) or 0.0 for role in training) if training else None,
            wait_main=sum(self.mean("cpu_wait", role) or 0.0 for role in training),
        )

    @cached_property
    def device(self) -> Device:
        stretch, gpus = self.stretch, self.data.used_gpus

        def rate(metric: str) -> float | None:
            return _mean([mean_in(gpu.of(metric), stretch) for gpu in gpus])

        def gauge(metric: str) -> float | None:
            return _mean([reading_in(gpu.of(metric), stretch) for gpu in gpus])

        clocks = [clock for gpu in gpus if len(clock := gpu.of("gpu_sm_clock"))]
        device = Device(
            active=rate("gpu_active"),
            sm=rate("gpu_sm"),
            tensor=rate("gpu_tensor"),
            fp32=rate("gpu_fp32"),
            dram=rate("gpu_dram"),
            utilization=gauge("gpu_utilization"),
            received=rate("gpu_pcie_received"),
            others=gauge("gpu_others"),
            slowed_power=gauge("gpu_slowed_power"),
            slowed_heat=gauge("gpu_slowed_heat"),
            power=gauge("gpu_power"),
            clock=gauge("gpu_sm_clock"),
            clock_most=max((float(clock.value.max()) for clock in clocks), default=None),
        )
        if self.lead is None:
            return device
        steps = self.lead.trainer.device_steps
        steps = steps[(steps["t"] > stretch.begin_ns) & (steps["t"] <= stretch.end_ns)]
        if not len(steps):
            return device
        spans = steps["a"]
        # A step with an evaluation in it is not like the others.
        usual = spans[spans <= limit("far_longer") * np.median(spans)]
        return replace(
            device,
            ahead=float((steps["flags"] & HOST_AHEAD).mean()),
            span=float(usual.mean()) / 1e9,
            queueing=float(np.median(steps["b"])) / 1e9,
        )


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
    recommendations: Sequence[Recommendation | None] = (),
) -> Finding:
    """A finding without the evidence and recommendations that are None."""
    return Finding(
        cause=cause,
        confidence=confidence,
        speedup_bound=None if speedup_bound is None else max(1.0, speedup_bound),
        values=values or {},
        variant=variant,
        reasons=tuple(reasons),
        healthy=CAUSES[cause].kind == "healthy",
        evidence=tuple(each for each in evidence if each is not None),
        recommendations=tuple(each for each in recommendations if each is not None),
    )


def measured(
    metric: str, value: float | None, unit: str, threshold: str | None = None, source: str = ""
) -> Evidence | None:
    """A number of evidence beside its threshold; None where it is not known."""
    if value is None:
        return None
    return Evidence(
        metric, float(value), unit, threshold, limit(threshold) if threshold else None, source
    )
