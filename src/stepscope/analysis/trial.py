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
from stepscope.analysis.series import amount_of
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
_OTHERS_CORES = 0.25
_BUSY_HOST = 0.85


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
    """Whether a whole one was run after the warm-up; else it is projected from the rate."""
    imbalance: float | None
    """Step time of the slowest rank over that of the fastest."""
    overhead: Overhead
    host_memory_peak: float | None
    device_memory: DeviceMemory
    joules: float | None
    """Of its GPUs, over the steady steps."""
    samples_per_joule: float | None
    host_cpus: float | None = None
    """That the machine has."""
    host_cores: float | None = None
    """Of them busy, on average over the steady steps, with whatever it was."""
    others_cores: float | None = None
    """Of these, with neither the trial nor its watcher."""
    begin_ns: int | None = None
    """Of the steady steps, like `end_ns`."""
    end_ns: int | None = None

    @property
    def is_disturbed(self) -> bool:
        """Whether others took CPU time that the trial may have wanted.

        A quarter of a core is more than an idle machine needs for itself, and than two counters
        differ that are read at different instants. And others only take something away where
        little is left: below 85 % there was nearly always a CPU free for who wanted one.
        """
        if self.others_cores is None or self.host_cores is None or self.host_cpus is None:
            return False
        is_busy = self.host_cores > _BUSY_HOST * self.host_cpus
        return is_busy and self.others_cores > _OTHERS_CORES


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


def measure(
    record: TrialRecord,
    recorded: Recorded | None,
    spread: Spread | None,
    cpus: float | None = None,
) -> Measurement:
    """What a trial tells; `recorded` is what its watcher saw, `spread` what was known before, and
    `cpus` how many the machine has: unsaid, those that the trial was allowed."""
    taken = _Taken.of(record)
    steady = find_steady(taken.lengths, int(number(record.workload, "workers") or 0))
    kept = taken.after(steady.warmup)
    rate = _rate(record, kept)
    epoch, measured = _epoch_seconds(record, taken, steady.warmup, rate)
    busy, others = _host_load(recorded, kept)
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
        host_cpus=cpus or (recorded.cpu_allowed if recorded else None),
        host_cores=busy,
        others_cores=others,
        begin_ns=int(kept.ends[0]) if len(kept.ends) else None,
        end_ns=int(kept.ends[-1]) if len(kept.ends) else None,
    )


def host_cpus(environment: Any) -> float | None:
    """How many the machine has, from the environment of its run."""
    return number({"environment": environment}, "environment", "cpu", "logical")


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
    record: TrialRecord, taken: _Taken, warmup: int, rate: Rate | None
) -> tuple[float | None, bool]:
    """The time of an epoch, and whether it was measured: the mean of those that lie wholly after
    the warm-up, which the first never does, else what the rate lets expect."""
    ends, length = taken.ends, int(number(record.told, "steps_per_epoch") or 0)
    if length > 0:
        first, last = -(-(warmup + 1) // length), len(ends) // length
        if last > first:
            whole = float(ends[last * length - 1] - ends[first * length - 1]) / 1e9
            return whole / (last - first), True
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


def _host_load(recorded: Recorded | None, kept: _Taken) -> tuple[float | None, float | None]:
    """Cores that were busy on the machine over the steady steps, and those busy for others."""
    if recorded is None or len(kept.ends) < 2:
        return None, None
    begin, end = int(kept.ends[0]), int(kept.ends[-1])

    def cores(metric: str, entity: str) -> float | None:
        amount = amount_of(recorded.of(metric, entity), begin, end)
        return None if amount is None else amount.total / amount.seconds

    host, own = cores("host_cpu", "host"), cores("cpu", "tree")
    if host is None or own is None:
        return host, None
    return host, max(0.0, host - own - (cores("watcher_cpu", "watcher") or 0.0))
