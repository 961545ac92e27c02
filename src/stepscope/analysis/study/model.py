"""A linear model with main effects and two-factor interactions.

Levels use sum-to-zero coding: the intercept is the mean over the full grid, with equal weight for
each level, whichever combinations are missing. Only the normal matrix (X'X) is built, from counts
of trials, so the cost does not depend on the number of trials. Its entries are integers and
therefore exact, which makes the test of what is estimable reliable.
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

_CHEAP_COLUMNS = 300
"""Models up to this size are always solved. A larger one has interactions only if there are at
least as many configurations as columns: with fewer, hardly any would be estimable."""
MAX_COLUMNS = 1500
"""Five factors with ten levels each need 856 columns; more than this takes seconds to solve."""
_ZERO_EIGENVALUE = 1e-9
"""Relative to the largest eigenvalue."""
_WELL_CONDITIONED = 1e7
"""Below this condition number (Frobenius norm) no eigenvalue can be zero."""
_NULL_SPACE = 1e-6
"""A contrast is not estimable if a larger share of it is in the null space."""


@dataclass(frozen=True)
class Term:
    """The intercept (no factor), a main effect (one factor) or an interaction (two factors)."""

    factors: tuple[int, ...]
    coding: Floats  # a row per level or combination of levels; each column sums to zero
    columns: slice


@dataclass(frozen=True)
class ModelFit:
    """The solved normal equations of some terms of a model, for any response."""

    columns: Integers  # of the whole model
    inverse: Floats
    null: Floats  # basis of the null space: directions without information
    rank: int

    def coefficients(self, moments: Floats) -> Floats:
        """Return the coefficients by the columns of the whole model; zero for other terms."""
        coefficients = np.zeros(len(moments))
        coefficients[self.columns] = self.inverse @ moments[self.columns]
        return coefficients

    def estimable(self, contrasts: Floats) -> npt.NDArray[np.bool_]:
        """Return which of these contrasts (one per row) are estimable."""
        known = contrasts[:, self.columns]
        in_null_space = np.linalg.norm(known @ self.null, axis=1)
        return np.asarray(in_null_space <= _NULL_SPACE * np.linalg.norm(known, axis=1))

    def covariance(self, contrasts: Floats) -> Floats:
        """Return the covariance of contrasts, in units of the variance of a trial."""
        used = np.flatnonzero(contrasts[:, self.columns].any(axis=0))
        known = contrasts[:, self.columns[used]]
        return np.asarray(known @ self.inverse[np.ix_(used, used)] @ known.T)


class Model:
    """The model of a set of configurations, with all its terms."""

    def __init__(self, cells: Cells) -> None:
        self.cells = cells
        self.terms = _terms(cells)
        self.width = self.terms[-1].columns.stop
        self._normal = np.zeros((self.width, self.width))
        rows = [_coding_rows(cells, term) for term in self.terms]
        for i, one in enumerate(self.terms):
            for j, other in enumerate(self.terms[: i + 1]):
                shape = len(one.coding), len(other.coding)
                both = rows[i] * shape[1] + rows[j]
                counts = np.bincount(both, cells.repeats, shape[0] * shape[1])
                block = one.coding.T @ counts.reshape(shape) @ other.coding
                self._normal[one.columns, other.columns] = block
                self._normal[other.columns, one.columns] = block.T

    @property
    def pairs(self) -> tuple[tuple[int, int], ...]:
        return tuple(
            (term.factors[0], term.factors[1]) for term in self.terms if len(term.factors) == 2
        )

    @cached_property
    def full(self) -> ModelFit:
        return self._fit(self.terms)

    @cached_property
    def reduced(self) -> ModelFit:
        """Without the interactions that are not estimable and would alias main effects."""
        terms = [term for term in self.terms if len(term.factors) < 2 or self._is_estimable(term)]
        return self.full if len(terms) == len(self.terms) else self._fit(terms)

    @cached_property
    def additive(self) -> ModelFit:
        return self._fit([term for term in self.terms if len(term.factors) < 2])

    @cached_property
    def not_estimable(self) -> tuple[tuple[int, int], ...]:
        """Pairs of factors whose interaction is not fully estimable."""
        terms = [
            term for term in self.terms if len(term.factors) == 2 and not self._is_estimable(term)
        ]
        return tuple((term.factors[0], term.factors[1]) for term in terms)

    def moments(self, means: Floats) -> Floats:
        """Return X'y for the means of a response."""
        weighted = means * self.cells.repeats
        sums = [
            np.bincount(_coding_rows(self.cells, term), weighted, len(term.coding)) @ term.coding
            for term in self.terms
        ]
        return np.concatenate(sums)

    def predicted(self, coefficients: Floats) -> Floats:
        parts = [
            (term.coding @ coefficients[term.columns])[_coding_rows(self.cells, term)]
            for term in self.terms
        ]
        return np.asarray(sum(parts))

    def rows(self, *factors: int) -> Floats:
        """Return the contrasts of each level of a factor, or combination of levels of two."""
        term = next(term for term in self.terms if term.factors == factors)
        rows = np.zeros((len(term.coding), self.width))
        rows[:, term.columns] = term.coding
        return rows

    def center(self, without: int | None = None) -> Floats:
        """Return the contrast of the mean over the grid.

        With `without`, it is the mean over the observed levels of all factors but this one.
        """
        center = np.zeros(self.width)
        center[0] = 1
        if without is not None:
            for term in self.terms[1:]:
                if without not in term.factors:
                    counts = np.bincount(_coding_rows(self.cells, term), minlength=len(term.coding))
                    center[term.columns] = counts @ term.coding / len(self.cells.repeats)
        return center

    def _is_estimable(self, term: Term) -> bool:
        return bool(np.abs(self.full.null[term.columns]).max(initial=0.0) <= _NULL_SPACE)

    def _fit(self, terms: Sequence[Term]) -> ModelFit:
        columns = np.concatenate([np.arange(self.width)[term.columns] for term in terms])
        normal = self._normal[np.ix_(columns, columns)]
        # Inversion takes a third of the time of an eigendecomposition, if the matrix is regular.
        with contextlib.suppress(np.linalg.LinAlgError):
            inverse: Floats = np.linalg.inv(normal).astype(np.float64)
            if np.linalg.norm(normal) * np.linalg.norm(inverse) < _WELL_CONDITIONED:
                return ModelFit(columns, inverse, np.zeros((len(columns), 0)), len(columns))
        values, vectors = np.linalg.eigh(normal)
        nonzero = values > _ZERO_EIGENVALUE * values[-1]
        inverse = (vectors[:, nonzero] / values[nonzero]) @ vectors[:, nonzero].T
        return ModelFit(columns, inverse, vectors[:, ~nonzero], int(nonzero.sum()))


def _terms(cells: Cells) -> tuple[Term, ...]:
    """Return the terms; interactions up to the maximum size, those with few levels first."""
    sizes = cells.sizes()
    is_numeric = [factor.is_numeric for factor in cells.factors]
    # Numeric factor first: the effect of workers by model, rather than of the model by workers.
    pairs = [
        (other, one) if is_numeric[other] and not is_numeric[one] else (one, other)
        for one, other in combinations(range(len(sizes)), 2)
    ]
    pairs.sort(key=lambda pair: sizes[pair[0]] * sizes[pair[1]])
    terms = [Term((), np.ones((1, 1)), slice(0, 1))]
    for factors in [*((at,) for at in range(len(sizes))), *pairs]:
        coding: Floats = np.ones((1, 1))
        for at in factors:
            sum_to_zero = np.vstack([np.eye(sizes[at] - 1), -np.ones(sizes[at] - 1)])
            coding = np.kron(coding, sum_to_zero).astype(np.float64)
        start = terms[-1].columns.stop
        if len(factors) < 2 or start + coding.shape[1] <= MAX_COLUMNS:
            terms.append(Term(factors, coding, slice(start, start + coding.shape[1])))
    if terms[-1].columns.stop > max(_CHEAP_COLUMNS, len(cells.codes)):
        return tuple(term for term in terms if len(term.factors) < 2)
    return tuple(terms)


def _coding_rows(cells: Cells, term: Term) -> Integers:
    """Return the row of a term's coding for each configuration."""
    rows = np.zeros(len(cells.codes), np.int64)
    for at in term.factors:
        rows = rows * cells.sizes()[at] + cells.codes[:, at]
    return rows
