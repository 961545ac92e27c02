"""Scaling curves and their knees."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from stepscope.analysis.study.records import Level, ScalingCurve
from stepscope.analysis.study.scaling import CERTAIN_GAIN, MIN_GAIN
from unit.analysis.study.builders import curves, factors_of, grid, observed, sensitivities

LEVELS = (1, 2, 4, 8, 16)
WORKERS = factors_of(workers=LEVELS)
BOTH = factors_of(workers=LEVELS, batch_size=(32, 64))


def curve(
    rate: Callable[[int], float],
    repeats: int = 3,
    noise: float = 0.0,
    random: np.random.Generator | None = None,
    levels: tuple[int, ...] = LEVELS,
) -> ScalingCurve:
    factors = factors_of(workers=levels)
    return curves(observed(grid(factors), rate, repeats, noise, random), factors)[0]


def table(*rates: float) -> Callable[[int], float]:
    return lambda workers: dict(zip(LEVELS, rates, strict=True))[workers]


def no_knee(curve: ScalingCurve) -> tuple[str, Level, Level]:
    result = curve.no_knee
    assert result is not None
    return result.kind, result.level, result.other


class TestKnees:
    def test_plateau(self) -> None:
        result = curve(lambda workers: min(100 * workers, 400))
        assert result.knee is not None
        assert result.knee.level == 4
        assert result.knee.gain.value == pytest.approx(1)
        assert result.knee.is_certain
        assert [each.level for each in result.points] == list(LEVELS)
        assert [each.mean for each in result.points] == pytest.approx([100, 200, 400, 400, 400])

    def test_small_gain_beyond_the_knee(self) -> None:
        result = curve(table(100, 200, 400, 404, 412))
        assert result.knee is not None
        assert result.knee.level == 4
        assert result.knee.best == 16
        assert result.knee.gain.value == pytest.approx(1.03)

    def test_still_gaining(self) -> None:
        result = curve(lambda workers: workers**0.5)
        assert result.knee is None
        assert no_knee(result) == ("gaining", 8, 16)
        assert result.no_knee and result.no_knee.gain.value == pytest.approx(2**0.5)

    def test_no_effect(self) -> None:
        result = curve(table(100, 101, 99, 100, 101))
        assert result.knee is None
        assert no_knee(result)[0] == "flat"
        assert result.no_knee and result.no_knee.gain.value == pytest.approx(101 / 99)

    def test_more_is_slower(self) -> None:
        result = curve(table(100, 90, 80, 70, 60))
        assert result.knee is None
        assert no_knee(result) == ("slower", 1, 16)
        assert result.no_knee and result.no_knee.gain.value == pytest.approx(0.6)

    def test_fall_beyond_the_peak(self) -> None:
        result = curve(table(100, 200, 300, 310, 273))
        assert result.knee is not None
        assert result.knee.level == 4
        fall = result.knee.fall
        assert fall and (fall.peak, fall.worst) == (8, 16)
        assert fall.loss.value == pytest.approx(273 / 310)

    def test_two_levels_have_no_knee(self) -> None:
        result = curve(lambda workers: 100.0 * workers, levels=(1, 2))
        assert result.knee is None
        assert no_knee(result) == ("two_levels", 1, 2)
        assert [each.mean for each in result.points] == pytest.approx([100, 200])

    def test_knee_without_repeats_is_not_certain(self) -> None:
        result = curve(lambda workers: min(100 * workers, 400), repeats=1)
        assert result.knee is not None
        assert (result.knee.level, result.knee.is_certain) == (4, False)
        assert result.knee.gain.high == math.inf

    def test_effect_within_the_noise(self) -> None:
        result = curve(table(100, 108, 104, 110, 109), 2, 0.3, np.random.default_rng(1))
        assert result.knee is None
        assert no_knee(result)[0] == "not_significant"

    def test_gain_within_the_noise_but_significant_fall(self) -> None:
        random = np.random.default_rng(1)
        result = curve(table(100, 106, 105, 107, 40), 3, 0.05, random)
        assert result.knee is None
        assert no_knee(result)[::2] == ("slower", 16)

    def test_gain_within_the_noise_after_a_dip(self) -> None:
        result = curve(table(100, 40, 108, 109, 110), 2, 0.08, np.random.default_rng(1))
        assert result.knee is None
        assert no_knee(result)[:2] == ("unclear", 1)

    def test_small_gain_after_a_dip(self) -> None:
        result = curve(table(100, 40, 102, 103, 102))
        assert result.knee is None
        assert no_knee(result) == ("small_gain", 1, 8)

    def test_constants(self) -> None:
        assert 0 < MIN_GAIN < CERTAIN_GAIN


class TestKneesWithNoise:
    def simulated(self, rate: Callable[[int], float], noise: float) -> list[ScalingCurve]:
        random = np.random.default_rng(11)
        return [curve(rate, 5, noise, random) for _ in range(150)]

    @pytest.mark.parametrize("noise", [0.03, 0.08])
    @pytest.mark.parametrize("knee", [2, 4, 8])
    def test_sharp_knee(self, knee: int, noise: float) -> None:
        result = self.simulated(lambda workers: 100.0 * min(workers, knee), noise)
        correct = [each.knee is not None and each.knee.level == knee for each in result]
        assert np.mean(correct) >= 0.9

    @pytest.mark.parametrize("power", [4, 8])
    def test_soft_knee(self, power: int) -> None:
        """At the true level, or at one that is within 5% of it."""

        def rate(workers: int) -> float:
            return float(((100 * workers) ** -power + 400.0**-power) ** (-1 / power))

        rates = {level: rate(level) for level in LEVELS}
        knee = next(
            level for level in LEVELS if max(rates.values()) <= rates[level] * (1 + MIN_GAIN)
        )
        good = [level for level in LEVELS if abs(rates[level] / rates[knee] - 1) <= MIN_GAIN]
        result = self.simulated(rate, 0.03)
        assert (
            np.mean([each.knee is not None and each.knee.level in good for each in result]) >= 0.9
        )

    def test_certain_knees_are_correct(self) -> None:
        result = self.simulated(lambda workers: 100.0 * min(workers, 4), 0.05)
        certain = [each.knee.level for each in result if each.knee and each.knee.is_certain]
        assert len(certain) > 0.3 * len(result)
        assert np.mean([level == 4 for level in certain]) >= 0.95


class TestSignificance:
    """A curve never claims what the main effect of its factor does not support."""

    @pytest.mark.parametrize("noise", [0.02, 0.05, 0.15])
    @pytest.mark.parametrize(
        "rates",
        [
            (100, 100, 100, 100, 100),
            (100, 104, 108, 111, 112),
            (100, 99, 97, 95, 92),
            (100, 108, 104, 98, 90),
            (100, 150, 180, 185, 182),
        ],
    )
    def test_curves_agree_with_main_effects(self, rates: tuple[float, ...], noise: float) -> None:
        factors = factors_of(workers=LEVELS, model=("cnn", "vit"))
        rate = table(*rates)
        random = np.random.default_rng(5)
        checked = 0
        for _ in range(10):
            trials = observed(grid(factors), lambda workers, model: rate(workers), 2, noise, random)
            effects = {
                (each.factor, str(ranking.group)): each
                for ranking in sensitivities(trials, factors)
                for each in ranking.effects
            }
            for each in curves(trials, factors):
                effect = effects[each.factor, str(each.group)]
                kind = each.no_knee.kind if each.no_knee else "knee"
                assert (kind == "not_significant") == (not effect.is_significant)
                checked += 1
        assert checked >= 30


class TestGroups:
    def test_one_curve_per_model(self) -> None:
        factors = factors_of(model=("small", "large"), workers=LEVELS)

        def rate(model: str, workers: int) -> float:
            return min(100 * workers, 800 if model == "small" else 200)

        result = curves(observed(grid(factors), rate, 3, 0.02), factors)
        levels = {str(each.group): each.knee.level if each.knee else None for each in result}
        assert levels == {"{}": 8, "{'model': 'small'}": 8, "{'model': 'large'}": 2}

    def test_one_curve_per_level_of_the_largest_interaction(self) -> None:
        factors = factors_of(workers=(1, 2, 4), cpus=(1, 2, 4), batch_size=(32, 64))

        def rate(workers: int, cpus: int, batch_size: int) -> float:
            return 100 * min(workers, cpus) * (batch_size / 32) ** 0.05

        result = curves(observed(grid(factors), rate, 3, 0.02), factors)
        groups = [(each.factor, dict(each.group)) for each in result]
        of_workers: list[dict[str, Level]] = [{}, {"cpus": 1}, {"cpus": 2}, {"cpus": 4}]
        assert [group for name, group in groups if name == "workers"] == of_workers
        assert [group for name, group in groups if name == "batch_size"] == [{}]
        by = {str(each.group): each for each in result if each.factor == "workers"}
        assert no_knee(by["{'cpus': 1}"])[0] == "not_significant"
        knee = by["{'cpus': 2}"].knee
        assert knee is not None
        assert knee.level == 2

    def test_levels_in_any_order(self) -> None:
        factors = factors_of(workers=(16, 1, 8, 2, 4))
        trials = observed(grid(factors), lambda workers: min(100 * workers, 400), 2)
        (result,) = curves(trials, factors)
        assert [each.level for each in result.points] == list(LEVELS)
        assert result.knee is not None
        assert result.knee.level == 4

    def test_factors_that_are_not_numeric_have_no_curve(self) -> None:
        factors = factors_of(model=("cnn", "vit"), memory=(1 << 30, None))
        assert curves(observed(grid(factors), lambda model, memory: 1.0, 2), factors) == ()
        assert curves([], factors) == ()
