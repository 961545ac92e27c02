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
    end = np.minimum(rate.t, end_ns)
    begin = np.maximum(rate.t - rate.window * 1e9, begin_ns)
    overlap = np.clip(end - begin, 0, None) / 1e9
    if not (overlap > 0).any():
        return None
    return float((rate.value * overlap).sum())


def statistic(metric: str, entity: str, series: Series, is_rate: bool) -> Statistic | None:
    """Mean (a rate's over time), 95th percentile and maximum; None without any value."""
    if not len(series):
        return None
    covered = float(series.window.sum())
    if is_rate and covered > 0:
        mean = float((series.value * series.window).sum()) / covered
    else:
        mean = float(series.value.mean())
    return Statistic(
        metric,
        entity,
        mean,
        float(np.percentile(series.value, 95)),
        float(series.value.max()),
        len(series),
    )


def memory_without_sharing(rss: Series, processes: Series, pss: Series) -> Series:
    """Memory at every RSS sample, less what the nearest PSS reading showed to be shared.

    The nearest reading with as many processes is taken: a fork changes what is shared at once.
    """
    if not len(rss) or not len(pss):
        return rss
    count_at = _held(processes, rss.t)
    rss_then = _nearest(rss, pss.t)
    shared = np.clip(rss_then - pss.value, 0, None)
    count_then = _held(processes, pss.t)
    after = np.clip(np.searchsorted(pss.t, rss.t), 0, len(pss) - 1)
    before = np.clip(after - 1, 0, None)
    prefer_after = count_then[after] == count_at
    prefer_before = count_then[before] == count_at
    closer_after = np.abs(pss.t[after] - rss.t) <= np.abs(pss.t[before] - rss.t)
    pick = np.where(prefer_after & (closer_after | ~prefer_before), after, before)
    return Series(rss.t, rss.window, np.clip(rss.value - shared[pick], 0, None))


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
