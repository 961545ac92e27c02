"""The ranking of main effects, for all trials and for each model."""

from __future__ import annotations

import numpy as np
import pytest

from stepscope.analysis.study.records import Factor
from unit.analysis.study.builders import factors_of, grid, observed, sensitivities

FACTORS = factors_of(model=("alexnet", "vit"), cpus=(1, 2), batch_size=(32, 64))


def rate(model: str, cpus: int, batch_size: int, machine: str = "") -> float:
    """CPUs have an effect for alexnet only, and the batch size for vit only."""
    if model == "alexnet":
        return 1000 * 1.28 ** (cpus - 1)
    return 100 * 1.5 ** (batch_size / 32 - 1)


def test_each_model_has_its_own_ranking() -> None:
    trials = observed(grid(FACTORS), rate, 4, 0.02)
    all_trials, alexnet, vit = sensitivities(trials, FACTORS)
    assert all_trials.group == {}
    assert all_trials.effects[0].factor == "model"
    assert alexnet.group == {"model": "alexnet"}
    assert [each.factor for each in alexnet.effects] == ["cpus", "batch_size"]
    assert alexnet.effects[0].size.value == pytest.approx(1.28, rel=0.05)
    assert [each.factor for each in vit.effects] == ["batch_size", "cpus"]
    assert [each.is_significant for each in vit.effects] == [True, False]


def test_one_model_is_grouped_by_machine() -> None:
    factors = (Factor("machine", ("old", "new")), Factor("model", ("vit",)), *FACTORS[1:])
    rankings = sensitivities(observed(grid(factors), rate, 2, 0.02), factors)
    assert [each.group for each in rankings] == [{}, {"machine": "old"}, {"machine": "new"}]


def test_groups_with_few_repeats_use_the_pooled_noise() -> None:
    """Two configurations with two repeats: their own noise would give enormous intervals."""
    factors = factors_of(model=tuple("abcdefgh"), cpus=(1, 2))
    random = np.random.default_rng(0)
    rankings = sensitivities(
        observed(grid(factors), lambda model, cpus: 100 * 1.5**cpus, 2, 0.05, random), factors
    )
    assert len(rankings) > 8 and all(group.effects[0].is_significant for group in rankings[1:])


def test_no_observations_and_one_configuration() -> None:
    assert sensitivities([], FACTORS) == ()
    (only,) = sensitivities(observed([grid(FACTORS)[0]], rate, 3), FACTORS)
    assert only.effects == ()
