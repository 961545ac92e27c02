"""What a trial measured: its rate with an interval, what its steps are made of, what it cost.

Ranks step together, so a step of the trial is over when it is over on the slowest of them. The
first step has no length of its own: when it began is not in the log, and it is never steady.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sized
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np
import numpy.typing as npt

from stepscope.analysis.gpus import figures
from stepscope.analysis.steady import Floats, Steady, find_steady
from stepscope.analysis.summary import Recorded
from stepscope.analysis.throughput import Interval, Rate, Spread, interval, throughput

Steps = npt.NDArray[np.void]
"""Steps of one rank, as `runs.trial.read_steps` gives them."""
Ints = npt.NDArray[np.int64]

_LEAST_LENGTHS = 3
"""Steps whose length is known; of fewer no rate is told."""
_OWN_PHASES = ("import", "data", "build", "first_step", "profile", "closing")
"""Told by the processes themselves; their training is in the steps."""


@dataclass(frozen=True)
class RankRecord:
    """What one process of the training left."""

    rank: int
    told: Mapping[str, Any]
    """What it said of itself; empty where it did not come to it."""
    steps: Steps


@dataclass(frozen=True)
class TrialRecord:
    """What a trial left beside the samples of its run."""

    workload: Mapping[str, Any]
    limits: Mapping[str, Any]
    """What was asked for, and how it was enforced."""
    trial: Mapping[str, Any]
    """Which repeat it is, when it was started, what spread was known."""
    ranks: tuple[RankRecord, ...]

    @property
    def told(self) -> Mapping[str, Any]:
        """What the first rank said that said anything: ranks are alike."""
        return next((rank.told for rank in self.ranks if rank.told), {})


@dataclass(frozen=True)
class Part:
    """A part of every steady step, in seconds."""

    median: float
    p95: float


@dataclass(frozen=True)
class Overhead:
    """Seconds of a trial that are not its steady steps; None where they are not known."""

    start: float | None = None
    """Until its processes were started."""
    imports: float | None = None
    data: float | None = None
    build: float | None = None
    first_step: float | None = None
    warmup: float | None = None
    """After the first step."""
    profile: float | None = None
    closing: float | None = None
    other: float | None = None
    """What its processes spent besides: interpreters, the launcher, leaving."""
    cleanup: float | None = None
    total: float | None = None


@dataclass(frozen=True)
class DeviceMemory:
    """Peaks in bytes, of the rank that has most."""

    allocated: float | None = None
    """Tensors, as the framework's allocator counts them."""
    reserved: float | None = None
    """What the allocator took from the device for them."""
    device: float | None = None
    """What the driver says that the trial held, contexts and libraries included."""
    retries: int | None = None
    """How often the allocator had to give back what it kept, to try again."""


@dataclass(frozen=True)
class Measurement:
    """A trial as a measured fact. None where it is not known."""

    rate: Rate | None
    """Samples per second of all ranks together."""
    interval: Interval | None
    spread: Spread | None
    why_no_rate: str
    steady: Steady
    steps: int
    """That all ranks took, like the samples."""
    steady_steps: int
    samples: int | None
    step: Part | None
    wait: Part | None
    """For the batch, as the host sees it."""
    copy: Part | None
    compute: Part | None
    data_wait_share: float | None
    """Of the steady time, in which missing data held the training up."""
    epoch_seconds: float | None
    epoch_measured: bool
    """Whether whole epochs were run; else their time is projected from the rate."""
    imbalance: float | None
    """Step time of the slowest rank over that of the fastest."""
    overhead: Overhead
    host_memory_peak: float | None
    device_memory: DeviceMemory
    joules: float | None
    """Of its GPUs, over the steady steps."""
    samples_per_joule: float | None


@dataclass(frozen=True)
class _Taken:
    """Steps that all ranks took, and when each was over on the last of them."""

    ranks: tuple[Steps, ...]
    ends: Ints

    @classmethod
    def of(cls, record: TrialRecord) -> _Taken:
        logs = [rank.steps for rank in record.ranks]
        if not logs:
            return cls((), np.empty(0, np.int64))
        common = reduce(np.intersect1d, (log["step"] for log in logs))
        ranks = tuple(log[np.isin(log["step"], common)] for log in logs)
        return cls(ranks, np.max([steps["end_ns"] for steps in ranks], axis=0))

    def after(self, warmup: int) -> _Taken:
        return _Taken(tuple(steps[warmup:] for steps in self.ranks), self.ends[warmup:])

    @property
    def lengths(self) -> Floats:
        """In seconds, of all but the first."""
        return np.diff(self.ends) / 1e9

    @property
    def seconds(self) -> float:
        return float(self.lengths.sum())


def measure(record: TrialRecord, recorded: Recorded | None, spread: Spread | None) -> Measurement:
    """What a trial tells; `recorded` is what its watcher saw, `spread` what was known before."""
    taken = _Taken.of(record)
    steady = find_steady(taken.lengths, int(number(record.workload, "workers") or 0))
    kept = taken.after(steady.warmup)
    rate = _rate(record, kept)
    epoch, measured = _epoch_seconds(record, taken, rate)
    joules = _joules(recorded, kept) if rate else None
    return Measurement(
        rate=rate,
        interval=interval(rate, spread) if rate and spread else None,
        spread=spread,
        why_no_rate="" if rate else _why_no_rate(record, taken),
        steady=steady,
        steps=len(taken.ends),
        steady_steps=len(kept.lengths),
        samples=_samples(record, taken.ends),
        step=_part(kept.lengths),
        wait=_logged(kept, "wait_ns"),
        copy=_logged(kept, "copy_ns"),
        compute=_logged(kept, "compute_ns"),
        data_wait_share=_data_wait_share(kept),
        epoch_seconds=epoch,
        epoch_measured=measured,
        imbalance=_imbalance(kept),
        overhead=_overhead(record, taken, kept),
        host_memory_peak=_host_memory_peak(recorded),
        device_memory=_device_memory(record, recorded),
        joules=joules,
        samples_per_joule=(_samples(record, kept.lengths) or 0) / joules if joules else None,
    )


def number(facts: Mapping[str, Any], *path: str) -> float | None:
    """A number somewhere in nested facts; None where there is none."""
    value: Any = facts
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return None if isinstance(value, bool) or not isinstance(value, int | float) else float(value)


def samples_per_step(record: TrialRecord) -> int | None:
    """Of all ranks together: the global batch."""
    sizes = [number(record.workload, key) for key in ("batch_size", "accumulate", "ranks")]
    found = number(record.told, "batch", "global")
    if found is None and None not in sizes:
        found = float(np.prod([size or 1 for size in sizes]))
    return int(found) if found else None


def _samples(record: TrialRecord, steps: Sized) -> int | None:
    """In so many steps."""
    each = samples_per_step(record)
    return None if each is None else each * len(steps)


def _rate(record: TrialRecord, kept: _Taken) -> Rate | None:
    each = samples_per_step(record)
    return throughput(kept.lengths, each) if each and len(kept.lengths) >= _LEAST_LENGTHS else None


def _why_no_rate(record: TrialRecord, taken: _Taken) -> str:
    idle = [rank.rank for rank in record.ranks if not len(rank.steps)]
    if idle and len(idle) < len(record.ranks):
        return f"rank {idle[0]} took no step"
    steps = len(taken.ends)
    if steps and samples_per_step(record) is None:
        return "how many samples a step has was not told"
    return f"{steps} steps are too few" if steps > 1 else f"{('no', 'one')[steps]} step was taken"


def _part(seconds: Floats) -> Part | None:
    if not len(seconds):
        return None
    return Part(float(np.median(seconds)), float(np.percentile(seconds, 95)))


def _logged(kept: _Taken, field: str) -> Part | None:
    """A part of the steps as the ranks logged it; negative is "not known"."""
    values = [steps[field][1:] for steps in kept.ranks]
    every = np.concatenate(values) if values else np.empty(0)
    return _part(every[every >= 0] / 1e9)


def _data_wait_share(kept: _Taken) -> float | None:
    stalled, time = 0, 0
    for steps in kept.ranks:
        lengths, stalls = np.diff(steps["end_ns"]), steps["stall_ns"][1:]
        stalled += int(stalls[stalls >= 0].sum())
        time += int(lengths[stalls >= 0].sum())
    return min(1.0, stalled / time) if time else None


def _imbalance(kept: _Taken) -> float | None:
    if len(kept.ranks) < 2 or len(kept.ends) < 2:
        return None
    medians = [float(np.median(np.diff(steps["end_ns"]))) for steps in kept.ranks]
    return max(medians) / min(medians)


def _epoch_seconds(
    record: TrialRecord, taken: _Taken, rate: Rate | None
) -> tuple[float | None, bool]:
    """The time of an epoch, and whether it was run as a whole: the mean of those after the first,
    else the first with its first step, else what the rate lets expect."""
    ends, length = taken.ends, int(number(record.told, "steps_per_epoch") or 0)
    if length and len(ends) >= 2 * length:
        whole = len(ends) // length
        return float(ends[whole * length - 1] - ends[length - 1]) / 1e9 / (whole - 1), True
    first_step = _longest(record, "first_step")
    if length and len(ends) >= length and first_step is not None:
        return first_step + float(ends[length - 1] - ends[0]) / 1e9, True
    samples = number(record.told, "samples_per_epoch")
    return (samples / rate.per_second, False) if samples and rate else (None, False)


def _overhead(record: TrialRecord, taken: _Taken, kept: _Taken) -> Overhead:
    began, spawned, ended, cleaned = (
        number(record.trial, key) for key in ("started_ns", "spawned_ns", "ended_ns", "cleaned_ns")
    )
    phases = {name: _longest(record, name) for name in _OWN_PHASES}
    life, whole = _seconds(spawned, ended), _seconds(began, cleaned)
    accounted = taken.seconds + sum(seconds or 0.0 for seconds in phases.values())
    return Overhead(
        start=_seconds(began, spawned),
        imports=phases["import"],
        data=phases["data"],
        build=phases["build"],
        first_step=phases["first_step"],
        warmup=taken.seconds - kept.seconds if len(taken.ends) else None,
        profile=phases["profile"],
        closing=phases["closing"],
        other=None if life is None else max(0.0, life - accounted),
        cleanup=_seconds(ended, cleaned),
        total=None if whole is None else max(0.0, whole - kept.seconds),
    )


def _seconds(begin_ns: float | None, end_ns: float | None) -> float | None:
    return None if begin_ns is None or end_ns is None else (end_ns - begin_ns) / 1e9


def _longest(record: TrialRecord, phase: str) -> float | None:
    """Of the ranks, which go through a phase at the same time."""
    return _most(number(rank.told, "phases", phase) for rank in record.ranks)


def _most(values: Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


def _host_memory_peak(recorded: Recorded | None) -> float | None:
    memory = recorded.of("memory").value if recorded else np.empty(0)
    return float(memory.max()) if len(memory) else None


def _device_memory(record: TrialRecord, recorded: Recorded | None) -> DeviceMemory:
    def most(key: str) -> float | None:
        return _most(number(rank.told, "device_memory", key) for rank in record.ranks)

    retries = most("retries")
    return DeviceMemory(
        allocated=most("allocated_peak"),
        reserved=most("reserved_peak"),
        device=recorded.gpu_use.together.gpu_memory_peak_bytes if recorded else None,
        retries=None if retries is None else int(retries),
    )


def _joules(recorded: Recorded | None, kept: _Taken) -> float | None:
    if recorded is None or len(kept.ends) < 2:
        return None
    return figures(recorded.used_gpus, int(kept.ends[0]), int(kept.ends[-1])).joules
