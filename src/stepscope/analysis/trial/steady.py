"""Where the warm-up of a training ends, and whether what follows is steady.

The cut is MSER's (White 1997): of all places in the first half of the steps, the one after which
the mean is known best, that is with the smallest variance / count. It asks for no threshold, and
does not care whether the beginning is slow (compilation, autotuning, memory that grows) or fast
(the batches that workers had ready before the first step). Four things are added:

- Steps are averaged in batches first, of whole rounds of the loader's workers: with four of them
  three batches come at once and the fourth is waited for, which is no warm-up.
- A single slow step (the border of an epoch, a checkpoint) would draw the cut to just behind it. So
  steps are first clipped to what is usual in the second half. They are clipped for the search only:
  periodic slow steps belong to the steady state, and count in the throughput.
- What clipping hides, a few extreme steps at the very beginning, is cut by itself.
- A beginning that does not differ from the rest is not cut: chance also makes minima.

The rest is steady unless it drifts: unless Mann and Kendall's test, which asks for no distribution,
is sure of a trend, and Sen's slope says that it is large enough to matter.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

_USUAL = (0.05, 0.95)
_MSER_BATCHES = 40
_LEAST_MSER_BATCHES = 5
_DIFFERS = 3.0  # standard errors between the mean of a warm-up and that of the rest
_DRIFT_BATCHES = 30
LEAST_JUDGED = 7  # with fewer steps no trend, however clear, could be told from chance
_SURE = 2.58
"""As many standard deviations of Mann and Kendall's count: chance does it in 1 of 100 cases."""
MUCH = 0.05
"""A step time that changes by less than this from the first to the last is steady enough."""


@dataclass(frozen=True)
class Steady:
    """How many steps to cut, and whether the rest is steady, or why not."""

    warmup: int
    steady: bool
    reason: str = ""
    drift: float | None = None
    """By how much of itself the step time changes from the first steady step to the last; None
    where that cannot be told."""


def find_steady(durations: npt.ArrayLike, workers: int = 0) -> Steady:
    """The warm-up and the steadiness of steps of these lengths, in any unit of time."""
    steps = np.asarray(durations, np.float64)
    warmup = _warmup(steps, max(1, workers)) if len(steps) > 1 else 0
    rest = steps[warmup:]
    if len(rest) < LEAST_JUDGED:
        many = f"{len(rest)} steps are" if len(rest) != 1 else "one step is"
        return Steady(warmup, False, f"{many} too few to judge whether it is steady")
    sureness, drift = trend(batch_means(_clipped(rest, rest), _DRIFT_BATCHES))
    if sureness < _SURE or abs(drift) < MUCH:
        return Steady(warmup, True, drift=drift)
    change = f"{'rises' if drift > 0 else 'falls'} by {abs(drift) * 100:.0f} %"
    reason = f"the step time {change} over the measured steps"
    if warmup >= len(steps) // 2 and drift < 0:
        reason = f"still warming up after half of the steps: {reason}"
    return Steady(warmup, False, reason, drift)


def drift_of(durations: Floats) -> float | None:
    """By how much of itself the step time changes from the first of these steps to the last; None
    where chance could do it, or where there are too few."""
    if len(durations) < LEAST_JUDGED:
        return None
    sureness, drift = trend(batch_means(_clipped(durations, durations), _DRIFT_BATCHES))
    return drift if sureness >= _SURE else None


def batch_means(values: Floats, at_most: int, size: int | None = None) -> Floats:
    """Means of values that follow each other, by default as few together as make `at_most` means;
    the first ones are left out where they fill no batch."""
    size = size or max(1, -(-len(values) // at_most))
    count = len(values) // size
    means: Floats = values[len(values) - count * size :].reshape(count, size).mean(axis=1)
    return means


def _warmup(steps: Floats, workers: int) -> int:
    usual = _clipped(steps, steps[len(steps) // 2 :])
    unusual = usual != steps
    extreme = int(np.argmin(unusual)) if not unusual.all() else len(steps)
    # Steps in a batch: whole rounds of the workers, as long as that leaves batches enough.
    rounds = -(-len(steps) // (_MSER_BATCHES * workers))
    size = max(1, min(rounds * workers, len(steps) // _LEAST_MSER_BATCHES))
    means = batch_means(usual, _MSER_BATCHES, size)
    cuts = range(len(means) // 2 + 1)
    cut = int(np.argmin([means[cut:].var() / (len(means) - cut) for cut in cuts]))
    mser = 0
    if cut:
        head, rest = means[:cut], means[cut:]
        error = float(rest.std(ddof=1)) * math.sqrt(1 / len(head) + 1 / len(rest))
        if abs(float(head.mean() - rest.mean())) > _DIFFERS * error:
            mser = len(steps) - len(rest) * size
    return min(max(extreme, mser), len(steps) // 2)


def _clipped(values: Floats, usual: Floats) -> Floats:
    low, high = np.quantile(usual, _USUAL)
    return np.clip(values, low, high)


def trend(means: Floats) -> tuple[float, float]:
    """How sure a trend is, in standard deviations, and how large it is over all of the values."""
    count = len(means)
    first, later = np.triu_indices(count, 1)
    change = means[later] - means[first]
    tendency = abs(float(np.sign(change).sum()))
    deviation = math.sqrt(count * (count - 1) * (2 * count + 5) / 18)
    slope = float(np.median(change / (later - first)))
    usual = float(np.median(means))
    return max(0.0, tendency - 1) / deviation, slope * (count - 1) / usual if usual else 0.0
