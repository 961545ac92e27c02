"""Main effects, interactions and the coverage of their intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from stepscope.analysis.study.records import (
    RESPONSES,
    THROUGHPUT,
    Effects,
    Factor,
    Interaction,
    MainEffect,
    Observation,
    Remark,
    Response,
)
from stepscope.records.trial import ProcessNoise
from unit.analysis.study.builders import effects, factors_of, grid, observed, steps

RATE = RESPONSES[THROUGHPUT]
SHARE = RESPONSES["cpu_share"]
FACTORS = factors_of(cpus=(1, 2, 4), workers=(0, 2), model=("cnn", "vit"))
PLANTED = steps(
    cpus={1: 1.0, 2: 1.5, 4: 1.8}, workers={0: 1.0, 2: 1.28}, model={"cnn": 1, "vit": 1}
)
MACHINE = ProcessNoise(0.08, 4, "assumed")


def analyzed(
    observations: Sequence[Observation],
    factors: Sequence[Factor] = FACTORS,
    response: Response = RATE,
    prior: ProcessNoise | None = None,
) -> Effects:
    result = effects(observations, factors, response, prior)
    assert result is not None
    return result


def main(result: Effects, name: str) -> MainEffect:
    return next(each for each in result.main if each.factor == name)


def pair(result: Effects, one: str, other: str) -> Interaction:
    return next(each for each in result.interactions if {each.first, each.second} == {one, other})


class TestWithoutNoise:
    def test_main_effects_are_exact(self) -> None:
        result = analyzed(observed(grid(FACTORS), PLANTED, repeats=2))
        assert [each.factor for each in result.main] == ["cpus", "workers", "model"]
        assert [each.size.value for each in result.main] == pytest.approx([1.8, 1.28, 1])
        assert [each.is_significant for each in result.main] == [True, True, False]
        cpus = main(result, "cpus")
        assert (cpus.lowest_level, cpus.highest_level) == (1, 4)
        ratios = [each.mean / cpus.levels[0].mean for each in cpus.levels]
        assert ratios == pytest.approx([1, 1.5, 1.8])
        assert [each.trials for each in cpus.levels] == [8, 8, 8]
        assert result.explained_variance_share == pytest.approx(1)
        assert not any(each.is_significant for each in result.interactions)

    def test_interaction_is_exact(self) -> None:
        factors = factors_of(cpus=(1, 2), workers=(0, 2), model=("cnn", "vit"))

        def rate(cpus: int, workers: int, model: str) -> float:
            return {(1, 0): 100, (2, 0): 190, (1, 2): 200, (2, 2): 220}[cpus, workers]

        result = analyzed(observed(grid(factors), rate, repeats=2), factors)
        first = result.interactions[0]
        assert (first.first, first.second) == ("cpus", "workers")
        assert first.size.value == pytest.approx(1.9 / 1.1)
        assert (first.from_level, first.to_level) == (1, 2)
        assert (first.stronger_at, first.weaker_at) == (0, 2)
        assert [at for at, _ in first.simple_effects] == [0, 2]
        assert [value for _, value in first.simple_effects] == pytest.approx([1.9, 1.1])
        cells = {(each.first, each.second): each.mean for each in first.cells}
        assert cells == pytest.approx({(1, 0): 100, (2, 0): 190, (1, 2): 200, (2, 2): 220})
        assert [each.is_significant for each in result.interactions] == [True, False, False]

    def test_differences_are_in_points(self) -> None:
        def share(cpus: int, workers: int, model: str) -> float:
            return 0.1 * cpus + (0.3 if workers and cpus == 4 else 0)

        result = analyzed(observed(grid(FACTORS), share, repeats=2, key=SHARE.key), response=SHARE)
        assert main(result, "cpus").size.value == pytest.approx(0.45)
        assert main(result, "model").size.value == pytest.approx(0, abs=1e-12)
        simple_effects = pair(result, "cpus", "workers").simple_effects
        assert [value for _, value in simple_effects] == pytest.approx([0.3, 0.6])

    @given(
        st.lists(st.floats(0.2, 5), min_size=3, max_size=3),
        st.lists(st.floats(0.2, 5), min_size=2, max_size=2),
        st.floats(1e-6, 1e9),
    )
    @settings(max_examples=30)
    def test_effects_of_any_size_in_any_unit(
        self, cpus: list[float], workers: list[float], unit: float
    ) -> None:
        rate = steps(
            cpus=dict(zip((1, 2, 4), cpus, strict=True)),
            workers=dict(zip((0, 2), workers, strict=True)),
            model={"cnn": unit, "vit": unit * 3},
        )
        result = analyzed(observed(grid(FACTORS), rate))
        assert main(result, "cpus").size.value == pytest.approx(max(cpus) / min(cpus))
        assert main(result, "workers").size.value == pytest.approx(max(workers) / min(workers))
        assert main(result, "model").size.value == pytest.approx(3)
        assert all(each.size.value == pytest.approx(1) for each in result.interactions)


def noisy(seed: int, repeats: int = 2) -> list[Observation]:
    random = np.random.default_rng(seed)
    return observed(grid(FACTORS), PLANTED, repeats, 0.08, random)


def sizes(result: Effects) -> list[float]:
    shown = [each.size for each in (*result.main, *result.interactions)]
    return [number for size in shown for number in (size.value, size.low, size.high)]


class TestInvariance:
    @given(st.integers(0, 5), st.floats(1e-6, 1e9))
    @settings(max_examples=20)
    def test_ratios_do_not_depend_on_the_unit(self, seed: int, unit: float) -> None:
        trials = noisy(seed)
        scaled = [
            replace(each, values={THROUGHPUT: each.values[THROUGHPUT] * unit}) for each in trials
        ]
        assert sizes(analyzed(scaled)) == pytest.approx(sizes(analyzed(trials)))

    @given(st.permutations(range(24)))
    @settings(max_examples=20)
    def test_order_of_trials(self, order: list[int]) -> None:
        trials = noisy(1)
        assert sizes(analyzed([trials[at] for at in order])) == pytest.approx(
            sizes(analyzed(trials))
        )

    @given(st.permutations(range(3)))
    def test_order_of_factors(self, order: list[int]) -> None:
        result = analyzed(noisy(1), [FACTORS[at] for at in order])
        assert sizes(result) == pytest.approx(sizes(analyzed(noisy(1))))

    def test_constant_factor_is_ignored(self) -> None:
        trials = [replace(each, levels={**each.levels, "ranks": 1}) for each in noisy(1)]
        result = analyzed(trials, (*FACTORS, Factor("ranks", (1, 2))))
        assert result == analyzed(noisy(1))

    def test_true_and_one_are_different_levels(self) -> None:
        """Although they are equal in Python."""
        factors = factors_of(cache=(True, False, 1, None, "1"))
        rate = steps(cache={True: 1.0})
        rates = iter([100.0, 110.0, 120.0, 130.0, 140.0])
        trials = observed(grid(factors), lambda cache: next(rates))
        assert rate(cache=True) == 100
        levels = main(analyzed(trials, factors), "cache").levels
        assert [str(each.level) for each in levels] == ["True", "False", "1", "None", "1"]
        assert [each.mean for each in levels] == pytest.approx([100, 110, 120, 130, 140])

    def test_int_and_float_are_the_same_level(self) -> None:
        trials = [Observation({"cpus": each}, {THROUGHPUT: 100.0 * each}) for each in (1.0, 2, 2.0)]
        result = analyzed(trials, factors_of(cpus=(1, 2)))
        assert [each.trials for each in main(result, "cpus").levels] == [1, 2]


class TestIncompleteDesigns:
    def test_cells_skipped_by_a_rule(self) -> None:
        """Effects of other factors, and the interaction of the remaining cells, stay exact."""
        factors = factors_of(cpus=(1, 2, 4), workers=(0, 2, 4, 8), batch_size=(32, 64))
        points = [each for each in grid(factors) if each["workers"] <= 2 * each["cpus"]]

        def rate(cpus: int, workers: int, batch_size: int) -> float:
            return 100 * min(cpus, workers + 1) * batch_size**0.5

        result = analyzed(observed(points, rate, repeats=2), factors)
        assert main(result, "batch_size").size.value == pytest.approx(2**0.5)
        assert Remark("interaction_incomplete", ("cpus", "workers")) in result.remarks
        both = pair(result, "cpus", "workers")
        assert both.size.value == pytest.approx(3)
        assert len(both.cells) == 3 + 3 + 2 + 1
        assert {each.factor for each in result.main} == {"cpus", "workers", "batch_size"}

    def test_additive_effects_with_missing_cells(self) -> None:
        points = [each for each in grid(FACTORS) if (each["cpus"], each["workers"]) != (1, 2)]
        result = analyzed(observed(points, PLANTED, repeats=2))
        assert main(result, "cpus").size.value == pytest.approx(1.8)
        assert main(result, "workers").size.value == pytest.approx(1.28)

    def test_unequal_repeats_do_not_weight_levels(self) -> None:
        trials = observed(grid(FACTORS), PLANTED)
        trials += [
            each for each in trials if each.levels["cpus"] == 4 and each.levels["workers"]
        ] * 9
        result = analyzed(trials)
        assert main(result, "workers").size.value == pytest.approx(1.28)

    def test_half_fraction_has_main_effects_only(self) -> None:
        """Each interaction is aliased with that of the other two factors."""
        factors = factors_of(a=(0, 1), b=(0, 1), c=(0, 1), d=(0, 1))
        points = [each for each in grid(factors) if sum(each.values()) % 2 == 0]
        result = analyzed(observed(points, lambda a, b, c, d: 100 * 1.5**a * 1.2**b, 2), factors)
        assert [each.size.value for each in result.main] == pytest.approx([1.5, 1.2, 1, 1])
        assert not result.interactions
        assert result.remarks[0] == Remark("interactions_not_estimable", count=8)

    def test_small_sample_of_many_configurations(self) -> None:
        """Main effects are estimated; the 856 columns with interactions are not."""
        factors = factors_of(**{name: tuple(range(10)) for name in "abcde"})
        random = np.random.default_rng(0)
        points = [
            dict(zip("abcde", map(int, each), strict=True))
            for each in random.integers(0, 10, (200, 5))
        ]
        result = analyzed(observed(points, lambda a, **_: 1.1**a), factors)
        assert main(result, "a").size.value == pytest.approx(1.1**9)
        assert [each.is_significant for each in result.main] == [True, False, False, False, False]
        assert not result.interactions
        assert any(each.kind == "interactions_not_estimable" for each in result.remarks)

    def test_confounded_factors(self) -> None:
        factors = factors_of(model=("cnn", "vit"), machine=("old", "new"), cpus=(1, 2))
        points = [
            each for each in grid(factors) if (each["model"] == "cnn") == (each["machine"] == "old")
        ]
        result = analyzed(
            observed(points, lambda model, machine, cpus: 50 * cpus + len(machine), 2), factors
        )
        assert [each.factor for each in result.main] == ["cpus"]
        assert main(result, "cpus").size.value == pytest.approx(2, rel=0.1)
        assert Remark("confounded_factor", ("machine",)) in result.remarks

    def test_machines_without_a_common_model(self) -> None:
        """A merged study: factors that vary on both machines are estimable."""
        factors = factors_of(machine=("old", "new"), model=("cnn", "vit", "mlp"), cpus=(1, 2))
        points = [
            each for each in grid(factors) if (each["model"] == "mlp") == (each["machine"] == "old")
        ]
        rate = steps(cpus={1: 1, 2: 1.7}, machine={"old": 1, "new": 2})
        result = analyzed(observed(points, rate, 2), factors)
        assert main(result, "cpus").size.value == pytest.approx(1.7)

    def test_unknown_level(self) -> None:
        trials = [*noisy(1), Observation({"cpus": 3, "workers": 0}, {THROUGHPUT: 1.0})]
        result = analyzed(trials)
        assert sizes(result) == sizes(analyzed(noisy(1)))
        assert result.remarks[0] == Remark("unknown_level", ("cpus",), count=1)

    @pytest.mark.parametrize("value", [0.0, -3.0, math.nan, math.inf, 1e300])
    def test_invalid_values(self, value: float) -> None:
        trials = [*noisy(1), replace(noisy(1)[0], values={THROUGHPUT: value})]
        result = analyzed(trials)
        assert sizes(result) == sizes(analyzed(noisy(1)))
        assert result.remarks[0] == Remark("invalid_values", response="throughput", count=1)

    def test_fewer_than_two_trials(self) -> None:
        assert effects([], FACTORS, RATE) is None
        assert effects(noisy(1)[:1], FACTORS, RATE) is None
        assert effects(noisy(1), FACTORS, SHARE) is None


class TestNoise:
    def test_from_repeats(self) -> None:
        noise = analyzed(noisy(1), prior=MACHINE).noise
        assert (noise.source, noise.dof) == ("repeats", 12)
        assert noise.sigma == pytest.approx(0.08, rel=0.5)

    def test_few_repeats_update_the_prior(self) -> None:
        trials = noisy(1, repeats=1)
        noise = analyzed([*trials, trials[0]], prior=MACHINE).noise
        assert (noise.source, noise.dof) == ("repeats", 5)
        assert noise.sigma == pytest.approx(0.08 * (4 / 5) ** 0.5)

    def test_few_repeats_are_combined_with_residuals(self) -> None:
        trials = noisy(1, repeats=1)
        noise = analyzed([*trials, trials[0]]).noise
        assert (noise.source, noise.dof) == ("residuals", 13 - 5)

    def test_no_repeats(self) -> None:
        noise = analyzed(noisy(1, repeats=1), prior=MACHINE).noise
        assert (noise.source, noise.dof) == ("residuals", 12 - 5)
        two = factors_of(cpus=(1, 2))
        trials = observed(grid(two), lambda cpus: 100.0 * cpus)
        assert analyzed(trials, two, prior=MACHINE).noise.source == "prior"

    def test_unknown_noise_has_no_significant_effects(self) -> None:
        two = factors_of(cpus=(1, 2))
        result = analyzed(observed(grid(two), lambda cpus: 100.0 * cpus), two)
        assert result.noise.source == "none"
        size = result.main[0].size
        assert (size.value, size.low, size.high) == (pytest.approx(2), 0, math.inf)
        assert not result.main[0].is_significant
        assert Remark("noise_unknown") in result.remarks
        shares = observed(grid(two), lambda cpus: 0.1 * cpus, key=SHARE.key)
        size = analyzed(shares, two, SHARE).main[0].size
        assert (size.low, size.high) == (-math.inf, math.inf)


STUDIES = 300


class TestCoverage:
    """The confidence level is 90%."""

    def simulated(self, repeats: int, factors: Sequence[Factor] = FACTORS) -> list[Effects]:
        random = np.random.default_rng(7)
        return [
            analyzed(observed(grid(factors), PLANTED, repeats, 0.08, random), factors)
            for _ in range(STUDIES)
        ]

    @pytest.mark.parametrize("repeats", [1, 2])
    def test_main_effects(self, repeats: int) -> None:
        studies = self.simulated(repeats)
        for name, expected in (("cpus", 1.8), ("workers", 1.28)):
            effects = [main(each, name).size for each in studies]
            covered = np.mean([each.low <= expected <= each.high for each in effects])
            assert 0.85 <= covered <= 0.99, name

    @pytest.mark.parametrize("repeats", [1, 2])
    def test_false_positive_rate(self, repeats: int) -> None:
        studies = self.simulated(repeats)
        assert np.mean([main(each, "model").is_significant for each in studies]) <= 0.12
        pairs = [each for study in studies for each in study.interactions]
        assert np.mean([each.is_significant for each in pairs]) <= 0.12

    def test_false_positive_rate_of_a_factor_with_many_levels(self) -> None:
        """The largest of 28 differences is large by chance."""
        factors = factors_of(batch_size=(1, 2, 4, 8, 16, 32, 64, 128))
        random = np.random.default_rng(3)
        studies = [
            analyzed(observed(grid(factors), lambda batch_size: 50.0, 3, 0.08, random), factors)
            for _ in range(STUDIES)
        ]
        assert np.mean([each.main[0].is_significant for each in studies]) <= 0.12

    def test_marginal_means_with_missing_cells(self) -> None:
        factors = factors_of(cpus=(1, 2, 4), workers=(0, 2), model=("cnn", "vit"))
        points = [each for each in grid(factors) if (each["cpus"], each["workers"]) != (1, 2)]
        random = np.random.default_rng(5)
        expected = 100 * np.array([1.0, 1.5, 1.8]) * 1.28**0.5
        covered = []
        for _ in range(STUDIES // 2):
            levels = main(analyzed(observed(points, PLANTED, 2, 0.08, random)), "cpus").levels
            covered += [
                each.low <= mean <= each.high for each, mean in zip(levels, expected, strict=True)
            ]
        assert 0.85 <= np.mean(covered) <= 0.95
