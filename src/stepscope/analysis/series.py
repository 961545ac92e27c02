"""One metric of one entity over time, and the few sums and means we take of it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from stepscope.records import Statistic

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Series:
    """Values at times (monotonic ns). A rate holds over the `window` seconds before its time."""

    t: Ints
    window: Floats
    value: Floats

    def __len__(self) -> int:
        return len(self.t)

    def between(self, begin_ns: int, end_ns: int) -> Series:
        """The samples taken in a stretch of time."""
        keep = (self.t >= begin_ns) & (self.t <= end_ns)
        return Series(self.t[keep], self.window[keep], self.value[keep])


EMPTY = Series(np.empty(0, np.int64), np.empty(0), np.empty(0))


def integrate(rate: Series, begin_ns: int, end_ns: int) -> float | None:
    """What a rate adds up to in a stretch of time; samples on its edges count in part.

    None where no sample's window touches it.
    """
    longest_ns = rate.window.max(initial=0) * 1e9
    near = slice(*np.searchsorted(rate.t, (begin_ns, end_ns + longest_ns), side="right"))
    t, window = rate.t[near], rate.window[near]
    overlap = np.clip(np.minimum(t, end_ns) - np.maximum(t - window * 1e9, begin_ns), 0, None) / 1e9
    if not (overlap > 0).any():
        return None
    return float((rate.value[near] * overlap).sum())


def statistic(metric: str, entity: str, series: Series, is_rate: bool) -> Statistic | None:
    """Mean (a rate's over time), 95th percentile and maximum; None without any value."""
    if not len(series):
        return None
    covered = float(series.window.sum())
    values = series.value
    if is_rate and covered > 0:
        mean = float((values * series.window).sum()) / covered
        # The last sample of a run may be a millisecond after the one before: no rate to compare.
        values = values[series.window >= np.median(series.window) / 2]
    else:
        mean = float(values.mean())
    p95, most = float(np.percentile(values, 95)), float(values.max())
    return Statistic(metric, entity, mean, p95, most, len(series))


def memory_without_sharing(rss: Series, processes: Series, pss: Series) -> Series:
    """Memory at every RSS sample, less what the nearest PSS reading showed to be shared.

    The nearest reading with as many processes is taken: a fork changes what is shared at once.
    Where there is none, each process but one is taken to share as much as they did then.
    """
    if not len(rss) or not len(pss):
        return rss
    count_at, count_then = _held(processes, rss.t), _held(processes, pss.t)
    shared_then = np.clip(_nearest(rss, pss.t) - pss.value, 0, None)
    shared = np.zeros(len(rss))
    for count in np.unique(count_at):
        now = count_at == count
        alike, part = count_then == count, 1.0
        if not alike.any():
            alike = count_then > 1
            part = max(0.0, count - 1) / np.clip(count_then[alike] - 1, 1, None)
        if alike.any():
            readings = Series(pss.t[alike], pss.window[alike], shared_then[alike] * part)
            shared[now] = _nearest(readings, rss.t[now])
    return Series(rss.t, rss.window, np.clip(rss.value - shared, 0, None))


def _held(series: Series, at: Ints) -> Floats:
    """The last value at or before each time."""
    if not len(series):
        return np.zeros(len(at))
    return series.value[np.clip(np.searchsorted(series.t, at, side="right") - 1, 0, None)]


def _nearest(series: Series, at: Ints) -> Floats:
    after = np.clip(np.searchsorted(series.t, at), 0, len(series) - 1)
    before = np.clip(after - 1, 0, None)
    pick = np.where(np.abs(series.t[after] - at) <= np.abs(series.t[before] - at), after, before)
    return series.value[pick]
