"""Pareto fronts."""

from __future__ import annotations

import math

import hypothesis.strategies as st
from hypothesis import given

from stepscope.analysis.study.configurations import fronts
from stepscope.analysis.study.records import ENERGY, MEMORY, THROUGHPUT, Configuration

GPU, HOST = MEMORY
SMALL = st.integers(0, 6).map(float)
POINTS = st.lists(st.tuples(SMALL, SMALL), min_size=1, max_size=25)


def configurations_of(points: list[tuple[float, float]], key: str = HOST) -> list[Configuration]:
    return [
        Configuration(f"c{at}", {"n": at}, 1, {THROUGHPUT: rate, key: cost})
        for at, (rate, cost) in enumerate(points)
    ]


def dominates(one: Configuration, other: Configuration) -> bool:
    (rate, cost), (its_rate, its_cost) = (
        (e.values[THROUGHPUT], e.values[HOST]) for e in (one, other)
    )
    return rate >= its_rate and cost <= its_cost and (rate, cost) != (its_rate, its_cost)


@given(POINTS)
def test_exactly_the_configurations_off_the_front_are_dominated(
    points: list[tuple[float, float]],
) -> None:
    configurations = configurations_of(points)
    (front,) = fronts(configurations)
    on_front = {each.name for each in front.configurations}
    assert front.dominated == len(configurations) - len(on_front)
    for each in configurations:
        is_dominated = any(dominates(other, each) for other in front.configurations)
        assert is_dominated == (each.name not in on_front)
    rates = [each.values[THROUGHPUT] for each in front.configurations]
    assert rates == sorted(rates, reverse=True)


@given(st.permutations(configurations_of([(1, 1), (2, 3), (2, 3), (3, 3), (3, 5), (4, 9), (0, 0)])))
def test_result_does_not_depend_on_the_order(configurations: list[Configuration]) -> None:
    assert [each.name for each in fronts(configurations)[0].configurations] == [
        "c5",
        "c3",
        "c0",
        "c6",
    ]


def test_ties_are_kept() -> None:
    (front,) = fronts(configurations_of([(2, 3), (2, 3), (1, 3)]))
    assert [each.name for each in front.configurations] == ["c0", "c1"]


def test_memory_that_most_configurations_have_is_used() -> None:
    """GPU memory if there is a tie."""
    on_gpu = configurations_of([(1, 1), (2, 2)], GPU)
    assert fronts(on_gpu)[0].responses == (THROUGHPUT, GPU)
    both = [Configuration("x", {}, 1, {**each.values, HOST: 1.0}) for each in on_gpu]
    assert fronts(both)[0].responses == (THROUGHPUT, GPU)
    assert fronts(configurations_of([(1, 1)]))[0].responses == (THROUGHPUT, HOST)
    most_on_host = [*configurations_of([(1, 1), (2, 2)]), on_gpu[0]]
    assert fronts(most_on_host)[0].responses == (THROUGHPUT, HOST)
    assert len(fronts(most_on_host)[0].configurations) == 2


def test_energy_and_invalid_values() -> None:
    (front,) = fronts(configurations_of([(1, 1), (2, math.nan), (3, math.inf)], ENERGY))
    assert (front.responses, front.dominated) == ((THROUGHPUT, ENERGY), 0)
    assert [each.name for each in front.configurations] == ["c0"]
    assert fronts([]) == ()
    assert fronts([Configuration("x", {}, 1, {THROUGHPUT: 1.0})]) == ()
