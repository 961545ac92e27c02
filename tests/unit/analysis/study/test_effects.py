"""Planted effects are found, with intervals that hold what they promise."""

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
from unit.analysis.study.made import effects, factors_of, grid, observed, steps

RATE = RESPONSES[THROUGHPUT]
SHARE = RESPONSES["cpu_share"]
FACTORS = factors_of(cpus=(1, 2, 4), workers=(0, 2), model=("cnn", "vit"))
PLANTED = steps(
    cpus={1: 1.0, 2: 1.5, 4: 1.8}, workers={0: 1.0, 2: 1.28}, model={"cnn": 1, "vit": 1}
)
MACHINE = ProcessNoise(0.08, 4, "assumed")


def told(
    observations: Sequence[Observation],
    factors: Sequence[Factor] = FACTORS,
    response: Response = RATE,
    known: ProcessNoise | None = None,
) -> Effects:
    found = effects(observations, factors, response, known)
    assert found is not None
    return found


def main(found: Effects, name: str) -> MainEffect:
    return next(each for each in found.main if each.factor == name)


def pair(found: Effects, one: str, other: str) -> Interaction:
    return next(each for each in found.interactions if {each.first, each.second} == {one, other})


class TestWithoutNoise:
    def test_main_effects_are_what_was_planted(self) -> None:
        found = told(observed(grid(FACTORS), PLANTED, repeats=2))
        assert [each.factor for each in found.main] == ["cpus", "workers", "model"]
        assert [each.size.value for each in found.main] == pytest.approx([1.8, 1.28, 1])
        assert [each.is_significant for each in found.main] == [True, True, False]
        cpus = main(found, "cpus")
        assert (cpus.lowest, cpus.highest) == (1, 4)
        ratios = [each.mean / cpus.levels[0].mean for each in cpus.levels]
        assert ratios == pytest.approx([1, 1.5, 1.8])
        assert [each.trials for each in cpus.levels] == [8, 8, 8]
        assert found.explained == pytest.approx(1)
        assert not any(each.is_significant for each in found.interactions)

    def test_an_interaction_is_what_was_planted(self) -> None:
        factors = factors_of(cpus=(1, 2), workers=(0, 2), model=("cnn", "vit"))

        def rate(cpus: int, workers: int, model: str) -> float:
            return {(1, 0): 100, (2, 0): 190, (1, 2): 200, (2, 2): 220}[cpus, workers]

        found = told(observed(grid(factors), rate, repeats=2), factors)
        first = found.interactions[0]
        assert (first.first, first.second) == ("cpus", "workers")
        assert first.size.value == pytest.approx(1.9 / 1.1)
        assert (first.low, first.high, first.more, first.less) == (1, 2, 0, 2)
        assert [at for at, _ in first.changes] == [0, 2]
        assert [value for _, value in first.changes] == pytest.approx([1.9, 1.1])
        cells = {(each.first, each.second): each.mean for each in first.cells}
        assert cells == pytest.approx({(1, 0): 100, (2, 0): 190, (1, 2): 200, (2, 2): 220})
        assert [each.is_significant for each in found.interactions] == [True, False, False]

    def test_differences_are_in_points(self) -> None:
        def share(cpus: int, workers: int, model: str) -> float:
            return 0.1 * cpus + (0.3 if workers and cpus == 4 else 0)

        found = told(observed(grid(FACTORS), share, repeats=2, key=SHARE.key), response=SHARE)
        assert main(found, "cpus").size.value == pytest.approx(0.45)
        assert main(found, "model").size.value == pytest.approx(0, abs=1e-12)
        changes = pair(found, "cpus", "workers").changes
        assert [value for _, value in changes] == pytest.approx([0.3, 0.6])

    @given(
        st.lists(st.floats(0.2, 5), min_size=3, max_size=3),
        st.lists(st.floats(0.2, 5), min_size=2, max_size=2),
        st.floats(1e-6, 1e9),
    )
    @settings(max_examples=30)
    def test_any_effects_in_any_unit(
        self, cpus: list[float], workers: list[float], unit: float
    ) -> None:
        rate = steps(
            cpus=dict(zip((1, 2, 4), cpus, strict=True)),
            workers=dict(zip((0, 2), workers, strict=True)),
            model={"cnn": unit, "vit": unit * 3},
        )
        found = told(observed(grid(FACTORS), rate))
        assert main(found, "cpus").size.value == pytest.approx(max(cpus) / min(cpus))
        assert main(found, "workers").size.value == pytest.approx(max(workers) / min(workers))
        assert main(found, "model").size.value == pytest.approx(3)
        assert all(each.size.value == pytest.approx(1) for each in found.interactions)


def noisy(seed: int, repeats: int = 2) -> list[Observation]:
    random = np.random.default_rng(seed)
    return observed(grid(FACTORS), PLANTED, repeats, 0.08, random)


def sizes(found: Effects) -> list[float]:
    shown = [each.size for each in (*found.main, *found.interactions)]
    return [number for size in shown for number in (size.value, size.low, size.high)]


class TestInvariance:
    @given(st.integers(0, 5), st.floats(1e-6, 1e9))
    @settings(max_examples=20)
    def test_ratios_know_no_unit(self, seed: int, unit: float) -> None:
        trials = noisy(seed)
        scaled = [
            replace(each, values={THROUGHPUT: each.values[THROUGHPUT] * unit}) for each in trials
        ]
        assert sizes(told(scaled)) == pytest.approx(sizes(told(trials)))

    @given(st.permutations(range(24)))
    @settings(max_examples=20)
    def test_the_order_of_trials_is_nothing(self, order: list[int]) -> None:
        trials = noisy(1)
        assert sizes(told([trials[at] for at in order])) == pytest.approx(sizes(told(trials)))

    @given(st.permutations(range(3)))
    def test_the_order_of_factors_is_nothing(self, order: list[int]) -> None:
        found = told(noisy(1), [FACTORS[at] for at in order])
        assert sizes(found) == pytest.approx(sizes(told(noisy(1))))

    def test_a_factor_that_never_varies_changes_nothing(self) -> None:
        trials = [replace(each, levels={**each.levels, "ranks": 1}) for each in noisy(1)]
        found = told(trials, (*FACTORS, Factor("ranks", (1, 2))))
        assert found == told(noisy(1))

    def test_levels_that_python_takes_for_equal(self) -> None:
        """True is 1 and 1 is 1.0 to a dict: a level of a knob is not."""
        factors = factors_of(cache=(True, False, 1, None, "1"))
        rate = steps(cache={True: 1.0})
        rates = iter([100.0, 110.0, 120.0, 130.0, 140.0])
        trials = observed(grid(factors), lambda cache: next(rates))
        assert rate(cache=True) == 100
        levels = main(told(trials, factors), "cache").levels
        assert [str(each.level) for each in levels] == ["True", "False", "1", "None", "1"]
        assert [each.mean for each in levels] == pytest.approx([100, 110, 120, 130, 140])

    def test_a_number_is_the_same_however_it_was_written(self) -> None:
        trials = [Observation({"cpus": each}, {THROUGHPUT: 100.0 * each}) for each in (1.0, 2, 2.0)]
        found = told(trials, factors_of(cpus=(1, 2)))
        assert [each.trials for each in main(found, "cpus").levels] == [1, 2]


class TestWhatIsMissing:
    def test_cells_that_a_rule_skips(self) -> None:
        """The effects of other factors stay exact, and so does what the cells left tell."""
        factors = factors_of(cpus=(1, 2, 4), workers=(0, 2, 4, 8), batch_size=(32, 64))
        points = [each for each in grid(factors) if each["workers"] <= 2 * each["cpus"]]

        def rate(cpus: int, workers: int, batch_size: int) -> float:
            return 100 * min(cpus, workers + 1) * batch_size**0.5

        found = told(observed(points, rate, repeats=2), factors)
        assert main(found, "batch_size").size.value == pytest.approx(2**0.5)
        assert Remark("pair_incomplete", ("cpus", "workers")) in found.remarks
        both = pair(found, "cpus", "workers")
        assert both.size.value == pytest.approx(3)
        assert len(both.cells) == 3 + 3 + 2 + 1
        assert {each.factor for each in found.main} == {"cpus", "workers", "batch_size"}

    def test_additive_effects_survive_missing_cells(self) -> None:
        points = [each for each in grid(FACTORS) if (each["cpus"], each["workers"]) != (1, 2)]
        found = told(observed(points, PLANTED, repeats=2))
        assert main(found, "cpus").size.value == pytest.approx(1.8)
        assert main(found, "workers").size.value == pytest.approx(1.28)

    def test_unequal_repeats_do_not_weigh_levels(self) -> None:
        trials = observed(grid(FACTORS), PLANTED)
        trials += [
            each for each in trials if each.levels["cpus"] == 4 and each.levels["workers"]
        ] * 9
        found = told(trials)
        assert main(found, "workers").size.value == pytest.approx(1.28)

    def test_half_a_grid_tells_main_effects_only(self) -> None:
        """Each pair of factors is mixed up with the other two: nobody can say which it was."""
        factors = factors_of(a=(0, 1), b=(0, 1), c=(0, 1), d=(0, 1))
        points = [each for each in grid(factors) if sum(each.values()) % 2 == 0]
        found = told(observed(points, lambda a, b, c, d: 100 * 1.5**a * 1.2**b, 2), factors)
        assert [each.size.value for each in found.main] == pytest.approx([1.5, 1.2, 1, 1])
        assert not found.interactions
        assert found.remarks[0] == Remark("pairs_unknown", count=8)

    def test_a_few_of_very_many_configurations(self) -> None:
        """Main effects of them are told; 856 effects of pairs are not looked for."""
        factors = factors_of(**{name: tuple(range(10)) for name in "abcde"})
        random = np.random.default_rng(0)
        points = [
            dict(zip("abcde", map(int, each), strict=True))
            for each in random.integers(0, 10, (200, 5))
        ]
        found = told(observed(points, lambda a, **_: 1.1**a), factors)
        assert main(found, "a").size.value == pytest.approx(1.1**9)
        assert [each.is_significant for each in found.main] == [True, False, False, False, False]
        assert not found.interactions
        assert any(each.kind == "pairs_unknown" for each in found.remarks)

    def test_factors_that_only_changed_together(self) -> None:
        factors = factors_of(model=("cnn", "vit"), machine=("old", "new"), cpus=(1, 2))
        points = [
            each for each in grid(factors) if (each["model"] == "cnn") == (each["machine"] == "old")
        ]
        found = told(
            observed(points, lambda model, machine, cpus: 50 * cpus + len(machine), 2), factors
        )
        assert [each.factor for each in found.main] == ["cpus"]
        assert main(found, "cpus").size.value == pytest.approx(2, rel=0.1)
        assert Remark("confounded_factor", ("machine",)) in found.remarks

    def test_trials_on_machines_that_share_no_model(self) -> None:
        """A merged study: what both machines did is still told."""
        factors = factors_of(machine=("old", "new"), model=("cnn", "vit", "mlp"), cpus=(1, 2))
        points = [
            each for each in grid(factors) if (each["model"] == "mlp") == (each["machine"] == "old")
        ]
        rate = steps(cpus={1: 1, 2: 1.7}, machine={"old": 1, "new": 2})
        found = told(observed(points, rate, 2), factors)
        assert main(found, "cpus").size.value == pytest.approx(1.7)

    def test_a_level_nobody_named(self) -> None:
        trials = [*noisy(1), Observation({"cpus": 3, "workers": 0}, {THROUGHPUT: 1.0})]
        found = told(trials)
        assert sizes(found) == sizes(told(noisy(1)))
        assert found.remarks[0] == Remark("unknown_level", ("cpus",), count=1)

    @pytest.mark.parametrize("value", [0.0, -3.0, math.nan, math.inf, 1e300])
    def test_values_that_cannot_be(self, value: float) -> None:
        trials = [*noisy(1), replace(noisy(1)[0], values={THROUGHPUT: value})]
        found = told(trials)
        assert sizes(found) == sizes(told(noisy(1)))
        assert found.remarks[0] == Remark("bad_values", response="throughput", count=1)

    def test_fewer_than_two_trials_tell_nothing(self) -> None:
        assert effects([], FACTORS, RATE) is None
        assert effects(noisy(1)[:1], FACTORS, RATE) is None
        assert effects(noisy(1), FACTORS, SHARE) is None


class TestNoise:
    def test_of_repeats(self) -> None:
        noise = told(noisy(1), known=MACHINE).noise
        assert (noise.source, noise.dof) == ("repeats", 12)
        assert noise.sigma == pytest.approx(0.08, rel=0.5)

    def test_few_repeats_count_with_what_is_known(self) -> None:
        trials = noisy(1, repeats=1)
        noise = told([*trials, trials[0]], known=MACHINE).noise
        assert (noise.source, noise.dof) == ("repeats", 5)
        assert noise.sigma == pytest.approx(0.08 * (4 / 5) ** 0.5)

    def test_few_repeats_count_with_what_the_model_leaves(self) -> None:
        trials = noisy(1, repeats=1)
        noise = told([*trials, trials[0]]).noise
        assert (noise.source, noise.dof) == ("residuals", 13 - 5)

    def test_no_repeats(self) -> None:
        noise = told(noisy(1, repeats=1), known=MACHINE).noise
        assert (noise.source, noise.dof) == ("residuals", 12 - 5)
        two = factors_of(cpus=(1, 2))
        trials = observed(grid(two), lambda cpus: 100.0 * cpus)
        assert told(trials, two, known=MACHINE).noise.source == "known"

    def test_where_nothing_is_known_nothing_is_claimed(self) -> None:
        two = factors_of(cpus=(1, 2))
        found = told(observed(grid(two), lambda cpus: 100.0 * cpus), two)
        assert found.noise.source == "none"
        size = found.main[0].size
        assert (size.value, size.low, size.high) == (pytest.approx(2), 0, math.inf)
        assert not found.main[0].is_significant
        assert Remark("noise_unknown") in found.remarks
        shares = observed(grid(two), lambda cpus: 0.1 * cpus, key=SHARE.key)
        size = told(shares, two, SHARE).main[0].size
        assert (size.low, size.high) == (-math.inf, math.inf)


STUDIES = 300


class TestIntervalsHoldWhatTheyPromise:
    """At a confidence of 90 %."""

    def simulated(self, repeats: int, factors: Sequence[Factor] = FACTORS) -> list[Effects]:
        random = np.random.default_rng(7)
        return [
            told(observed(grid(factors), PLANTED, repeats, 0.08, random), factors)
            for _ in range(STUDIES)
        ]

    @pytest.mark.parametrize("repeats", [1, 2])
    def test_planted_effects_lie_in_them(self, repeats: int) -> None:
        studies = self.simulated(repeats)
        for name, truth in (("cpus", 1.8), ("workers", 1.28)):
            effects = [main(each, name).size for each in studies]
            covered = np.mean([each.low <= truth <= each.high for each in effects])
            assert 0.85 <= covered <= 0.99, name

    @pytest.mark.parametrize("repeats", [1, 2])
    def test_no_effect_is_hardly_ever_told(self, repeats: int) -> None:
        studies = self.simulated(repeats)
        assert np.mean([main(each, "model").is_significant for each in studies]) <= 0.12
        pairs = [each for study in studies for each in study.interactions]
        assert np.mean([each.is_significant for each in pairs]) <= 0.12

    def test_a_factor_of_many_levels_that_does_nothing(self) -> None:
        """The largest of its 28 differences is always large."""
        factors = factors_of(batch_size=(1, 2, 4, 8, 16, 32, 64, 128))
        random = np.random.default_rng(3)
        studies = [
            told(observed(grid(factors), lambda batch_size: 50.0, 3, 0.08, random), factors)
            for _ in range(STUDIES)
        ]
        assert np.mean([each.main[0].is_significant for each in studies]) <= 0.12

    def test_level_means_lie_in_them_with_cells_missing(self) -> None:
        factors = factors_of(cpus=(1, 2, 4), workers=(0, 2), model=("cnn", "vit"))
        points = [each for each in grid(factors) if (each["cpus"], each["workers"]) != (1, 2)]
        random = np.random.default_rng(5)
        truth = 100 * np.array([1.0, 1.5, 1.8]) * 1.28**0.5
        covered = []
        for _ in range(STUDIES // 2):
            levels = main(told(observed(points, PLANTED, 2, 0.08, random)), "cpus").levels
            covered += [
                each.low <= mean <= each.high for each, mean in zip(levels, truth, strict=True)
            ]
        assert 0.85 <= np.mean(covered) <= 0.95
