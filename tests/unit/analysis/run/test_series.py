"""Sums, means and statistics of series."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from stepscope.analysis.run.series import (
    EMPTY,
    Series,
    amount_of,
    combined,
    integrate,
    memory_without_sharing,
    statistic,
    sum_of_held,
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
def test_integrals_of_parts_add_up(pieces: list[tuple[float, float]], cuts: list[float]) -> None:
    windows = np.array([window for window, _ in pieces])
    times = (np.cumsum(windows) * S).astype(np.int64)
    rate = Series(times, windows, np.array([value for _, value in pieces]))
    end = int(times[-1])
    edges = sorted({0, end, *(int(cut * end) for cut in cuts)})
    parts = sum(integrate(rate, a, b) or 0 for a, b in zip(edges, edges[1:], strict=False))
    assert parts == pytest.approx(float((rate.value * windows).sum()), rel=1e-6, abs=1e-6)


def test_integral_outside_of_all_windows_is_unknown() -> None:
    assert integrate(series([1.0], [5.0]), 2 * S, 3 * S) is None


def test_mean_of_a_rate_is_over_time() -> None:
    rate = Series(np.array([S, 2 * S]), np.array([0.9, 0.1]), np.array([1.0, 11.0]))
    found = statistic("cpu", "tree", rate, is_rate=True)
    assert found is not None and found.mean == pytest.approx(2.0)


def test_maximum_ignores_very_short_windows() -> None:
    rate = Series(
        np.arange(1, 5) * S, np.array([0.1, 0.1, 0.1, 0.001]), np.array([1.0, 1.5, 1.2, 40.0])
    )
    found = statistic("cpu", "tree", rate, is_rate=True)
    assert found is not None and found.max == 1.5


def test_shared_pages_are_subtracted() -> None:
    rss = series([1, 2, 3, 4], [100, 500, 520, 100])
    processes = series([1, 2, 3, 4], [1, 5, 5, 1])
    pss = series([1, 3], [100, 130])
    memory = memory_without_sharing(rss, processes, pss)
    assert memory.value.tolist() == [100, 110, 130, 100]


def test_pss_reading_with_the_same_number_of_processes_is_preferred() -> None:
    """Workers start in every epoch; PSS was read once with them, and often without."""
    rss = series([1, 2, 3, 4, 5, 6], [100, 500, 100, 500, 100, 300])
    processes = series([1, 2, 3, 4, 5, 6], [1, 5, 1, 5, 1, 3])
    pss = series([1, 2, 3, 5], [100, 110, 100, 100])
    memory = memory_without_sharing(rss, processes, pss)
    assert memory.value.tolist() == [100, 110, 100, 110, 100, 105]


def test_memory_without_pss_is_rss() -> None:
    rss = series([1, 2], [100, 200])
    assert memory_without_sharing(rss, series([1], [1]), series([], [])) is rss


def test_amount_has_its_covered_seconds() -> None:
    rate = Series(np.array([1, 2, 5]) * S, np.array([1.0, 1.0, 1.0]), np.array([2.0, 2.0, 4.0]))
    amount = amount_of(rate, 0, 5 * S)
    assert amount is not None
    assert (amount.total, amount.seconds) == (8.0, 3.0), "no samples from 2 to 4"


HELD = st.lists(
    st.tuples(st.integers(0, 50), st.integers(0, 9)),
    min_size=1,
    max_size=20,
    unique_by=lambda reading: reading[0],
)


@given(st.lists(HELD, min_size=1, max_size=4))
def test_sum_of_gauges_at_every_reading(
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


def test_combined_series_count_only_while_they_are_read() -> None:
    there = series([1, 2, 3, 4], [1, 1, 1, 1], window=1)
    lost = series([1, 2], [3, 5], window=1)
    assert combined([there, lost], np.nanmean).value.tolist() == [2, 3, 1, 1]
    assert combined([there, lost], np.nansum).value.tolist() == [4, 6, 1, 1]
    assert combined([there, lost], np.nanmax).value.tolist() == [3, 5, 1, 1]
    assert combined([EMPTY, there], np.nansum) is there
    assert combined([], np.nansum) is EMPTY


def test_combined_readings_at_slightly_different_times() -> None:
    """Two readings a moment apart do not count twice: windows are shortened."""
    first = series([1, 2, 3], [4, 4, 4], window=1.0)
    second = series([1.1, 2.1, 3.1], [6, 6, 6], window=1.0)
    mean = combined([first, second], np.nanmean)
    assert mean.value.tolist() == [5] * 6
    assert mean.window.sum() == pytest.approx(3.1)


@given(
    times=st.lists(st.integers(0, 20), max_size=12).map(sorted),
    begin=st.integers(-1, 21),
    end=st.integers(-1, 21),
)
def test_between_returns_the_samples_of_a_time_span(times: list[int], begin: int, end: int) -> None:
    """Edges are included; times may repeat, and a span may end before it begins."""
    t = np.array(times, np.int64)
    series = Series(t, t / 2, t * 3.0).between(begin, end)
    inside = [each for each in times if begin <= each <= end]
    assert series.t.tolist() == inside
    assert series.window.tolist() == [each / 2 for each in inside]
    assert series.value.tolist() == [each * 3.0 for each in inside]
