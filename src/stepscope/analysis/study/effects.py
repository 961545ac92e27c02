"""What factors do to a response: how much each changes it, and whether that depends on another.

A linear model of logarithms (ratios) or values (differences), by least squares: see `model`. What
is told of a level is the mean over the grid of all others, and what the observed configurations
do not tell is left out, with a remark.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from stepscope.analysis.study.fitted import Fitted, Margin, fitted
from stepscope.analysis.study.interactions import interactions
from stepscope.analysis.study.noise import estimate, is_told
from stepscope.analysis.study.records import (
    Effects,
    Factor,
    LevelMean,
    MainEffect,
    Noise,
    Observation,
    Response,
    Scale,
)
from stepscope.analysis.study.table import Table, table_of
from stepscope.analysis.study.words import Text, listed, plain
from stepscope.analysis.throughput import Spread


def effects(
    observations: Sequence[Observation],
    factors: Sequence[Factor],
    response: Response,
    known: Spread | None = None,
    text: Text = plain,
) -> Effects | None:
    """All that factors do to one response; None if fewer than two trials have it.

    `known` is how much trials of the same usually differ on this machine, as a part of the
    response: of throughput only.
    """
    table = table_of(observations, factors)
    told = all_effects(table, [response], {response.key: known} if known else {}, text)
    return told[0] if told else None


def all_effects(
    table: Table, responses: Sequence[Response], known: Mapping[str, Spread], text: Text = plain
) -> tuple[Effects, ...]:
    """Of every response that two trials have."""
    return tuple(effects_of(each, text) for each in fitted(table, responses, known).values())


def effects_of(fit: Fitted, text: Text) -> Effects:
    main, untold = main_effects(fit, text)
    return Effects(
        response=fit.response,
        trials=fit.trials,
        configurations=len(fit.means),
        noise=fit.noise,
        main=main,
        interactions=interactions(fit, text),
        explained=fit.explained,
        remarks=(*fit.remarks, *_about_noise(fit), *_about_pairs(fit), *untold),
    )


def main_effects(fit: Fitted, text: Text = plain) -> tuple[tuple[MainEffect, ...], tuple[str, ...]]:
    """Of every factor that is told, the largest first; and what is not told."""
    told, remarks = [], []
    for column, factor in enumerate(fit.cells.factors):
        margin = fit.margin(column)
        if margin is None:
            remarks.append(
                f"the effect of {factor.name} cannot be told: it changed only together with others"
            )
            continue
        if margin.untold:
            levels = listed([text(factor.name, level) for level in margin.untold])
            remarks.append(
                f"{factor.name} {levels} cannot be compared with its other levels: more changed"
                " with it"
            )
        told.append(_main_effect(margin, fit.noise, fit.response.scale))
    return tuple(sorted(told, key=lambda each: -each.size.value)), tuple(remarks)


def _main_effect(margin: Margin, noise: Noise, scale: Scale) -> MainEffect:
    highest, lowest = int(np.argmax(margin.means)), int(np.argmin(margin.means))
    levels = len(margin.means)
    size = estimate(
        float(margin.means[highest] - margin.means[lowest]),
        margin.error(highest, lowest),
        noise,
        scale,
        looked=levels * (levels - 1) // 2,
    )
    return MainEffect(
        margin.factor.name,
        level_means(margin, noise, scale),
        margin.factor.levels[highest],
        margin.factor.levels[lowest],
        size,
        is_told(size, scale),
    )


def level_means(margin: Margin, noise: Noise, scale: Scale) -> tuple[LevelMean, ...]:
    told = []
    for at, level in enumerate(margin.factor.levels):
        error = math.sqrt(max(0.0, float(margin.covariance[at, at])))
        mean = estimate(float(margin.means[at]), error, noise, scale)
        told.append(LevelMean(level, mean.value, mean.low, mean.high, margin.trials[at]))
    return tuple(told)


def _about_noise(fit: Fitted) -> tuple[str, ...]:
    if fit.noise.source == "none":
        return (
            "how much trials differ by themselves is not known: repeats would tell what is an"
            " effect and what is chance",
        )
    if fit.noise.source == "residuals":
        return (
            "there are few repeats: all that the model does not explain is taken for chance,"
            " which makes intervals rather too wide",
        )
    return ()


def _about_pairs(fit: Fitted) -> tuple[str, ...]:
    """What had to be assumed of how factors act together."""
    cells, model = fit.cells, fit.model
    names = [factor.name for factor in cells.factors]
    possible = len(names) * (len(names) - 1) // 2
    untold = possible - len(model.pairs) + len(model.untold)
    if possible > 1 and untold == possible:
        return (
            f"the {len(fit.means)} configurations observed do not tell how factors depend on each"
            " other: each is told as if it did not",
        )
    remarks = []
    for one, other in model.untold:
        both = f"{names[one]} and {names[other]}"
        remarks.append(
            f"not all combinations of {both} were observed: the effect of each is told as if it"
            " did not depend on the other"
            if (one, other) in _missing(fit)
            else f"whether {both} depend on each other cannot be told by these configurations:"
            " each is told as if it did not"
        )
    if len(model.pairs) < possible:
        remarks.append("there are too many levels to tell how all factors depend on each other")
    return tuple(remarks)


def _missing(fit: Fitted) -> list[tuple[int, int]]:
    """Pairs of factors of which some combinations were not observed."""
    cells, sizes = fit.cells, fit.cells.sizes()
    return [
        (one, other)
        for one, other in fit.model.untold
        if len(np.unique(cells.codes[:, one] * sizes[other] + cells.codes[:, other]))
        < sizes[one] * sizes[other]
    ]
