"""A planted warm-up is cut, and drift is not called steady."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings

from stepscope.analysis.trial.steady import MIN_STEADY_STEPS, Steady, batch_means, find_steady

Floats = npt.NDArray[np.float64]
SEEDS = st.integers(0, 2**32 - 1)


def noisy(lengths: Floats, noise: float, seed: int) -> Floats:
    return lengths * (1 + noise * np.random.default_rng(seed).normal(size=len(lengths)))


def even(steps: int) -> Floats:
    return np.full(steps, 0.02)


def relative_mean(found: Steady, steps: Floats) -> float:
    """Return the mean of the steps after the warm-up, relative to the planted mean."""
    return float(steps[found.warmup :].mean()) / 0.02


@settings(max_examples=60)
@given(SEEDS, st.integers(40, 400), st.floats(0.02, 0.5), st.floats(0.3, 5), st.floats(0.005, 0.05))
def test_planted_warmup_is_cut(
    seed: int, steps: int, part: float, factor: float, noise: float
) -> None:
    """The first steps are significantly slower or faster."""
    if 0.75 < factor < 1.33:
        factor = 2.0
    planted = max(1, int(steps * part * 0.9))
    lengths = even(steps)
    lengths[:planted] *= factor
    found = find_steady(noisy(lengths, noise, seed))
    assert planted - 1 <= found.warmup <= steps // 2
    assert relative_mean(found, lengths) == pytest.approx(1, abs=0.03)


def test_little_is_cut_without_a_warmup() -> None:
    cuts = [find_steady(noisy(even(200), 0.05, seed)).warmup for seed in range(100)]
    assert np.mean(np.array(cuts) <= 5) > 0.9


def test_noise_is_steady() -> None:
    found = [find_steady(noisy(even(150), 0.05, seed)) for seed in range(100)]
    assert sum(each.steady for each in found) >= 98
    assert not any(each.reason for each in found if each.steady)


def test_only_one_long_first_step_is_cut() -> None:
    """As after compilation or autotuning."""
    lengths = noisy(even(100), 0.02, 3)
    lengths[0] = 30.0
    found = find_steady(lengths)
    assert 1 <= found.warmup <= 5 and found.steady


def test_slowly_falling_step_times() -> None:
    falling = even(300) * (1 + 1.5 * np.exp(-np.arange(300) / 15))
    found = find_steady(noisy(falling, 0.03, 5))
    assert 35 <= found.warmup <= 120
    assert relative_mean(found, falling) == pytest.approx(1, abs=0.01)


@pytest.mark.parametrize(("workers", "prefetched", "steps"), [(4, 8, 60), (8, 16, 80), (2, 4, 24)])
def test_prefetched_batches_are_warmup(workers: int, prefetched: int, steps: int) -> None:
    """They arrive fast; later, training waits for one batch in each round of the workers."""
    index = np.arange(steps)
    waits = np.where(index % workers == workers - 1, 0.02 * workers - 0.004 * (workers - 1), 0.004)
    lengths = np.where(index < prefetched, 0.004, waits)
    for seed in range(10):
        found = find_steady(noisy(lengths, 0.05, seed), workers)
        assert prefetched - 1 <= found.warmup <= steps // 2
        rest = lengths[found.warmup :]
        assert float(rest[: len(rest) // workers * workers].mean()) == pytest.approx(0.02, rel=0.15)


@pytest.mark.parametrize(("every", "slow"), [(50, 10), (20, 3), (75, 100)])
def test_periodic_slow_steps_are_part_of_the_steady_state(every: int, slow: int) -> None:
    """As at the end of epochs and at checkpoints."""
    lengths = even(300)
    lengths[every::every] *= slow
    for seed in range(20):
        found = find_steady(noisy(lengths, 0.03, seed))
        assert found.warmup < every and found.steady


@pytest.mark.parametrize("change", [-0.25, 0.2, 0.6])
def test_drift_is_reported_with_its_size(change: float) -> None:
    lengths = even(200) * np.linspace(1, 1 + change, 200)
    found = find_steady(noisy(lengths, 0.03, 7))
    assert not found.steady
    assert found.drift is not None and found.drift * change > 0
    assert ("rises" if change > 0 else "falls") in found.reason
    assert f"by {abs(found.drift) * 100:.0f}%" in found.reason


@pytest.mark.parametrize("factor", [0.05, 20.0])
def test_large_drift_is_relative_to_the_first_step(factor: float) -> None:
    found = find_steady(even(200) * np.geomspace(1, factor, 200))
    assert not found.steady and found.drift is not None
    # The warm-up, the first half, is cut from falling step times.
    expected = factor ** (1 - found.warmup / 200) - 1
    assert found.drift == pytest.approx(expected, rel=0.15)
    assert found.drift > -1


def test_throttling_halfway() -> None:
    lengths = even(200)
    lengths[120:] *= 1.25
    assert not find_steady(noisy(lengths, 0.03, 2)).steady


def test_warmup_longer_than_half_is_not_steady() -> None:
    lengths = even(120) * np.linspace(3, 1, 120)
    found = find_steady(noisy(lengths, 0.02, 2))
    assert found.warmup == 60 and not found.steady
    assert found.reason.startswith("the warm-up takes more than half of the steps")


def test_small_drift_is_steady() -> None:
    lengths = even(400) * np.linspace(1, 1.03, 400)
    assert find_steady(noisy(lengths, 0.01, 2)).steady


@pytest.mark.parametrize("steps", range(MIN_STEADY_STEPS))
def test_few_steps_are_not_steady(steps: int) -> None:
    found = find_steady(even(steps))
    assert (found.warmup, found.steady, found.drift) == (0, False, None)
    assert "too few" in found.reason


def test_seven_steps_with_a_warmup() -> None:
    found = find_steady([0.9, 0.5, 0.021, 0.02, 0.019, 0.02, 0.0205])
    assert found.warmup in (2, 3) and not found.steady


def test_equal_steps_are_steady() -> None:
    assert find_steady(even(50)) == Steady(0, True, drift=0.0)


@given(st.lists(st.integers(1, 10**12), max_size=60), st.integers(-20, 20), st.integers(0, 9))
def test_unit_does_not_matter(lengths: list[int], power: int, workers: int) -> None:
    scaled = find_steady(np.array(lengths, float) * 2.0**power, workers)
    assert scaled == find_steady(np.array(lengths, float), workers)
    assert 0 <= scaled.warmup <= len(lengths) // 2


@given(st.lists(st.floats(0, 1e6), max_size=200), st.integers(1, 50))
def test_batch_means(values: list[float], at_most: int) -> None:
    means = batch_means(np.array(values), at_most)
    assert len(means) <= at_most
    if values:
        size = -(-len(values) // at_most)
        kept = values[len(values) - len(means) * size :]
        assert float(means.mean()) == pytest.approx(float(np.mean(kept)), abs=1e-6)
        assert len(kept) > len(values) / 2
