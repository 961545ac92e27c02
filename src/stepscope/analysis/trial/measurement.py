"""What a trial measured: its throughput with an interval, the parts of its steps, its overhead.

Ranks step together, so a step of the trial is over when it is over on the slowest of them. The
first step has no length of its own: when it began is not in the log, and it is never steady.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt

from stepscope.analysis.run.data import RunData
from stepscope.analysis.run.gpus import figures
from stepscope.analysis.trial.interference import Interference, interference
from stepscope.analysis.trial.steady import Floats, Steady, find_steady
from stepscope.analysis.trial.throughput import Interval, Rate, interval, throughput
from stepscope.records.trial import LimitFacts, ProcessNoise, RankFacts, TrialFacts, TrialSettings

Steps = npt.NDArray[np.void]  # steps of one rank, as `runs.trial.read_steps` gives them
Ints = npt.NDArray[np.int64]

_Number = TypeVar("_Number", int, float)

_LEAST_LENGTHS = 3
"""Steps whose length is known; fewer of them tell no throughput."""
_OWN_PHASES = ("data", "build", "first_step", "profile", "closing")
"""Told by the processes themselves, with `import`; their training is in the steps."""


@dataclass(frozen=True)
class RankRecord:
    rank: int
    facts: RankFacts
    steps: Steps


@dataclass(frozen=True)
class TrialRecord:
    """What a trial left beside the samples of its run."""

    workload: Mapping[str, Any]  # all its settings, for display
    settings: TrialSettings
    limits: LimitFacts
    trial: TrialFacts
    ranks: tuple[RankRecord, ...]

    @property
    def first(self) -> RankFacts:
        """The facts of the first rank that left any: ranks are alike."""
        known = (rank.facts for rank in self.ranks if rank.facts.pid is not None)
        return next(known, RankFacts())

    @property
    def noise(self) -> ProcessNoise | None:
        """Between processes, as it was known when the trial ran."""
        noise = self.trial.spread
        return noise if noise and noise.cv >= 0 and noise.dof > 0 else None

    @property
    def samples_per_step(self) -> int | None:
        """Of all ranks together: the global batch."""
        settings = self.settings
        if "global" in self.first.batch:
            return self.first.batch["global"] or None
        if settings.batch_size is None or settings.accumulate is None:
            return None
        return settings.batch_size * settings.accumulate * settings.ranks or None


@dataclass(frozen=True)
class Part:
    """A part of every steady step, in seconds."""

    median: float
    p95: float


@dataclass(frozen=True)
class Overhead:
    """Seconds of a trial that are not its steady steps; None where they are not known."""

    start: float | None = None  # until its processes were started
    imports: float | None = None
    data: float | None = None
    build: float | None = None
    first_step: float | None = None
    warmup: float | None = None  # after the first step
    profile: float | None = None
    closing: float | None = None
    other: float | None = None
    """What its processes spent besides: interpreters, the launcher, leaving."""
    cleanup: float | None = None
    total: float | None = None


@dataclass(frozen=True)
class DeviceMemory:
    """Peaks in bytes, of the rank that has most."""

    allocated: float | None = None  # tensors, as the framework's allocator counts them
    reserved: float | None = None  # what the allocator took from the device for them
    device: float | None = None
    """What the driver says that the trial held, contexts and libraries included."""
    retries: int | None = None  # how often the allocator had to free its cache and try again

    @property
    def peak(self) -> float | None:
        """By the best source that there is."""
        peaks = (self.device, self.reserved, self.allocated)
        return next((peak for peak in peaks if peak is not None), None)


@dataclass(frozen=True)
class MissingRate:
    """Why a trial has no throughput."""

    kind: Literal["idle_rank", "unknown_batch", "few_steps"]
    number: int = 0  # the rank, or the steps


@dataclass(frozen=True)
class Measurement:
    """A trial as a measured fact. None where it is not known."""

    rate: Rate | None  # samples per second of all ranks together
    interval: Interval | None
    noise: ProcessNoise | None
    missing_rate: MissingRate | None
    steady: Steady
    steps: int  # that all ranks took, like the samples
    steady_steps: int
    samples: int | None
    step: Part | None
    wait: Part | None  # for the batch, as the host sees it
    copy: Part | None
    compute: Part | None
    data_wait_share: float | None  # of the steady time, in which missing data held the training up
    epoch_seconds: float | None
    epoch_measured: bool
    """Whether a whole one was run after the warm-up; else it is projected from the rate."""
    imbalance: float | None  # step time of the slowest rank over that of the fastest
    overhead: Overhead
    host_memory_peak: float | None
    device_memory: DeviceMemory
    joules: float | None  # of its GPUs, over the steady steps
    samples_per_joule: float | None
    interference: Interference = field(default_factory=Interference)
    """Of others, over the steady steps."""
    begin_ns: int | None = None  # of the steady steps, like `end_ns`
    end_ns: int | None = None

    @property
    def is_disturbed(self) -> bool:
        """Whether others took CPU time that the trial may have wanted."""
        return self.interference.on_cpus


@dataclass(frozen=True)
class _StepsTaken:
    """Steps that all ranks took, and when each was over on the last of them."""

    ranks: tuple[Steps, ...]
    ends: Ints

    @classmethod
    def of(cls, record: TrialRecord) -> _StepsTaken:
        logs = [rank.steps for rank in record.ranks]
        if not logs:
            return cls((), np.empty(0, np.int64))
        common = reduce(np.intersect1d, (log["step"] for log in logs))
        ranks = tuple(log[np.isin(log["step"], common)] for log in logs)
        return cls(ranks, np.max([steps["end_ns"] for steps in ranks], axis=0))

    def after(self, warmup: int) -> _StepsTaken:
        return _StepsTaken(tuple(steps[warmup:] for steps in self.ranks), self.ends[warmup:])

    @property
    def lengths(self) -> Floats:
        """In seconds, of all but the first."""
        return np.diff(self.ends) / 1e9

    @property
    def seconds(self) -> float:
        return float(self.lengths.sum())


def measure(record: TrialRecord, data: RunData) -> Measurement:
    taken = _StepsTaken.of(record)
    steady = find_steady(taken.lengths, record.settings.workers)
    kept = taken.after(steady.warmup)
    batch, noise = record.samples_per_step, record.noise
    rate, joules, per_joule = None, None, None
    if batch and len(kept.lengths) >= _LEAST_LENGTHS:
        rate = throughput(kept.lengths, batch)
        joules = figures(data.used_gpus, int(kept.ends[0]), int(kept.ends[-1])).joules
        per_joule = batch * len(kept.lengths) / joules if joules else None
    epoch_seconds, epoch_measured = _epoch(record, taken, steady.warmup, rate)
    imbalance = None
    if len(kept.ranks) > 1 and len(kept.ends) > 1:
        medians = [float(np.median(np.diff(steps["end_ns"]))) for steps in kept.ranks]
        imbalance = max(medians) / min(medians)
    memory, devices = data.of("memory").value, [rank.facts.device_memory for rank in record.ranks]
    begin, end = (int(kept.ends[i]) if len(kept.ends) else None for i in (0, -1))
    return Measurement(
        rate=rate,
        interval=interval(rate, noise) if rate and noise else None,
        noise=noise,
        missing_rate=None if rate else _missing_rate(record, taken),
        steady=steady,
        steps=len(taken.ends),
        steady_steps=len(kept.lengths),
        samples=None if batch is None else batch * len(taken.ends),
        step=_part(kept.lengths),
        wait=_logged(kept, "wait_ns"),
        copy=_logged(kept, "copy_ns"),
        compute=_logged(kept, "compute_ns"),
        data_wait_share=_data_wait_share(kept),
        epoch_seconds=epoch_seconds,
        epoch_measured=epoch_measured,
        imbalance=imbalance,
        overhead=_overhead(record, taken, kept),
        host_memory_peak=float(memory.max()) if len(memory) else None,
        device_memory=DeviceMemory(
            allocated=_most(each.allocated_peak for each in devices),
            reserved=_most(each.reserved_peak for each in devices),
            device=data.gpu_use.together.gpu_memory_peak_bytes,
            retries=_most(each.retries for each in devices),
        ),
        joules=joules,
        samples_per_joule=per_joule,
        interference=interference(data, begin, end),
        begin_ns=begin,
        end_ns=end,
    )


def _missing_rate(record: TrialRecord, taken: _StepsTaken) -> MissingRate:
    idle = [rank.rank for rank in record.ranks if not len(rank.steps)]
    if idle and len(idle) < len(record.ranks):
        return MissingRate("idle_rank", idle[0])
    steps = len(taken.ends)
    if steps and record.samples_per_step is None:
        return MissingRate("unknown_batch")
    return MissingRate("few_steps", steps)


def _part(seconds: Floats) -> Part | None:
    if not len(seconds):
        return None
    return Part(float(np.median(seconds)), float(np.percentile(seconds, 95)))


def _logged(kept: _StepsTaken, field: str) -> Part | None:
    """A part of the steps as the ranks logged it; negative is "not known"."""
    values = [steps[field][1:] for steps in kept.ranks]
    every = np.concatenate(values) if values else np.empty(0)
    return _part(every[every >= 0] / 1e9)


def _data_wait_share(kept: _StepsTaken) -> float | None:
    stalled, time = 0, 0
    for steps in kept.ranks:
        lengths, stalls = np.diff(steps["end_ns"]), steps["stall_ns"][1:]
        stalled += int(stalls[stalls >= 0].sum())
        time += int(lengths[stalls >= 0].sum())
    return min(1.0, stalled / time) if time else None


def _epoch(
    record: TrialRecord, taken: _StepsTaken, warmup: int, rate: Rate | None
) -> tuple[float | None, bool]:
    """The time of an epoch, and whether it was measured: the mean of those that lie wholly after
    the warm-up, which the first never does, else what the throughput lets expect."""
    ends, length = taken.ends, int(record.first.steps_per_epoch or 0)
    if length > 0:
        first, last = -(-(warmup + 1) // length), len(ends) // length
        if last > first:
            whole = float(ends[last * length - 1] - ends[first * length - 1]) / 1e9
            return whole / (last - first), True
    samples = record.first.samples_per_epoch
    return (samples / rate.per_second, False) if samples and rate else (None, False)


def _overhead(record: TrialRecord, taken: _StepsTaken, kept: _StepsTaken) -> Overhead:
    def seconds(begin_ns: int | None, end_ns: int | None) -> float | None:
        return None if begin_ns is None or end_ns is None else (end_ns - begin_ns) / 1e9

    # Ranks go through a phase at the same time: the longest counts.
    def longest(phase: str) -> float | None:
        return _most(rank.facts.phases.get(phase) for rank in record.ranks)

    phases = {"imports": longest("import"), **{name: longest(name) for name in _OWN_PHASES}}
    trial = record.trial
    life, whole = seconds(trial.spawned_ns, trial.ended_ns), trial.seconds
    accounted = taken.seconds + sum(each or 0.0 for each in phases.values())
    return Overhead(
        **phases,
        start=seconds(trial.started_ns, trial.spawned_ns),
        warmup=taken.seconds - kept.seconds if len(taken.ends) else None,
        other=None if life is None else max(0.0, life - accounted),
        cleanup=seconds(trial.ended_ns, trial.cleaned_ns),
        total=None if whole is None else max(0.0, whole - kept.seconds),
    )


def _most(values: Iterable[_Number | None]) -> _Number | None:
    return max((value for value in values if value is not None), default=None)
