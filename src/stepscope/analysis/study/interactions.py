"""Two-factor interactions: whether the effect of one factor depends on the level of another."""

from __future__ import annotations

from itertools import combinations
from typing import NamedTuple

import numpy as np

from stepscope.analysis.study.fitted import Fitted
from stepscope.analysis.study.model import ModelFit
from stepscope.analysis.study.noise import estimate, exp, is_significant
from stepscope.analysis.study.records import CellMean, Interaction
from stepscope.analysis.study.table import Cells, Floats, Integers

MAX_LEVELS = 6
"""Levels that are compared pairwise (15 pairs): more comparisons widen every interval."""

Pairs = list[tuple[int, int]]


def interactions(fitted: Fitted) -> tuple[Interaction, ...]:
    """Return the interaction of each pair of factors that is estimable, the largest first."""
    pairs = [_interaction(fitted, *pair) for pair in sorted(fitted.model.pairs)]
    estimable = [each for each in pairs if each is not None]
    return tuple(sorted(estimable, key=lambda each: -each.size.value))


def _interaction(fitted: Fitted, one: int, other: int) -> Interaction | None:
    cells, response = fitted.cells, fitted.response
    fit, means = _cell_means(fitted, one, other)
    contrast = _largest_contrast(fitted, fit or fitted.model.full, one, other)
    if contrast is None:
        return None
    (low, high), stronger, weaker, value, error, comparisons = contrast
    size = estimate(value, error, fitted.noise, response.scale, comparisons)
    first, second = cells.factors[one], cells.factors[other]
    value_of = exp if response.scale == "ratio" else float
    simple_effects = [
        (second.levels[at], value_of(float(means[high, at] - means[low, at])))
        for at in (sorted((stronger, weaker)) if fit else ())
    ]
    counts = _counts(cells, one, other).reshape(means.shape)
    observed = tuple(
        CellMean(first.levels[i], second.levels[j], value_of(float(means[i, j])), int(counts[i, j]))
        for i, j in zip(*np.nonzero(counts), strict=True)
    )
    return Interaction(
        first=first.name,
        second=second.name,
        cells=observed,
        size=size,
        is_significant=is_significant(size, response.scale),
        from_level=first.levels[low],
        to_level=first.levels[high],
        stronger_at=second.levels[stronger],
        weaker_at=second.levels[weaker],
        simple_effects=tuple(simple_effects),
    )


class _Contrast(NamedTuple):
    """The largest interaction contrast of two factors."""

    levels: tuple[int, int]  # of the first factor: from which to which
    stronger: int  # level of the second factor with the larger effect
    weaker: int  # level of the second factor with the smaller effect
    value: float
    error: float  # in units of the noise
    comparisons: int


def _largest_contrast(fitted: Fitted, fit: ModelFit, one: int, other: int) -> _Contrast | None:
    """Compare the ends of numeric factors; if those are not estimable, compare all levels."""
    ends, pairs = [], []
    for column in (one, other):
        factor, trials = fitted.cells.factors[column], fitted.cells.trials(column)
        order = list(range(len(factor.levels)))
        if factor.is_numeric:
            order.sort(key=lambda at: factor.levels[at])  # type: ignore[arg-type,return-value]
        most_trials = sorted(order, key=lambda at: -trials[at])[:MAX_LEVELS]
        pairs.append(list(combinations([at for at in order if at in most_trials], 2)))
        ends.append([(order[0], order[-1])] if factor.is_numeric else pairs[-1])
    return _largest_of(fitted, fit, (one, other), *ends) or (
        _largest_of(fitted, fit, (one, other), *pairs)
    )


def _largest_of(
    fitted: Fitted, fit: ModelFit, factors: tuple[int, int], firsts: Pairs, seconds: Pairs
) -> _Contrast | None:
    model, sizes = fitted.model, fitted.cells.sizes()
    coding = model.rows(*factors).reshape(sizes[factors[0]], sizes[factors[1]], model.width)
    compared = [(first, second) for first in firsts for second in seconds]
    rows = np.array(
        [
            coding[high, here] - coding[low, here] - coding[high, there] + coding[low, there]
            for (low, high), (here, there) in compared
        ]
    )
    estimable = np.flatnonzero(fit.estimable(rows))
    if not len(estimable):
        return None
    values = rows[estimable] @ fit.coefficients(fitted.moments)
    at = int(np.argmax(np.abs(values)))
    error = max(0.0, float(fit.covariance(rows[estimable[at], np.newaxis])[0, 0])) ** 0.5
    pair, (here, there) = compared[int(estimable[at])]
    stronger, weaker = (here, there) if values[at] >= 0 else (there, here)
    return _Contrast(pair, stronger, weaker, abs(float(values[at])), error, len(estimable))


def _cell_means(fitted: Fitted, one: int, other: int) -> tuple[ModelFit | None, Floats]:
    """Return the marginal means of all cells, with the fit in which they are estimable.

    If there is none, they are the raw means of the trials in each cell.
    """
    model, cells = fitted.model, fitted.cells
    shape = cells.sizes()[one], cells.sizes()[other]
    firsts = np.repeat(model.rows(one), shape[1], axis=0)
    seconds = np.tile(model.rows(other), (shape[0], 1))
    rows = model.center() + firsts + seconds + model.rows(one, other)
    counts = _counts(cells, one, other)
    for fit in [model.full] if (one, other) in model.not_estimable else [model.full, model.reduced]:
        if fit.estimable(rows[counts > 0]).all():
            return fit, (rows @ fit.coefficients(fitted.moments)).reshape(shape)
    sums = np.bincount(_combination(cells, one, other), fitted.means * cells.repeats, len(rows))
    return None, (sums / np.maximum(1, counts)).reshape(shape)


def _combination(cells: Cells, one: int, other: int) -> Integers:
    return cells.codes[:, one] * cells.sizes()[other] + cells.codes[:, other]


def _counts(cells: Cells, one: int, other: int) -> Integers:
    size = cells.sizes()[one] * cells.sizes()[other]
    return np.bincount(_combination(cells, one, other), cells.repeats, size).astype(np.int64)
