"""Rates and the coverage of their intervals."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given
from scipy.stats import t as scipy_t

from stepscope.analysis.trial.throughput import (
    MIN_NOISE_DOF,
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
def test_students_t_matches_scipy(dof: float) -> None:
    """Between the integers of the table it may be slightly too wide, but not too narrow."""
    expected = float(scipy_t.ppf(0.95, dof))
    assert 0.9995 * expected <= students_t(dof) <= 1.025 * expected


@pytest.mark.parametrize("dof", [1, 2, 3, 5, 10, 30])
def test_table_of_students_t(dof: int) -> None:
    assert students_t(dof) == pytest.approx(float(scipy_t.ppf(0.95, dof)), rel=1e-4)


def test_rate_is_all_samples_over_the_total_time() -> None:
    lengths = np.full(100, 0.05)
    lengths[::20] = 1.0  # checkpoints count
    assert throughput(lengths, 32).per_second == pytest.approx(3200 / lengths.sum())


@given(st.lists(st.floats(0.001, 10), min_size=3, max_size=100), st.integers(-10, 10))
def test_error_does_not_depend_on_the_unit(lengths: list[float], power: int) -> None:
    rate = throughput(lengths, 32)
    scaled = throughput(np.array(lengths) * 2.0**power, 32)
    assert scaled.relative_error == pytest.approx(rate.relative_error, rel=1e-9, abs=1e-12)
    assert scaled.per_second == pytest.approx(rate.per_second / 2.0**power)


def test_error_of_independent_steps() -> None:
    random = np.random.default_rng(0)
    rates = [throughput(1 + 0.1 * random.normal(size=400), 1) for _ in range(300)]
    expected = np.std([rate.per_second for rate in rates])
    assert np.mean([rate.relative_error for rate in rates]) == pytest.approx(expected, rel=0.15)


def test_error_of_correlated_steps() -> None:
    """A naive standard error would be about a quarter of the true one."""
    random = np.random.default_rng(0)
    rates = []
    for _ in range(200):
        noise = random.normal(size=600)
        for index in range(1, 600):
            noise[index] = 0.9 * noise[index - 1] + 0.436 * noise[index]
        rates.append(throughput(1 + 0.1 * noise, 1))
    expected = np.std([rate.per_second for rate in rates])
    assert np.mean([rate.relative_error for rate in rates]) > 0.75 * expected


@pytest.mark.parametrize(("cv", "repeats"), [(0.08, 6), (0.02, 5), (0.15, 20)])
def test_interval_of_one_trial_covers_the_mean_of_others(cv: float, repeats: int) -> None:
    """At least 85% of the intervals, with the noise from earlier repeats."""
    random = np.random.default_rng(1)
    covered = 0
    for _ in range(1500):
        known = with_evidence(
            ASSUMED, *scatter(100 * (1 + cv * random.normal(size=repeats))), repeats
        )
        one, *others = 100 * (1 + cv * random.normal(size=12))
        found = interval(Rate(one, 0.003, 19), known)
        covered += found.low <= np.mean(others) <= found.high
    assert 0.85 <= covered / 1500 <= 0.95


def test_interval_of_the_mean_covers_the_true_value() -> None:
    random = np.random.default_rng(2)
    covered = 0
    for _ in range(1500):
        found = combined(list(100 * (1 + 0.06 * random.normal(size=5))), ASSUMED).interval
        covered += found.low <= 100 <= found.high
    assert covered / 1500 >= 0.88


def test_intervals_from_steps_only_cover_almost_nothing() -> None:
    """The reason for including the noise between processes."""
    random = np.random.default_rng(3)
    rates = 100 * (1 + 0.08 * random.normal(size=300))
    naive = [interval(Rate(rate, 0.003, 19), ProcessNoise(0, 1, "assumed")) for rate in rates]
    assert np.mean([each.low <= 100 <= each.high for each in naive]) < 0.1


@given(st.floats(0.1, 1e6), st.floats(1e-4, 0.5), st.floats(1e-4, 0.5), st.floats(1, 100))
def test_interval_includes_the_rate_and_both_errors(
    per_second: float, within: float, cv: float, dof: float
) -> None:
    found = interval(Rate(per_second, within, 19), ProcessNoise(cv, dof, "learned", 9))
    assert 0 <= found.low <= per_second <= found.high
    half = found.high / per_second - 1
    assert half >= 1.64 * max(within, cv) * (1 - 1e-9)


def test_five_repeats_replace_the_assumption() -> None:
    quiet = [100.0, 100.5, 99.5, 100.2]
    few = combined(quiet, ASSUMED)
    assert few.noise.source == "assumed" and few.noise.cv > 0.05
    enough = combined([*quiet, 99.9], ASSUMED)
    assert (enough.noise.source, enough.noise.dof) == ("learned", MIN_NOISE_DOF)
    assert enough.noise.cv == pytest.approx(0.0037, abs=0.0002)


def test_repeats_with_more_variation_than_known_count() -> None:
    known = ProcessNoise(0.01, 60, "learned", 70)
    noisy = [80.0, 120.0, 95.0, 105.0]
    assert combined(noisy, known).noise.cv == pytest.approx(np.std(np.log(noisy), ddof=1))


@given(RATES, st.floats(0.1, 10))
def test_scatter_is_relative(rates: list[float], factor: float) -> None:
    squares, dof = scatter([rate * factor for rate in rates])
    assert squares == pytest.approx(scatter(rates)[0], abs=1e-6)
    assert dof == len(rates) - 1


@given(RATES, RATES)
def test_order_of_evidence_does_not_matter(first: list[float], second: list[float]) -> None:
    known = ProcessNoise(0.05, 10, "learned", 11)
    one = with_evidence(with_evidence(known, *scatter(first), 1), *scatter(second), 2)
    other = with_evidence(with_evidence(known, *scatter(second), 2), *scatter(first), 1)
    assert one.cv == pytest.approx(other.cv) and one.dof == other.dof and one.trials == 14


def test_assumption_is_kept_until_it_is_replaced() -> None:
    assumed = ProcessNoise(0.08, 4, "assumed")
    few = with_evidence(assumed, *scatter([1, 1.5]), 2)
    more = with_evidence(few, *scatter([1, 1.2]), 2)
    assert (few.assumed, few.trials, more.assumed, more.trials) == (0.08, 2, 0.08, 4)
    assert combined([1, 1.5, 0.8], assumed).noise.assumed == 0.08
    learned = with_evidence(assumed, *scatter([1, 1.1, 1.2, 1, 1]), 5)
    assert (learned.source, learned.assumed) == ("learned", None)
