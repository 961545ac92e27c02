"""Sums and means of a series."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from stepscope.analysis.run.series import (
    EMPTY,
    Series,
    amount_of,
    integrate,
    memory_without_sharing,
    statistic,
    sum_of_held,
    together,
)

S = 1_000_000_000


def series(times: list[float], values: list[float], window: float = 0.1) -> Series:
    return Series(
        np.array([int(t * S) for t in times], np.int64),
        np.full(len(times), window),
        np.array(values, float),
    )


@given(
    st.lists(st.tuples(st.floats(0.01, 2), st.floats(0, 100)), min_size=1, max_size=40),
    st.lists(st.floats(0, 1), min_size=1, max_size=5),
)
def test_the_parts_add_up_to_the_whole(
    pieces: list[tuple[float, float]], cuts: list[float]
) -> None:
    windows = np.array([window for window, _ in pieces])
    times = (np.cumsum(windows) * S).astype(np.int64)
    rate = Series(times, windows, np.array([value for _, value in pieces]))
    end = int(times[-1])
    edges = sorted({0, end, *(int(cut * end) for cut in cuts)})
    parts = sum(integrate(rate, a, b) or 0 for a, b in zip(edges, edges[1:], strict=False))
    assert parts == pytest.approx(float((rate.value * windows).sum()), rel=1e-6, abs=1e-6)


def test_outside_of_all_windows_nothing_is_known() -> None:
    assert integrate(series([1.0], [5.0]), 2 * S, 3 * S) is None


def test_the_mean_of_a_rate_is_over_time() -> None:
    rate = Series(np.array([S, 2 * S]), np.array([0.9, 0.1]), np.array([1.0, 11.0]))
    found = statistic("cpu", "tree", rate, is_rate=True)
    assert found is not None and found.mean == pytest.approx(2.0)


def test_a_rate_over_a_sliver_is_no_maximum() -> None:
    rate = Series(
        np.arange(1, 5) * S, np.array([0.1, 0.1, 0.1, 0.001]), np.array([1.0, 1.5, 1.2, 40.0])
    )
    found = statistic("cpu", "tree", rate, is_rate=True)
    assert found is not None and found.max == 1.5


def test_shared_pages_are_taken_off() -> None:
    rss = series([1, 2, 3, 4], [100, 500, 520, 100])
    processes = series([1, 2, 3, 4], [1, 5, 5, 1])
    pss = series([1, 3], [100, 130])
    memory = memory_without_sharing(rss, processes, pss)
    assert memory.value.tolist() == [100, 110, 130, 100]


def test_a_reading_with_as_many_processes_is_taken_from_afar() -> None:
    """Workers start in every epoch; PSS was read once with them, and often without."""
    rss = series([1, 2, 3, 4, 5, 6], [100, 500, 100, 500, 100, 300])
    processes = series([1, 2, 3, 4, 5, 6], [1, 5, 1, 5, 1, 3])
    pss = series([1, 2, 3, 5], [100, 110, 100, 100])
    memory = memory_without_sharing(rss, processes, pss)
    assert memory.value.tolist() == [100, 110, 100, 110, 100, 105]


def test_without_pss_memory_is_rss() -> None:
    rss = series([1, 2], [100, 200])
    assert memory_without_sharing(rss, series([1], [1]), series([], [])) is rss


def test_an_amount_says_over_how_much_time_it_is_known() -> None:
    rate = Series(np.array([1, 2, 5]) * S, np.array([1.0, 1.0, 1.0]), np.array([2.0, 2.0, 4.0]))
    amount = amount_of(rate, 0, 5 * S)
    assert amount is not None
    assert (amount.total, amount.seconds) == (8.0, 3.0), "nothing is known from 2 to 4"


HELD = st.lists(
    st.tuples(st.integers(0, 50), st.integers(0, 9)),
    min_size=1,
    max_size=20,
    unique_by=lambda told: told[0],
)


@given(st.lists(HELD, min_size=1, max_size=4))
def test_what_is_held_is_added_up_at_every_time_that_anybody_tells(
    parts: list[list[tuple[int, int]]],
) -> None:
    ordered = [sorted(part) for part in parts]
    total = sum_of_held(
        [series([t for t, _ in part], [float(v) for _, v in part]) for part in ordered]
    )
    times = sorted({t for part in ordered for t, _ in part})
    assert (total.t // S).tolist() == times

    def held(part: list[tuple[int, int]], at: int) -> int:
        return next((value for t, value in reversed(part) if t <= at), 0)

    assert total.value.tolist() == [sum(held(part, at) for part in ordered) for at in times]


def test_side_by_side_each_counts_while_it_is_read() -> None:
    there = series([1, 2, 3, 4], [1, 1, 1, 1], window=1)
    lost = series([1, 2], [3, 5], window=1)
    assert together([there, lost], np.nanmean).value.tolist() == [2, 3, 1, 1]
    assert together([there, lost], np.nansum).value.tolist() == [4, 6, 1, 1]
    assert together([there, lost], np.nanmax).value.tolist() == [3, 5, 1, 1]
    assert together([EMPTY, there], np.nansum) is there
    assert together([], np.nansum) is EMPTY


def test_side_by_side_a_moment_apart_is_still_the_same_time() -> None:
    """The windows stay those of time: two readings a moment apart do not count twice."""
    first = series([1, 2, 3], [4, 4, 4], window=1.0)
    second = series([1.1, 2.1, 3.1], [6, 6, 6], window=1.0)
    mean = together([first, second], np.nanmean)
    assert mean.value.tolist() == [5] * 6
    assert mean.window.sum() == pytest.approx(3.1)


@given(
    times=st.lists(st.integers(0, 20), max_size=12).map(sorted),
    begin=st.integers(-1, 21),
    end=st.integers(-1, 21),
)
def test_a_stretch_has_what_was_taken_in_it(times: list[int], begin: int, end: int) -> None:
    """Its edges included; times may repeat, and a stretch may end before it begins."""
    t = np.array(times, np.int64)
    series = Series(t, t / 2, t * 3.0).between(begin, end)
    inside = [each for each in times if begin <= each <= end]
    assert series.t.tolist() == inside
    assert series.window.tolist() == [each / 2 for each in inside]
    assert series.value.tolist() == [each * 3.0 for each in inside]
