"""The analysis of a whole study, and of invalid input."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from itertools import product

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from stepscope.analysis.study.analyze import analyze
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
from unit.analysis.study.builders import factors_of, grid, observed, steps

FACTORS = factors_of(cpus=(1, 2), workers=(0, 2), model=("cnn", "vit"))
PLANTED = steps(cpus={1: 1, 2: 1.6}, workers={0: 1, 2: 1.3}, model={"cnn": 1, "vit": 0.4})
MACHINE = ProcessNoise(0.08, 4, "assumed")


def study(
    repeats: int = 3, noise: float = 0.03, prior: ProcessNoise | None = None
) -> StudyAnalysis:
    return analyze(observed(grid(FACTORS), PLANTED, repeats, noise), FACTORS, prior)


def test_analysis_of_a_study() -> None:
    analysis = study()
    assert analysis.factors == FACTORS
    assert [each.response.key for each in analysis.effects] == [THROUGHPUT]
    assert [each.factor for each in analysis.sensitivity[0].effects] == ["model", "cpus", "workers"]
    assert [each.group for each in analysis.sensitivity] == [{}, {"model": "cnn"}, {"model": "vit"}]
    assert len(analysis.configurations) == 8
    best = analysis.configurations[0]
    assert (best.name, best.trials) == ("cpus=2 workers=2 model=cnn", 3)
    assert best.low is not None
    assert best.high is not None
    assert best.low < best.values[THROUGHPUT] < best.high
    assert best.low < 208 < best.high
    assert {each.factor for each in analysis.curves} == {"cpus", "workers"}
    assert analysis.equivalent == ()


def test_equivalent_configurations() -> None:
    factors = factors_of(workers=(1, 2, 4, 8))
    rate = steps(workers={1: 0.5, 2: 1, 4: 1, 8: 0.6})
    random = np.random.default_rng(1)
    correct = []
    for _ in range(60):
        analysis = analyze(observed(grid(factors), rate, 4, 0.05, random), factors)
        correct.append(
            {analysis.configurations[0].name, *analysis.equivalent} == {"workers=2", "workers=4"}
        )
    assert np.mean(correct) >= 0.85


def test_equivalent_configurations_include_the_true_best() -> None:
    """In at least nine of ten studies, although ten configurations differ by little."""
    factors = factors_of(workers=tuple(range(10)))
    random = np.random.default_rng(4)
    covered = []
    for _ in range(100):
        trials = observed(grid(factors), lambda workers: 100 + 1.0 * workers, 3, 0.05, random)
        analysis = analyze(trials, factors)
        covered.append("workers=9" in (analysis.configurations[0].name, *analysis.equivalent))
    assert np.mean(covered) >= 0.9


def test_intervals_cover_the_true_throughput() -> None:
    random = np.random.default_rng(6)
    covered = []
    for _ in range(100):
        trials = observed(grid(FACTORS), PLANTED, 2, 0.08, random)
        for each in analyze(trials, FACTORS, MACHINE).configurations:
            assert each.low is not None
            assert each.high is not None
            covered.append(each.low <= PLANTED(**each.levels) <= each.high)
    assert 0.87 <= np.mean(covered) <= 0.97


def test_one_configuration_has_the_interval_of_a_trial() -> None:
    trials = observed([{"cpus": 1}], lambda cpus: 100, 3, 0.05)
    (only,) = analyze(trials, factors_of(cpus=(1, 2)), MACHINE).configurations
    alone = combined([each.values[THROUGHPUT] for each in trials], MACHINE)
    assert only.low is not None
    assert only.high is not None
    assert only.high / only.low == pytest.approx(alone.interval.high / alone.interval.low)


def test_means_are_geometric_for_ratios() -> None:
    trials = [
        Observation({"cpus": 1}, {THROUGHPUT: rate, "cpu_share": share})
        for rate, share in ((100, 0.2), (400, 0.4))
    ]
    (only,) = analyze(trials, factors_of(cpus=(1, 2))).configurations
    assert only.values == pytest.approx({THROUGHPUT: 200, "cpu_share": 0.3})


def test_the_machine_of_a_merged_study_is_part_of_the_configuration() -> None:
    factors = factors_of(machine=("old", "new"), cpus=(1, 2))
    trials = [
        replace(each, name=str(each.levels["cpus"]))
        for each in observed(grid(factors), lambda machine, cpus: len(machine) * cpus, 2)
    ]
    assert len(analyze(trials, factors).configurations) == 4


def test_several_responses() -> None:
    trials = [
        replace(each, values={**each.values, "host_memory_peak": 1e9, ENERGY: 2.0, "other": 1.0})
        for each in observed(grid(FACTORS), PLANTED, 2, 0.02)
    ]
    analysis = analyze(trials, FACTORS)
    assert [each.response.key for each in analysis.effects] == [
        THROUGHPUT,
        "host_memory_peak",
        ENERGY,
    ]
    assert [each.responses[1] for each in analysis.fronts] == ["host_memory_peak", ENERGY] * 2
    assert [each.group for each in analysis.fronts] == [{"model": "cnn"}] * 2 + [
        {"model": "vit"}
    ] * 2
    assert [len(each.configurations) for each in analysis.fronts] == [1, 1, 1, 1]


@pytest.mark.parametrize("count", [0, 1])
def test_fewer_than_two_trials(count: int) -> None:
    analysis = analyze(observed(grid(FACTORS), PLANTED)[:count], FACTORS, MACHINE)
    assert len(analysis.configurations) == count
    assert analysis.factors == analysis.effects == analysis.sensitivity == analysis.curves == ()
    assert analysis.remarks == (Remark("too_few_trials"),)


def test_a_single_configuration() -> None:
    analysis = analyze(observed([grid(FACTORS)[0]], PLANTED, 5, 0.05), FACTORS)
    assert analysis.factors == ()
    assert analysis.effects[0].main == ()
    assert len(analysis.configurations) == 1
    assert analysis.equivalent == ()


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


@given(TRIALS, ANY_FACTORS, st.sampled_from([None, MACHINE, ProcessNoise(0.0, 1, "learned")]))
@settings(max_examples=150)
def test_no_input_is_an_error(
    trials: list[Observation], factors: list[Factor], prior: ProcessNoise | None
) -> None:
    analysis = analyze(trials, factors, prior)
    assert sum(each.trials for each in analysis.configurations) == len(trials)
    for effects in analysis.effects:
        for each in (*effects.main, *effects.interactions):
            size = each.size
            assert size.low <= size.value <= size.high
            assert not math.isnan(size.value)
    for curve in analysis.curves:
        assert (curve.knee is None) == (curve.no_knee is not None)


def test_ten_thousand_trials_are_analyzed_quickly() -> None:
    """Five factors with ten levels each: 856 columns, eight responses."""
    factors = factors_of(**{name: tuple(range(10)) for name in "abcde"})
    points = list(product(range(10), repeat=5))
    random = np.random.default_rng(0)
    trials = []
    for at in random.choice(len(points), 10_000, replace=False):
        levels = dict(zip("abcde", points[at], strict=True))
        rate = math.exp(0.1 * levels["a"] + 0.05 * random.normal())
        trials.append(Observation(levels, dict.fromkeys(RESPONSES, rate)))
    started = time.thread_time()
    fits = fitted(table_of(trials, factors), RESPONSES.values())
    effects = [effects_of(fit) for fit in fits.values()]
    seconds = time.thread_time() - started
    assert len(effects) == len(RESPONSES)
    assert effects[0].main[0].factor == "a"
    assert effects[0].main[0].size.value == pytest.approx(math.exp(0.9), rel=0.05)
    assert seconds < 6, "usually 0.3 s, but more on a busy machine"
