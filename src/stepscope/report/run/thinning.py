"""Reduces the points of a long line to the mean, minimum and maximum of time buckets."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from stepscope.analysis.run.series import Floats, Ints

MAX_POINTS = 4000
"""Longer lines are drawn as buckets."""
BUCKETS = 2000

_GAP = 3.0  # how many times longer a gap is than the median and the adjacent spacings


class ThinnedPoints(NamedTuple):
    """The points of a line; NaN at gaps. Only buckets have `low` and `high`."""

    x: Floats
    y: Floats
    low: Floats | None = None
    high: Floats | None = None


def drawn_points(x: Floats, y: Floats, end: float) -> ThinnedPoints:
    """Return the points of a line on a time axis from 0 to `end`; bucket centers if it is long.

    Buckets depend only on `end`, so the long lines of a panel share their times.
    """
    breaks = gaps(x)
    if len(x) <= MAX_POINTS:
        middles = (x[breaks] + x[breaks + 1]) / 2
        return ThinnedPoints(np.insert(x, breaks + 1, middles), np.insert(y, breaks + 1, np.nan))
    width = bucket_seconds(end)
    bucket = np.clip(x / width, 0, BUCKETS - 1).astype(np.int64)
    starts = np.concatenate(([0], np.flatnonzero(np.diff(bucket)) + 1))
    counts = np.diff(np.concatenate((starts, [len(x)])))
    occupied = bucket[starts]
    # A gap that leaves no bucket empty is too narrow to be visible.
    wide = breaks[bucket[breaks + 1] - bucket[breaks] > 1]
    after = np.searchsorted(occupied, bucket[wide], side="right")

    def with_gaps(values: Floats) -> Floats:
        return np.insert(values, after, np.nan)

    return ThinnedPoints(
        np.insert((occupied + 0.5) * width, after, (bucket[wide] + 1.5) * width),
        with_gaps(np.add.reduceat(y, starts) / counts),
        with_gaps(np.minimum.reduceat(y, starts)),
        with_gaps(np.maximum.reduceat(y, starts)),
    )


def bucket_seconds(end: float) -> float:
    """Return the time that each point of a long line covers."""
    return end / BUCKETS


def gaps(x: Floats) -> Ints:
    """Return the indices i with a gap between points i and i + 1.

    Adjacent spacings count too: a sampler that backs off is slower for a while, without a gap.
    """
    if len(x) < 3:
        return np.empty(0, np.int64)
    spacing = np.diff(x)
    padded = np.concatenate(([spacing[1]], spacing, [spacing[-2]]))
    adjacent = np.maximum(padded[:-2], padded[2:])
    return np.flatnonzero(spacing > _GAP * np.maximum(np.median(spacing), adjacent))
