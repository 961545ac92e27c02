"""The elements of the live view: traces of metrics, in rows, in blocks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from stepscope.analysis.run.data import RunData
from stepscope.analysis.run.series import Floats, Ints, Series
from stepscope.metrics import BY_KEY, is_counter
from stepscope.report.kit.format import value_text

SECONDS_BACK = 120
"""Length of the history in the live view."""

ESSENTIAL, DETAILS = 20, 40
"""Rows with a priority below `ESSENTIAL` are on every screen; from `DETAILS` on tall ones only."""

_NOW_S = 1.0  # the current value of a rate is a mean over this time: single samples fluctuate
_STALE_S, _STALE_WINDOWS = 2.0, 3.0
"""A value older than both, in seconds and in windows, is not current: its processes exited."""
_MIN_COVERED_S = 0.05  # a sparkline column with less data stays empty
_EMPTY_ROW = 100  # added to the priority of rows without any value


@dataclass(frozen=True)
class LiveTrace:
    """One metric of one entity: its last seconds and its current value."""

    metric: str
    entity: str
    series: Series
    now: float | None
    full_scale: float | None = None  # value of a full column; None: the highest visible value
    name: str = ""  # the direction, in a row with two traces: "read", "write"
    detail: str = ""  # shown after the value: "of 2 cores"

    @property
    def text(self) -> str:
        return value_text(self.now, BY_KEY[self.metric].unit)


@dataclass(frozen=True)
class Row:
    """A line of the screen with up to two traces, such as read and write."""

    label: str
    traces: tuple[LiveTrace, ...]
    priority: int  # rows with the highest number are omitted first
    text: str = ""  # shown instead of the value
    indented: bool = False  # whether it is a part of the row above


@dataclass(frozen=True)
class Block:
    """Rows under a title. `brief` is one row that can replace all of them."""

    title: str
    detail: str
    rows: tuple[Row, ...]
    brief: Row | None = None
    used: bool = True  # whether the run uses it
    throttled: bool = False  # whether `detail` is a warning

    @property
    def height(self) -> int:
        """Number of lines, including the title."""
        return len(self.rows) + (1 if self.title else 0)


def trace(
    data: RunData,
    metric: str,
    entity: str,
    *,
    full_scale: float | None = None,
    name: str = "",
    detail: str = "",
    series: Series | None = None,
) -> LiveTrace:
    """Return the trace of a metric, or of a given series of it."""
    series = data.of(metric, entity) if series is None else series
    now = None
    if _is_current(series, data.end_ns):
        now = mean(series, _NOW_S) if is_counter(metric) else last(series)
    return LiveTrace(metric, entity, series, now, full_scale, name, detail)


def prioritized(rows: Iterable[Row]) -> tuple[Row, ...]:
    """Assign the lowest priority to rows without any value."""
    return tuple(
        row
        if not row.traces or any(len(trace.series) for trace in row.traces)
        else replace(row, priority=row.priority + _EMPTY_ROW)
        for row in rows
    )


def last(series: Series) -> float | None:
    return float(series.value[-1]) if len(series) else None


def mean(series: Series, seconds: float) -> float | None:
    """Return the mean over the last seconds of the series."""
    if not len(series):
        return None
    recent = series.between(int(series.t[-1] - seconds * 1e9) + 1, int(series.t[-1]))
    covered = float(recent.window.sum())
    return float((recent.value * recent.window).sum()) / covered if covered else last(series)


def _is_current(series: Series, end_ns: int) -> bool:
    if not len(series):
        return False
    age = (end_ns - int(series.t[-1])) / 1e9
    return age <= max(_STALE_S, _STALE_WINDOWS * float(series.window[-1]))


def columns(series: Series, end_ns: int, count: int, seconds: float) -> Floats:
    """Return means over the last `count` intervals of `seconds` each; NaN without data.

    The intervals are aligned to the clock, not to `end_ns`, so the sparkline scrolls without
    changing its shape.
    """
    means = np.full(count, np.nan)
    series = _held(series, end_ns)
    known = series.window > 0
    if not known.any():
        return means
    step = int(seconds * 1e9)
    edges = ((end_ns - 1) // step + 1 - np.arange(count, -1, -1)) * step
    # A sample covers its window. The cumulative sums of windows and of values over them are linear
    # between the window edges, so a column is the difference of two interpolated sums.
    t, window = series.t[known], series.window[known]
    begins = t - (window * 1e9).astype(np.int64)
    times = np.maximum.accumulate(np.stack([begins, t], 1).ravel())
    covered = _within(edges, times, window)
    amount = _within(edges, times, window * series.value[known])
    enough = covered > min(_MIN_COVERED_S, seconds / 2)
    means[enough] = amount[enough] / covered[enough]
    return means


def _held(series: Series, end_ns: int) -> Series:
    """Extend the last value to `end_ns`: sensors have different intervals."""
    if not _is_current(series, end_ns) or series.t[-1] >= end_ns:
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
