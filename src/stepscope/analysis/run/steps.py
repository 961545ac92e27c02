"""Counts the steps of a run with several optimizers, ranks or consecutive trainings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from stepscope.analysis.run.passes import Timeline, Times
from stepscope.analysis.run.series import distinct


@dataclass(frozen=True)
class StepStream:
    """The steps of one optimizer in one process."""

    pid: int
    times: Times
    counts: Times

    @property
    def first(self) -> int:
        return int(self.times[0])

    @property
    def last(self) -> int:
        return int(self.times[-1])

    def between(self, begin_ns: int, end_ns: int) -> int:
        if self.last < begin_ns or self.first > end_ns:
            return 0
        first = np.searchsorted(self.times, begin_ns)
        last = np.searchsorted(self.times, end_ns, side="right")
        return int(self.counts[first:last].sum())

    def rate(self, now_ns: int, seconds: float) -> float | None:
        """Return steps per second over the last `seconds`, or over the last two steps.

        While the process hangs, the rate decreases.
        """
        if len(self.times) < 2:
            return None
        first = min(int(np.searchsorted(self.times, now_ns - seconds * 1e9)), len(self.times) - 2)
        gaps = np.diff(self.times[first:])
        idle = now_ns - self.last
        elapsed = int(gaps.sum()) + (idle if idle > gaps.max() else 0)
        return float(self.counts[first + 1 :].sum()) / elapsed * 1e9 if elapsed > 0 else None


StepGroup = Sequence[StepStream]
"""Concurrent streams: ranks, or the two optimizers of a GAN. They step together, so the stream with
the most steps counts for all."""


def step_groups(timelines: Sequence[Timeline]) -> list[StepGroup]:
    """Group the streams that overlap in time."""
    streams = sorted(
        (stream for timeline in timelines for stream in _streams(timeline)), key=lambda s: s.first
    )
    groups: list[list[StepStream]] = []
    end = -1
    for stream in streams:
        if stream.first > end:
            groups.append([])
        groups[-1].append(stream)
        end = max(end, stream.last)
    return list(groups)


def steps_between(
    groups: Sequence[StepGroup], begin_ns: int, end_ns: int, pid: int | None = None
) -> int | None:
    """Return the steps in a time span; None if the run reported no steps.

    Streams of `pid` are preferred: the span may be an epoch of that rank, and other ranks may be
    a step ahead.
    """
    if not groups:
        return None
    total = 0
    for group in groups:
        own = [stream for stream in group if stream.pid == pid] or group
        total += max(stream.between(begin_ns, end_ns) for stream in own)
    return total


def _streams(timeline: Timeline) -> list[StepStream]:
    steps = timeline.steps
    if len(steps):
        return [
            StepStream(
                timeline.pid,
                np.ascontiguousarray(steps["t"][steps["number"] == number]),
                np.ascontiguousarray(steps["a"][steps["number"] == number]),
            )
            for number in distinct(steps["number"])
        ]
    marks = [mark.t for mark in timeline.marks if mark.edge is None and mark.name == "step"]
    return (
        [StepStream(timeline.pid, np.array(marks, np.int64), np.ones(len(marks), np.int64))]
        if marks
        else []
    )
