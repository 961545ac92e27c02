"""Observations as arrays: the level codes of every trial, and the response values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from stepscope.analysis.study.records import Factor, Level, Observation, Remark, Response

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]

_MAX_VALUE = 1e150
"""Larger values cannot be measurements, and their squares overflow."""
MAX_LEVELS = 100
"""Factors with more levels, such as a seed, are not analyzed."""


def level_key(level: Level) -> tuple[bool, Level]:
    """Return a key by which 1 equals 1.0 (files may contain either) but not True."""
    return isinstance(level, bool), level


@dataclass(frozen=True)
class ObservationTable:
    """Trials (rows) by factors (columns), as indexes of levels."""

    observations: tuple[Observation, ...]
    factors: tuple[Factor, ...]
    codes: Integers
    remarks: tuple[Remark, ...] = ()

    def subset(self, factor: str, level: Level) -> ObservationTable:
        """Return the trials with this level, without the column of the factor."""
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
        """Return the rows with a valid response, its values (logarithms for ratios) and remarks."""
        measured = [each.values.get(response.key) for each in self.observations]
        values = np.array([math.nan if each is None else each for each in measured], np.float64)
        valid = np.abs(values) < _MAX_VALUE
        if response.scale == "ratio":
            valid &= values > 1 / _MAX_VALUE
        excluded = sum(each is not None for each in measured) - int(valid.sum())
        remark = Remark("invalid_values", response=response.label, count=excluded)
        chosen = np.flatnonzero(valid)
        kept = values[chosen]
        return (
            chosen,
            np.log(kept) if response.scale == "ratio" else kept,
            ((remark,) if excluded else ()),
        )


def table_of(observations: Sequence[Observation], factors: Sequence[Factor]) -> ObservationTable:
    """Return the table of all observations that have a known level of every factor."""
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
    """The distinct configurations of some trials."""

    factors: tuple[Factor, ...]
    """Factors that were observed at more than one level, with only these levels."""
    codes: Integers
    repeats: Integers
    cell_of_trial: Integers
    remarks: tuple[Remark, ...] = ()

    def sizes(self) -> tuple[int, ...]:
        return tuple(len(factor.levels) for factor in self.factors)

    def mean(self, values: Floats) -> Floats:
        return np.bincount(self.cell_of_trial, values, len(self.repeats)) / self.repeats

    def trials(self, column: int) -> Integers:
        """Return the number of trials per level of a factor."""
        return np.bincount(self.codes[:, column], self.repeats, self.sizes()[column]).astype(
            np.int64
        )


def cells_of(table: ObservationTable, rows: Integers) -> Cells:
    """Return the configurations of these trials, without factors that are constant among them."""
    codes = table.codes[rows]
    factors, columns, remarks = [], [], []
    for column, factor in enumerate(table.factors):
        observed, recoded = np.unique(codes[:, column], return_inverse=True)
        if len(observed) > MAX_LEVELS:
            remarks.append(Remark("too_many_levels", (factor.name,), count=len(observed)))
        elif len(observed) > 1:
            factors.append(replace(factor, levels=tuple(factor.levels[each] for each in observed)))
            columns.append(recoded.reshape(-1))
    stacked = np.stack(columns, axis=1) if columns else np.zeros((len(codes), 0), np.int64)
    sizes = [len(factor.levels) for factor in factors]
    cell = np.zeros(len(codes), np.int64)
    for column, size in enumerate(sizes):
        # Renumbered in every pass: many factors have more combinations than an int64 can count.
        cell = np.unique(cell * size + stacked[:, column], return_inverse=True)[1].reshape(-1)
    _, first, cell_of_trial, repeats = np.unique(
        cell, return_index=True, return_inverse=True, return_counts=True
    )
    return Cells(tuple(factors), stacked[first], repeats, cell_of_trial.reshape(-1), tuple(remarks))
