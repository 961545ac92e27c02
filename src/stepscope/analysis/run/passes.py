"""Passes over data loaders: what an epoch or an evaluation looks like from outside of the loop.

Loops differ. Some fetch one batch ahead, so that the last step comes after the loader said that it
was exhausted; some keep one endless pass and count batches themselves; some take a single batch of
every pass. What is found here is where a reader of the loop would put the epochs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from stepscope.analysis.run.series import distinct

RECORD = np.dtype(
    [("t", "<i8"), ("kind", "<u2"), ("flags", "<u2"), ("number", "<u4"), ("a", "<i8"), ("b", "<i8")]
)
"""An event as `inject/events.py` writes it."""
Records = npt.NDArray[np.void]
"""Arrays of them, sorted by time."""

Times = npt.NDArray[np.int64]
Source = Literal["marks", "pattern", "fit", "loader"]

_NEVER = np.iinfo(np.int64).max


@dataclass(frozen=True)
class MarkEvent:
    """A mark (`edge` None) or the edge of a phase."""

    t: int
    name: str
    value: float | str | None
    edge: Literal["begin", "end"] | None
    source: Source


@dataclass(frozen=True)
class Timeline:
    """What one process reported, in order. `a` of a batch is the wait in ns, `b` its samples."""

    pid: int
    rank: int | None
    loader_begins: Records
    batches: Records
    loader_ends: Records
    steps: Records
    marks: Sequence[MarkEvent] = field(default=())

    @property
    def last_ns(self) -> int:
        """When anything was last reported; 0 where nothing was."""
        columns = (self.loader_begins, self.batches, self.loader_ends, self.steps)
        times = [int(records["t"][-1]) for records in columns if len(records)]
        return max([0, *times, *(mark.t for mark in self.marks[-1:])])

    def after(self, t_ns: int) -> Timeline:
        """What was reported later than that."""

        def later(records: Records) -> Records:
            return records[records["t"] > t_ns]

        return replace(
            self,
            loader_begins=later(self.loader_begins),
            batches=later(self.batches),
            loader_ends=later(self.loader_ends),
            steps=later(self.steps),
            marks=[mark for mark in self.marks if mark.t > t_ns],
        )


@dataclass(frozen=True)
class Pass:
    """One pass over a loader."""

    number: int
    begin_ns: int
    end_ns: int
    batches: int
    exhausted: bool
    complete: bool
    trains: bool = False


def find_passes(timeline: Timeline) -> list[Pass]:
    """All passes of a process, in the order in which they began."""
    found: list[Pass] = []
    for number in distinct(timeline.loader_begins["number"]):
        found += _of_loader(timeline, int(number))
    found.sort(key=lambda each: each.begin_ns)
    return _with_steps(found, timeline)


def training_loaders(timeline: Timeline, passes: Sequence[Pass]) -> list[int]:
    """The loaders in whose passes the optimizer stepped; all of them where nothing ever did."""
    if not len(timeline.steps):
        return sorted({each.number for each in passes})
    return sorted({each.number for each in passes if each.trains})


def _of_loader(timeline: Timeline, number: int) -> list[Pass]:
    begins = timeline.loader_begins[timeline.loader_begins["number"] == number]
    ends = np.ascontiguousarray(timeline.loader_ends["t"][timeline.loader_ends["number"] == number])
    own = timeline.batches.take(np.flatnonzero(timeline.batches["number"] == number))
    times = np.ascontiguousarray(own["t"])
    starts = np.ascontiguousarray(begins["t"])
    limits = np.append(starts[1:], _NEVER)
    length = int(begins["b"].max())
    passes: list[Pass] = []
    for start, limit, spent in zip(starts, limits, begins["a"], strict=True):
        first, last = np.searchsorted(times, (start, limit))
        end = int(np.searchsorted(ends, start, side="right"))
        exhausted = end < len(ends) and ends[end] <= limit
        if exhausted:
            finish = int(ends[end])
        else:
            finish = int(times[last - 1]) if last > first else int(start)
        whole = Pass(
            number,
            int(start - spent),
            finish,
            int(last - first),
            exhausted,
            complete=exhausted or limit != _NEVER,
        )
        passes += _cut(whole, own[first:last], length)
    return _joined(passes, length)


def _cut(whole: Pass, batches: Records, length: int) -> list[Pass]:
    """An endless pass over a loader of known length is cut where the loop would begin anew."""
    if length <= 0 or len(batches) <= length:
        return [whole]
    heads = batches[::length]
    edges = [int(head["t"] - head["a"]) for head in heads]
    edges[0] = whole.begin_ns
    pieces = []
    for index, (begin, end) in enumerate(zip(edges, [*edges[1:], whole.end_ns], strict=True)):
        count = min(length, len(batches) - index * length)
        pieces.append(
            replace(whole, begin_ns=begin, end_ns=end, batches=count, complete=count == length)
        )
    return pieces


def _joined(passes: list[Pass], length: int) -> list[Pass]:
    """`next(iter(loader))` makes a pass of every batch: such passes are put together again."""
    joined: list[Pass] = []
    for each in passes:
        last = joined[-1] if joined else None
        single = each.batches == 1 and not each.exhausted and length != 1
        if (
            single
            and last is not None
            and not last.exhausted
            and (last.batches == 1 or not last.complete)
            and (length <= 0 or last.batches < length)
        ):
            count = last.batches + 1
            joined[-1] = replace(last, end_ns=each.end_ns, batches=count, complete=count == length)
        else:
            joined.append(replace(each, complete=False) if single else each)
    return joined


def _with_steps(passes: list[Pass], timeline: Timeline) -> list[Pass]:
    """Which passes train; one whose last batches were fetched ahead ends with their last step."""
    steps = np.ascontiguousarray(timeline.steps["t"])
    if not len(steps):
        return passes
    times = np.concatenate([timeline.loader_begins["t"], timeline.batches["t"]])
    events = np.sort(times, kind="stable")  # of two sorted pieces: fifty times as fast
    latest_end, found = 0, []
    for each in passes:
        first, last = np.searchsorted(steps, (each.begin_ns, each.end_ns), side="right")
        inside_another = latest_end > each.end_ns
        if not inside_another and last - first < each.batches:
            next_event = int(np.searchsorted(events, each.end_ns, side="right"))
            until = int(events[next_event]) if next_event < len(events) else _NEVER
            owed = int(np.searchsorted(steps, until)) - last
            last += min(owed, each.batches - (last - first))
        end = max(each.end_ns, int(steps[last - 1])) if last > first else each.end_ns
        latest_end = max(latest_end, end)
        found.append(replace(each, end_ns=end, trains=last > first))
    return found
