"""The noise between identical trials: from repeats, from residuals, or from a prior.

Repeats take precedence, even if the residuals of the model are much larger (for example because
three factors interact): a marginal mean is the mean over this grid, and its precision depends on
how precisely the grid was measured, not on how well the model fits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from stepscope.analysis.statistics import t_quantile
from stepscope.analysis.study.records import Estimate, Noise, Scale
from stepscope.analysis.trial.throughput import CONFIDENCE, MIN_NOISE_DOF, with_evidence
from stepscope.records.trial import ProcessNoise

_ROUNDING = 1e-9
"""Relative differences below it are rounding errors, however well the repeats agree."""


@dataclass(frozen=True)
class Scatter:
    """A sum of squared deviations with its degrees of freedom."""

    squares: float
    dof: float

    def __add__(self, other: Scatter) -> Scatter:
        return Scatter(self.squares + other.squares, self.dof + other.dof)

    @property
    def sigma(self) -> float:
        return math.sqrt(self.squares / self.dof)


def noise_of(
    repeats: Scatter,
    residuals: Sequence[Scatter],
    prior: ProcessNoise | None,
    trials: int,
    unit: float,
) -> Noise:
    """Return the noise from the best available source.

    `residuals` are those of several models, the one with the most terms first, because it is the
    least biased. `unit` is the magnitude of the values, for rounding errors.
    """

    def noise(sigma: float, dof: float, source: Literal["repeats", "residuals", "prior"]) -> Noise:
        return Noise(max(sigma, _ROUNDING * unit), dof, source)

    if repeats.dof >= MIN_NOISE_DOF:
        return noise(repeats.sigma, repeats.dof, "repeats")
    if repeats.dof and prior:
        updated = with_evidence(prior, repeats.squares, repeats.dof, trials)
        return noise(updated.cv, updated.dof, "repeats")
    for each in residuals:
        both = repeats + each
        if both.dof >= MIN_NOISE_DOF:
            return noise(both.sigma, both.dof, "residuals")
    if repeats.dof:
        return noise(repeats.sigma, repeats.dof, "repeats")
    return noise(prior.cv, prior.dof, "prior") if prior else Noise(0.0, 0.0, "none")


def estimate(
    value: float, error: float, noise: Noise, scale: Scale, comparisons: int = 1
) -> Estimate:
    """Return a contrast with its confidence interval; `error` is in units of the noise.

    A contrast that was selected as the largest of several `comparisons` is large partly by chance,
    so its interval is simultaneous for all of them (Bonferroni).
    """
    half = math.inf
    if noise.source != "none":
        tail = (1 - CONFIDENCE) / 2 / max(comparisons, 1)
        half = t_quantile(1 - tail, noise.dof) * noise.sigma * error
    low, high = value - half, value + half
    if scale == "ratio":
        return Estimate(exp(value), exp(low), exp(high))
    return Estimate(value, low, high)


def is_significant(size: Estimate, scale: Scale) -> bool:
    """Whether the interval excludes "no effect"."""
    no_effect = 1.0 if scale == "ratio" else 0.0
    return not size.low <= no_effect <= size.high


def exp(logarithm: float) -> float:
    """Return the exponential, or infinity where it overflows."""
    try:
        return math.exp(logarithm)
    except OverflowError:
        return math.inf
