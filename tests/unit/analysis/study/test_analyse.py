"""A whole study, and whatever else may come."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from itertools import product

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from stepscope.analysis.study.analyse import analyse
from stepscope.analysis.study.effects import effects_of
from stepscope.analysis.study.fitted import fitted
from stepscope.analysis.study.records import (
    ENERGY,
    RESPONSES,
    THROUGHPUT,
    Factor,
    Observation,
    Remark,
    StudyAnalysis,
)
from stepscope.analysis.study.table import table_of
from stepscope.analysis.trial.throughput import combined
from stepscope.records.trial import ProcessNoise
from unit.analysis.study.made import factors_of, grid, observed, steps

FACTORS = factors_of(cpus=(1, 2), workers=(0, 2), model=("cnn", "vit"))
PLANTED = steps(cpus={1: 1, 2: 1.6}, workers={0: 1, 2: 1.3}, model={"cnn": 1, "vit": 0.4})
MACHINE = ProcessNoise(0.08, 4, "assumed")


def study(
    repeats: int = 3, noise: float = 0.03, known: ProcessNoise | None = None
) -> StudyAnalysis:
    return analyse(observed(grid(FACTORS), PLANTED, repeats, noise), FACTORS, known)


def test_a_study() -> None:
    told = study()
    assert told.factors == FACTORS
    assert [each.response.key for each in told.effects] == [THROUGHPUT]
    assert [each.factor for each in told.sensitivity[0].effects] == ["model", "cpus", "workers"]
    assert [each.group for each in told.sensitivity] == [{}, {"model": "cnn"}, {"model": "vit"}]
    assert len(told.configurations) == 8
    best = told.configurations[0]
    assert (best.name, best.trials) == ("cpus=2 workers=2 model=cnn", 3)
    assert best.low is not None
    assert best.high is not None
    assert best.low < best.values[THROUGHPUT] < best.high
    assert best.low < 208 < best.high
    assert {each.factor for each in told.curves} == {"cpus", "workers"}
    assert told.as_good == ()


def test_as_good_as_the_best() -> None:
    factors = factors_of(workers=(1, 2, 4, 8))
    rate = steps(workers={1: 0.5, 2: 1, 4: 1, 8: 0.6})
    random = np.random.default_rng(1)
    right = []
    for _ in range(60):
        told = analyse(observed(grid(factors), rate, 4, 0.05, random), factors)
        right.append({told.configurations[0].name, *told.as_good} == {"workers=2", "workers=4"})
    assert np.mean(right) >= 0.85


def test_the_true_best_is_among_the_best() -> None:
    """Picked among ten that differ by little: in nine of ten studies, at least."""
    factors = factors_of(workers=tuple(range(10)))
    random = np.random.default_rng(4)
    held = []
    for _ in range(100):
        trials = observed(grid(factors), lambda workers: 100 + 1.0 * workers, 3, 0.05, random)
        told = analyse(trials, factors)
        held.append("workers=9" in (told.configurations[0].name, *told.as_good))
    assert np.mean(held) >= 0.9


def test_intervals_hold_the_rate() -> None:
    random = np.random.default_rng(6)
    held = []
    for _ in range(100):
        trials = observed(grid(FACTORS), PLANTED, 2, 0.08, random)
        for each in analyse(trials, FACTORS, MACHINE).configurations:
            assert each.low is not None
            assert each.high is not None
            held.append(each.low <= PLANTED(**each.levels) <= each.high)
    assert 0.87 <= np.mean(held) <= 0.97


def test_one_configuration_has_the_interval_of_a_trial() -> None:
    trials = observed([{"cpus": 1}], lambda cpus: 100, 3, 0.05)
    (only,) = analyse(trials, factors_of(cpus=(1, 2)), MACHINE).configurations
    alone = combined([each.values[THROUGHPUT] for each in trials], MACHINE)
    assert only.low is not None
    assert only.high is not None
    assert only.high / only.low == pytest.approx(alone.interval.high / alone.interval.low)


def test_means_are_geometric_for_ratios() -> None:
    trials = [
        Observation({"cpus": 1}, {THROUGHPUT: rate, "cpu_share": share})
        for rate, share in ((100, 0.2), (400, 0.4))
    ]
    (only,) = analyse(trials, factors_of(cpus=(1, 2))).configurations
    assert only.values == pytest.approx({THROUGHPUT: 200, "cpu_share": 0.3})


def test_machines_of_a_merged_study_are_configurations_of_their_own() -> None:
    factors = factors_of(machine=("old", "new"), cpus=(1, 2))
    trials = [
        replace(each, name=str(each.levels["cpus"]))
        for each in observed(grid(factors), lambda machine, cpus: len(machine) * cpus, 2)
    ]
    assert len(analyse(trials, factors).configurations) == 4


def test_all_at_once_and_with_units() -> None:
    trials = [
        replace(each, values={**each.values, "host_memory_peak": 1e9, ENERGY: 2.0, "other": 1.0})
        for each in observed(grid(FACTORS), PLANTED, 2, 0.02)
    ]
    told = analyse(trials, FACTORS)
    assert [each.response.key for each in told.effects] == [THROUGHPUT, "host_memory_peak", ENERGY]
    assert [each.responses[1] for each in told.fronts] == ["host_memory_peak", ENERGY] * 2
    assert [each.group for each in told.fronts] == [{"model": "cnn"}] * 2 + [{"model": "vit"}] * 2
    assert [len(each.best) for each in told.fronts] == [1, 1, 1, 1]


@pytest.mark.parametrize("count", [0, 1])
def test_hardly_any_trials(count: int) -> None:
    told = analyse(observed(grid(FACTORS), PLANTED)[:count], FACTORS, MACHINE)
    assert len(told.configurations) == count
    assert told.factors == told.effects == told.sensitivity == told.curves == ()
    assert told.remarks == (Remark("too_few_trials"),)


def test_trials_that_are_all_the_same() -> None:
    told = analyse(observed([grid(FACTORS)[0]], PLANTED, 5, 0.05), FACTORS)
    assert told.factors == ()
    assert told.effects[0].main == ()
    assert len(told.configurations) == 1
    assert told.as_good == ()


LEVELS = st.sampled_from([None, True, False, 0, 1, 1.0, 2, "1", "x", 0.5])
VALUES = st.sampled_from(
    [0.0, -1.0, 1.0, 2.0, 2.5, 1e9, 1e-9, 1e200, -1e200, 5e-324, math.nan, math.inf, -math.inf]
)
TRIALS = st.lists(
    st.builds(
        Observation,
        st.dictionaries(st.sampled_from(["cpus", "workers", "model", "odd"]), LEVELS),
        st.dictionaries(st.sampled_from([*RESPONSES, "unknown"]), VALUES),
        st.sampled_from(["", "a", "b"]),
    ),
    max_size=12,
)
ANY_FACTORS = st.lists(
    st.builds(
        Factor,
        st.sampled_from(["cpus", "workers", "model", "machine"]),
        st.lists(LEVELS, max_size=4).map(tuple),
    ),
    max_size=4,
    unique_by=lambda factor: factor.name,
)


@given(TRIALS, ANY_FACTORS, st.sampled_from([None, MACHINE, ProcessNoise(0.0, 1, "learnt")]))
@settings(max_examples=150)
def test_whatever_comes_it_does_not_fail(
    trials: list[Observation], factors: list[Factor], known: ProcessNoise | None
) -> None:
    told = analyse(trials, factors, known)
    assert sum(each.trials for each in told.configurations) == len(trials)
    for effects in told.effects:
        for each in (*effects.main, *effects.interactions):
            size = each.size
            assert size.low <= size.value <= size.high
            assert not math.isnan(size.value)
    for curve in told.curves:
        assert (curve.knee is None) == (curve.no_knee is not None)


def test_ten_thousand_trials_are_no_wait() -> None:
    """Of five factors with ten levels each: 856 effects, of eight responses."""
    factors = factors_of(**{name: tuple(range(10)) for name in "abcde"})
    points = list(product(range(10), repeat=5))
    random = np.random.default_rng(0)
    trials = []
    for at in random.choice(len(points), 10_000, replace=False):
        levels = dict(zip("abcde", points[at], strict=True))
        rate = math.exp(0.1 * levels["a"] + 0.05 * random.normal())
        trials.append(Observation(levels, dict.fromkeys(RESPONSES, rate)))
    began = time.thread_time()
    fits = fitted(table_of(trials, factors), RESPONSES.values())
    told = [effects_of(fit) for fit in fits.values()]
    seconds = time.thread_time() - began
    assert len(told) == len(RESPONSES)
    assert told[0].main[0].factor == "a"
    assert told[0].main[0].size.value == pytest.approx(math.exp(0.9), rel=0.05)
    assert seconds < 6, "0.3 s, and more where it waits for threads on a busy machine"
