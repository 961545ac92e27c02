"""The measurements of a trial: throughput with its interval, parts of the steps, overhead.

Ranks step together, so a step ends when it ends on the slowest rank. The first step has no length,
because its start is not in the log; it is never steady.
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

Steps = npt.NDArray[np.void]  # steps of one rank, from `runs.trial.read_steps`
Ints = npt.NDArray[np.int64]

_Number = TypeVar("_Number", int, float)

_MIN_LENGTHS = 3  # steps with a known length that a throughput needs
_PHASES = ("data", "build", "first_step", "profile", "closing")
"""Phases that the ranks report, in addition to `import`."""


@dataclass(frozen=True)
class RankRecord:
    rank: int
    facts: RankFacts
    steps: Steps


@dataclass(frozen=True)
class TrialRecord:
    """The records of a trial in addition to the samples of its run."""

    workload: Mapping[str, Any]  # all settings, for display
    settings: TrialSettings
    limits: LimitFacts
    trial: TrialFacts
    ranks: tuple[RankRecord, ...]

    @property
    def first(self) -> RankFacts:
        """The facts of the first rank that recorded any; all ranks have the same settings."""
        known = (rank.facts for rank in self.ranks if rank.facts.pid is not None)
        return next(known, RankFacts())

    @property
    def noise(self) -> ProcessNoise | None:
        """Noise between processes, as known when the trial ran."""
        noise = self.trial.noise
        return noise if noise and noise.cv >= 0 and noise.dof > 0 else None

    @property
    def samples_per_step(self) -> int | None:
        """The global batch size: samples per step of all ranks together."""
        settings = self.settings
        if "global" in self.first.batch:
            return self.first.batch["global"] or None
        if settings.batch_size is None or settings.accumulate is None:
            return None
        return settings.batch_size * settings.accumulate * settings.ranks or None


@dataclass(frozen=True)
class Part:
    """Time of one part of the steady steps, in seconds."""

    median: float
    p95: float


@dataclass(frozen=True)
class Overhead:
    """Seconds of a trial outside its steady steps; None if unknown."""

    start: float | None = None  # until the processes are started
    imports: float | None = None
    data: float | None = None
    build: float | None = None
    first_step: float | None = None
    warmup: float | None = None  # after the first step
    profile: float | None = None
    closing: float | None = None
    other: float | None = None  # interpreter, launcher, exit of the processes
    cleanup: float | None = None
    total: float | None = None


@dataclass(frozen=True)
class DeviceMemory:
    """Peak memory in bytes, of the rank with the highest peak."""

    allocated: float | None = None  # tensors, as counted by the framework's allocator
    reserved: float | None = None  # reserved by the allocator
    device: float | None = None  # reported by the driver, including contexts and libraries
    retries: int | None = None  # allocator retries

    @property
    def peak(self) -> float | None:
        """The peak from the best available source."""
        peaks = (self.device, self.reserved, self.allocated)
        return next((peak for peak in peaks if peak is not None), None)


@dataclass(frozen=True)
class MissingRate:
    """Why a trial has no throughput."""

    kind: Literal["idle_rank", "unknown_batch", "few_steps"]
    number: int = 0  # the rank, or the steps


@dataclass(frozen=True)
class Measurement:
    """The measurements of a trial; None if unknown."""

    rate: Rate | None  # samples per second of all ranks together
    interval: Interval | None
    noise: ProcessNoise | None
    missing_rate: MissingRate | None
    steady: Steady
    steps: int  # completed by all ranks
    steady_steps: int
    samples: int | None  # in all completed steps of all ranks
    step: Part | None
    wait: Part | None  # wait of the host for a batch
    copy: Part | None
    compute: Part | None
    data_wait_share: float | None  # share of the steady time in which training waits for data
    epoch_seconds: float | None
    epoch_measured: bool
    """Whether a whole epoch ran after the warm-up; otherwise `epoch_seconds` is an estimate."""
    imbalance: float | None  # step time of the slowest rank over that of the fastest rank
    overhead: Overhead
    host_memory_peak: float | None
    device_memory: DeviceMemory
    joules: float | None  # energy of the GPUs over the steady steps
    samples_per_joule: float | None
    interference: Interference = field(default_factory=Interference)  # over the steady steps
    begin_ns: int | None = None  # of the steady steps
    end_ns: int | None = None

    @property
    def has_interference(self) -> bool:
        """Whether other processes took CPU time that the trial may have needed."""
        return self.interference.on_cpus


@dataclass(frozen=True)
class _CommonSteps:
    """Steps that all ranks completed, with the end time of each on the slowest rank."""

    ranks: tuple[Steps, ...]
    ends: Ints

    @classmethod
    def of(cls, record: TrialRecord) -> _CommonSteps:
        logs = [rank.steps for rank in record.ranks]
        if not logs:
            return cls((), np.empty(0, np.int64))
        common = reduce(np.intersect1d, (log["step"] for log in logs))
        ranks = tuple(log[np.isin(log["step"], common)] for log in logs)
        return cls(ranks, np.max([steps["end_ns"] for steps in ranks], axis=0))

    def after(self, warmup: int) -> _CommonSteps:
        return _CommonSteps(tuple(steps[warmup:] for steps in self.ranks), self.ends[warmup:])

    @property
    def lengths(self) -> Floats:
        """Durations in seconds of all steps but the first."""
        return np.diff(self.ends) / 1e9

    @property
    def seconds(self) -> float:
        return float(self.lengths.sum())


def measure(record: TrialRecord, data: RunData) -> Measurement:
    steps = _CommonSteps.of(record)
    steady = find_steady(steps.lengths, record.settings.workers)
    measured = steps.after(steady.warmup)
    batch, noise = record.samples_per_step, record.noise
    rate, joules, per_joule = None, None, None
    if batch and len(measured.lengths) >= _MIN_LENGTHS:
        rate = throughput(measured.lengths, batch)
        joules = figures(data.used_gpus, int(measured.ends[0]), int(measured.ends[-1])).joules
        per_joule = batch * len(measured.lengths) / joules if joules else None
    epoch_seconds, epoch_measured = _epoch(record, steps, steady.warmup, rate)
    imbalance = None
    if len(measured.ranks) > 1 and len(measured.ends) > 1:
        medians = [float(np.median(np.diff(rank["end_ns"]))) for rank in measured.ranks]
        imbalance = max(medians) / min(medians)
    memory, devices = data.of("memory").value, [rank.facts.device_memory for rank in record.ranks]
    begin, end = (int(measured.ends[i]) if len(measured.ends) else None for i in (0, -1))
    return Measurement(
        rate=rate,
        interval=interval(rate, noise) if rate and noise else None,
        noise=noise,
        missing_rate=None if rate else _missing_rate(record, steps),
        steady=steady,
        steps=len(steps.ends),
        steady_steps=len(measured.lengths),
        samples=None if batch is None else batch * len(steps.ends),
        step=_part(measured.lengths),
        wait=_logged(measured, "wait_ns"),
        copy=_logged(measured, "copy_ns"),
        compute=_logged(measured, "compute_ns"),
        data_wait_share=_data_wait_share(measured),
        epoch_seconds=epoch_seconds,
        epoch_measured=epoch_measured,
        imbalance=imbalance,
        overhead=_overhead(record, steps, measured),
        host_memory_peak=float(memory.max()) if len(memory) else None,
        device_memory=DeviceMemory(
            allocated=_max(each.allocated_peak for each in devices),
            reserved=_max(each.reserved_peak for each in devices),
            device=data.gpu_use.overall.gpu_memory_peak_bytes,
            retries=_max(each.retries for each in devices),
        ),
        joules=joules,
        samples_per_joule=per_joule,
        interference=interference(data, begin, end),
        begin_ns=begin,
        end_ns=end,
    )


def _missing_rate(record: TrialRecord, steps: _CommonSteps) -> MissingRate:
    idle = [rank.rank for rank in record.ranks if not len(rank.steps)]
    if idle and len(idle) < len(record.ranks):
        return MissingRate("idle_rank", idle[0])
    if len(steps.ends) and record.samples_per_step is None:
        return MissingRate("unknown_batch")
    return MissingRate("few_steps", len(steps.ends))


def _part(seconds: Floats) -> Part | None:
    if not len(seconds):
        return None
    return Part(float(np.median(seconds)), float(np.percentile(seconds, 95)))


def _logged(steps: _CommonSteps, field: str) -> Part | None:
    """Return a part of the steps from the logs of the ranks; negative values are unknown."""
    values = [rank[field][1:] for rank in steps.ranks]
    times = np.concatenate(values) if values else np.empty(0)
    return _part(times[times >= 0] / 1e9)


def _data_wait_share(steps: _CommonSteps) -> float | None:
    stalled, total = 0, 0
    for rank in steps.ranks:
        lengths, stalls = np.diff(rank["end_ns"]), rank["stall_ns"][1:]
        stalled += int(stalls[stalls >= 0].sum())
        total += int(lengths[stalls >= 0].sum())
    return min(1.0, stalled / total) if total else None


def _epoch(
    record: TrialRecord, steps: _CommonSteps, warmup: int, rate: Rate | None
) -> tuple[float | None, bool]:
    """Return the time of an epoch, and whether it was measured.

    A measured time is the mean of the epochs that lie entirely after the warm-up, which the first
    one never does. Otherwise it is estimated from the throughput.
    """
    ends, length = steps.ends, int(record.first.steps_per_epoch or 0)
    if length > 0:
        first, last = -(-(warmup + 1) // length), len(ends) // length
        if last > first:
            whole = float(ends[last * length - 1] - ends[first * length - 1]) / 1e9
            return whole / (last - first), True
    samples = record.first.samples_per_epoch
    return (samples / rate.per_second, False) if samples and rate else (None, False)


def _overhead(record: TrialRecord, steps: _CommonSteps, measured: _CommonSteps) -> Overhead:
    def seconds(begin_ns: int | None, end_ns: int | None) -> float | None:
        return None if begin_ns is None or end_ns is None else (end_ns - begin_ns) / 1e9

    # All ranks run a phase at the same time, so the longest time counts.
    def longest(phase: str) -> float | None:
        return _max(rank.facts.phases.get(phase) for rank in record.ranks)

    phases = {"imports": longest("import"), **{name: longest(name) for name in _PHASES}}
    trial = record.trial
    running, total = seconds(trial.spawned_ns, trial.ended_ns), trial.seconds
    accounted = steps.seconds + sum(each or 0.0 for each in phases.values())
    return Overhead(
        **phases,
        start=seconds(trial.started_ns, trial.spawned_ns),
        warmup=steps.seconds - measured.seconds if len(steps.ends) else None,
        other=None if running is None else max(0.0, running - accounted),
        cleanup=seconds(trial.ended_ns, trial.cleaned_ns),
        total=None if total is None else max(0.0, total - measured.seconds),
    )


def _max(values: Iterable[_Number | None]) -> _Number | None:
    return max((value for value in values if value is not None), default=None)
