"""What factors do to a response: how much each changes it, and whether that depends on another.

A linear model of logarithms (ratios) or values (differences), by least squares: see `model`. What
is told of a level is the mean over the grid of all others, and what the observed configurations
do not tell is left out, with a remark.
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np

from stepscope.analysis.study.fitted import Fitted, Margin, Throughputs
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

_ABOUT_NOISE = {"none": [Remark("noise_unknown")], "residuals": [Remark("noise_from_residuals")]}


def effects_of(fit: Fitted) -> Effects:
    main, confounded = main_effects(fit)
    about_noise = _ABOUT_NOISE.get(fit.noise.source, ())
    return Effects(
        response=fit.response,
        trials=fit.trials,
        configurations=len(fit.means),
        noise=fit.noise,
        main=main,
        interactions=interactions(fit),
        explained=fit.explained,
        remarks=(*fit.remarks, *about_noise, *_about_pairs(fit), *confounded),
    )


def main_effects(fit: Fitted) -> tuple[tuple[MainEffect, ...], tuple[Remark, ...]]:
    """Of every factor that is told, the largest first; and what is not told."""
    told, remarks = [], []
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
        size = estimate(difference, error, fit.noise, scale, looked=pairs)
        means = level_means(margin, fit.noise, scale)
        told.append(
            MainEffect(
                factor=factor.name,
                levels=means,
                highest=levels[highest],
                lowest=levels[lowest],
                size=size,
                is_significant=is_significant(size, scale),
            )
        )
    return tuple(sorted(told, key=lambda each: -each.size.value)), tuple(remarks)


def level_means(margin: Margin, noise: Noise, scale: Scale) -> tuple[LevelMean, ...]:
    told = []
    for at, level in enumerate(margin.factor.levels):
        error = math.sqrt(max(0.0, float(margin.covariance[at, at])))
        mean = estimate(float(margin.means[at]), error, noise, scale)
        told.append(LevelMean(level, mean.value, mean.low, mean.high, margin.trials[at]))
    return tuple(told)


def _about_pairs(fit: Fitted) -> tuple[Remark, ...]:
    """What had to be assumed of how factors act together."""
    cells, model, sizes = fit.cells, fit.model, fit.cells.sizes()
    names = [factor.name for factor in cells.factors]
    possible = len(names) * (len(names) - 1) // 2
    if possible > 1 and len(model.pairs) == len(model.not_estimable):
        return (Remark("pairs_unknown", count=len(fit.means)),)
    remarks = []
    for one, other in model.not_estimable:
        seen = len(np.unique(cells.codes[:, one] * sizes[other] + cells.codes[:, other]))
        is_complete = seen == sizes[one] * sizes[other]
        kind: Literal["pair_confounded", "pair_incomplete"]
        kind = "pair_confounded" if is_complete else "pair_incomplete"
        remarks.append(Remark(kind, (names[one], names[other])))
    if len(model.pairs) < possible:
        remarks.append(Remark("too_many_pairs"))
    return tuple(remarks)


def sensitivities(trials: Throughputs) -> tuple[Sensitivity, ...]:
    """Which factors matter for throughput: for all trials, then for each model (or machine)."""
    if trials.all is None:
        return ()
    grouping = trials.grouping
    groups: list[tuple[dict[str, Level], Fitted | None]] = [({}, trials.all)]
    if grouping:
        name = grouping.name
        groups += [({name: level}, trials.of(name, level)) for level in grouping.levels]
    return tuple(Sensitivity(group, main_effects(fit)[0]) for group, fit in groups if fit)
