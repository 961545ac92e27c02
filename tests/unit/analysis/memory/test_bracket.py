"""The bracket search ends at the edge, quickly, and tries no batch twice."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import example, given, settings

from stepscope.analysis.memory.bracket import (
    TOLERANCE,
    batches_beyond,
    edges,
    failures_below_max,
    is_closed,
    next_batches,
)

EDGES = st.one_of(st.integers(0, 50), st.integers(0, 100_000))
TRIED = st.dictionaries(st.integers(1, 2000), st.booleans(), max_size=30)


def search(
    edge: int,
    guess: float,
    parallel: int = 1,
    tolerance: float = TOLERANCE,
    upper: int | None = None,
) -> tuple[dict[int, bool], int]:
    """Return all batches tried until the search ended, and the number of rounds."""
    tried: dict[int, bool] = {}
    rounds = 0
    while wanted := next_batches(tried, guess, parallel, tolerance, upper):
        rounds += 1
        assert rounds <= 40, "the search does not end"
        assert len(wanted) <= parallel
        assert sorted(set(wanted)) == list(wanted) and not set(wanted) & set(tried)
        assert all(1 <= batch <= (upper or batch) for batch in wanted)
        tried |= {batch: batch <= edge for batch in wanted}
    return tried, rounds


@given(EDGES, st.floats(0.1, 200_000), st.integers(1, 6), st.sampled_from([TOLERANCE, 0.012, 0.1]))
@example(0, 1.0, 1, TOLERANCE)
@example(0, 200_000.0, 1, TOLERANCE)
@example(100_000, 1.0, 1, TOLERANCE)
@settings(max_examples=200)
def test_any_edge_is_found_from_any_guess(
    edge: int, guess: float, parallel: int, tolerance: float
) -> None:
    tried, _ = search(edge, guess, parallel, tolerance)
    low, high = edges(tried)
    assert high is not None and low <= edge < high
    assert high - low <= 1 + tolerance * low


@given(EDGES, st.floats(0.1, 200_000), st.integers(1, 6), st.integers(1, 100_000))
@settings(max_examples=200)
def test_no_batch_above_the_upper_bound_is_tried(
    edge: int, guess: float, parallel: int, upper: int
) -> None:
    tried, _ = search(edge, guess, parallel, upper=upper)
    low, high = edges(tried)
    if edge >= upper:
        assert (low, high) == (upper, None)
    else:
        assert high is not None and low <= edge < high <= upper
        assert high - low <= 1 + TOLERANCE * low


@given(st.integers(20, 20_000), st.floats(-0.02, 0.02), st.integers(1, 6))
def test_a_good_guess_takes_few_probes(edge: int, error: float, parallel: int) -> None:
    tried, rounds = search(edge, edge * (1 + error), parallel)
    assert rounds <= 8
    assert len(tried) <= 8 + 4 * parallel


@given(st.integers(20, 20_000))
def test_a_correct_guess_takes_two_probes(edge: int) -> None:
    tried, rounds = search(edge, edge)
    assert (len(tried), rounds) == (2, 2)


@given(st.integers(1000, 20_000), st.floats(0.5, 1.5))
def test_more_parallel_probes_take_no_more_rounds(edge: int, ratio: float) -> None:
    assert search(edge, edge * ratio, 5)[1] <= search(edge, edge * ratio, 1)[1]


def test_edge_is_zero_if_no_batch_passes() -> None:
    tried, _ = search(0, 300.0)
    assert edges(tried) == (0, 1) and is_closed(tried)


@given(TRIED)
def test_edges_are_the_largest_pass_and_the_next_failure(tried: dict[int, bool]) -> None:
    low, high = edges(tried)
    assert all(not passed for batch, passed in tried.items() if batch > low)
    assert low == 0 or tried[low]
    above = [batch for batch in tried if batch > low]
    assert high == (min(above) if above else None)


def test_a_bracket_is_closed_at_width_1_or_the_tolerance() -> None:
    assert is_closed({10: True, 11: False})
    assert not is_closed({10: True, 12: False})
    assert is_closed({1000: True, 1005: False})
    assert not is_closed({1000: True, 1006: False})
    assert is_closed({1000: True, 1013: False}, tolerance=0.012)
    assert not is_closed({1000: True, 1014: False}, tolerance=0.012)
    assert not is_closed({1000: True})
    assert not is_closed({})


def test_failures_below_a_pass_are_reported() -> None:
    tried = {150: True, 156: False, 158: False, 162: True, 170: True, 171: False}
    assert failures_below_max(tried) == ((156, 162), (158, 162))
    assert failures_below_max({1: True, 2: False}) == failures_below_max({}) == ()


@given(TRIED)
def test_each_failure_below_the_max_names_the_next_pass(tried: dict[int, bool]) -> None:
    found = dict(failures_below_max(tried))
    for batch, passed in tried.items():
        larger = [other for other, ok in tried.items() if ok and other > batch]
        assert found.get(batch) == (min(larger) if larger and not passed else None)


def test_batches_beyond_a_failure_are_some_percent_apart() -> None:
    tried = {1000: True, 1001: False}
    assert batches_beyond(tried) == (1011,)
    assert batches_beyond(tried, parallel=3) == (1011, 1021, 1031)
    assert batches_beyond(tried, parallel=9) == (1011, 1021, 1031)
    assert batches_beyond({**tried, 1021: False}, parallel=3) == (1011, 1031)
    assert batches_beyond(tried, parallel=3, upper=1021) == (1011, 1021)
    assert batches_beyond({10: True, 11: False}, parallel=3) == (12, 13, 14)
    assert batches_beyond({10: True}) == ()


@given(TRIED, st.integers(1, 6), st.one_of(st.none(), st.integers(1, 2000)))
def test_batches_beyond_are_new_and_between_the_failure_and_the_upper_bound(
    tried: dict[int, bool], parallel: int, upper: int | None
) -> None:
    high = edges(tried)[1]
    found = batches_beyond(tried, parallel, upper)
    assert len(found) <= parallel and not set(found) & set(tried)
    assert all(high is not None and high < batch <= (upper or batch) for batch in found)
