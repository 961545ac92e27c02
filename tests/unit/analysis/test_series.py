"""Sums and means of a series."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from stepscope.analysis.series import Series, integrate, memory_without_sharing, statistic

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
