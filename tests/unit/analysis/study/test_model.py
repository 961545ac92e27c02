"""The model built from counts agrees with an explicit design matrix."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import numpy.typing as npt
from hypothesis import given, settings

from stepscope.analysis.study.model import Model
from stepscope.analysis.study.records import THROUGHPUT, Observation
from stepscope.analysis.study.table import Cells, cells_of, table_of
from unit.analysis.study.builders import factors_of, grid

FACTORS = factors_of(cpus=(1, 2, 4), workers=(0, 2, 4), model=("cnn", "vit"))
POINTS = grid(FACTORS)


def cells(chosen: list[int]) -> Cells:
    trials = [Observation(POINTS[at], {THROUGHPUT: 1.0}) for at in chosen]
    return cells_of(table_of(trials, FACTORS), np.arange(len(trials)))


def matrix(model: Model) -> npt.NDArray[np.float64]:
    """Return the design matrix, with one row per configuration."""
    rows = np.zeros((len(model.cells.codes), model.width))
    for number, codes in enumerate(model.cells.codes):
        for term in model.terms:
            at = 0
            for factor in term.factors:
                at = at * model.cells.sizes()[factor] + codes[factor]
            rows[number, term.columns] = term.coding[at]
    return rows


CHOSEN = st.lists(st.integers(0, len(POINTS) - 1), min_size=1, max_size=40)


@given(CHOSEN, st.integers(0, 99))
@settings(max_examples=60)
def test_predictions_agree_with_least_squares(chosen: list[int], seed: int) -> None:
    model = Model(cells(chosen))
    rows = matrix(model)
    means = np.random.default_rng(seed).normal(size=len(rows))
    weights = np.sqrt(model.cells.repeats)
    expected = np.linalg.lstsq(rows * weights[:, None], means * weights, rcond=None)[0]
    coefficients = model.full.coefficients(model.moments(means))
    assert np.allclose(model.predicted(coefficients), rows @ expected)
    assert np.allclose(rows @ coefficients, rows @ expected)
    assert model.full.rank == np.linalg.matrix_rank(rows)


@given(CHOSEN)
@settings(max_examples=60)
def test_contrasts_in_the_row_space_are_estimable(chosen: list[int]) -> None:
    """And no other contrast is."""
    model = Model(cells(chosen))
    rows = matrix(model)
    contrasts = np.vstack([np.eye(model.width), rows, rows[:1] - rows[-1:]])
    rank = np.linalg.matrix_rank(rows)
    expected = [np.linalg.matrix_rank(np.vstack([rows, each])) == rank for each in contrasts]
    assert model.full.estimable(contrasts).tolist() == expected


def test_reduced_model_excludes_interactions_that_are_not_estimable() -> None:
    """One combination of cpus and workers is missing."""
    chosen = [at for at, each in enumerate(POINTS) if (each["cpus"], each["workers"]) != (1, 4)]
    model = Model(cells(chosen))
    names = [each.name for each in model.cells.factors]
    assert [{names[one], names[other]} for one, other in model.not_estimable] == [
        {"cpus", "workers"}
    ]
    assert model.reduced.rank == len(model.reduced.columns) == model.width - 4
    assert model.full.rank == model.width - 1
    assert model.additive.rank == 1 + 2 + 2 + 1
