"""The scan that determines the true batch sizes. These are pure functions: nothing runs here.

A scan goes in steps of 1% around the two answers of `fit`. The next batches follow from the known
points alone, so a scan can be interrupted, continued on another machine, and merged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

STEP = 0.01
MAX_STEPS = 45
"""Steps after which the scan gives up: `fit` was wrong then."""
AHEAD = 3
"""Batches that are trained ahead, because they will probably be needed."""
FAILURES = 4
"""Consecutive failures above the edge that end the scan."""
FULL_SPEED = 0.98
"""Share of the best throughput that counts as full speed."""
SLOW = 0.97
"""Share of the best throughput below which a batch counts as slow, with a margin for noise."""


@dataclass(frozen=True)
class Point:
    """The result of a batch in a fresh process."""

    batch: int
    passed: bool
    retries: int = 0
    rate: float = 0.0  # samples per second

    @property
    def retry_free(self) -> bool:
        return self.passed and self.retries == 0


@dataclass(frozen=True)
class Truth:
    """The result of a complete scan."""

    max_batch: int
    ragged: bool  # whether a batch below the max failed
    best_rate: float  # samples per second
    recommended: int  # the max_batch batch at full speed without a retry


Points = Mapping[int, Point]


def points_of(records: Mapping[str, Mapping[str, Any]]) -> dict[int, Point]:
    """Return the points of a state file."""
    points = (
        Point(int(batch), bool(r["passed"]), int(r.get("retries") or 0), float(r.get("rate") or 0))
        for batch, r in records.items()
    )
    return {point.batch: point for point in sorted(points, key=lambda point: point.batch)}


def step_of(batch: int) -> int:
    return max(1, round(batch * STEP))


def truth(points: Points) -> Truth | None:
    passed = [point for point in points.values() if point.passed]
    if not passed:
        return None
    max_batch = max(point.batch for point in passed)
    best = max(point.rate for point in passed)
    fast = [p.batch for p in passed if p.retry_free and p.rate >= FULL_SPEED * best]
    ragged = any(not point.passed and point.batch < max_batch for point in points.values())
    return Truth(max_batch, ragged, best, max(fast, default=0))


def next_batches(
    max_batch: int, recommended: int, points: Points, thorough: bool = True
) -> list[int]:
    """Return the batches to train next, the most important first; empty when complete."""
    edge = [max_batch] if max_batch not in points else []
    step = step_of(max_batch)
    edge += _walk(points, max_batch + step, step, _failed, FAILURES if thorough else 3, MAX_STEPS)
    if max_batch in points and not points[max_batch].passed:
        edge += _walk(points, max_batch - step, -step, _passed, 2, MAX_STEPS)
    around = _around_recommended if thorough else _near_recommended
    return list(dict.fromkeys([*edge, *around(max_batch, recommended, points)]))


def found_edge(max_batch: int, points: Points, thorough: bool = True) -> bool:
    """Return whether enough consecutive batches above failed, so the scan did not give up."""
    step = step_of(max_batch)
    steps = (max_batch + n * step for n in range(1, MAX_STEPS + 1))
    known = [point for batch in steps if (point := _known(points, batch, step))]
    enough = FAILURES if thorough else 3
    return len(known) >= enough and not any(point.passed for point in known[-enough:])


def _around_recommended(max_batch: int, recommended: int, points: Points) -> list[int]:
    best = max((point.rate for point in points.values()), default=0.0)

    def poor(point: Point) -> bool:
        return not point.retry_free or point.rate < SLOW * best

    step = step_of(recommended)
    missing = [] if recommended in points else [recommended]
    top = round(max_batch * 1.05)
    below = [recommended - n * step for n in (1, 2)]
    coarse = [round(recommended * share) for share in (0.60, 0.85)]
    missing += _absent(points, [*below, *coarse], step)
    missing += _walk(points, recommended + step, step, poor, 3, (top - recommended) // step)
    if max_batch - recommended > 0.08 * max_batch:
        between = [round(recommended + (max_batch - recommended) * n / 3) for n in (1, 2)]
        missing += _absent(points, between, step)
    return missing


def _near_recommended(max_batch: int, recommended: int, points: Points) -> list[int]:
    step = step_of(recommended)
    near = [recommended, *(recommended + n * step for n in (-1, 1, 2, 4))]
    return _absent(points, [batch for batch in near if batch <= max_batch * 1.05], step)


def _walk(
    points: Points, start: int, step: int, ends: Callable[[Point], bool], enough: int, most: int
) -> list[int]:
    """Return the unknown batches of a walk that ends after enough consecutive points."""
    in_a_row, missing = 0, []
    for n in range(most):
        batch = start + n * step
        if batch < 1:
            break
        point = _known(points, batch, abs(step))
        if point is None:
            missing.append(batch)
            if len(missing) == AHEAD:
                break
            continue
        in_a_row = in_a_row + 1 if ends(point) else 0
        if in_a_row == enough:
            break
    return missing


def _absent(points: Points, batches: Iterable[int], step: int) -> list[int]:
    return [batch for batch in batches if batch >= 1 and not _known(points, batch, step)]


def _known(points: Points, batch: int, step: int) -> Point | None:
    """Return the point of a batch, or of one that is close enough."""
    if batch in points or not points:
        return points.get(batch)
    near = min(points, key=lambda other: abs(other - batch))
    return points[near] if abs(near - batch) <= 0.4 * step else None


def _failed(point: Point) -> bool:
    return not point.passed


def _passed(point: Point) -> bool:
    return point.passed
