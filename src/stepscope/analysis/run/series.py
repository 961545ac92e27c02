"""One metric of one entity over time, and the few sums and means we take of it."""

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
    """Values at times (monotonic ns), in their order. A rate holds over the `window` seconds before
    its time."""

    t: Ints
    window: Floats
    value: Floats

    def __len__(self) -> int:
        return len(self.t)

    def between(self, begin_ns: int, end_ns: int) -> Series:
        """The samples taken in a stretch of time."""
        keep = slice(self.t.searchsorted(begin_ns), self.t.searchsorted(end_ns, side="right"))
        return Series(self.t[keep], self.window[keep], self.value[keep])

    @cached_property
    def longest_window_ns(self) -> int:
        return int(self.window.max(initial=0) * 1e9)


EMPTY = Series(np.empty(0, np.int64), np.empty(0), np.empty(0))

SeriesTable = Mapping[tuple[str, str], Series]
"""(metric, entity) to its values; rows of single processes are not in it."""


@dataclass(frozen=True)
class Amount:
    """What adds up in a stretch of time, and over how many seconds of it that is known."""

    total: float
    seconds: float


def integrate(rate: Series, begin_ns: int, end_ns: int) -> float | None:
    """What a rate adds up to in a stretch of time; None where no sample's window touches it."""
    amount = amount_of(rate, begin_ns, end_ns)
    return None if amount is None else amount.total


def amount_of(rate: Series, begin_ns: int, end_ns: int) -> Amount | None:
    """The amount of a rate in a stretch of time; samples on its edges count in part."""
    until_ns = end_ns + rate.longest_window_ns
    near = slice(*rate.t.searchsorted((begin_ns, until_ns), side="right"))
    t, window = rate.t[near], rate.window[near]
    overlap = np.clip(np.minimum(t, end_ns) - np.maximum(t - window * 1e9, begin_ns), 0, None) / 1e9
    if not (overlap > 0).any():
        return None
    return Amount(float((rate.value[near] * overlap).sum()), float(overlap.sum()))


class Curve:
    """A gauge as a line from reading to reading, for what lies below it (power over time: energy).

    The first and the last reading stand for one usual spacing more: a run does not begin and end
    at the instants of its readings. Where nothing was read for long, the line goes on across.
    """

    def __init__(self, gauge: Series) -> None:
        reach = int(np.median(np.diff(gauge.t))) if len(gauge) > 1 else 0
        self._t = np.pad(gauge.t, 1)
        self._t[[0, -1]] = gauge.t[0] - reach, gauge.t[-1] + reach
        self._value: Floats = np.pad(gauge.value, 1, mode="edge")
        pieces = (self._value[1:] + self._value[:-1]) / 2 * np.diff(self._t) / 1e9
        self._below: Floats = np.concatenate(([0.0], np.cumsum(pieces)))

    def amount(self, begin_ns: int, end_ns: int) -> Amount | None:
        """What lies below a stretch of the line; None where there is no line."""
        begin, end = np.clip((begin_ns, end_ns), self._t[0], self._t[-1])
        if end <= begin:
            return None
        low, high = self._until(np.array([begin, end]))
        return Amount(float(high - low), float(end - begin) / 1e9)

    def within(self, begins_ns: Ints, ends_ns: Ints) -> Floats:
        """What lies below each of many stretches; NaN for one that the line does not cover."""
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
"""How far a reading reaches, in usual spacings: half of one, and more as some come late."""

Combine = Callable[..., Floats]
"""`np.nanmean`, `np.nansum`, `np.nanmax`: from the values of several at one time to one value."""


def together(parts: Sequence[Series], combine: Combine) -> Series:
    """Several series that are read side by side as one; each counts while it is read."""
    parts = [part for part in parts if len(part)]
    if len(parts) < 2:
        return parts[0] if parts else EMPTY
    t, first = np.unique(np.concatenate([part.t for part in parts]), return_index=True)
    values = np.stack([_while_read(part, t) for part in parts])
    window = np.concatenate([part.window for part in parts])[first]
    window[1:] = np.minimum(window[1:], np.diff(t) / 1e9)
    return Series(t, window, combine(values, axis=0))


def _while_read(series: Series, at: Ints) -> Floats:
    """The nearest value at each time; NaN where another should have been nearer."""
    reach = _REACH * np.median(np.diff(series.t)) if len(series) > 1 else 0.0
    nearest = _nearest_places(series, at)
    return np.where(np.abs(series.t[nearest] - at) <= reach, series.value[nearest], np.nan)


def concatenated(parts: Sequence[Series]) -> Series:
    """Series that follow each other as one."""
    if len(parts) == 1:
        return parts[0]
    columns = ([getattr(part, name) for part in parts] for name in ("t", "window", "value"))
    return Series(*map(np.concatenate, columns))


def sum_of_held(parts: Sequence[Series]) -> Series:
    """The sum of gauges that are told now and then: each holds until it is told anew."""
    parts = [part for part in parts if len(part)]
    if len(parts) < 2:
        return parts[0] if parts else EMPTY
    t = np.unique(np.concatenate([part.t for part in parts]))
    value = sum(np.where(t >= part.t[0], held_at(part, t), 0.0) for part in parts)
    return Series(t, np.zeros(len(t)), np.asarray(value))


def statistic(
    metric: str, entity: str, series: Series, is_rate: bool, seconds: float = 0.0
) -> Statistic | None:
    """Mean (a rate's over time, and over `seconds` at least), 95th percentile and maximum; None
    without any value."""
    if not len(series):
        return None
    covered = float(series.window.sum())
    values = series.value
    if is_rate and covered > 0:
        mean = float((values * series.window).sum()) / max(covered, seconds)
        # The last sample of a run may be a millisecond after the one before: no rate to compare.
        values = values[series.window >= np.median(series.window) / 2]
    else:
        mean = float(values.mean())
    p95, most = float(np.percentile(values, 95)), float(values.max())
    return Statistic(metric, entity, mean, p95, max(most, mean), len(series))


MEMORY_FROM = ("rss", "processes", "pss")
"""What the derived `memory` is made of."""


def with_memory(series: SeriesTable) -> dict[tuple[str, str], Series]:
    """Add the derived `memory` of every entity that has RSS."""
    full = dict(series)
    for (metric, entity), rss in series.items():
        if metric == "rss" and rss.value.any():  # else it was only read when nobody was left
            processes = series.get(("processes", entity), EMPTY)
            pss = series.get(("pss", entity), EMPTY)
            full["memory", entity] = memory_without_sharing(rss, processes, pss)
    return full


def memory_without_sharing(rss: Series, processes: Series, pss: Series) -> Series:
    """Memory at every RSS sample, less what the nearest PSS reading showed to be shared.

    The nearest reading with as many processes is taken: a fork changes what is shared at once.
    Where there is none, each process but one is taken to share as much as they did then.
    """
    if not len(rss) or not len(pss):
        return rss
    count_at, count_then = held_at(processes, rss.t), held_at(processes, pss.t)
    shared_then = np.clip(_nearest(rss, pss.t) - pss.value, 0, None)
    shared = np.zeros(len(rss))
    for count in distinct(count_at):
        now = count_at == count
        alike, part = count_then == count, 1.0
        if not alike.any():
            alike = count_then > 1
            part = max(0.0, count - 1) / np.clip(count_then[alike] - 1, 1, None)
        if alike.any():
            readings = Series(pss.t[alike], pss.window[alike], shared_then[alike] * part)
            shared[now] = _nearest(readings, rss.t[now])
    return Series(rss.t, rss.window, np.clip(rss.value - shared, 0, None))


def distinct(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The values that occur, in order. With their counts: without, numpy imports its masked arrays
    to look whether it has one, which takes longer than most of what is asked here."""
    return np.unique(values, return_counts=True)[0]


def held_at(series: Series, at: Ints) -> Floats:
    """The last value at or before each time."""
    if not len(series):
        return np.zeros(len(at))
    if at is series.t and (at[1:] > at[:-1]).all():  # of metrics that are read together
        return series.value
    return series.value[np.clip(np.searchsorted(series.t, at, side="right") - 1, 0, None)]


def _nearest(series: Series, at: Ints) -> Floats:
    return series.value[_nearest_places(series, at)]


def _nearest_places(series: Series, at: Ints) -> Ints:
    after = np.clip(np.searchsorted(series.t, at), 0, len(series) - 1)
    before = np.clip(after - 1, 0, None)
    nearer = np.abs(series.t[after] - at) <= np.abs(series.t[before] - at)
    return np.where(nearer, after, before)
