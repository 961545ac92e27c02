"""Which batches a scan still has to train, and what is true once it has. Nothing runs in here.

A scan goes in steps of 1 % around the two answers of `fit`. What it wants next follows from the
points that are known, wherever these come from: so it can stop, go on elsewhere, and be merged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

STEP = 0.01
MOST_UPWARDS = 45
"""Steps beyond which the edge is not looked for: then `fit` was wrong anyway."""
AHEAD = 3
"""Batches that are tried at once, in the hope that they will be needed."""
FAILURES = 4
"""So many in a row above the edge are its end."""
FULL_SPEED = 0.98
"""Of the best rate: what still is full speed."""
SLOW = 0.97
"""Of the best rate: what counts as slow while a scan goes on, with room for noise."""


@dataclass(frozen=True)
class Point:
    """How a batch went in a fresh process."""

    batch: int
    passed: bool
    retries: int = 0
    rate: float = 0.0
    """Samples per second."""

    @property
    def smooth(self) -> bool:
        return self.passed and self.retries == 0


@dataclass(frozen=True)
class Truth:
    """What the scan shows."""

    largest: int
    ragged: bool
    """Whether a batch failed below the largest that passed."""
    best_rate: float
    fast: int
    """The largest at full speed, without a retry."""


Points = Mapping[int, Point]


def points_of(told: Mapping[str, Mapping[str, Any]]) -> dict[int, Point]:
    """Points as a state file keeps them."""
    found = (
        Point(int(batch), bool(t["passed"]), int(t.get("retries") or 0), float(t.get("rate") or 0))
        for batch, t in told.items()
    )
    return {point.batch: point for point in sorted(found, key=lambda point: point.batch)}


def step_of(batch: int) -> int:
    return max(1, round(batch * STEP))


def truth(points: Points) -> Truth | None:
    passed = [point for point in points.values() if point.passed]
    if not passed:
        return None
    largest = max(point.batch for point in passed)
    best = max(point.rate for point in passed)
    fast = [p.batch for p in passed if p.smooth and p.rate >= FULL_SPEED * best]
    ragged = any(not point.passed and point.batch < largest for point in points.values())
    return Truth(largest, ragged, best, max(fast, default=0))


def wanted(largest: int, fast: int, points: Points, thorough: bool = True) -> list[int]:
    """The batches still to be trained, the most telling first; none when the scan is complete."""
    edge = [largest] if largest not in points else []
    step = step_of(largest)
    edge += _walk(points, largest + step, step, _failed, FAILURES if thorough else 3, MOST_UPWARDS)
    if largest in points and not points[largest].passed:
        edge += _walk(points, largest - step, -step, _passed, 2, MOST_UPWARDS)
    around = _around_fast(largest, fast, points) if thorough else _near_fast(largest, fast, points)
    return list(dict.fromkeys([*edge, *around]))


def found_edge(largest: int, points: Points, thorough: bool = True) -> bool:
    """Whether enough batches in a row failed above, rather than that the scan gave up."""
    step = step_of(largest)
    steps = (largest + place * step for place in range(1, MOST_UPWARDS + 1))
    known = [point for batch in steps if (point := _known(points, batch, step))]
    enough = FAILURES if thorough else 3
    return len(known) >= enough and not any(point.passed for point in known[-enough:])


def _around_fast(largest: int, fast: int, points: Points) -> list[int]:
    best = max((point.rate for point in points.values()), default=0.0)

    def poor(point: Point) -> bool:
        return not point.smooth or point.rate < SLOW * best

    step = step_of(fast)
    missing = [] if fast in points else [fast]
    top = round(largest * 1.05)
    below = [fast - place * step for place in (1, 2)]
    coarse = [round(fast * share) for share in (0.60, 0.85)]
    missing += _absent(points, [*below, *coarse], step)
    missing += _walk(points, fast + step, step, poor, 3, (top - fast) // step)
    if largest - fast > 0.08 * largest:
        between = [round(fast + (largest - fast) * place / 3) for place in (1, 2)]
        missing += _absent(points, between, step)
    return missing


def _near_fast(largest: int, fast: int, points: Points) -> list[int]:
    step = step_of(fast)
    near = [fast, *(fast + place * step for place in (-1, 1, 2, 4))]
    return _absent(points, [batch for batch in near if batch <= largest * 1.05], step)


def _walk(
    points: Points, start: int, step: int, ends: Callable[[Point], bool], enough: int, most: int
) -> list[int]:
    """What is unknown on a way that ends when enough points in a row say so."""
    in_a_row, missing = 0, []
    for place in range(most):
        batch = start + place * step
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
    """The point of a batch, or of one so near that it tells the same."""
    if batch in points or not points:
        return points.get(batch)
    near = min(points, key=lambda other: abs(other - batch))
    return points[near] if abs(near - batch) <= 0.4 * step else None


def _failed(point: Point) -> bool:
    return not point.passed


def _passed(point: Point) -> bool:
    return point.passed
