"""Progress and current throughput of a run, for the live view."""

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
from stepscope.inject import events

RECENT_S = 10.0
"""Throughput is the mean over this many seconds."""
_ANY_TIME = 2**62

Phase = Literal["training", "evaluation", "done"]
Loaders = Mapping[int, Sequence[int]]
"""The training loaders of each process, by pid."""


@dataclass(frozen=True)
class EpochNow:
    """The current epoch, with its batches so far or those of the evaluation that follows it."""

    index: int  # number of the epoch
    phase: Phase  # `training`, `evaluation` or `done`
    batches: int | None = None  # batches so far
    total_batches: int | None = None  # batches of the whole epoch; null if unknown


@dataclass(frozen=True)
class ReportedProgress:
    """Progress since the start of the run. For a long run it is slow to compute."""

    epoch: EpochNow | None = None
    steps: int | None = None
    loaders: Loaders = field(default_factory=dict)
    until: Mapping[int, int] = field(default_factory=dict)
    """The time of the last event that was read, by pid."""
    counted: tuple[int, int] | None = None
    """The pid and the loader whose batches `epoch` counts."""


@dataclass(frozen=True)
class LiveThroughput:
    """Current throughput of all ranks together."""

    samples_per_second: float | None = None  # current throughput
    data_wait_share: float | None = None  # share of the time that training waits for data, 0 to 1
    steps_per_second: float | None = None  # current steps per second


def progress_of(timelines: Sequence[Timeline], begin_ns: int, now_ns: int) -> ReportedProgress:
    """Return the progress from all events of a run."""
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


def updated(progress: ReportedProgress, recent: Sequence[Timeline]) -> ReportedProgress:
    """Add the batches and steps of recent events, without reading all events again."""
    until = progress.until
    new = [each.after(until[each.pid]) for each in recent if each.pid in until]
    steps, epoch = progress.steps, progress.epoch
    if steps is not None:
        steps += steps_between(step_groups(new), 0, _ANY_TIME) or 0
    if epoch is not None and epoch.batches is not None and progress.counted:
        pid, loader = progress.counted
        counts = (int((each.batches["number"] == loader).sum()) for each in new if each.pid == pid)
        batches = epoch.batches + sum(counts)
        epoch = replace(epoch, batches=min(batches, epoch.total_batches or batches))
    return replace(progress, epoch=epoch, steps=steps)


_CountedEpoch = tuple[EpochNow | None, tuple[int, int] | None]


def _epoch_now(
    timelines: Sequence[Timeline], loaders: Loaders, begin_ns: int, now_ns: int
) -> _CountedEpoch:
    """Return the current epoch, and the pid and loader whose batches it counts."""
    source, spans = find_epochs(timelines, begin_ns, now_ns)
    if not spans:
        return None, None
    span = spans[-1]
    index = span.index
    assert index is not None  # every epoch has a number
    with_loaders = [timeline for timeline in timelines if len(timeline.loader_begins)]
    if not with_loaders:
        return EpochNow(index, "training"), None
    timeline = next((t for t in with_loaders if t.pid == span.pid), with_loaders[0])
    training, last = loaders[timeline.pid], _loader_events(timeline)[-1]
    exhausted = last["kind"] == events.LOADER_END
    if last["number"] not in training:
        if exhausted:
            return EpochNow(index, "done"), None
        evaluation = EpochNow(index, "evaluation")
        return _counting(evaluation, timeline, [int(last["number"])], span.end_ns)
    begins = timeline.loader_begins
    next_pass = begins["t"][np.isin(begins["number"], training) & (begins["t"] > span.end_ns)]
    if source == "loader" and span.complete and next_pass.size:  # no step yet
        return _counting(EpochNow(index + 1, "training"), timeline, training, int(next_pass[0]))
    epoch = EpochNow(index, "done" if exhausted else "training")
    return _counting(epoch, timeline, training, span.begin_ns)


def _counting(
    epoch: EpochNow, timeline: Timeline, numbers: Sequence[int], since_ns: int
) -> _CountedEpoch:
    """Add the batches of the busiest of these loaders since a time, and its length."""
    batches = timeline.batches["number"][timeline.batches["t"] >= since_ns]
    counts = {number: int((batches == number).sum()) for number in numbers}
    busiest = max(counts, key=lambda number: counts[number])
    begins = timeline.loader_begins
    lengths = begins["b"][begins["number"] == busiest]
    total = int(lengths[-1]) if len(lengths) and lengths[-1] > 0 else None
    counted = replace(epoch, batches=counts[busiest], total_batches=total)
    return counted, (timeline.pid, busiest)


def throughput_of(recent: Sequence[Timeline], loaders: Loaders, now_ns: int) -> LiveThroughput:
    """Return the throughput of training over the last seconds; evaluations do not count."""
    per_process = [_loop_of(timeline, loaders.get(timeline.pid)) for timeline in recent]
    loops = [loop for loop in per_process if loop is not None]
    latest = [loop.since(now_ns - int(RECENT_S * 1e9)) for loop in loops]
    if not any(len(loop.ends) for loop in latest):  # slow steps, or the run has ended
        latest = [loop.last() for loop in loops]
    active = [loop for loop in latest if len(loop.ends)]
    rates = [loop.samples_per_second(now_ns) for loop in active]
    known = [rate for rate in rates if rate is not None]
    streams = [stream for group in step_groups(recent) for stream in group]
    steps = [stream.rate(now_ns, RECENT_S) for stream in streams]
    return LiveThroughput(
        # A sum over only some of the processes would look like a slower run.
        sum(known) if known and len(known) == len(rates) else None,
        float(np.mean([loop.wait_share() for loop in active])) if active else None,
        max((rate for rate in steps if rate is not None), default=None),
    )


@dataclass(frozen=True)
class _Loop:
    """The training loop of one process as intervals from batch to batch."""

    ends: Times
    lengths: Times
    samples: Times
    waits: Records
    """Its data waits, including those for other loaders of the same loop."""
    open_since: int | None
    """Time of its last batch; None after the last pass."""

    def since(self, begin_ns: int) -> _Loop:
        keep = self.ends > begin_ns
        waits = self.waits[self.waits["t"] > begin_ns]
        return _Loop(
            self.ends[keep], self.lengths[keep], self.samples[keep], waits, self.open_since
        )

    def last(self) -> _Loop:
        """Return its last seconds, whenever they were; of an unfinished pass, the last interval."""
        if not len(self.ends):
            return self
        back_ns = RECENT_S * 1e9 if self.open_since is None else 1
        return self.since(int(self.ends[-1] - back_ns))

    def samples_per_second(self, now_ns: int) -> float | None:
        """Return None if a batch size is unknown. While the loop hangs, the rate decreases."""
        if (self.samples < 0).any():
            return None
        elapsed = int(self.lengths.sum())
        if self.open_since is not None and now_ns - self.open_since > self.lengths.max():
            elapsed += now_ns - self.open_since
        return float(self.samples.sum()) / elapsed * 1e9 if elapsed > 0 else None

    def wait_share(self) -> float:
        return min(1.0, float(self.waits["a"].sum()) / max(1, int(self.lengths.sum())))


def _loop_of(timeline: Timeline, training: Sequence[int] | None) -> _Loop | None:
    """Return the loop over the training loaders; if none is visible, over the current loader.

    Evaluations do not count, since their throughput differs from that of training.
    """
    records = _loader_events(timeline)
    if not len(records):
        return None
    current = records[-1]
    seen = np.unique(timeline.batches["number"]).tolist()
    numbers = [n for n in seen if training is None or n in training] or [int(current["number"])]
    intervals = {number: _between_batches(records, number) for number in numbers}
    ends, lengths, samples = max(intervals.values(), key=lambda each: int(each[2].sum()))
    is_open = current["number"] in numbers and current["kind"] != events.LOADER_END
    waits = records[np.isin(records["number"], numbers)]
    return _Loop(ends, lengths, samples, waits, int(current["t"]) if is_open else None)


def _loader_events(timeline: Timeline) -> Records:
    records = np.concatenate([timeline.loader_begins, timeline.batches, timeline.loader_ends])
    return records.take(np.argsort(records["t"], kind="stable"))


def _between_batches(records: Records, number: int) -> tuple[Times, Times, Times]:
    """Return end, length and samples of each interval between events of a loader.

    The samples are those of the batch at its start. Time between two passes counts only if no
    other loader was used: then the loop takes one batch per pass.
    """
    places = np.flatnonzero(records["number"] == number)
    own = records[places]
    begins, batches = own["kind"] == events.LOADER_BEGIN, own["kind"] == events.BATCH
    starts = np.where(begins, own["t"] - own["a"], own["t"])
    within = ~begins[1:] & (begins | batches)[:-1]
    between = begins[1:] & batches[:-1] & (np.diff(places) == 1)
    ends = np.where(between, starts[1:], own["t"][1:])
    keep = within | between
    samples = np.where(batches[:-1], own["b"][:-1], 0)
    return ends[keep], (ends - starts[:-1])[keep], samples[keep]
