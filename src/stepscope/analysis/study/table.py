"""Observations as numbers: which level every trial has of every factor, and what was measured."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from stepscope.analysis.study.records import Factor, Level, Observation, Remark, Response

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]

_LARGEST = 1e150
"""No measurement is larger; of what is, not even the square can be written."""
MOST_LEVELS = 100
"""Of a factor whose effect is told: of a seed with a thousand levels there is nothing to tell."""


def level_key(level: Level) -> tuple[bool, Level]:
    """Equal for equal levels only: 1 is 1.0, as a file may have it, but it is not True."""
    return isinstance(level, bool), level


@dataclass(frozen=True)
class ObservationTable:
    """Trials (rows) by factors (columns): which of its levels each has."""

    observations: tuple[Observation, ...]
    factors: tuple[Factor, ...]
    codes: Integers
    remarks: tuple[Remark, ...] = ()

    def only(self, factor: str, level: Level) -> ObservationTable:
        """The trials with this level, of which this factor is none any more."""
        at = [each.name for each in self.factors].index(factor)
        keys = [level_key(each) for each in self.factors[at].levels]
        chosen = np.flatnonzero(self.codes[:, at] == keys.index(level_key(level)))
        others = np.array([i for i in range(len(self.factors)) if i != at], np.int64)
        return ObservationTable(
            tuple(self.observations[row] for row in chosen),
            tuple(self.factors[column] for column in others),
            self.codes[np.ix_(chosen, others)],
        )

    def rows_with(self, response: Response) -> tuple[Integers, Floats, tuple[Remark, ...]]:
        """Which trials have it, its values there (their logarithms for ratios), and remarks."""
        measured = [each.values.get(response.key) for each in self.observations]
        values = np.array([math.nan if each is None else each for each in measured], np.float64)
        good = np.abs(values) < _LARGEST
        if response.scale == "ratio":
            good &= values > 1 / _LARGEST
        left_out = sum(each is not None for each in measured) - int(good.sum())
        remark = Remark("bad_values", response=response.label, count=left_out)
        chosen = np.flatnonzero(good)
        kept = values[chosen]
        return (
            chosen,
            np.log(kept) if response.scale == "ratio" else kept,
            ((remark,) if left_out else ()),
        )


def table_of(observations: Sequence[Observation], factors: Sequence[Factor]) -> ObservationTable:
    """All observations that have a level of every factor."""
    codes = np.zeros((len(observations), len(factors)), np.int64)
    remarks = []
    for column, factor in enumerate(factors):
        numbers: dict[tuple[bool, Level], int] = {}
        for number, level in enumerate(factor.levels):
            numbers.setdefault(level_key(level), number)
        codes[:, column] = [
            numbers.get(level_key(each.levels.get(factor.name)), -1) for each in observations
        ]
        if unknown := int((codes[:, column] < 0).sum()):
            remarks.append(Remark("unknown_level", (factor.name,), count=unknown))
    known = np.flatnonzero((codes >= 0).all(axis=1))
    chosen = tuple(observations[int(row)] for row in known)
    return ObservationTable(chosen, tuple(factors), codes[known], tuple(remarks))


@dataclass(frozen=True)
class Cells:
    """The distinct configurations of some trials, with only what was observed of factors."""

    factors: tuple[Factor, ...]
    """On more than one level, with those levels only."""
    codes: Integers
    repeats: Integers
    which: Integers
    """The configuration of every trial."""
    remarks: tuple[Remark, ...] = ()

    def sizes(self) -> tuple[int, ...]:
        return tuple(len(factor.levels) for factor in self.factors)

    def mean(self, values: Floats) -> Floats:
        return np.bincount(self.which, values, len(self.repeats)) / self.repeats

    def trials(self, column: int) -> Integers:
        return np.bincount(self.codes[:, column], self.repeats, self.sizes()[column]).astype(
            np.int64
        )


def cells_of(table: ObservationTable, rows: Integers) -> Cells:
    """Of these trials; factors that they all have the same level of are none."""
    codes = table.codes[rows]
    factors, columns, remarks = [], [], []
    for column, factor in enumerate(table.factors):
        seen, again = np.unique(codes[:, column], return_inverse=True)
        if len(seen) > MOST_LEVELS:
            remarks.append(Remark("too_many_levels", (factor.name,), count=len(seen)))
        elif len(seen) > 1:
            factors.append(replace(factor, levels=tuple(factor.levels[each] for each in seen)))
            columns.append(again.reshape(-1))
    stacked = np.stack(columns, axis=1) if columns else np.zeros((len(codes), 0), np.int64)
    sizes = [len(factor.levels) for factor in factors]
    place = np.zeros(len(codes), np.int64)
    for column, size in enumerate(sizes):
        # Numbered anew each time: many factors have more combinations than there are numbers.
        place = np.unique(place * size + stacked[:, column], return_inverse=True)[1].reshape(-1)
    _, first, which, repeats = np.unique(
        place, return_index=True, return_inverse=True, return_counts=True
    )
    return Cells(tuple(factors), stacked[first], repeats, which.reshape(-1), tuple(remarks))
