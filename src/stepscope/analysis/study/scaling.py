"""Throughput over CPUs, workers, ranks …, and where more of them stop paying."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from stepscope.analysis.study.effects import level_means
from stepscope.analysis.study.fitted import Fitted, Margin, Throughputs
from stepscope.analysis.study.interactions import interactions
from stepscope.analysis.study.noise import estimate, raised
from stepscope.analysis.study.records import (
    Estimate,
    Factor,
    Fall,
    Knee,
    Level,
    Noise,
    NoKnee,
    ScalingCurve,
)

WORTH = 0.05
"""A gain that pays. Less is what trials of the same differ by on a quiet machine, and no reason to
take up more of it."""
SURELY_LITTLE = 0.10
"""What the gain beyond a knee must surely be below, for the knee to be sure."""


def curves(trials: Throughputs) -> tuple[ScalingCurve, ...]:
    """Of every factor with an order: over all trials, for each model (or machine), and for each
    level of the factor that it depends on most."""
    if trials.all is None:
        return ()
    grouping, factors = trials.grouping, {each.name: each for each in trials.all.cells.factors}
    pairs = [{each.first, each.second} for each in interactions(trials.all) if each.is_significant]
    found = []
    for factor in factors.values():
        if not factor.is_numeric:
            continue
        found.append(_curve(trials.all, factor.name, {}))
        # Beside the one that trials are grouped by, the factor that changes its effect most.
        others = [factors[name] for pair in pairs if factor.name in pair for name in pair]
        most = [other for other in others if other not in (factor, grouping)][:1]
        groups = [grouping] if grouping and grouping != factor else []
        for other in (*groups, *most):
            for level in other.levels:
                if fit := trials.of(other.name, level):
                    found.append(_curve(fit, factor.name, {other.name: level}))
    return tuple(each for each in found if each is not None)


def _curve(fit: Fitted, name: str, group: Mapping[str, Level]) -> ScalingCurve | None:
    columns = [column for column, each in enumerate(fit.cells.factors) if each.name == name]
    margin = fit.margin(columns[0]) if columns else None
    if margin is None:
        return None
    levels = margin.factor.levels
    order = sorted(range(len(levels)), key=lambda at: levels[at])  # type: ignore[arg-type,return-value]
    margin = replace(
        margin,
        factor=Factor(name, tuple(levels[at] for at in order)),
        means=margin.means[order],
        covariance=margin.covariance[np.ix_(order, order)],
        trials=tuple(margin.trials[at] for at in order),
    )
    points = level_means(margin, fit.noise, fit.response.scale)
    shape = _Shape(margin, fit.noise).knee()
    if isinstance(shape, Knee):
        return ScalingCurve(name, group, points, shape)
    return ScalingCurve(name, group, points, None, shape)


class _Shape:
    """A curve by its levels in ascending order, which `at` counts."""

    def __init__(self, margin: Margin, noise: Noise) -> None:
        self._margin, self._noise = margin, noise
        self._levels = margin.factor.levels
        self._last = len(margin.means) - 1

    def knee(self) -> Knee | NoKnee:
        means = self._margin.means
        if self._last < 2:
            return NoKnee("two_levels", self._levels[0], self._levels[1], self._gain(1, 0))
        # A gain that chance explains is none: of levels on a plateau one is always highest.
        at = next(
            at
            for at in range(self._last + 1)
            if not any(self._pays(beyond, at) for beyond in range(at + 1, self._last + 1))
        )
        if at == self._last:
            before = self._levels[at - 1]
            return NoKnee("gaining", before, self._levels[at], self._gain(at, at - 1))
        best = at + 1 + int(np.argmax(means[at + 1 :]))
        gain = self._gain(best, at, looked=self._last - at)
        if at > 0:
            before_it = self._gain(at, at - 1, looked=self._last)  # it was picked among them
            less_is_worse = before_it.value > 1 + WORTH and before_it.low > 1
            is_sure = less_is_worse and gain.high < 1 + SURELY_LITTLE
            level = float(self._levels[at])  # type: ignore[arg-type]
            return Knee(level, self._levels[best], gain, is_sure, self._fall())
        if gain.value > 1 + WORTH:
            return NoKnee("unclear", self._levels[0], self._levels[best], gain)
        highest, lowest = int(np.argmax(means)), int(np.argmin(means))
        between = self._gain(highest, lowest)
        if between.value - 1 <= WORTH:
            return NoKnee("flat", self._levels[lowest], self._levels[highest], between)
        return NoKnee("never_pays", self._levels[0], self._levels[lowest], self._gain(lowest, 0))

    def _pays(self, beyond: int, at: int) -> bool:
        gain = self._gain(beyond, at, looked=self._last - at)
        return gain.value > 1 + WORTH and (gain.low > 1 or self._noise.source == "none")

    def _fall(self) -> Fall | None:
        means = self._margin.means
        peak = int(np.argmax(means))
        worst = peak + int(np.argmin(means[peak:]))
        loss = 1 - raised(float(means[worst] - means[peak]))
        told = self._gain(peak, worst, looked=max(1, self._last - peak))
        if loss <= WORTH or (told.low <= 1 and self._noise.source != "none"):
            return None
        return Fall(self._levels[peak], self._levels[worst], loss)

    def _gain(self, one: int, other: int, looked: int = 1) -> Estimate:
        """Of one level over another; `looked` is among how many it was picked."""
        value = float(self._margin.means[one] - self._margin.means[other])
        return estimate(value, self._margin.error(one, other), self._noise, "ratio", looked)
