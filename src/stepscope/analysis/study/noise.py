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
from typing import Literal

from stepscope.analysis.statistics import t_quantile
from stepscope.analysis.study.records import Estimate, Noise, Scale
from stepscope.analysis.trial.throughput import CONFIDENCE, LEARNT_FROM, with_evidence
from stepscope.records.trial import ProcessNoise

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
    repeats: Scatter,
    leftovers: Sequence[Scatter],
    known: ProcessNoise | None,
    trials: int,
    unit: float,
) -> Noise:
    """`leftovers` are of models, the one with most terms first: it leaves least over that it does
    not know of. `unit` is how large values are, for what rounding does to them."""

    def of(sigma: float, dof: float, source: Literal["repeats", "residuals", "known"]) -> Noise:
        return Noise(max(sigma, _ROUNDING * unit), dof, source)

    if repeats.dof >= LEARNT_FROM:
        return of(repeats.sigma, repeats.dof, "repeats")
    if repeats.dof and known:
        spread = with_evidence(known, repeats.squares, repeats.dof, trials)
        return of(spread.cv, spread.dof, "repeats")
    for leftover in leftovers:
        both = repeats + leftover
        if both.dof >= LEARNT_FROM:
            return of(both.sigma, both.dof, "residuals")
    if repeats.dof:
        return of(repeats.sigma, repeats.dof, "repeats")
    return of(known.cv, known.dof, "known") if known else Noise(0.0, 0.0, "none")


def estimate(value: float, error: float, noise: Noise, scale: Scale, looked: int = 1) -> Estimate:
    """A contrast with its interval; `error` is in units of the noise.

    The largest of several that were looked at is large by chance too: its interval is as wide as
    it takes for all of them to hold at once (Bonferroni).
    """
    half = math.inf
    if noise.source != "none":
        tail = (1 - CONFIDENCE) / 2 / max(looked, 1)
        half = t_quantile(1 - tail, noise.dof) * noise.sigma * error
    low, high = value - half, value + half
    if scale == "ratio":
        return Estimate(raised(value), raised(low), raised(high))
    return Estimate(value, low, high)


def is_significant(size: Estimate, scale: Scale) -> bool:
    """Whether it is not no effect."""
    nothing = 1.0 if scale == "ratio" else 0.0
    return not size.low <= nothing <= size.high


def raised(logarithm: float) -> float:
    """Its exponential, also where that is more than a number can be."""
    try:
        return math.exp(logarithm)
    except OverflowError:
        return math.inf
