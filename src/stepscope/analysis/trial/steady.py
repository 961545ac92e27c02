"""Find the end of the warm-up, and whether the following steps are steady.

The cut follows the MSER rule (White 1997): it is the point in the first half of the steps after
which the mean is known best, that is with the smallest variance / count. The rule needs no
threshold, and works whether the first steps are slow (compilation, autotuning, growing memory) or
fast (batches that the loader workers prepared before the first step). Four rules are added:

- Steps are first averaged in batches of whole rounds of the loader workers. With four workers,
  three batches arrive at once and the fourth one later, which is not a warm-up.
- A single slow step (end of an epoch, checkpoint) would move the cut right behind it. Therefore
  steps are clipped to the typical range of the second half, for the search only: periodic slow
  steps are part of the steady state and count in the throughput.
- A few extreme steps at the very start, which clipping hides, are cut separately.
- A start that does not differ significantly from the rest is not cut, because minima also occur by
  chance.

The rest is steady unless it drifts: the distribution-free Mann-Kendall test finds a significant
trend, and Sen's slope is large enough to matter.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

_TYPICAL_QUANTILES = (0.05, 0.95)
_MSER_BATCHES = 40
_MIN_MSER_BATCHES = 5
_MIN_DIFFERENCE = 3.0  # standard errors between the means of the warm-up and the rest
_DRIFT_BATCHES = 30
MIN_STEADY_STEPS = 7  # with fewer steps, not even a monotonic trend is significant
_MIN_Z = 2.58  # of the Mann-Kendall test: p = 0.01
_MIN_DRIFT = 0.05
"""A smaller change of the step time from the first to the last step counts as steady."""


@dataclass(frozen=True)
class Steady:
    """The number of warm-up steps, and whether the rest is steady."""

    warmup: int
    steady: bool
    reason: str = ""  # why it is not steady
    drift: float | None = None
    """Relative change of the step time from the first to the last steady step; None if unknown."""


def find_steady(durations: npt.ArrayLike, workers: int = 0) -> Steady:
    """Return the warm-up and the steadiness of steps with these durations, in any time unit."""
    steps = np.asarray(durations, np.float64)
    warmup = _warmup(steps, max(1, workers)) if len(steps) > 1 else 0
    rest = steps[warmup:]
    if len(rest) < MIN_STEADY_STEPS:
        count = f"{len(rest)} {'step' if len(rest) == 1 else 'steps'}"
        return Steady(warmup, False, f"too few steps to detect drift ({count})")
    z, drift = trend(batch_means(_clipped(rest, rest), _DRIFT_BATCHES))
    if z < _MIN_Z or abs(drift) < _MIN_DRIFT:
        return Steady(warmup, True, drift=drift)
    change = f"{'rises' if drift > 0 else 'falls'} by {abs(drift) * 100:.0f}%"
    reason = f"the step time {change} over the measured steps"
    if warmup >= len(steps) // 2 and drift < 0:
        reason = f"the warm-up takes more than half of the steps: {reason}"
    return Steady(warmup, False, reason, drift)


def drift_of(durations: Floats) -> float | None:
    """Return the relative change of the step time from the first to the last step, or None if it is
    not significant."""
    if len(durations) < MIN_STEADY_STEPS:
        return None
    z, drift = trend(batch_means(_clipped(durations, durations), _DRIFT_BATCHES))
    return drift if z >= _MIN_Z else None


def batch_means(values: Floats, at_most: int, size: int | None = None) -> Floats:
    """Return the means of batches of consecutive values, by default at most `at_most` batches.

    The first values are omitted if they do not fill a batch.
    """
    size = size or max(1, -(-len(values) // at_most))
    count = len(values) // size
    means: Floats = values[len(values) - count * size :].reshape(count, size).mean(axis=1)
    return means


def _warmup(steps: Floats, workers: int) -> int:
    clipped = _clipped(steps, steps[len(steps) // 2 :])
    is_extreme = clipped != steps
    extreme = int(np.argmin(is_extreme)) if not is_extreme.all() else len(steps)
    # A batch has whole rounds of the workers, unless that leaves too few batches.
    rounds = -(-len(steps) // (_MSER_BATCHES * workers))
    size = max(1, min(rounds * workers, len(steps) // _MIN_MSER_BATCHES))
    means = batch_means(clipped, _MSER_BATCHES, size)
    cuts = range(len(means) // 2 + 1)
    cut = int(np.argmin([means[cut:].var() / (len(means) - cut) for cut in cuts]))
    mser = 0
    if cut:
        head, rest = means[:cut], means[cut:]
        error = float(rest.std(ddof=1)) * math.sqrt(1 / len(head) + 1 / len(rest))
        if abs(float(head.mean() - rest.mean())) > _MIN_DIFFERENCE * error:
            mser = len(steps) - len(rest) * size
    return min(max(extreme, mser), len(steps) // 2)


def _clipped(values: Floats, reference: Floats) -> Floats:
    low, high = np.quantile(reference, _TYPICAL_QUANTILES)
    return np.clip(values, low, high)


def trend(means: Floats) -> tuple[float, float]:
    """Return the Mann-Kendall z score (absolute) and Sen's slope of the logarithms as a relative
    change from the first to the last value; it is 0 if a value is not positive."""
    count = len(means)
    first, later = np.triu_indices(count, 1)
    change = means[later] - means[first]
    statistic = abs(float(np.sign(change).sum()))
    deviation = math.sqrt(count * (count - 1) * (2 * count + 5) / 18)
    drift = 0.0
    if means.min() > 0:
        growth = np.log(means[later] / means[first]) / (later - first)
        drift = math.expm1(float(np.median(growth)) * (count - 1))
    return max(0.0, statistic - 1) / deviation, drift
