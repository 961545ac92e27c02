"""A run in memory: what `runs.load` reads once, and what every analysis and report takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from stepscope.analysis.run.gpus import (
    GpuUse,
    RecordedGpu,
    gpus_of_run,
    recorded_gpus,
    use_of,
)
from stepscope.analysis.run.passes import RECORD, Records, Timeline, find_passes, training_loaders
from stepscope.analysis.run.series import EMPTY, Floats, Ints, Series, SeriesTable
from stepscope.analysis.run.steps import StepGroup, step_groups
from stepscope.records import CodeLocation, Ending, Gpu
from stepscope.records.facts import RunFacts

NO_RECORDS: Records = np.empty(0, RECORD)


@dataclass(frozen=True)
class Loader:
    """The settings of a data loader."""

    number: int
    workers: int
    prefetch: int
    batch_size: int | None
    pins: bool
    persists: bool
    location: CodeLocation | None = None
    """The line of code that made it."""


@dataclass(frozen=True)
class StackLocation(CodeLocation):
    """Where the training thread was found: the user's line, and where that led to."""

    inner: str = ""
    """The innermost function, "torch/nn/modules/linear.py:forward", and its code."""
    inner_code: str = ""
    part: str = ""
    """Which part of PyTorch it went through: "loader", "save", "ranks", "backward", …"""


@dataclass(frozen=True)
class StackSamples:
    """How long a thread was where, told every few seconds: `place` points into `places`."""

    t: Ints
    place: Ints
    seconds: Floats
    places: Sequence[StackLocation] = ()

    def between(self, begin_ns: int, end_ns: int) -> dict[StackLocation, float]:
        """Seconds by place, of what was told in a stretch of time."""
        inside = (self.t > begin_ns) & (self.t <= end_ns)
        totals = np.bincount(
            self.place[inside], weights=self.seconds[inside], minlength=len(self.places)
        )
        return {
            place: float(total) for place, total in zip(self.places, totals, strict=False) if total
        }


NO_STACK_SAMPLES = StackSamples(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0))


@dataclass(frozen=True)
class TrainerSettings:
    """What the framework was set to after the first step; None where it is not told."""

    threads: int | None = None
    optimizer: str | None = None
    device: str | None = None
    parameters: int | None = None
    matmul_precision: str | None = None
    fused: bool | None = None


@dataclass(frozen=True)
class Trainer:
    """One process that trains: what it reported of itself."""

    timeline: Timeline
    loaders: Mapping[int, Loader] = field(default_factory=dict)
    device_steps: Records = field(default_factory=lambda: NO_RECORDS)
    """Steps that were timed on a GPU: `a` ns from batch to end, `b` ns to queue them."""
    stack_samples: StackSamples = NO_STACK_SAMPLES
    settings: TrainerSettings = TrainerSettings()

    @property
    def rank(self) -> int | None:
        return self.timeline.rank

    @property
    def did_anything(self) -> bool:
        """Whether it fetched batches, took steps or set marks."""
        timeline = self.timeline
        return bool(len(timeline.batches) or len(timeline.steps) or timeline.marks)


@dataclass(frozen=True)
class BatchTiming:
    """What preparing batches took, batch by batch: when it was done, and seconds."""

    t: Ints
    wall: Floats
    cpu: Floats
    without_cpu: Floats
    """Ready to run, but no CPU was free."""

    def __len__(self) -> int:
        return len(self.t)

    def between(self, begin_ns: int, end_ns: int) -> BatchTiming:
        inside = (self.t > begin_ns) & (self.t <= end_ns)
        times = (self.wall, self.cpu, self.without_cpu)
        return BatchTiming(self.t[inside], *(each[inside] for each in times))

    @property
    def blocked(self) -> Floats:
        """Neither computing nor waiting for a CPU: for storage, the network, a lock."""
        left: Floats = np.clip(self.wall - self.cpu - self.without_cpu, 0.0, None)
        return left


NO_BATCH_TIMING = BatchTiming(np.empty(0, np.int64), *[np.empty(0)] * 3)


@dataclass(frozen=True)
class RunData:
    """A run, or its last seconds, in memory."""

    series: SeriesTable
    timelines: Sequence[Timeline]
    begin_ns: int
    end_ns: int
    facts: RunFacts = field(default_factory=RunFacts)
    gpus: tuple[Gpu, ...] = ()
    """All that are known of, used or not."""
    ending: Ending | None = None
    trainers: tuple[Trainer, ...] = ()
    preparation: BatchTiming = NO_BATCH_TIMING
    """What reading and transforming the samples of each batch took, in all workers."""
    collation: BatchTiming = NO_BATCH_TIMING
    events_dropped: int = 0
    """Events that the processes could not write."""

    def of(self, metric: str, entity: str = "tree") -> Series:
        return self.series.get((metric, entity), EMPTY)

    @property
    def is_trial(self) -> bool:
        return self.facts.workload is not None

    @property
    def cpu_allowed(self) -> float | None:
        return self.facts.environment.cpu.allowed

    @cached_property
    def training_loaders(self) -> list[list[int]]:
        """Of each timeline the loaders that train: found once, asked for in every epoch."""
        return [training_loaders(timeline, find_passes(timeline)) for timeline in self.timelines]

    @cached_property
    def step_groups(self) -> list[StepGroup]:
        """Steps of processes and optimizers, those that stepped together put together."""
        return step_groups(self.timelines)

    @cached_property
    def all_gpus(self) -> tuple[RecordedGpu, ...]:
        return recorded_gpus(self.gpus, self.series)

    @cached_property
    def used_gpus(self) -> tuple[RecordedGpu, ...]:
        """The GPUs of the run."""
        return gpus_of_run(self.all_gpus)

    @cached_property
    def gpu_use(self) -> GpuUse:
        return use_of(self.all_gpus, self.used_gpus, self.begin_ns, self.end_ns)
