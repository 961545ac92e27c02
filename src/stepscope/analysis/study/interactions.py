"""Whether the effect of one factor depends on another."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations

import numpy as np

from stepscope.analysis.study.fitted import Fitted
from stepscope.analysis.study.model import Fit
from stepscope.analysis.study.noise import estimate, is_told, raised
from stepscope.analysis.study.records import CellMean, Factor, Interaction, Response
from stepscope.analysis.study.table import Cells, Floats, Integers
from stepscope.analysis.study.words import Text, effect

MOST_LEVELS = 6
"""Levels of a factor that are compared with each other: they make 15 pairs. Looking at more makes
every interval wider."""

Pairs = list[tuple[int, int]]


def interactions(fitted: Fitted, text: Text) -> tuple[Interaction, ...]:
    """One for each two factors that were observed together, the largest first."""
    told = [_interaction(fitted, *pair, text) for pair in sorted(fitted.model.pairs)]
    sizes = [each for each in told if each is not None]
    return tuple(sorted(sizes, key=lambda each: -each.size.value))


def _interaction(fitted: Fitted, one: int, other: int, text: Text) -> Interaction | None:
    """The four cells that differ most from each having its own share of both factors."""
    cells, response = fitted.cells, fitted.response
    fit, means = _cell_means(fitted, one, other)
    found = _largest(fitted, fit or fitted.model.full, one, other)
    if found is None:
        return None
    size = estimate(found.value, found.error, fitted.noise, response.scale, found.looked)
    words = _Words(response, cells.factors[one], cells.factors[other], text)
    return Interaction(
        cells.factors[one].name,
        cells.factors[other].name,
        _observed(fitted, means, one, other),
        size,
        is_told(size, response.scale),
        words.each_effect(means, found) if fit else words.difference(size.value, found),
    )


@dataclass(frozen=True)
class _Largest:
    """Of all contrasts that were looked at."""

    firsts: tuple[int, int]
    """From which level of the first factor to which."""
    more: int
    """The level of the second with which that does more than with the other."""
    less: int
    value: float
    error: float
    looked: int


def _largest(fitted: Fitted, fit: Fit, one: int, other: int) -> _Largest | None:
    """Among the ends of factors with an order; where they are not told, among all levels."""
    cells = fitted.cells
    return _largest_of(fitted, fit, (one, other), _ends(cells, one), _ends(cells, other)) or (
        _largest_of(fitted, fit, (one, other), _pairs(cells, one), _pairs(cells, other))
    )


def _largest_of(
    fitted: Fitted, fit: Fit, of: tuple[int, int], firsts: Pairs, seconds: Pairs
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
    told = np.flatnonzero(fit.tells(rows))
    if not len(told):
        return None
    values = rows[told] @ fit.solved(fitted.moments)
    at = int(np.argmax(np.abs(values)))
    error = max(0.0, float(fit.covariance(rows[told[at], np.newaxis])[0, 0])) ** 0.5
    pair, (here, there) = chosen[int(told[at])]
    more, less = (here, there) if values[at] >= 0 else (there, here)
    return _Largest(pair, more, less, abs(float(values[at])), error, len(told))


def _ends(cells: Cells, column: int) -> Pairs:
    """Of a factor with an order its lowest and highest level say most."""
    if not cells.factors[column].is_numeric:
        return _pairs(cells, column)
    order = _ascending(cells.factors[column])
    return [(order[0], order[-1])]


def _pairs(cells: Cells, column: int) -> Pairs:
    """All pairs of the levels with most trials."""
    order = _ascending(cells.factors[column])
    trials = cells.trials(column)
    most = sorted(order, key=lambda at: -trials[at])[:MOST_LEVELS]
    return list(combinations([at for at in order if at in most], 2))


def _ascending(factor: Factor) -> list[int]:
    """Its levels by size where they have one, else as the design has them."""
    order = list(range(len(factor.levels)))
    return sorted(order, key=lambda at: factor.levels[at]) if factor.is_numeric else order  # type: ignore[arg-type,return-value]


def _cell_means(fitted: Fitted, one: int, other: int) -> tuple[Fit | None, Floats]:
    """By the first model that tells them all, the other factors being equally mixed; else just
    those of the trials there."""
    model, cells = fitted.model, fitted.cells
    shape = cells.sizes()[one], cells.sizes()[other]
    firsts = np.repeat(model.rows(one), shape[1], axis=0)
    seconds = np.tile(model.rows(other), (shape[0], 1))
    rows = model.centre() + firsts + seconds + model.rows(one, other)
    counts = _counts(cells, one, other)
    for fit in [model.full] if (one, other) in model.untold else [model.full, model.kept]:
        if fit.tells(rows[counts > 0]).all():
            return fit, (rows @ fit.solved(fitted.moments)).reshape(shape)
    sums = np.bincount(_place(cells, one, other), fitted.means * cells.repeats, len(rows))
    return None, (sums / np.maximum(1, counts)).reshape(shape)


def _observed(fitted: Fitted, means: Floats, one: int, other: int) -> tuple[CellMean, ...]:
    cells = fitted.cells
    counts = _counts(cells, one, other).reshape(means.shape)
    is_ratio = fitted.response.scale == "ratio"
    return tuple(
        CellMean(
            cells.factors[one].levels[i],
            cells.factors[other].levels[j],
            raised(float(means[i, j])) if is_ratio else float(means[i, j]),
            int(counts[i, j]),
        )
        for i, j in zip(*np.nonzero(counts), strict=True)
    )


def _place(cells: Cells, one: int, other: int) -> Integers:
    return cells.codes[:, one] * cells.sizes()[other] + cells.codes[:, other]


def _counts(cells: Cells, one: int, other: int) -> Integers:
    """Of trials in each cell."""
    size = cells.sizes()[one] * cells.sizes()[other]
    return np.bincount(_place(cells, one, other), cells.repeats, size).astype(np.int64)


class _Words:
    """An interaction in a sentence."""

    def __init__(self, response: Response, first: Factor, second: Factor, text: Text) -> None:
        self._response, self._text = response, text
        self._first, self._second = first, second

    def each_effect(self, means: Floats, found: _Largest) -> str:
        """The effect of the first factor, with two levels of the second."""
        low, high = found.firsts
        effects = []
        for at in sorted((found.more, found.less)):
            change = float(means[high, at] - means[low, at])
            value = raised(change) if self._response.scale == "ratio" else change
            effects.append(f"{effect(value, self._response)} with {self._with(at)}")
        return f"{self._from(found)}: {', '.join(effects)}"

    def difference(self, size: float, found: _Largest) -> str:
        """How much more it is with one than with the other, where each is not told."""
        more, less = self._with(found.more), self._with(found.less)
        much = effect(size, self._response).lstrip("+")
        if self._response.scale == "ratio":
            return f"{self._from(found)}: {much} as much with {more} as with {less}"
        return f"{self._from(found)}: {much} more with {more} than with {less}"

    def _from(self, found: _Largest) -> str:
        name = self._first.name
        low, high = (self._text(name, self._first.levels[at]) for at in found.firsts)
        return f"from {low} to {high} {name}"

    def _with(self, at: int) -> str:
        return f"{self._second.name} {self._text(self._second.name, self._second.levels[at])}"
