"""Scaling curves: throughput over numeric factors such as cpus or workers, and their knees.

A curve follows the same test as the main effect of its factor: if that is not significant, the
curve has no knee and no gain or loss is claimed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

import numpy as np

from stepscope.analysis.study.effects import level_means
from stepscope.analysis.study.fitted import Fitted, Margin, ThroughputFits
from stepscope.analysis.study.interactions import interactions
from stepscope.analysis.study.noise import estimate
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

MIN_GAIN = 0.05
"""About the noise of an idle machine: a smaller gain does not justify more resources."""
CERTAIN_GAIN = 0.10
"""A knee is certain if the interval of the gain beyond it stays below this."""


def curves(fits: ThroughputFits) -> tuple[ScalingCurve, ...]:
    """Return the curves of every numeric factor.

    One is over all trials, one for each model (or machine), and one for each level of the factor
    with the largest significant interaction.
    """
    if fits.all is None:
        return ()
    grouping, factors = fits.grouping, {each.name: each for each in fits.all.cells.factors}
    pairs = [{each.first, each.second} for each in interactions(fits.all) if each.is_significant]
    result = []
    for factor in factors.values():
        if not factor.is_numeric:
            continue
        result.append(_curve(fits.all, factor.name, {}))
        # Interactions are sorted: the first one that is not with the grouping is the largest.
        partners = [factors[name] for pair in pairs if factor.name in pair for name in pair]
        largest = [other for other in partners if other not in (factor, grouping)][:1]
        groups = [grouping] if grouping and grouping != factor else []
        for other in (*groups, *largest):
            for level in other.levels:
                if fit := fits.of(other.name, level):
                    result.append(_curve(fit, factor.name, {other.name: level}))
    return tuple(each for each in result if each is not None)


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
    """The shape of a curve; levels are in ascending order and identified by their index."""

    def __init__(self, margin: Margin, noise: Noise) -> None:
        self._margin, self._noise = margin, noise
        self._levels = margin.factor.levels
        self._last = len(margin.means) - 1

    def knee(self) -> Knee | NoKnee:
        means, last = self._margin.means, self._last
        if last < 2:
            return NoKnee("two_levels", self._levels[0], self._levels[1], self._gain(1, 0))
        highest, lowest = int(np.argmax(means)), int(np.argmin(means))
        pairs = last * (last + 1) // 2
        effect = self._gain(highest, lowest, pairs)
        if not self._exceeds_noise(effect):
            return NoKnee("not_significant", self._levels[lowest], self._levels[highest], effect)
        if effect.value - 1 <= MIN_GAIN:
            return NoKnee("flat", self._levels[lowest], self._levels[highest], effect)
        # Only significant gains count: one of the levels on a plateau is always the highest.
        at = next(
            at
            for at in range(last + 1)
            if not any(self._is_worth(beyond, at) for beyond in range(at + 1, last + 1))
        )
        if at == last:
            return NoKnee("gaining", self._levels[at - 1], self._levels[at], self._gain(at, at - 1))
        best = at + 1 + int(np.argmax(means[at + 1 :]))
        gain = self._gain(best, at, comparisons=last - at)
        if at > 0:
            # Simultaneous for all levels, because the knee was selected among them.
            step = self._gain(at, at - 1, comparisons=last)
            less_is_slower = step.value > 1 + MIN_GAIN and step.low > 1
            is_certain = less_is_slower and gain.high < 1 + CERTAIN_GAIN
            level = float(self._levels[at])  # type: ignore[arg-type]
            return Knee(level, self._levels[best], gain, is_certain, self._fall())
        if lowest > highest:
            loss = self._gain(lowest, highest, pairs)
            return NoKnee("slower", self._levels[highest], self._levels[lowest], loss)
        kind: Literal["unclear", "small_gain"]
        kind = "unclear" if gain.value > 1 + MIN_GAIN else "small_gain"
        return NoKnee(kind, self._levels[0], self._levels[best], gain)

    def _is_worth(self, beyond: int, at: int) -> bool:
        gain = self._gain(beyond, at, comparisons=self._last - at)
        return gain.value > 1 + MIN_GAIN and self._exceeds_noise(gain)

    def _exceeds_noise(self, gain: Estimate) -> bool:
        """Whether a gain is significant; without any estimate of the noise, all gains count."""
        return gain.low > 1 or self._noise.source == "none"

    def _fall(self) -> Fall | None:
        means = self._margin.means
        peak = int(np.argmax(means))
        worst = peak + int(np.argmin(means[peak:]))
        comparisons = max(1, self._last - peak)
        loss = self._gain(worst, peak, comparisons)
        if 1 - loss.value <= MIN_GAIN or not self._exceeds_noise(
            self._gain(peak, worst, comparisons)
        ):
            return None
        return Fall(self._levels[peak], self._levels[worst], loss)

    def _gain(self, one: int, other: int, comparisons: int = 1) -> Estimate:
        """Return the throughput at one level divided by that at another."""
        value = float(self._margin.means[one] - self._margin.means[other])
        return estimate(value, self._margin.error(one, other), self._noise, "ratio", comparisons)
