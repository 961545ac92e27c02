"""Rates, and intervals that hold what they promise."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given
from scipy.stats import t as scipy_t

from stepscope.analysis.trial.throughput import (
    LEARNT_FROM,
    Rate,
    combined,
    interval,
    scatter,
    students_t,
    throughput,
    with_evidence,
)
from stepscope.records.trial import ProcessNoise

ASSUMED = ProcessNoise(0.08, 4, "assumed")
RATES = st.lists(st.floats(1, 1e6), min_size=2, max_size=20)


@given(st.floats(1, 500))
def test_students_t_is_that_of_scipy(dof: float) -> None:
    """Between the whole numbers of the table it may be a little wide, never narrow."""
    truth = float(scipy_t.ppf(0.95, dof))
    assert 0.9995 * truth <= students_t(dof) <= 1.025 * truth


@pytest.mark.parametrize("dof", [1, 2, 3, 5, 10, 30])
def test_the_table_of_students_t(dof: int) -> None:
    assert students_t(dof) == pytest.approx(float(scipy_t.ppf(0.95, dof)), rel=1e-4)


def test_the_rate_is_all_samples_over_all_time() -> None:
    lengths = np.full(100, 0.05)
    lengths[::20] = 1.0  # checkpoints count
    assert throughput(lengths, 32).per_second == pytest.approx(3200 / lengths.sum())


@given(st.lists(st.floats(0.001, 10), min_size=3, max_size=100), st.integers(-10, 10))
def test_the_error_does_not_depend_on_the_unit(lengths: list[float], power: int) -> None:
    rate = throughput(lengths, 32)
    scaled = throughput(np.array(lengths) * 2.0**power, 32)
    assert scaled.within == pytest.approx(rate.within, rel=1e-9, abs=1e-12)
    assert scaled.per_second == pytest.approx(rate.per_second / 2.0**power)


def test_the_error_of_independent_steps() -> None:
    random = np.random.default_rng(0)
    rates = [throughput(1 + 0.1 * random.normal(size=400), 1) for _ in range(300)]
    truth = np.std([rate.per_second for rate in rates])
    assert np.mean([rate.within for rate in rates]) == pytest.approx(truth, rel=0.15)


def test_steps_that_resemble_their_neighbours_count_for_less() -> None:
    """A naive standard error would be about a fourth of the true one."""
    random = np.random.default_rng(0)
    rates = []
    for _ in range(200):
        noise = random.normal(size=600)
        for place in range(1, 600):
            noise[place] = 0.9 * noise[place - 1] + 0.436 * noise[place]
        rates.append(throughput(1 + 0.1 * noise, 1))
    truth = np.std([rate.per_second for rate in rates])
    assert np.mean([rate.within for rate in rates]) > 0.75 * truth


@pytest.mark.parametrize(("cv", "learnt_from"), [(0.08, 6), (0.02, 5), (0.15, 20)])
def test_the_interval_of_one_trial_covers_the_mean_of_others(cv: float, learnt_from: int) -> None:
    """The goal is 85 %: of intervals that know only what earlier repeats have taught."""
    random = np.random.default_rng(1)
    covered = 0
    for _ in range(1500):
        known = with_evidence(
            ASSUMED, *scatter(100 * (1 + cv * random.normal(size=learnt_from))), learnt_from
        )
        one, *others = 100 * (1 + cv * random.normal(size=12))
        found = interval(Rate(one, 0.003, 19), known)
        covered += found.low <= np.mean(others) <= found.high
    assert 0.85 <= covered / 1500 <= 0.95


def test_the_interval_of_the_mean_covers_the_truth() -> None:
    random = np.random.default_rng(2)
    covered = 0
    for _ in range(1500):
        found = combined(list(100 * (1 + 0.06 * random.normal(size=5))), ASSUMED).interval
        covered += found.low <= 100 <= found.high
    assert covered / 1500 >= 0.88


def test_steps_alone_cover_next_to_nothing() -> None:
    """Why the spread between processes is in the interval at all."""
    random = np.random.default_rng(3)
    rates = 100 * (1 + 0.08 * random.normal(size=300))
    naive = [interval(Rate(rate, 0.003, 19), ProcessNoise(0, 1, "assumed")) for rate in rates]
    assert np.mean([each.low <= 100 <= each.high for each in naive]) < 0.1


@given(st.floats(0.1, 1e6), st.floats(1e-4, 0.5), st.floats(1e-4, 0.5), st.floats(1, 100))
def test_an_interval_holds_its_rate_and_both_parts(
    per_second: float, within: float, cv: float, dof: float
) -> None:
    found = interval(Rate(per_second, within, 19), ProcessNoise(cv, dof, "learnt", 9))
    assert 0 <= found.low <= per_second <= found.high
    half = found.high / per_second - 1
    assert half >= 1.64 * max(within, cv) * (1 - 1e-9)


def test_an_assumption_is_given_up_after_five_repeats() -> None:
    calm = [100.0, 100.5, 99.5, 100.2]
    few = combined(calm, ASSUMED)
    assert few.noise.source == "assumed" and few.noise.cv > 0.05
    enough = combined([*calm, 99.9], ASSUMED)
    assert (enough.noise.source, enough.noise.dof) == ("learnt", LEARNT_FROM)
    assert enough.noise.cv == pytest.approx(0.0037, abs=0.0002)


def test_repeats_that_scatter_more_than_usual_are_believed() -> None:
    usual = ProcessNoise(0.01, 60, "learnt", 70)
    wild = [80.0, 120.0, 95.0, 105.0]
    assert combined(wild, usual).noise.cv == pytest.approx(np.std(np.log(wild), ddof=1))


@given(RATES, st.floats(0.1, 10))
def test_scatter_is_relative(rates: list[float], factor: float) -> None:
    squares, dof = scatter([rate * factor for rate in rates])
    assert squares == pytest.approx(scatter(rates)[0], abs=1e-6)
    assert dof == len(rates) - 1


@given(RATES, RATES)
def test_evidence_adds_up_in_any_order(first: list[float], second: list[float]) -> None:
    usual = ProcessNoise(0.05, 10, "learnt", 11)
    one = with_evidence(with_evidence(usual, *scatter(first), 1), *scatter(second), 2)
    other = with_evidence(with_evidence(usual, *scatter(second), 2), *scatter(first), 1)
    assert one.cv == pytest.approx(other.cv) and one.dof == other.dof and one.trials == 14


def test_what_was_assumed_stays_known_until_it_is_asked_no_more() -> None:
    assumed = ProcessNoise(0.08, 4, "assumed")
    few = with_evidence(assumed, *scatter([1, 1.5]), 2)
    more = with_evidence(few, *scatter([1, 1.2]), 2)
    assert (few.assumed, few.trials, more.assumed, more.trials) == (0.08, 2, 0.08, 4)
    assert combined([1, 1.5, 0.8], assumed).noise.assumed == 0.08
    learnt = with_evidence(assumed, *scatter([1, 1.1, 1.2, 1, 1]), 5)
    assert (learnt.source, learnt.assumed) == ("learnt", None)
