"""Thinned lines keep their mean, range and gaps."""

from __future__ import annotations

import numpy as np

from stepscope.report.run.thinning import BUCKETS, MAX_POINTS, drawn_points, gaps


def test_short_line_is_unchanged() -> None:
    x, y = np.arange(10.0), np.arange(10.0) ** 2
    points = drawn_points(x, y, 10)
    assert np.array_equal(points.x, x)
    assert np.array_equal(points.y, y)
    assert points.low is None
    assert points.high is None


def test_gap_breaks_a_short_line() -> None:
    x = np.array([0, 0.1, 0.2, 0.3, 2.0, 2.1, 2.2])
    points = drawn_points(x, np.ones(7), 2.2)
    assert np.flatnonzero(np.isnan(points.y)).tolist() == [4]
    assert 0.3 < points.x[4] < 2.0


def test_slower_sampling_is_not_a_gap() -> None:
    x = np.concatenate((np.arange(0, 10, 0.1), np.arange(10, 30, 0.5)))
    assert not len(gaps(x))


def test_few_points_have_no_gaps() -> None:
    assert not len(gaps(np.array([0.0, 100.0])))
    assert not len(gaps(np.empty(0)))


def test_long_line_keeps_mean_and_extremes() -> None:
    x = np.arange(0, 86400, 0.5)
    y = np.sin(x / 5000)
    y[100_000] = 40.0
    points = drawn_points(x, y, 86400)
    assert len(points.x) == BUCKETS < MAX_POINTS
    assert points.low is not None
    assert points.high is not None
    assert points.high.max() == 40.0
    assert points.low.min() == y.min()
    assert np.all(points.low <= points.y)
    assert np.all(points.y <= points.high)
    assert np.isclose(points.y.mean(), y.mean(), atol=1e-3)
    assert np.all(np.diff(points.x) > 0)


def test_gap_breaks_a_long_line_and_long_lines_share_their_times() -> None:
    x = np.arange(0, 10_000.0)
    with_gap = np.delete(x, slice(4000, 6000))
    whole = drawn_points(x, x, 10_000)
    points = drawn_points(with_gap, with_gap, 10_000)
    (gap,) = np.flatnonzero(np.isnan(points.y))
    assert 3995 < points.x[gap - 1] < points.x[gap] < 4010
    assert points.x[gap + 1] > 5990
    assert np.isin(points.x, whole.x).all()


def test_sample_after_the_end_falls_into_the_last_bucket() -> None:
    x = np.linspace(0, 1001, MAX_POINTS + 10)
    points = drawn_points(x, x, 1000)
    assert points.x[-1] < 1000
    assert len(points.x) == BUCKETS
