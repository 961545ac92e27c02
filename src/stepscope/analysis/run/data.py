"""A run in memory: read once by `runs.load`, the input of every analysis and report."""

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
from stepscope.metrics import Scope
from stepscope.records import CodeLocation, ExitStatus, Gpu
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
    """The line of code that created it."""


@dataclass(frozen=True)
class StackLocation(CodeLocation):
    """Where the training thread was: the line in the user's code and the innermost frame."""

    inner: str = ""
    """The innermost function: "torch/nn/modules/linear.py:forward"."""
    inner_code: str = ""
    part: str = ""
    """The part of PyTorch on the stack: "loader", "save", "ranks", "backward", …"""


@dataclass(frozen=True)
class StackSamples:
    """Seconds that a thread spent at each location, reported every few seconds.

    `place` holds indices into `places`.
    """

    t: Ints
    place: Ints
    seconds: Floats
    places: Sequence[StackLocation] = ()

    def between(self, begin_ns: int, end_ns: int) -> dict[StackLocation, float]:
        """Return seconds by location in a time span."""
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
    """Framework settings after the first step; None: not reported."""

    threads: int | None = None
    optimizer: str | None = None
    device: str | None = None
    parameters: int | None = None
    matmul_precision: str | None = None
    fused: bool | None = None


@dataclass(frozen=True)
class Trainer:
    """What one training process reported."""

    timeline: Timeline
    loaders: Mapping[int, Loader] = field(default_factory=dict)
    device_steps: Records = field(default_factory=lambda: NO_RECORDS)
    """Steps timed on a GPU: `a` ns from batch to end, `b` ns to enqueue."""
    stack_samples: StackSamples = NO_STACK_SAMPLES
    settings: TrainerSettings = TrainerSettings()

    @property
    def rank(self) -> int | None:
        return self.timeline.rank

    @property
    def has_events(self) -> bool:
        """Whether the process fetched batches, took steps or set marks."""
        timeline = self.timeline
        return bool(len(timeline.batches) or len(timeline.steps) or timeline.marks)


@dataclass(frozen=True)
class BatchTiming:
    """End time and duration in seconds of the preparation of each batch."""

    t: Ints
    wall: Floats
    cpu: Floats
    without_cpu: Floats
    """Time spent runnable without a free CPU."""

    def __len__(self) -> int:
        return len(self.t)

    def between(self, begin_ns: int, end_ns: int) -> BatchTiming:
        inside = (self.t > begin_ns) & (self.t <= end_ns)
        times = (self.wall, self.cpu, self.without_cpu)
        return BatchTiming(self.t[inside], *(each[inside] for each in times))

    @property
    def blocked(self) -> Floats:
        """Time spent blocked: on storage, the network or a lock."""
        blocked: Floats = np.clip(self.wall - self.cpu - self.without_cpu, 0.0, None)
        return blocked


NO_BATCH_TIMING = BatchTiming(np.empty(0, np.int64), *[np.empty(0)] * 3)


@dataclass(frozen=True)
class SampleGap:
    """Samples of a scope that are missing because files are damaged or missing."""

    scope: Scope
    begin_ns: int
    end_ns: int


@dataclass(frozen=True)
class RunData:
    """A run, or its last seconds, in memory."""

    series: SeriesTable
    timelines: Sequence[Timeline]
    begin_ns: int
    end_ns: int
    facts: RunFacts = field(default_factory=RunFacts)
    gpus: tuple[Gpu, ...] = ()
    """All known GPUs, used or not."""
    exit_status: ExitStatus | None = None
    trainers: tuple[Trainer, ...] = ()
    preparation: BatchTiming = NO_BATCH_TIMING
    """Reading and transforming the samples of each batch, in all workers."""
    collation: BatchTiming = NO_BATCH_TIMING
    events_dropped: int = 0
    """Number of events that the processes could not write."""
    events_outside: int = 0
    """Number of events that were dropped because they are not from the time of the run."""
    gaps: tuple[SampleGap, ...] = ()
    """Times without samples because files are damaged or missing."""

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
        """The training loaders of each timeline. Cached: every epoch needs them."""
        return [training_loaders(timeline, find_passes(timeline)) for timeline in self.timelines]

    @cached_property
    def step_groups(self) -> list[StepGroup]:
        """Steps by process and optimizer, grouped by those that step together."""
        return step_groups(self.timelines)

    @cached_property
    def all_gpus(self) -> tuple[RecordedGpu, ...]:
        return recorded_gpus(self.gpus, self.series)

    @cached_property
    def used_gpus(self) -> tuple[RecordedGpu, ...]:
        """The GPUs that the run used."""
        return gpus_of_run(self.all_gpus)

    @cached_property
    def gpu_use(self) -> GpuUse:
        return use_of(self.all_gpus, self.used_gpus, self.begin_ns, self.end_ns)
