"""Main effects and interactions of factors.

A linear model of logarithms (ratios) or values (differences) is fitted by least squares: see
`model`. The marginal mean of a level is the mean over the grid of all other factors. What is not
estimable from the observed configurations is left out, with a remark.
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np

from stepscope.analysis.study.fitted import Fitted, Margin, ThroughputFits
from stepscope.analysis.study.interactions import interactions
from stepscope.analysis.study.noise import estimate, is_significant
from stepscope.analysis.study.records import (
    Effects,
    Level,
    LevelMean,
    MainEffect,
    Noise,
    Remark,
    Scale,
    Sensitivity,
)

_NOISE_REMARKS = {"none": [Remark("noise_unknown")], "residuals": [Remark("noise_from_residuals")]}


def effects_of(fit: Fitted) -> Effects:
    main, confounded = main_effects(fit)
    return Effects(
        response=fit.response,
        trials=fit.trials,
        configurations=len(fit.means),
        noise=fit.noise,
        main=main,
        interactions=interactions(fit),
        explained_variance_share=fit.explained_variance_share,
        remarks=(
            *fit.remarks,
            *_NOISE_REMARKS.get(fit.noise.source, ()),
            *_interaction_remarks(fit),
            *confounded,
        ),
    )


def main_effects(fit: Fitted) -> tuple[tuple[MainEffect, ...], tuple[Remark, ...]]:
    """Return the effects of all estimable factors, the largest first, and remarks on the rest."""
    effects, remarks = [], []
    for column, factor in enumerate(fit.cells.factors):
        margin = fit.margin(column)
        if margin is None:
            remarks.append(Remark("confounded_factor", (factor.name,)))
            continue
        if margin.not_estimable:
            remarks.append(Remark("confounded_levels", (factor.name,), margin.not_estimable))
        levels, scale = margin.factor.levels, fit.response.scale
        highest, lowest = int(np.argmax(margin.means)), int(np.argmin(margin.means))
        difference = float(margin.means[highest] - margin.means[lowest])
        error, pairs = margin.error(highest, lowest), len(levels) * (len(levels) - 1) // 2
        size = estimate(difference, error, fit.noise, scale, comparisons=pairs)
        effects.append(
            MainEffect(
                factor=factor.name,
                levels=level_means(margin, fit.noise, scale),
                highest_level=levels[highest],
                lowest_level=levels[lowest],
                size=size,
                is_significant=is_significant(size, scale),
            )
        )
    return tuple(sorted(effects, key=lambda each: -each.size.value)), tuple(remarks)


def level_means(margin: Margin, noise: Noise, scale: Scale) -> tuple[LevelMean, ...]:
    means = []
    for at, level in enumerate(margin.factor.levels):
        error = math.sqrt(max(0.0, float(margin.covariance[at, at])))
        mean = estimate(float(margin.means[at]), error, noise, scale)
        means.append(LevelMean(level, mean.value, mean.low, mean.high, margin.trials[at]))
    return tuple(means)


def _interaction_remarks(fit: Fitted) -> tuple[Remark, ...]:
    """Return remarks on the interactions that are not estimable."""
    cells, model, sizes = fit.cells, fit.model, fit.cells.sizes()
    names = [factor.name for factor in cells.factors]
    possible = len(names) * (len(names) - 1) // 2
    if possible > 1 and len(model.pairs) == len(model.not_estimable):
        return (Remark("interactions_not_estimable", count=len(fit.means)),)
    remarks = []
    for one, other in model.not_estimable:
        observed = len(np.unique(cells.codes[:, one] * sizes[other] + cells.codes[:, other]))
        is_complete = observed == sizes[one] * sizes[other]
        kind: Literal["interaction_confounded", "interaction_incomplete"]
        kind = "interaction_confounded" if is_complete else "interaction_incomplete"
        remarks.append(Remark(kind, (names[one], names[other])))
    if len(model.pairs) < possible:
        remarks.append(Remark("too_many_interactions"))
    return tuple(remarks)


def sensitivities(fits: ThroughputFits) -> tuple[Sensitivity, ...]:
    """Return the main effects on throughput: for all trials, then for each model (or machine)."""
    if fits.all is None:
        return ()
    grouping = fits.grouping
    groups: list[tuple[dict[str, Level], Fitted | None]] = [({}, fits.all)]
    if grouping:
        name = grouping.name
        groups += [({name: level}, fits.of(name, level)) for level in grouping.levels]
    return tuple(Sensitivity(group, main_effects(fit)[0]) for group, fit in groups if fit)
