"""Curves, and where more of something stops paying."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from stepscope.analysis.study.records import Fall, Level, ScalingCurve
from stepscope.analysis.study.scaling import SURELY_LITTLE, WORTH
from unit.analysis.study.made import curves, factors_of, grid, observed

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
    found = curve.no_knee
    assert found is not None
    return found.kind, found.level, found.other


class TestKnees:
    def test_where_more_stops_paying(self) -> None:
        found = curve(lambda workers: min(100 * workers, 400))
        assert found.knee is not None
        assert found.knee.level == 4
        assert found.knee.gain.value == pytest.approx(1)
        assert found.knee.is_sure
        assert [each.level for each in found.points] == list(LEVELS)
        assert [each.mean for each in found.points] == pytest.approx([100, 200, 400, 400, 400])

    def test_a_little_more_is_told_but_no_reason(self) -> None:
        found = curve(table(100, 200, 400, 404, 412))
        assert found.knee is not None
        assert found.knee.level == 4
        assert found.knee.best == 16
        assert found.knee.gain.value == pytest.approx(1.03)

    def test_still_gaining(self) -> None:
        found = curve(lambda workers: workers**0.5)
        assert found.knee is None
        assert no_knee(found) == ("gaining", 8, 16)
        assert found.no_knee and found.no_knee.gain.value == pytest.approx(2**0.5)

    def test_no_effect(self) -> None:
        found = curve(table(100, 101, 99, 100, 101))
        assert found.knee is None
        assert no_knee(found)[0] == "flat"
        assert found.no_knee and found.no_knee.gain.value == pytest.approx(101 / 99)

    def test_less_is_more(self) -> None:
        found = curve(table(100, 90, 80, 70, 60))
        assert found.knee is None
        assert no_knee(found) == ("never_pays", 1, 16)
        assert found.no_knee and found.no_knee.gain.value == pytest.approx(0.6)

    def test_too_much_is_worse_than_enough(self) -> None:
        found = curve(table(100, 200, 300, 310, 273))
        assert found.knee is not None
        assert found.knee.level == 4
        assert found.knee.fall == Fall(8, 16, pytest.approx(1 - 273 / 310))

    def test_two_levels_have_no_knee(self) -> None:
        found = curve(lambda workers: 100.0 * workers, levels=(1, 2))
        assert found.knee is None
        assert no_knee(found) == ("two_levels", 1, 2)
        assert [each.mean for each in found.points] == pytest.approx([100, 200])

    def test_without_repeats_nothing_is_sure(self) -> None:
        found = curve(lambda workers: min(100 * workers, 400), repeats=1)
        assert found.knee is not None
        assert (found.knee.level, found.knee.is_sure) == (4, False)
        assert found.knee.gain.high == math.inf

    def test_too_noisy_to_tell(self) -> None:
        found = curve(table(100, 108, 104, 110, 109), 2, 0.3, np.random.default_rng(1))
        assert found.knee is None
        assert no_knee(found)[0] == "unclear"

    def test_the_constants_make_sense(self) -> None:
        assert 0 < WORTH < SURELY_LITTLE


class TestPlantedKneesInNoise:
    def found(self, rate: Callable[[int], float], noise: float) -> list[ScalingCurve]:
        random = np.random.default_rng(11)
        return [curve(rate, 5, noise, random) for _ in range(150)]

    @pytest.mark.parametrize("noise", [0.03, 0.08])
    @pytest.mark.parametrize("knee", [2, 4, 8])
    def test_a_sharp_one(self, knee: int, noise: float) -> None:
        told = self.found(lambda workers: 100.0 * min(workers, knee), noise)
        right = [each.knee is not None and each.knee.level == knee for each in told]
        assert np.mean(right) >= 0.9

    @pytest.mark.parametrize("power", [4, 8])
    def test_a_soft_one(self, power: int) -> None:
        """At the right level, or at one that is within 5 % of it."""

        def rate(workers: int) -> float:
            return float(((100 * workers) ** -power + 400.0**-power) ** (-1 / power))

        rates = {level: rate(level) for level in LEVELS}
        truth = next(level for level in LEVELS if max(rates.values()) <= rates[level] * (1 + WORTH))
        good = [level for level in LEVELS if abs(rates[level] / rates[truth] - 1) <= WORTH]
        told = self.found(rate, 0.03)
        assert np.mean([each.knee is not None and each.knee.level in good for each in told]) >= 0.9

    def test_what_is_sure_is_right(self) -> None:
        told = self.found(lambda workers: 100.0 * min(workers, 4), 0.05)
        sure = [each.knee.level for each in told if each.knee and each.knee.is_sure]
        assert len(sure) > 0.3 * len(told)
        assert np.mean([level == 4 for level in sure]) >= 0.95


class TestGroups:
    def test_each_model_has_its_own(self) -> None:
        factors = factors_of(model=("small", "large"), workers=LEVELS)

        def rate(model: str, workers: int) -> float:
            return min(100 * workers, 800 if model == "small" else 200)

        told = curves(observed(grid(factors), rate, 3, 0.02), factors)
        levels = {str(each.group): each.knee.level if each.knee else None for each in told}
        assert levels == {"{}": 8, "{'model': 'small'}": 8, "{'model': 'large'}": 2}

    def test_and_each_level_of_what_it_depends_on_most(self) -> None:
        factors = factors_of(workers=(1, 2, 4), cpus=(1, 2, 4), batch_size=(32, 64))

        def rate(workers: int, cpus: int, batch_size: int) -> float:
            return 100 * min(workers, cpus) * (batch_size / 32) ** 0.05

        told = curves(observed(grid(factors), rate, 3, 0.02), factors)
        groups = [(each.factor, dict(each.group)) for each in told]
        of_workers: list[dict[str, Level]] = [{}, {"cpus": 1}, {"cpus": 2}, {"cpus": 4}]
        assert [group for name, group in groups if name == "workers"] == of_workers
        assert [group for name, group in groups if name == "batch_size"] == [{}]
        by = {str(each.group): each for each in told if each.factor == "workers"}
        assert no_knee(by["{'cpus': 1}"])[0] == "flat"
        knee = by["{'cpus': 2}"].knee
        assert knee is not None
        assert knee.level == 2

    def test_levels_in_any_order(self) -> None:
        factors = factors_of(workers=(16, 1, 8, 2, 4))
        trials = observed(grid(factors), lambda workers: min(100 * workers, 400), 2)
        (found,) = curves(trials, factors)
        assert [each.level for each in found.points] == list(LEVELS)
        assert found.knee is not None
        assert found.knee.level == 4

    def test_what_has_no_order_has_no_curve(self) -> None:
        factors = factors_of(model=("cnn", "vit"), memory=(1 << 30, None))
        assert curves(observed(grid(factors), lambda model, memory: 1.0, 2), factors) == ()
        assert curves([], factors) == ()
