"""One run as the causes look at it: the accounts of its processes, its cores and its GPUs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from stepscope.analysis.causes.account import Account, Stretch, account_of, mean_in, reading_in
from stepscope.analysis.causes.names import CAUSES
from stepscope.analysis.causes.thresholds import THRESHOLDS
from stepscope.analysis.observed import Ints, Observed, Work
from stepscope.analysis.series import Series
from stepscope.records import Advice, Confidence, Evidence, Finding


@dataclass(frozen=True)
class Cores:
    """CPU cores over the stretch, means; None where not known."""

    used: float | None
    """By the run."""
    wanted: float | None
    """Threads of the run that computed or were ready to."""
    allowed: float | None
    machine: int | None
    others: float | None
    """By everybody else."""
    throttled: float | None
    main: float | None
    workers: float | None
    wait_main: float | None
    """Threads of the training processes that were ready and had no core."""

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
        share = THRESHOLDS["cores_saturated"].value
        return bool(self.allowed and self.used is not None and self.used >= share * self.allowed)


@dataclass(frozen=True)
class Device:
    """What the GPUs of the run did over the stretch, means over time and over them."""

    active: float | None
    sm: float | None
    occupancy: float | None
    tensor: float | None
    fp32: float | None
    dram: float | None
    utilization: float | None
    received: float | None
    """Bytes a second to the device."""
    others: float | None
    slowed_power: float | None
    slowed_heat: float | None
    power: float | None
    clock: float | None
    clock_most: float | None
    ahead: float | None
    """Share of measured steps that were all queued before the device began them."""
    span: float | None
    """Seconds on the device from the batch to the end of the step, mean."""
    queueing: float | None
    """Seconds that the host takes to queue a step, median."""

    @property
    def busy(self) -> float | None:
        """Share of the time in which kernels ran: by GPM, else as NVML averages it."""
        return self.active if self.active is not None else self.utilization


class Case:
    """What is judged, and over which stretch."""

    def __init__(self, observed: Observed) -> None:
        self.observed = observed
        self.recorded = observed.recorded
        found = [account_of(trainer) for trainer in observed.trainers]
        self.accounts: Sequence[Account] = [account for account in found if account is not None]

    @cached_property
    def lead(self) -> Account | None:
        """The process that took most steps; of several the one of the lowest rank."""
        return max(self.accounts, key=lambda account: account.steps, default=None)

    @cached_property
    def stretch(self) -> Stretch:
        if self.lead is not None:
            return self.lead.stretch
        return Stretch(self.recorded.begin_ns, self.recorded.end_ns)

    @cached_property
    def ranks(self) -> Sequence[Account]:
        """The processes that step together with the leading one."""
        lead = self.lead
        if lead is None:
            return ()
        return [a for a in self.accounts if a.trainer.rank is not None and a.steps * 2 > lead.steps]

    @cached_property
    def on_gpu(self) -> bool:
        return bool(self.recorded.used_gpus)

    def mean(self, metric: str, entity: str = "tree") -> float | None:
        return mean_in(self.recorded.of(metric, entity), self.stretch)

    def reading(
        self, metric: str, entity: str = "tree", pick: Callable[..., float] = np.mean
    ) -> float | None:
        return reading_in(self.recorded.of(metric, entity), self.stretch, pick)

    @cached_property
    def samples(self) -> Work:
        return self.observed.samples.between(self.stretch.begin_ns, self.stretch.end_ns)

    @cached_property
    def collation(self) -> Work:
        return self.observed.collation.between(self.stretch.begin_ns, self.stretch.end_ns)

    @cached_property
    def cores(self) -> Cores:
        used, waiting = self.mean("cpu"), self.mean("cpu_wait")
        host, watcher = self.mean("host_cpu", "host"), self.mean("watcher_cpu", "watcher")
        training = [r for r in self._roles("cpu") if r == "main" or r.startswith("rank")]
        others = None
        if host is not None and used is not None:
            others = max(0.0, host - used - (watcher or 0.0))
        return Cores(
            used=used,
            wanted=None if used is None or waiting is None else used + waiting,
            allowed=self.recorded.cpu_allowed,
            machine=self.observed.machine.cpus,
            others=others,
            throttled=self.mean("cgroup_throttled", "cgroup"),
            main=sum(self.mean("cpu", role) or 0.0 for role in training) if training else None,
            workers=self.mean("cpu", "worker"),
            wait_main=sum(self.mean("cpu_wait", role) or 0.0 for role in training),
        )

    def _roles(self, metric: str) -> list[str]:
        return [entity for name, entity in self.recorded.series if name == metric]

    @cached_property
    def device(self) -> Device:
        spans = self._device_steps("a")
        clocks = self._gpu_series("gpu_sm_clock")
        return Device(
            active=self._gpu_mean("gpu_active"),
            sm=self._gpu_mean("gpu_sm"),
            occupancy=self._gpu_mean("gpu_occupancy"),
            tensor=self._gpu_mean("gpu_tensor"),
            fp32=self._gpu_mean("gpu_fp32"),
            dram=self._gpu_mean("gpu_dram"),
            utilization=self._gpu_reading("gpu_utilization"),
            received=self._gpu_mean("gpu_pcie_received"),
            others=self._gpu_reading("gpu_others"),
            slowed_power=self._gpu_reading("gpu_slowed_power"),
            slowed_heat=self._gpu_reading("gpu_slowed_heat"),
            power=self._gpu_reading("gpu_power"),
            clock=self._gpu_reading("gpu_sm_clock"),
            clock_most=max((float(s.value.max()) for s in clocks if len(s)), default=None),
            ahead=self._ahead(),
            span=_usual_mean(spans) / 1e9 if len(spans) else None,
            queueing=float(np.median(self._device_steps("b"))) / 1e9 if len(spans) else None,
        )

    def _gpu_series(self, metric: str) -> list[Series]:
        return [gpu.of(metric) for gpu in self.recorded.used_gpus]

    def _gpu_mean(self, metric: str) -> float | None:
        return _mean([mean_in(series, self.stretch) for series in self._gpu_series(metric)])

    def _gpu_reading(self, metric: str) -> float | None:
        return _mean([reading_in(series, self.stretch) for series in self._gpu_series(metric)])

    def _device_steps(self, field: str) -> Ints:
        if self.lead is None:
            return np.empty(0, np.int64)
        steps = self.lead.trainer.device_steps
        inside = (steps["t"] > self.stretch.begin_ns) & (steps["t"] <= self.stretch.end_ns)
        return np.asarray(steps[field][inside], np.int64)

    def _ahead(self) -> float | None:
        flags = self._device_steps("flags")
        return float((flags & 1).mean()) if len(flags) else None


def _usual_mean(values: Ints) -> float:
    """The mean of what is usual: a step with an evaluation in it is none."""
    return float(values[values <= THRESHOLDS["far_longer"].value * np.median(values)].mean())


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def finding(
    cause: str,
    says: str,
    confidence: Confidence,
    because: str,
    ceiling: float | None,
    evidence: Sequence[Evidence | None] = (),
    advice: Sequence[Advice | None] = (),
) -> Finding:
    """A finding by its cause: title and health are those of the table."""
    known = CAUSES[cause]
    return Finding(
        cause=cause,
        title=known.title,
        says=says,
        confidence=confidence,
        because=because,
        ceiling=None if ceiling is None else max(1.0, ceiling),
        healthy=known.healthy,
        evidence=tuple(each for each in evidence if each is not None),
        advice=tuple(each for each in advice if each is not None),
    )


def number(
    what: str, value: float | None, unit: str, threshold: str | None = None, source: str = ""
) -> Evidence | None:
    """A number of evidence beside its threshold; None where it is not known."""
    if value is None:
        return None
    limit = THRESHOLDS[threshold].value if threshold else None
    return Evidence(what, float(value), unit, threshold, limit, source)


def pct(share: float | None) -> str:
    return f"{(share or 0.0) * 100:.0f} %"
