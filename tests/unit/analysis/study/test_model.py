"""The model built from counts is the one that textbooks write out as a matrix."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import numpy.typing as npt
from hypothesis import given, settings

from stepscope.analysis.study.model import Model
from stepscope.analysis.study.records import THROUGHPUT, Observation
from stepscope.analysis.study.table import Cells, cells_of, table_of
from unit.analysis.study.made import factors_of, grid

FACTORS = factors_of(cpus=(1, 2, 4), workers=(0, 2, 4), model=("cnn", "vit"))
POINTS = grid(FACTORS)


def cells(chosen: list[int]) -> Cells:
    trials = [Observation(POINTS[at], {THROUGHPUT: 1.0}) for at in chosen]
    return cells_of(table_of(trials, FACTORS), np.arange(len(trials)))


def matrix(model: Model) -> npt.NDArray[np.float64]:
    """A row per configuration."""
    rows = np.zeros((len(model.cells.codes), model.width))
    for number, codes in enumerate(model.cells.codes):
        for term in model.terms:
            at = 0
            for factor in term.of:
                at = at * model.cells.sizes()[factor] + codes[factor]
            rows[number, term.columns] = term.coding[at]
    return rows


CHOSEN = st.lists(st.integers(0, len(POINTS) - 1), min_size=1, max_size=40)


@given(CHOSEN, st.integers(0, 99))
@settings(max_examples=60)
def test_it_predicts_what_least_squares_do(chosen: list[int], seed: int) -> None:
    model = Model(cells(chosen))
    rows = matrix(model)
    means = np.random.default_rng(seed).normal(size=len(rows))
    weights = np.sqrt(model.cells.repeats)
    truth = np.linalg.lstsq(rows * weights[:, None], means * weights, rcond=None)[0]
    effects = model.full.solved(model.moments(means))
    assert np.allclose(model.predicted(effects), rows @ truth)
    assert np.allclose(rows @ effects, rows @ truth)
    assert model.full.rank == np.linalg.matrix_rank(rows)


@given(CHOSEN)
@settings(max_examples=60)
def test_it_tells_what_is_a_mix_of_configurations(chosen: list[int]) -> None:
    """And nothing else: that is what estimable means."""
    model = Model(cells(chosen))
    rows = matrix(model)
    asked = np.vstack([np.eye(model.width), rows, rows[:1] - rows[-1:]])
    rank = np.linalg.matrix_rank(rows)
    truth = [np.linalg.matrix_rank(np.vstack([rows, each])) == rank for each in asked]
    assert model.full.estimable(asked).tolist() == truth


def test_pairs_that_are_not_told_are_kept_out() -> None:
    """One combination of cpus and workers is missing."""
    chosen = [at for at, each in enumerate(POINTS) if (each["cpus"], each["workers"]) != (1, 4)]
    model = Model(cells(chosen))
    names = [each.name for each in model.cells.factors]
    assert [{names[one], names[other]} for one, other in model.not_estimable] == [
        {"cpus", "workers"}
    ]
    assert model.kept.rank == len(model.kept.columns) == model.width - 4
    assert model.full.rank == model.width - 1
    assert model.additive.rank == 1 + 2 + 2 + 1
