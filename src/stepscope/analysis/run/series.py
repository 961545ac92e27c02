"""One metric of one entity over time, with its sums, means and statistics."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from stepscope.records import Statistic

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Series:
    """Values at times in monotonic ns, ordered. A rate covers the `window` seconds before its
    time."""

    t: Ints
    window: Floats
    value: Floats

    def __len__(self) -> int:
        return len(self.t)

    def between(self, begin_ns: int, end_ns: int) -> Series:
        """Return the samples in a time span."""
        keep = slice(self.t.searchsorted(begin_ns), self.t.searchsorted(end_ns, side="right"))
        return Series(self.t[keep], self.window[keep], self.value[keep])

    @cached_property
    def longest_window_ns(self) -> int:
        return int(self.window.max(initial=0) * 1e9)


EMPTY = Series(np.empty(0, np.int64), np.empty(0), np.empty(0))

SeriesTable = Mapping[tuple[str, str], Series]
"""(metric, entity) to its values, without the rows of single processes."""


@dataclass(frozen=True)
class Amount:
    """The integral over a time span, and the seconds of it that are covered by samples."""

    total: float
    seconds: float


def integrate(rate: Series, begin_ns: int, end_ns: int) -> float | None:
    """Return the integral of a rate over a time span; None if no sample covers any of it."""
    amount = amount_of(rate, begin_ns, end_ns)
    return None if amount is None else amount.total


def amount_of(rate: Series, begin_ns: int, end_ns: int) -> Amount | None:
    """Integrate a rate over a time span; samples at its edges count partially."""
    until_ns = end_ns + rate.longest_window_ns
    near = slice(*rate.t.searchsorted((begin_ns, until_ns), side="right"))
    t, window = rate.t[near], rate.window[near]
    overlap = np.clip(np.minimum(t, end_ns) - np.maximum(t - window * 1e9, begin_ns), 0, None) / 1e9
    if not (overlap > 0).any():
        return None
    return Amount(float((rate.value[near] * overlap).sum()), float(overlap.sum()))


class Curve:
    """A gauge, interpolated linearly and integrated (power over time is energy).

    The first and the last reading are extended by one median spacing, since a run does not start
    and end exactly at its readings. Gaps are interpolated.
    """

    def __init__(self, gauge: Series) -> None:
        reach = int(np.median(np.diff(gauge.t))) if len(gauge) > 1 else 0
        self._t = np.pad(gauge.t, 1)
        self._t[[0, -1]] = gauge.t[0] - reach, gauge.t[-1] + reach
        self._value: Floats = np.pad(gauge.value, 1, mode="edge")
        pieces = (self._value[1:] + self._value[:-1]) / 2 * np.diff(self._t) / 1e9
        self._below: Floats = np.concatenate(([0.0], np.cumsum(pieces)))

    def amount(self, begin_ns: int, end_ns: int) -> Amount | None:
        """Integrate over a time span; None outside of the readings."""
        begin, end = np.clip((begin_ns, end_ns), self._t[0], self._t[-1])
        if end <= begin:
            return None
        low, high = self._until(np.array([begin, end]))
        return Amount(float(high - low), float(end - begin) / 1e9)

    def within(self, begins_ns: Ints, ends_ns: Ints) -> Floats:
        """Integrate over each of several time spans; NaN for spans that are not covered."""
        covered = (begins_ns >= self._t[0]) & (ends_ns <= self._t[-1])
        return np.where(covered, self._until(ends_ns) - self._until(begins_ns), np.nan)

    def _until(self, at: Ints) -> Floats:
        before = np.clip(np.searchsorted(self._t, at, side="right") - 1, 0, len(self._t) - 2)
        seconds = (at - self._t[before]) / 1e9
        spacing = np.maximum(self._t[before + 1] - self._t[before], 1) / 1e9
        slope = (self._value[before + 1] - self._value[before]) / spacing
        below: Floats = (self._value[before] + slope * seconds / 2) * seconds
        return self._below[before] + below


_REACH = 0.75
"""How long a reading is valid, in median spacings: half of one, plus a margin for late ones."""

Combine = Callable[..., Floats]
"""`np.nanmean`, `np.nansum` or `np.nanmax`."""


def combined(parts: Sequence[Series], combine: Combine) -> Series:
    """Combine series that are read in parallel; each counts only while it is read."""
    parts = [part for part in parts if len(part)]
    if len(parts) < 2:
        return parts[0] if parts else EMPTY
    t, first = np.unique(np.concatenate([part.t for part in parts]), return_index=True)
    values = np.stack([_while_read(part, t) for part in parts])
    window = np.concatenate([part.window for part in parts])[first]
    window[1:] = np.minimum(window[1:], np.diff(t) / 1e9)
    return Series(t, window, combine(values, axis=0))


def _while_read(series: Series, at: Ints) -> Floats:
    """Return the nearest value at each time; NaN where no reading is close enough."""
    reach = _REACH * np.median(np.diff(series.t)) if len(series) > 1 else 0.0
    nearest = _nearest_places(series, at)
    return np.where(np.abs(series.t[nearest] - at) <= reach, series.value[nearest], np.nan)


def concatenated(parts: Sequence[Series]) -> Series:
    """Concatenate series in time."""
    if len(parts) == 1:
        return parts[0]
    columns = ([getattr(part, name) for part in parts] for name in ("t", "window", "value"))
    return Series(*map(np.concatenate, columns))


def sum_of_held(parts: Sequence[Series]) -> Series:
    """Return the sum of gauges that are read rarely: each value holds until the next."""
    parts = [part for part in parts if len(part)]
    if len(parts) < 2:
        return parts[0] if parts else EMPTY
    t = np.unique(np.concatenate([part.t for part in parts]))
    value = sum(np.where(t >= part.t[0], held_at(part, t), 0.0) for part in parts)
    return Series(t, np.zeros(len(t)), np.asarray(value))


def statistic(
    metric: str, entity: str, series: Series, is_rate: bool, seconds: float = 0.0
) -> Statistic | None:
    """Return mean, 95th percentile and maximum; None without values.

    The mean of a rate is over time, and over at least `seconds`.
    """
    if not len(series):
        return None
    covered = float(series.window.sum())
    values = series.value
    if is_rate and covered > 0:
        mean = float((values * series.window).sum()) / max(covered, seconds)
        # Ignore very short windows, such as that of the last sample: their rates are not reliable.
        values = values[series.window >= np.median(series.window) / 2]
    else:
        mean = float(values.mean())
    p95, highest = float(np.percentile(values, 95)), float(values.max())
    return Statistic(metric, entity, mean, p95, max(highest, mean), len(series))


MEMORY_FROM = ("rss", "processes", "pss")
"""The metrics that `memory` is derived from."""


def with_memory(series: SeriesTable) -> dict[tuple[str, str], Series]:
    """Add the derived metric `memory` for every entity that has RSS."""
    full = dict(series)
    for (metric, entity), rss in series.items():
        if metric == "rss" and rss.value.any():  # else it was only read after all processes exited
            processes = series.get(("processes", entity), EMPTY)
            pss = series.get(("pss", entity), EMPTY)
            full["memory", entity] = memory_without_sharing(rss, processes, pss)
    return full


def memory_without_sharing(rss: Series, processes: Series, pss: Series) -> Series:
    """Return RSS minus the shared memory that the nearest PSS reading shows.

    The nearest reading with the same number of processes is used, since a fork changes the shared
    memory immediately. Without one, shared memory is scaled by the number of processes minus one.
    """
    if not len(rss) or not len(pss):
        return rss
    count_at, count_then = held_at(processes, rss.t), held_at(processes, pss.t)
    shared_then = np.clip(_nearest(rss, pss.t) - pss.value, 0, None)
    shared = np.zeros(len(rss))
    for count in distinct(count_at):
        at = count_at == count
        usable, scale = count_then == count, 1.0
        if not usable.any():
            usable = count_then > 1
            scale = max(0.0, count - 1) / np.clip(count_then[usable] - 1, 1, None)
        if usable.any():
            readings = Series(pss.t[usable], pss.window[usable], shared_then[usable] * scale)
            shared[at] = _nearest(readings, rss.t[at])
    return Series(rss.t, rss.window, np.clip(rss.value - shared, 0, None))


def distinct(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the sorted distinct values.

    With counts: without them numpy imports `numpy.ma`, which takes longer than the call.
    """
    return np.unique(values, return_counts=True)[0]


def held_at(series: Series, at: Ints) -> Floats:
    """Return the last value at or before each time."""
    if not len(series):
        return np.zeros(len(at))
    if at is series.t and (at[1:] > at[:-1]).all():  # read together: same times
        return series.value
    return series.value[np.clip(np.searchsorted(series.t, at, side="right") - 1, 0, None)]


def _nearest(series: Series, at: Ints) -> Floats:
    return series.value[_nearest_places(series, at)]


def _nearest_places(series: Series, at: Ints) -> Ints:
    after = np.clip(np.searchsorted(series.t, at), 0, len(series) - 1)
    before = np.clip(after - 1, 0, None)
    nearer = np.abs(series.t[after] - at) <= np.abs(series.t[before] - at)
    return np.where(nearer, after, before)
