"""How far a run is and how fast it goes now, for a view that looks at it again and again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from stepscope.analysis.run.epochs import find_epochs
from stepscope.analysis.run.passes import (
    Records,
    Timeline,
    Times,
    find_passes,
    training_loaders,
)
from stepscope.analysis.run.steps import step_groups, steps_between
from stepscope.inject import events as written

LATELY_S = 10.0
"""How fast it goes is a mean over so many seconds."""
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
class ReportedProgress:
    """What was reported since the run began. In a long run it takes a while to find out."""

    epoch: EpochNow | None = None
    steps: int | None = None
    loaders: Loaders = field(default_factory=dict)
    until: Mapping[int, int] = field(default_factory=dict)
    """Of each process, the time of the last event that was looked at."""
    counted: tuple[int, int] | None = None
    """The process and the loader whose batches `epoch` counts."""


@dataclass(frozen=True)
class LiveThroughput:
    """How fast it goes, all ranks together."""

    samples_per_second: float | None = None
    data_wait_share: float | None = None
    steps_per_second: float | None = None


def progress_of(timelines: Sequence[Timeline], begin_ns: int, now_ns: int) -> ReportedProgress:
    """From all events of a run."""
    loaders = {
        timeline.pid: training_loaders(timeline, find_passes(timeline))
        for timeline in timelines
        if len(timeline.loader_begins)
    }
    epoch, counted = _epoch_now(timelines, loaders, begin_ns, now_ns)
    return ReportedProgress(
        epoch,
        steps_between(step_groups(timelines), 0, _ANY_TIME),
        loaders,
        {timeline.pid: timeline.last_ns for timeline in timelines},
        counted,
    )


def counted_on(told: ReportedProgress, recent: Sequence[Timeline]) -> ReportedProgress:
    """With the batches and steps that came since: all events are not looked at every time."""
    fresh = [each.after(told.until[each.pid]) for each in recent if each.pid in told.until]
    steps, epoch = told.steps, told.epoch
    if steps is not None:
        steps += steps_between(step_groups(fresh), 0, _ANY_TIME) or 0
    if epoch is not None and epoch.batches is not None and told.counted:
        pid, loader = told.counted
        new = (int((each.batches["number"] == loader).sum()) for each in fresh if each.pid == pid)
        batches = epoch.batches + sum(new)
        epoch = replace(epoch, batches=min(batches, epoch.of or batches))
    return replace(told, epoch=epoch, steps=steps)


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
    training, last = loaders[teller.pid], _loader_events(teller)[-1]
    exhausted = last["kind"] == written.LOADER_END
    if last["number"] not in training:
        if exhausted:
            return EpochNow(index, "done"), None
        evaluation = EpochNow(index, "evaluation")
        return _counting(evaluation, teller, [int(last["number"])], span.end_ns)
    begins = teller.loader_begins
    next_pass = begins["t"][np.isin(begins["number"], training) & (begins["t"] > span.end_ns)]
    if source == "loader" and span.complete and next_pass.size:  # waits for its first step
        return _counting(EpochNow(index + 1, "training"), teller, training, int(next_pass[0]))
    epoch = EpochNow(index, "done" if exhausted else "training")
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


def throughput_of(recent: Sequence[Timeline], loaders: Loaders, now_ns: int) -> LiveThroughput:
    """How fast it went in the last seconds. Training and evaluation are not mixed."""
    found = [_loop_of(timeline, loaders.get(timeline.pid)) for timeline in recent]
    loops = [loop for loop in found if loop is not None]
    lately = [loop.since(now_ns - int(LATELY_S * 1e9)) for loop in loops]
    if not any(len(loop.ends) for loop in lately):  # slow steps, or it has ended
        lately = [loop.last() for loop in loops]
    going = [loop for loop in lately if len(loop.ends)]
    rates = [loop.samples_per_second(now_ns) for loop in going]
    known = [rate for rate in rates if rate is not None]
    streams = [stream for group in step_groups(recent) for stream in group]
    steps = [stream.rate(now_ns, LATELY_S) for stream in streams]
    return LiveThroughput(
        # Unless it is known of all: a part would look like a slower run.
        sum(known) if known and len(known) == len(rates) else None,
        float(np.mean([loop.wait_share() for loop in going])) if going else None,
        max((rate for rate in steps if rate is not None), default=None),
    )


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
        back_ns = LATELY_S * 1e9 if self.open_since is None else 1
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


def _loop_of(timeline: Timeline, training: Sequence[int] | None) -> _Loop | None:
    """How a process trains, with the loaders that train; where none is in sight, the current one.

    An evaluation in between does not count: its throughput is not that of the training.
    """
    records = _loader_events(timeline)
    if not len(records):
        return None
    current = records[-1]
    seen = np.unique(timeline.batches["number"]).tolist()
    numbers = [n for n in seen if training is None or n in training] or [int(current["number"])]
    found = {number: _between_batches(records, number) for number in numbers}
    ends, lengths, samples = max(found.values(), key=lambda each: int(each[2].sum()))
    going = current["number"] in numbers and current["kind"] != written.LOADER_END
    waits = records[np.isin(records["number"], numbers)]
    return _Loop(ends, lengths, samples, waits, int(current["t"]) if going else None)


def _loader_events(timeline: Timeline) -> Records:
    records = np.concatenate([timeline.loader_begins, timeline.batches, timeline.loader_ends])
    return records.take(np.argsort(records["t"], kind="stable"))


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
