"""What a live view is made of: traces of metrics, in rows, in blocks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from stepscope.analysis.run.data import RunData
from stepscope.analysis.run.series import Floats, Ints, Series
from stepscope.metrics import BY_KEY, is_counter
from stepscope.report.kit.format import value_text

SECONDS_BACK = 120
"""How far back a live view looks."""

ESSENTIAL, DETAILS = 20, 40
"""Rows of a lower rank belong to any screen; those of a higher one are for tall screens."""

_NOW_S = 1.0  # a rate of now is a mean over so many seconds: single samples jump
_STALE_S, _STALE_WINDOWS = 2.0, 3.0
"""A value that is older, and older than so many of its windows, is not of now: its role is gone."""
_LEAST_COVERED_S = 0.05  # a column of a sparkline of which less is known stays empty
_NOTHING_TO_SHOW = 100  # added to the rank of rows without any value


@dataclass(frozen=True)
class LiveTrace:
    """One metric of one entity: its last seconds, its value now, and what that is measured by."""

    metric: str
    entity: str
    series: Series
    now: float | None
    whole: float | None = None  # what a full column stands for; the highest value in sight if None
    name: str = ""  # which way it goes, where there are two: "read", "written"
    detail: str = ""  # what follows the value: "of 2 cores"

    @property
    def text(self) -> str:
        return value_text(self.now, BY_KEY[self.metric].unit)


@dataclass(frozen=True)
class Row:
    """A line of the screen. What goes two ways has two traces; a remark has none."""

    label: str
    traces: tuple[LiveTrace, ...]
    rank: int  # rows with a high one are left out first
    text: str = ""  # what is said instead of the value
    part: bool = False  # whether it is a part of the row above


@dataclass(frozen=True)
class Block:
    """Rows under a title. `brief` is one row that can stand for all of them."""

    title: str
    remark: str
    rows: tuple[Row, ...]
    brief: Row | None = None
    used: bool = True  # whether it is about something that the run uses
    slowed: bool = False  # whether something holds it back, so that the remark is a warning

    @property
    def height(self) -> int:
        """Its lines with its title."""
        return len(self.rows) + (1 if self.title else 0)


def trace(
    data: RunData,
    metric: str,
    entity: str,
    *,
    whole: float | None = None,
    name: str = "",
    detail: str = "",
    series: Series | None = None,
) -> LiveTrace:
    """The trace of a metric, or of a series that stands for it."""
    series = data.of(metric, entity) if series is None else series
    now = None
    if _is_of_now(series, data.end_ns):
        now = mean(series, _NOW_S) if is_counter(metric) else last(series)
    return LiveTrace(metric, entity, series=series, now=now, whole=whole, name=name, detail=detail)


def ranked(rows: Iterable[Row]) -> tuple[Row, ...]:
    """Rows of which nothing was ever read fall behind all others."""
    return tuple(
        row
        if not row.traces or any(len(trace.series) for trace in row.traces)
        else replace(row, rank=row.rank + _NOTHING_TO_SHOW)
        for row in rows
    )


def last(series: Series) -> float | None:
    return float(series.value[-1]) if len(series) else None


def mean(series: Series, seconds: float) -> float | None:
    """Over the last seconds that are known."""
    if not len(series):
        return None
    recent = series.between(int(series.t[-1] - seconds * 1e9) + 1, int(series.t[-1]))
    covered = float(recent.window.sum())
    return float((recent.value * recent.window).sum()) / covered if covered else last(series)


def _is_of_now(series: Series, end_ns: int) -> bool:
    if not len(series):
        return False
    age = (end_ns - int(series.t[-1])) / 1e9
    return age <= max(_STALE_S, _STALE_WINDOWS * float(series.window[-1]))


def columns(series: Series, end_ns: int, count: int, seconds: float) -> Floats:
    """Means over the last `count` stretches of so many seconds; NaN where nothing is known.

    The stretches lie on the clock, not on `end_ns`: what was drawn moves on and keeps its shape.
    """
    means = np.full(count, np.nan)
    series = _held(series, end_ns)
    known = series.window > 0
    if not known.any():
        return means
    step = int(seconds * 1e9)
    edges = ((end_ns - 1) // step + 1 - np.arange(count, -1, -1)) * step
    # A sample stands for its window. Sums up to a time, of windows and of values over them, are
    # lines between the edges of windows; what lies in a column is a difference of two of them.
    t, window = series.t[known], series.window[known]
    begins = t - (window * 1e9).astype(np.int64)
    times = np.maximum.accumulate(np.stack([begins, t], 1).ravel())
    covered = _within(edges, times, window)
    amount = _within(edges, times, window * series.value[known])
    enough = covered > min(_LEAST_COVERED_S, seconds / 2)
    means[enough] = amount[enough] / covered[enough]
    return means


def _held(series: Series, end_ns: int) -> Series:
    """What was last read holds until it is read again: sensors have paces of their own."""
    if not _is_of_now(series, end_ns) or series.t[-1] >= end_ns:
        return series
    age = (end_ns - int(series.t[-1])) / 1e9
    return Series(
        np.append(series.t, end_ns),
        np.append(series.window, age),
        np.append(series.value, series.value[-1]),
    )


def _within(edges: Ints, times: Ints, pieces: Floats) -> Floats:
    sums = np.cumsum(pieces)
    around = np.stack([sums - pieces, sums], 1).ravel()
    return np.asarray(np.diff(np.interp(edges, times, around)))
