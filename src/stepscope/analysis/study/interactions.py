"""Whether the effect of one factor depends on another."""

from __future__ import annotations

from itertools import combinations
from typing import NamedTuple

import numpy as np

from stepscope.analysis.study.fitted import Fitted
from stepscope.analysis.study.model import ModelFit
from stepscope.analysis.study.noise import estimate, is_significant, raised
from stepscope.analysis.study.records import CellMean, Interaction
from stepscope.analysis.study.table import Cells, Floats, Integers

MOST_LEVELS = 6
"""Levels of a factor that are compared with each other: they make 15 pairs. Looking at more makes
every interval wider."""

Pairs = list[tuple[int, int]]


def interactions(fitted: Fitted) -> tuple[Interaction, ...]:
    """One for each two factors that were observed together, the largest first."""
    told = [_interaction(fitted, *pair) for pair in sorted(fitted.model.pairs)]
    sizes = [each for each in told if each is not None]
    return tuple(sorted(sizes, key=lambda each: -each.size.value))


def _interaction(fitted: Fitted, one: int, other: int) -> Interaction | None:
    """The four cells that differ most from each having its own share of both factors."""
    cells, response = fitted.cells, fitted.response
    fit, means = _cell_means(fitted, one, other)
    found = _largest(fitted, fit or fitted.model.full, one, other)
    if found is None:
        return None
    (low, high), more, less, value, error, looked = found
    size = estimate(value, error, fitted.noise, response.scale, looked)
    first, second = cells.factors[one], cells.factors[other]
    value_of = raised if response.scale == "ratio" else float
    changes = [
        (second.levels[at], value_of(float(means[high, at] - means[low, at])))
        for at in (sorted((more, less)) if fit else ())
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
        low=first.levels[low],
        high=first.levels[high],
        more=second.levels[more],
        less=second.levels[less],
        changes=tuple(changes),
    )


class _Largest(NamedTuple):
    """Of all contrasts that were looked at."""

    firsts: tuple[int, int]
    """From which level of the first factor to which."""
    more: int
    """The level of the second with which that does more than with the other."""
    less: int
    value: float
    error: float
    looked: int


def _largest(fitted: Fitted, fit: ModelFit, one: int, other: int) -> _Largest | None:
    """Among the ends of factors with an order; where they are not told, among all levels."""
    ends, pairs = [], []
    for column in (one, other):
        factor, trials = fitted.cells.factors[column], fitted.cells.trials(column)
        order = list(range(len(factor.levels)))
        if factor.is_numeric:
            order.sort(key=lambda at: factor.levels[at])  # type: ignore[arg-type,return-value]
        most = sorted(order, key=lambda at: -trials[at])[:MOST_LEVELS]
        pairs.append(list(combinations([at for at in order if at in most], 2)))
        ends.append([(order[0], order[-1])] if factor.is_numeric else pairs[-1])
    return _largest_of(fitted, fit, (one, other), *ends) or (
        _largest_of(fitted, fit, (one, other), *pairs)
    )


def _largest_of(
    fitted: Fitted, fit: ModelFit, of: tuple[int, int], firsts: Pairs, seconds: Pairs
) -> _Largest | None:
    model, sizes = fitted.model, fitted.cells.sizes()
    coding = model.rows(*of).reshape(sizes[of[0]], sizes[of[1]], model.width)
    chosen = [(first, second) for first in firsts for second in seconds]
    rows = np.array(
        [
            coding[high, here] - coding[low, here] - coding[high, there] + coding[low, there]
            for (low, high), (here, there) in chosen
        ]
    )
    told = np.flatnonzero(fit.estimable(rows))
    if not len(told):
        return None
    values = rows[told] @ fit.solved(fitted.moments)
    at = int(np.argmax(np.abs(values)))
    error = max(0.0, float(fit.covariance(rows[told[at], np.newaxis])[0, 0])) ** 0.5
    pair, (here, there) = chosen[int(told[at])]
    more, less = (here, there) if values[at] >= 0 else (there, here)
    return _Largest(pair, more, less, abs(float(values[at])), error, len(told))


def _cell_means(fitted: Fitted, one: int, other: int) -> tuple[ModelFit | None, Floats]:
    """By the first model that tells them all, the other factors being equally mixed; else just
    those of the trials there."""
    model, cells = fitted.model, fitted.cells
    shape = cells.sizes()[one], cells.sizes()[other]
    firsts = np.repeat(model.rows(one), shape[1], axis=0)
    seconds = np.tile(model.rows(other), (shape[0], 1))
    rows = model.centre() + firsts + seconds + model.rows(one, other)
    counts = _counts(cells, one, other)
    for fit in [model.full] if (one, other) in model.not_estimable else [model.full, model.kept]:
        if fit.estimable(rows[counts > 0]).all():
            return fit, (rows @ fit.solved(fitted.moments)).reshape(shape)
    sums = np.bincount(_place(cells, one, other), fitted.means * cells.repeats, len(rows))
    return None, (sums / np.maximum(1, counts)).reshape(shape)


def _place(cells: Cells, one: int, other: int) -> Integers:
    return cells.codes[:, one] * cells.sizes()[other] + cells.codes[:, other]


def _counts(cells: Cells, one: int, other: int) -> Integers:
    size = cells.sizes()[one] * cells.sizes()[other]
    return np.bincount(_place(cells, one, other), cells.repeats, size).astype(np.int64)
