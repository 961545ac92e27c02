"""Fewer points for a line that looks the same: mean, lowest and highest of each stretch of time."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from stepscope.analysis.run.series import Floats, Ints

MOST_POINTS = 4000
"""A line of more is drawn as buckets of time."""
BUCKETS = 2000

_GAP = 3.0  # a gap is so many times longer than the usual spacing, and than the spacings beside it


class ThinnedPoints(NamedTuple):
    """What is drawn of a line; NaN where it breaks. Only buckets have a `low` and a `high`."""

    x: Floats
    y: Floats
    low: Floats | None = None
    high: Floats | None = None


def drawn_points(x: Floats, y: Floats, end: float) -> ThinnedPoints:
    """The points of a line on a clock from 0 to `end`; of a long line the middles of buckets.

    Buckets depend on `end` alone, so that a panel of long lines needs their times only once.
    """
    breaks = gaps(x)
    if len(x) <= MOST_POINTS:
        middles = (x[breaks] + x[breaks + 1]) / 2
        return ThinnedPoints(np.insert(x, breaks + 1, middles), np.insert(y, breaks + 1, np.nan))
    width = bucket_seconds(end)
    bucket = np.clip(x / width, 0, BUCKETS - 1).astype(np.int64)
    starts = np.concatenate(([0], np.flatnonzero(np.diff(bucket)) + 1))
    counts = np.diff(np.concatenate((starts, [len(x)])))
    places = bucket[starts]
    # A gap that leaves no bucket empty is narrower than what can be seen.
    wide = breaks[bucket[breaks + 1] - bucket[breaks] > 1]
    after = np.searchsorted(places, bucket[wide], side="right")

    def broken(values: Floats) -> Floats:
        return np.insert(values, after, np.nan)

    return ThinnedPoints(
        np.insert((places + 0.5) * width, after, (bucket[wide] + 1.5) * width),
        broken(np.add.reduceat(y, starts) / counts),
        broken(np.minimum.reduceat(y, starts)),
        broken(np.maximum.reduceat(y, starts)),
    )


def bucket_seconds(end: float) -> float:
    """How much time each point of a long line stands for."""
    return end / BUCKETS


def gaps(x: Floats) -> Ints:
    """Positions i where the line breaks between points i and i + 1.

    A sampler that backed off is slower for a while, without a gap: hence the look at both sides.
    """
    if len(x) < 3:
        return np.empty(0, np.int64)
    spacing = np.diff(x)
    padded = np.concatenate(([spacing[1]], spacing, [spacing[-2]]))
    beside = np.maximum(padded[:-2], padded[2:])
    return np.flatnonzero(spacing > _GAP * np.maximum(np.median(spacing), beside))
