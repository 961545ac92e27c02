"""A linear model of configurations: a mean, the effect of each factor, and of each two of them.

Levels are coded so that the effects of a factor sum to zero: the mean is that over the full grid,
each level as often as any other, whatever was left out of it. Only the product of the model's
matrix with itself is built, from counts of trials: it takes as long for ten thousand trials as for
a hundred. It is of whole numbers, thus exact, so that what cannot be told is found for certain.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations

import numpy as np
import numpy.typing as npt

from stepscope.analysis.study.table import Cells, Floats, Integers

_FEW_COLUMNS = 300
"""Of a model that is solved in no time, whatever it is. A larger one has pairs only if there are as
many configurations as it has columns: of fewer it would tell next to nothing, and take long."""
MOST_COLUMNS = 1500
"""Of a model: five factors with ten levels each have 856. More take seconds to solve."""
_NOTHING = 1e-9
"""An eigenvalue that is none, as a part of the largest."""
_SAFE = 1e7
"""Of a matrix times its inverse, by size: below it no eigenvalue can be nothing."""
_OUTSIDE = 1e-6
"""A contrast is not told if more than this part of it is what no configuration shows."""


@dataclass(frozen=True)
class Term:
    """The mean (of no factor), an effect of one factor, or of two together."""

    of: tuple[int, ...]
    coding: Floats
    """A row per level, or per combination of levels; they sum to zero."""
    columns: slice


@dataclass(frozen=True)
class ModelFit:
    """The model with some of its terms, solved for any response."""

    columns: Integers
    """Of the whole model, that it has."""
    inverse: Floats
    null: Floats
    """Directions that the observed configurations say nothing of."""
    rank: int

    def solved(self, moments: Floats) -> Floats:
        """The effects, by the columns of the whole model; zero where it has no such term."""
        effects = np.zeros(len(moments))
        effects[self.columns] = self.inverse @ moments[self.columns]
        return effects

    def estimable(self, contrasts: Floats) -> npt.NDArray[np.bool_]:
        """Which of these (a row each) the observed configurations tell."""
        known = contrasts[:, self.columns]
        outside = np.linalg.norm(known @ self.null, axis=1)
        return np.asarray(outside <= _OUTSIDE * np.linalg.norm(known, axis=1))

    def covariance(self, contrasts: Floats) -> Floats:
        """Of these, in units of the variance of a trial."""
        used = np.flatnonzero(contrasts[:, self.columns].any(axis=0))
        known = contrasts[:, self.columns[used]]
        return np.asarray(known @ self.inverse[np.ix_(used, used)] @ known.T)


class Model:
    """All terms that some configurations may tell of."""

    def __init__(self, cells: Cells) -> None:
        self.cells = cells
        self.terms = _terms(cells)
        self.width = self.terms[-1].columns.stop
        self._normal = np.zeros((self.width, self.width))
        places = [_places(cells, term) for term in self.terms]
        for i, one in enumerate(self.terms):
            for j, other in enumerate(self.terms[: i + 1]):
                shape = len(one.coding), len(other.coding)
                both = places[i] * shape[1] + places[j]
                counts = np.bincount(both, cells.repeats, shape[0] * shape[1])
                block = one.coding.T @ counts.reshape(shape) @ other.coding
                self._normal[one.columns, other.columns] = block
                self._normal[other.columns, one.columns] = block.T

    @property
    def pairs(self) -> tuple[tuple[int, int], ...]:
        return tuple((term.of[0], term.of[1]) for term in self.terms if len(term.of) == 2)

    @cached_property
    def full(self) -> ModelFit:
        return self._fit(self.terms)

    @cached_property
    def kept(self) -> ModelFit:
        """Without the pairs that these configurations do not tell: what they leave open is then
        no longer mixed up with the effects of single factors."""
        told = [term for term in self.terms if len(term.of) < 2 or self._is_estimable(term)]
        return self.full if len(told) == len(self.terms) else self._fit(told)

    @cached_property
    def additive(self) -> ModelFit:
        return self._fit([term for term in self.terms if len(term.of) < 2])

    @cached_property
    def not_estimable(self) -> tuple[tuple[int, int], ...]:
        """Pairs of factors of which not all is told."""
        terms = [term for term in self.terms if len(term.of) == 2 and not self._is_estimable(term)]
        return tuple((term.of[0], term.of[1]) for term in terms)

    def moments(self, means: Floats) -> Floats:
        """The model's matrix times a response of the configurations."""
        weighted = means * self.cells.repeats
        sums = [
            np.bincount(_places(self.cells, term), weighted, len(term.coding)) @ term.coding
            for term in self.terms
        ]
        return np.concatenate(sums)

    def predicted(self, effects: Floats) -> Floats:
        parts = [
            (term.coding @ effects[term.columns])[_places(self.cells, term)] for term in self.terms
        ]
        return np.asarray(sum(parts))

    def rows(self, *of: int) -> Floats:
        """What each level of a factor (or combination of two) adds to the mean, as contrasts."""
        term = next(term for term in self.terms if term.of == of)
        rows = np.zeros((len(term.coding), self.width))
        rows[:, term.columns] = term.coding
        return rows

    def centre(self, without: int | None = None) -> Floats:
        """The mean over the grid; or over what was observed, but for what one factor adds."""
        centre = np.zeros(self.width)
        centre[0] = 1
        if without is not None:
            for term in self.terms[1:]:
                if without not in term.of:
                    counts = np.bincount(_places(self.cells, term), minlength=len(term.coding))
                    centre[term.columns] = counts @ term.coding / len(self.cells.repeats)
        return centre

    def _is_estimable(self, term: Term) -> bool:
        return bool(np.abs(self.full.null[term.columns]).max(initial=0.0) <= _OUTSIDE)

    def _fit(self, terms: Sequence[Term]) -> ModelFit:
        columns = np.concatenate([np.arange(self.width)[term.columns] for term in terms])
        normal = self._normal[np.ix_(columns, columns)]
        # By elimination where all is told, which takes a third of the time of eigenvalues.
        with contextlib.suppress(np.linalg.LinAlgError):
            inverse: Floats = np.linalg.inv(normal).astype(np.float64)
            if np.linalg.norm(normal) * np.linalg.norm(inverse) < _SAFE:
                return ModelFit(columns, inverse, np.zeros((len(columns), 0)), len(columns))
        values, vectors = np.linalg.eigh(normal)
        some = values > _NOTHING * values[-1]
        inverse = (vectors[:, some] / values[some]) @ vectors[:, some].T
        return ModelFit(columns, inverse, vectors[:, ~some], int(some.sum()))


def _terms(cells: Cells) -> tuple[Term, ...]:
    """Pairs as far as there is room, those of few levels first."""
    sizes = cells.sizes()
    is_numeric = [factor.is_numeric for factor in cells.factors]
    # What more workers do with either model, rather than what either model does with more.
    pairs = [
        (other, one) if is_numeric[other] and not is_numeric[one] else (one, other)
        for one, other in combinations(range(len(sizes)), 2)
    ]
    pairs.sort(key=lambda of: sizes[of[0]] * sizes[of[1]])
    terms = [Term((), np.ones((1, 1)), slice(0, 1))]
    for of in [*((at,) for at in range(len(sizes))), *pairs]:
        coding: Floats = np.ones((1, 1))
        for at in of:
            sum_to_zero = np.vstack([np.eye(sizes[at] - 1), -np.ones(sizes[at] - 1)])
            coding = np.kron(coding, sum_to_zero).astype(np.float64)
        start = terms[-1].columns.stop
        if len(of) < 2 or start + coding.shape[1] <= MOST_COLUMNS:
            terms.append(Term(of, coding, slice(start, start + coding.shape[1])))
    if terms[-1].columns.stop > max(_FEW_COLUMNS, len(cells.codes)):
        return tuple(term for term in terms if len(term.of) < 2)
    return tuple(terms)


def _places(cells: Cells, term: Term) -> Integers:
    """The row of a term's coding that each configuration has."""
    places = np.zeros(len(cells.codes), np.int64)
    for at in term.of:
        places = places * cells.sizes()[at] + cells.codes[:, at]
    return places
