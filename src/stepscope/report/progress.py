"""How far a run is and how fast it goes, from what its processes reported of themselves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from stepscope.analysis.epochs import find_epochs
from stepscope.analysis.passes import Records, Timeline, Times, find_passes, training_loaders
from stepscope.analysis.series import SeriesTable
from stepscope.analysis.steps import step_groups, steps_between
from stepscope.inject import events as written
from stepscope.records import Gpu
from stepscope.runs.events import ProcessEvents
from stepscope.runs.timelines import allocator_series, timeline_of

PACE_S = 10.0
"""How fast it goes is a mean over so many seconds."""

_LOADER_KINDS = (written.LOADER_BEGIN, written.BATCH, written.LOADER_END)
_STEP_NAME = written.name_id("step")
_ANY_TIME = 2**62

Phase = Literal["training", "evaluation", "done"]
Loaders = Mapping[int, Sequence[int]]
"""Of each process, by its number, the loaders that it trains with."""


@dataclass(frozen=True)
class EpochNow:
    """Where the run is: `batches` of `of` in the epoch, or in the evaluation that follows it."""

    index: int
    phase: Phase
    batches: int | None = None
    of: int | None = None


@dataclass(frozen=True)
class Told:
    """What was reported since the run began. In a long run it takes a while to find out."""

    epoch: EpochNow | None = None
    steps: int | None = None
    loaders: Loaders = field(default_factory=dict)
    allocators: SeriesTable = field(default_factory=dict)
    """What PyTorch said of its GPU memory."""
    until: Mapping[int, int] = field(default_factory=dict)
    """Of each process, the time of the last event that was looked at."""
    counted: tuple[int, int] | None = None
    """The process and the loader whose batches `epoch` counts."""


@dataclass(frozen=True)
class Pace:
    """How fast it goes, all ranks together."""

    samples_per_second: float | None = None
    data_wait_share: float | None = None
    steps_per_second: float | None = None


def told_by(
    processes: Sequence[ProcessEvents], gpus: Sequence[Gpu], begin_ns: int, now_ns: int
) -> Told:
    """Look at all events of a run."""
    timelines = [timeline_of(process) for process in processes]
    loaders = {
        timeline.pid: training_loaders(timeline, find_passes(timeline))
        for timeline in timelines
        if len(timeline.loader_begins)
    }
    epoch, counted = _epoch_now(timelines, loaders, begin_ns, now_ns)
    return Told(
        epoch,
        steps_between(step_groups(timelines), 0, _ANY_TIME),
        loaders,
        allocator_series(processes, [gpu.uuid for gpu in gpus]),
        {process.pid: int(process.records["t"][-1]) for process in processes},
        counted,
    )


def counted_on(told: Told, recent: Mapping[int, Records]) -> Told:
    """With the batches and steps that came since: all events are not looked at every time."""
    fresh = {
        pid: records[records["t"] > told.until[pid]]
        for pid, records in recent.items()
        if pid in told.until
    }
    steps = max((_steps_in(records) for records in fresh.values()), default=0)
    pid, loader = told.counted or (None, None)
    epoch = told.epoch
    if epoch is not None and epoch.batches is not None and pid in fresh:
        own = (fresh[pid]["kind"] == written.BATCH) & (fresh[pid]["number"] == loader)
        batches = epoch.batches + int(own.sum())
        epoch = replace(epoch, batches=min(batches, epoch.of or batches))
    return replace(told, epoch=epoch, steps=None if told.steps is None else told.steps + steps)


def _steps_in(records: Records) -> int:
    """Of the busiest optimizer; where Keras tells the steps, torch's are left out."""
    steps = _optimizer_steps(records)
    numbers = np.unique(steps["number"])
    return max((int(steps["a"][steps["number"] == n].sum()) for n in numbers), default=0)


def _optimizer_steps(records: Records) -> Records:
    steps: Records = records[records["kind"] == written.STEP]
    from_fit = (steps["flags"] & written.FROM_FIT) > 0
    return steps[from_fit] if from_fit.any() else steps


_Where = tuple[EpochNow | None, tuple[int, int] | None]


def _epoch_now(
    timelines: Sequence[Timeline], loaders: Loaders, begin_ns: int, now_ns: int
) -> _Where:
    """Where the run is, and the process and loader that tell it."""
    source, spans = find_epochs(timelines, begin_ns, now_ns)
    if not spans:
        return None, None
    span = spans[-1]
    index = len(spans) - 1 if span.index is None else span.index
    with_loaders = [timeline for timeline in timelines if timeline.pid in loaders]
    if not with_loaders:
        return EpochNow(index, "training"), None
    teller = next((t for t in with_loaders if t.pid == span.pid), with_loaders[0])
    training = loaders[teller.pid]
    current, over = _current_loader(teller)
    if current not in training:
        if over:
            return EpochNow(index, "done"), None
        return _counting(EpochNow(index, "evaluation"), teller, [current], span.end_ns)
    begins = teller.loader_begins
    next_pass = begins["t"][np.isin(begins["number"], training) & (begins["t"] > span.end_ns)]
    if source == "loader" and span.complete and next_pass.size:  # waits for its first step
        return _counting(EpochNow(index + 1, "training"), teller, training, int(next_pass[0]))
    epoch = EpochNow(index, "done" if over else "training")
    return _counting(epoch, teller, training, span.begin_ns)


def _counting(epoch: EpochNow, timeline: Timeline, numbers: Sequence[int], since_ns: int) -> _Where:
    """With the batches of the busiest of these loaders since then, and how many there will be."""
    batches = timeline.batches["number"][timeline.batches["t"] >= since_ns]
    counts = {number: int((batches == number).sum()) for number in numbers}
    busiest = max(counts, key=lambda number: counts[number])
    begins = timeline.loader_begins
    lengths = begins["b"][begins["number"] == busiest]
    of = int(lengths[-1]) if len(lengths) and lengths[-1] > 0 else None
    return replace(epoch, batches=counts[busiest], of=of), (timeline.pid, busiest)


def _current_loader(timeline: Timeline) -> tuple[int, bool]:
    """The loader that was last heard of, and whether it said that it was exhausted."""
    kinds = (timeline.loader_begins, timeline.batches, timeline.loader_ends)
    last = max((records[-1] for records in kinds if len(records)), key=lambda r: int(r["t"]))
    return int(last["number"]), int(last["kind"]) == written.LOADER_END


def pace_of(recent: Mapping[int, Records], loaders: Loaders, now_ns: int) -> Pace:
    """How fast it went in the last seconds. Training and evaluation are not mixed."""
    found = [_loops(records, loaders.get(pid)) for pid, records in recent.items()]
    loops = [loop for loop in found if loop is not None]
    lately = [loop.since(now_ns - int(PACE_S * 1e9)) for loop in loops]
    if not any(len(loop.ends) for loop in lately):  # slow steps, or it has ended
        lately = [loop.last() for loop in loops]
    going = [loop for loop in lately if len(loop.ends)]
    steps = [_steps_per_second(records, now_ns) for records in recent.values()]
    return Pace(
        _sum([loop.samples_per_second(now_ns) for loop in going]),
        float(np.mean([loop.wait_share() for loop in going])) if going else None,
        max((rate for rate in steps if rate is not None), default=None),
    )


def _sum(values: Sequence[float | None]) -> float | None:
    """None where one is not known: a part would look like a slower run."""
    known = [value for value in values if value is not None]
    return sum(known) if known and len(known) == len(values) else None


@dataclass(frozen=True)
class _Loop:
    """The loop of one process, from batch to batch."""

    ends: Times
    lengths: Times
    samples: Times
    waits: Records
    """What it waited for, also of loaders that it goes through side by side with the busiest."""
    open_since: int | None
    """Its last batch, where another may come."""

    def since(self, begin_ns: int) -> _Loop:
        keep = self.ends > begin_ns
        waits = self.waits[self.waits["t"] > begin_ns]
        return _Loop(
            self.ends[keep], self.lengths[keep], self.samples[keep], waits, self.open_since
        )

    def last(self) -> _Loop:
        """Its last seconds, whenever they were; of one that goes on, its last stretch."""
        if not len(self.ends):
            return self
        back_ns = PACE_S * 1e9 if self.open_since is None else 1
        return self.since(int(self.ends[-1] - back_ns))

    def samples_per_second(self, now_ns: int) -> float | None:
        """None where a batch did not tell. A loop that hangs gets slower and slower."""
        if (self.samples < 0).any():
            return None
        spent = int(self.lengths.sum())
        if self.open_since is not None and now_ns - self.open_since > self.lengths.max():
            spent += now_ns - self.open_since
        return float(self.samples.sum()) / spent * 1e9 if spent > 0 else None

    def wait_share(self) -> float:
        return min(1.0, float(self.waits["a"].sum()) / max(1, int(self.lengths.sum())))


def _loops(records: Records, training: Sequence[int] | None) -> _Loop | None:
    """How a process trains, with the loaders that train; where none is in sight, the current one.

    An evaluation in between does not count: its pace is not that of the training.
    """
    records = records[np.isin(records["kind"], _LOADER_KINDS)]
    if not len(records):
        return None
    current = records[-1]
    seen = np.unique(records["number"][records["kind"] == written.BATCH]).tolist()
    numbers = [n for n in seen if training is None or n in training] or [int(current["number"])]
    found = {number: _between_batches(records, number) for number in numbers}
    ends, lengths, samples = max(found.values(), key=lambda each: int(each[2].sum()))
    going = current["number"] in numbers and current["kind"] != written.LOADER_END
    waits = records[np.isin(records["number"], numbers)]
    return _Loop(ends, lengths, samples, waits, int(current["t"]) if going else None)


def _between_batches(records: Records, number: int) -> tuple[Times, Times, Times]:
    """When each stretch of a loader's passes ended, how long it was, the samples it worked on.

    Those are the samples of the batch that it began with. Time between two passes counts only
    where nothing else was looped over: it is that of a loop which takes one batch of every pass.
    """
    places = np.flatnonzero(records["number"] == number)
    own = records[places]
    begins, batches = own["kind"] == written.LOADER_BEGIN, own["kind"] == written.BATCH
    starts = np.where(begins, own["t"] - own["a"], own["t"])
    within = ~begins[1:] & (begins | batches)[:-1]
    between = begins[1:] & batches[:-1] & (np.diff(places) == 1)
    ends = np.where(between, starts[1:], own["t"][1:])
    keep = within | between
    samples = np.where(batches[:-1], own["b"][:-1], 0)
    return ends[keep], (ends - starts[:-1])[keep], samples[keep]


def _steps_per_second(records: Records, now_ns: int) -> float | None:
    """Of the busiest optimizer; the last two steps tell where there were few lately."""
    steps = _optimizer_steps(records)
    if not len(steps):
        marks = records["kind"] == written.MARK
        steps = records[marks & (records["a"] == _STEP_NAME)]
    rates = [_rate(steps[steps["number"] == n], now_ns) for n in np.unique(steps["number"])]
    return max((rate for rate in rates if rate is not None), default=None)


def _rate(steps: Records, now_ns: int) -> float | None:
    if len(steps) < 2:
        return None
    recent = int(np.searchsorted(steps["t"], now_ns - PACE_S * 1e9))
    steps = steps[min(recent, len(steps) - 2) :]
    counts = np.where(steps["kind"] == written.STEP, steps["a"], 1)
    gaps = np.diff(steps["t"])
    hanging = now_ns - int(steps["t"][-1])
    spent = int(gaps.sum()) + (hanging if hanging > gaps.max() else 0)
    return float(counts[1:].sum()) / spent * 1e9 if spent > 0 else None
