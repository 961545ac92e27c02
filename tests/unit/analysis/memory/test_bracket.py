"""Closing in on the largest that passes: it ends soon, at the edge, and asks nothing twice."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import example, given, settings

from stepscope.analysis.memory.bracket import (
    FINE,
    beyond,
    edges,
    holes,
    is_closed,
    next_batches,
)

EDGES = st.one_of(st.integers(0, 50), st.integers(0, 100_000))
TRIED = st.dictionaries(st.integers(1, 2000), st.booleans(), max_size=30)


def search(
    edge: int, guess: float, lanes: int = 1, fine: float = FINE, most: int | None = None
) -> tuple[dict[int, bool], int]:
    """All that was tried until nothing was wanted any more, and in how many rounds."""
    tried: dict[int, bool] = {}
    rounds = 0
    while wanted := next_batches(tried, guess, lanes, fine, most):
        rounds += 1
        assert rounds <= 40, "it does not end"
        assert len(wanted) <= lanes
        assert sorted(set(wanted)) == list(wanted) and not set(wanted) & set(tried)
        assert all(1 <= batch <= (most or batch) for batch in wanted)
        tried |= {batch: batch <= edge for batch in wanted}
    return tried, rounds


@given(EDGES, st.floats(0.1, 200_000), st.integers(1, 6), st.sampled_from([FINE, 0.012, 0.1]))
@example(0, 1.0, 1, FINE)
@example(0, 200_000.0, 1, FINE)
@example(100_000, 1.0, 1, FINE)
@settings(max_examples=200)
def test_any_edge_is_found_from_any_guess(edge: int, guess: float, lanes: int, fine: float) -> None:
    tried, _ = search(edge, guess, lanes, fine)
    low, high = edges(tried)
    assert high is not None and low <= edge < high
    assert high - low <= 1 + fine * low


@given(EDGES, st.floats(0.1, 200_000), st.integers(1, 6), st.integers(1, 100_000))
@settings(max_examples=200)
def test_nothing_above_the_most_is_tried(edge: int, guess: float, lanes: int, most: int) -> None:
    tried, _ = search(edge, guess, lanes, most=most)
    low, high = edges(tried)
    if edge >= most:
        assert (low, high) == (most, None)
    else:
        assert high is not None and low <= edge < high <= most
        assert high - low <= 1 + FINE * low


@given(st.integers(20, 20_000), st.floats(-0.02, 0.02), st.integers(1, 6))
def test_a_good_guess_takes_few_probes(edge: int, wrong: float, lanes: int) -> None:
    tried, rounds = search(edge, edge * (1 + wrong), lanes)
    assert rounds <= 8
    assert len(tried) <= 8 + 4 * lanes


@given(st.integers(20, 20_000))
def test_a_guess_that_is_right_takes_two(edge: int) -> None:
    tried, rounds = search(edge, edge)
    assert (len(tried), rounds) == (2, 2)


@given(st.integers(1000, 20_000), st.floats(0.5, 1.5))
def test_more_lanes_take_no_more_rounds(edge: int, part: float) -> None:
    assert search(edge, edge * part, 5)[1] <= search(edge, edge * part, 1)[1]


def test_where_not_even_one_passes_the_edge_is_nothing() -> None:
    tried, _ = search(0, 300.0)
    assert edges(tried) == (0, 1) and is_closed(tried)


@given(TRIED)
def test_edges_are_the_largest_that_passed_and_the_next_that_failed(tried: dict[int, bool]) -> None:
    low, high = edges(tried)
    assert all(not passed for batch, passed in tried.items() if batch > low)
    assert low == 0 or tried[low]
    above = [batch for batch in tried if batch > low]
    assert high == (min(above) if above else None)


def test_it_is_closed_by_the_next_or_by_little() -> None:
    assert is_closed({10: True, 11: False})
    assert not is_closed({10: True, 12: False})
    assert is_closed({1000: True, 1005: False})
    assert not is_closed({1000: True, 1006: False})
    assert is_closed({1000: True, 1013: False}, fine=0.012)
    assert not is_closed({1000: True, 1014: False}, fine=0.012)
    assert not is_closed({1000: True})
    assert not is_closed({})


def test_a_hole_is_what_fails_below_what_passes() -> None:
    tried = {150: True, 156: False, 158: False, 162: True, 170: True, 171: False}
    assert holes(tried) == ((156, 162), (158, 162))
    assert holes({1: True, 2: False}) == holes({}) == ()


@given(TRIED)
def test_each_hole_has_the_next_that_passes(tried: dict[int, bool]) -> None:
    found = dict(holes(tried))
    for batch, passed in tried.items():
        larger = [other for other, ok in tried.items() if ok and other > batch]
        assert found.get(batch) == (min(larger) if larger and not passed else None)


def test_beyond_what_failed_others_are_tried_some_per_cent_apart() -> None:
    tried = {1000: True, 1001: False}
    assert beyond(tried) == (1011,)
    assert beyond(tried, lanes=3) == (1011, 1021, 1031)
    assert beyond(tried, lanes=9) == (1011, 1021, 1031)
    assert beyond({**tried, 1021: False}, lanes=3) == (1011, 1031)
    assert beyond(tried, lanes=3, most=1021) == (1011, 1021)
    assert beyond({10: True, 11: False}, lanes=3) == (12, 13, 14)
    assert beyond({10: True}) == ()


@given(TRIED, st.integers(1, 6), st.one_of(st.none(), st.integers(1, 2000)))
def test_beyond_is_new_above_what_failed_and_within_the_most(
    tried: dict[int, bool], lanes: int, most: int | None
) -> None:
    high = edges(tried)[1]
    found = beyond(tried, lanes, most)
    assert len(found) <= lanes and not set(found) & set(tried)
    assert all(high is not None and high < batch <= (most or batch) for batch in found)
