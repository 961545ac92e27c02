"""How much trials of the same configuration differ: by repeats, by what a model leaves over, or by
what was learnt before.

Repeats are asked first. Where the model leaves far more over than repeats scatter (three factors
that act together), repeats still count: what is told of a factor is its mean over this grid, and
how sure that is depends on how well the grid was measured, not on how smooth it is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from stepscope.analysis.study.quantiles import t_quantile
from stepscope.analysis.study.records import Estimate, Noise, Scale
from stepscope.analysis.throughput import CONFIDENCE, LEARNT_FROM, Spread, with_evidence

_ROUNDING = 1e-9
"""Below it two numbers are the same, however exact their repeats were."""


@dataclass(frozen=True)
class Scatter:
    """A sum of squared deviations, and of how many that are free."""

    squares: float
    dof: float

    def __add__(self, other: Scatter) -> Scatter:
        return Scatter(self.squares + other.squares, self.dof + other.dof)

    @property
    def sigma(self) -> float:
        return math.sqrt(self.squares / self.dof)


def noise_of(
    repeats: Scatter, leftovers: Sequence[Scatter], known: Spread | None, trials: int, unit: float
) -> Noise:
    """`leftovers`: of models, the one with most terms first: its leftover is least of all due to
    what it does not know of. `unit` is how large values are, for what rounding does to them."""
    noise = _judged(repeats, leftovers, known, trials)
    if noise.source == "none":
        return noise
    return Noise(max(noise.sigma, _ROUNDING * unit), noise.dof, noise.source)


def _judged(
    repeats: Scatter, leftovers: Sequence[Scatter], known: Spread | None, trials: int
) -> Noise:
    if repeats.dof >= LEARNT_FROM:
        return Noise(repeats.sigma, repeats.dof, "repeats")
    if repeats.dof and known:
        spread = with_evidence(known, repeats.squares, repeats.dof, trials)
        return Noise(spread.cv, spread.dof, "repeats")
    for leftover in leftovers:
        both = repeats + leftover
        if both.dof >= LEARNT_FROM:
            return Noise(both.sigma, both.dof, "residuals")
    if repeats.dof:
        return Noise(repeats.sigma, repeats.dof, "repeats")
    if known:
        return Noise(known.cv, known.dof, "known")
    return Noise(0.0, 0.0, "none")


def estimate(value: float, error: float, noise: Noise, scale: Scale, looked: int = 1) -> Estimate:
    """A contrast with its interval; `error` is in units of the noise.

    The largest of several that were looked at is large by chance too: its interval is as wide as
    it takes for all of them to hold at once (Bonferroni).
    """
    half = half_width(error, noise, looked)
    low, high = value - half, value + half
    if scale == "ratio":
        return Estimate(raised(value), raised(low), raised(high))
    return Estimate(value, low, high)


def half_width(error: float, noise: Noise, looked: int = 1) -> float:
    if noise.source == "none":
        return math.inf
    tail = (1 - CONFIDENCE) / 2 / max(looked, 1)
    return t_quantile(1 - tail, noise.dof) * noise.sigma * error


def is_told(size: Estimate, scale: Scale) -> bool:
    """Whether it is not no effect."""
    nothing = 1.0 if scale == "ratio" else 0.0
    return not size.low <= nothing <= size.high


def raised(logarithm: float) -> float:
    """Its exponential, also where that is more than a number can be."""
    try:
        return math.exp(logarithm)
    except OverflowError:
        return math.inf
