"""Fronts: nobody in it is beaten, everybody else is."""

from __future__ import annotations

import math

import hypothesis.strategies as st
from hypothesis import given

from stepscope.analysis.study.configurations import fronts
from stepscope.analysis.study.records import ENERGY, MEMORY, THROUGHPUT, Configuration

GPU, HOST = MEMORY
SMALL = st.integers(0, 6).map(float)
POINTS = st.lists(st.tuples(SMALL, SMALL), min_size=1, max_size=25)


def made(points: list[tuple[float, float]], key: str = HOST) -> list[Configuration]:
    return [
        Configuration(f"c{at}", {"n": at}, 1, {THROUGHPUT: rate, key: cost})
        for at, (rate, cost) in enumerate(points)
    ]


def beats(one: Configuration, other: Configuration) -> bool:
    (rate, cost), (its_rate, its_cost) = (
        (e.values[THROUGHPUT], e.values[HOST]) for e in (one, other)
    )
    return rate >= its_rate and cost <= its_cost and (rate, cost) != (its_rate, its_cost)


@given(POINTS)
def test_nobody_in_front_is_beaten_and_everybody_else_is(points: list[tuple[float, float]]) -> None:
    everybody = made(points)
    (front,) = fronts(everybody)
    best = {each.name for each in front.best}
    assert front.beaten == len(everybody) - len(best)
    for each in everybody:
        by_somebody = any(beats(other, each) for other in front.best)
        assert by_somebody == (each.name not in best)
    rates = [each.values[THROUGHPUT] for each in front.best]
    assert rates == sorted(rates, reverse=True)


@given(st.permutations(made([(1, 1), (2, 3), (2, 3), (3, 3), (3, 5), (4, 9), (0, 0)])))
def test_the_order_is_nothing(everybody: list[Configuration]) -> None:
    assert [each.name for each in fronts(everybody)[0].best] == ["c5", "c3", "c0", "c6"]


def test_equals_are_kept() -> None:
    (front,) = fronts(made([(2, 3), (2, 3), (1, 3)]))
    assert [each.name for each in front.best] == ["c0", "c1"]


def test_which_memory() -> None:
    """That of the GPU where it was measured; what was not measured is left out."""
    on_gpu = made([(1, 1), (2, 2)], GPU)
    assert fronts(on_gpu)[0].responses == (THROUGHPUT, GPU)
    both = [Configuration("x", {}, 1, {**each.values, HOST: 1.0}) for each in on_gpu]
    assert fronts(both)[0].responses == (THROUGHPUT, GPU)
    assert fronts(made([(1, 1)]))[0].responses == (THROUGHPUT, HOST)
    most_on_host = [*made([(1, 1), (2, 2)]), on_gpu[0]]
    assert fronts(most_on_host)[0].responses == (THROUGHPUT, HOST)
    assert len(fronts(most_on_host)[0].best) == 2


def test_energy_and_what_cannot_be() -> None:
    (front,) = fronts(made([(1, 1), (2, math.nan), (3, math.inf)], ENERGY))
    assert (front.responses, front.beaten) == ((THROUGHPUT, ENERGY), 0)
    assert [each.name for each in front.best] == ["c0"]
    assert fronts([]) == ()
    assert fronts([Configuration("x", {}, 1, {THROUGHPUT: 1.0})]) == ()
