"""Which batch to try next, to find the largest that host memory bears for certain.

Pure: from what was tried to the next. On the host, the same batch takes some per cent more in one
process than in the next: malloc keeps what was freed, and how much depends on the order of things.
So there is no sharp edge to be found by halving. Peaks that were measured below the limit tell
where a process reaches it on average, and how much processes differ; the answer is so far below
that three fresh ones pass, and what is tried last is only the proof.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from stepscope.analysis.memory.model import MemoryLine
from stepscope.workloads.probing import ProbeResult

PASSES = 3
"""Fresh processes that the answer has to pass in."""
FIRST = 8
ENOUGH = 1 << 16
"""Batches beyond this are not tried where memory hardly grows with the batch."""
MOST_TRIALS = 18
_NEAR, _NEAR_ONCE_CERTAIN, _NEAR_IN_THE_END = 0.015, 0.02, 0.05
"""Two batches that differ by less than this part are as good as each other; after so many trials,
one takes what one has."""
_SEARCHES = 9
_BELOW_FAILED = 0.98
_ABOVE = 0.95
"""The answer is to be at least this part of the largest safe batch: the first above should fail."""
_TIGHT = 1.01
FAR = 8
"""How many times as large as what has passed the next may be; beyond, memory sets no limit."""
_FAR_AT_FIRST = 128
_HALF = 0.5
_WELL_BELOW = 0.8
"""Of the limit: what holds less passes in any process, however they differ."""
_UPPER = 0.4
"""A line goes through batches of at least this part of the largest: malloc treats tensors of
different sizes differently, so that small batches lie on another line."""
PRESSED = 4 << 20
"""So near to the limit, in bytes, the kernel has taken back what it could: peaks tell no more."""
_FAILED_BY = 0.01
"""By which part of the memory one that failed was above the limit, at least: a usual excess."""
_SPREAD, _SPREAD_COUNTS = 0.016, 2
"""How much a process differs from the others, as part of the batch, before anything was seen of
it; and as how many observations that counts."""
_SPREADS_BELOW = 2.0
_LEAST_MARGIN, _MOST_MARGIN = 0.02, 0.05


@dataclass(frozen=True)
class Bounds:
    """What there is to search in."""

    limit: int
    """Bytes."""
    base: int
    """Bytes that any batch takes: before the first step, and what its first step makes to stay."""
    most: int | None = None
    """The largest batch that the data has."""


@dataclass(frozen=True)
class Edge:
    """Where processes reach the limit."""

    line: MemoryLine
    batch: int | None
    """On average; None where memory sets no limit."""
    spread: float
    """How much processes differ, as part of the batch."""

    @property
    def safe(self) -> int | None:
        """So far below that nearly all pass."""
        if self.batch is None:
            return None
        margin = min(_MOST_MARGIN, max(_LEAST_MARGIN, _SPREADS_BELOW * self.spread))
        return max(int((1 - margin) * self.batch), math.ceil(_ABOVE * self.batch))


def next_batch(tried: Sequence[ProbeResult], bounds: Bounds | None) -> int | None:
    """The next to try, by what was tried; None when all is known, or will not be.

    `bounds` are not known before one has passed.
    """
    passed = _passed(tried)
    if not tried:
        return FIRST
    if not passed or bounds is None:
        lowest = min(result.batch for result in tried)
        return None if lowest <= 1 else 2 if lowest > 2 else 1
    if len(tried) >= MOST_TRIALS:
        return None
    wanted = _wanted(tried, bounds)
    if wanted is None:
        return None
    near = min((1 + _NEAR) * wanted, _ceiling(tried))
    best = max((batch for batch in passed if batch <= near), default=None)
    if best is None or best < (1 - _near(tried, best)) * wanted:
        return wanted if wanted not in passed or passed[wanted] < PASSES else None
    is_certain = best == bounds.most and well_below(tried, best, bounds.limit)
    if passed[best] < PASSES and not is_certain:
        return best
    return _proof_above(tried, best, bounds.most)


def well_below(tried: Sequence[ProbeResult], batch: int, limit: int) -> bool:
    """Whether it was always seen to stay well below the limit."""
    peaks = [result.reserved_peak for result in tried if result.batch == batch and result.is_ok]
    return all(0 < peak < _WELL_BELOW * limit for peak in peaks)


def answer(tried: Sequence[ProbeResult]) -> int | None:
    """The largest that has passed often enough, below all that failed; or the best there is."""
    passed, ceiling = _passed(tried), _ceiling(tried)
    below = [batch for batch in passed if batch <= ceiling]
    certain = [batch for batch in below if passed[batch] >= PASSES]
    return max(certain or below, default=None)


def edge_of(tried: Sequence[ProbeResult], bounds: Bounds) -> Edge:
    """By the line through the larger of the batches, and how far they are from it."""
    points = [(t.batch, float(t.reserved_peak)) for t in tried if t.is_ok and t.reserved_peak]
    points = points or [(t.batch, float(bounds.limit)) for t in tried if t.is_ok]
    upper = [p for p in points if p[0] >= _UPPER * max(batch for batch, _ in points)]
    line = MemoryLine.through(upper, bounds.base)
    if line.per_sample <= 0 or len({batch for batch, _ in upper}) == 1:
        line = MemoryLine.through(points, bounds.base)
    contradicting = _hidden(tried, line, bounds)
    if contradicting:
        upper += contradicting
        line = MemoryLine.through(upper, bounds.base)
    batch = line.largest(bounds.limit)
    if not batch:
        return Edge(line, batch, _SPREAD)
    # The standard deviation of a process, between what is usual and what was seen.
    per_batch = line.per_sample * batch
    squares = sum(((size - line.at(each)) / per_batch) ** 2 for each, size in upper)
    seen = max(0, len(upper) - 2)
    spread = math.sqrt((squares + _SPREAD_COUNTS * _SPREAD**2) / (seen + _SPREAD_COUNTS))
    return Edge(line, batch, spread)


def _hidden(
    tried: Sequence[ProbeResult], line: MemoryLine, bounds: Bounds
) -> list[tuple[int, float]]:
    """Peaks that nobody saw, as near to the line as they can have been, where that is not on it:
    who failed took more than the limit, who passed without a peak took nearly all of it."""
    beyond = bounds.limit + _FAILED_BY * (bounds.limit - bounds.base)
    found = []
    for result in tried:
        by_line = line.at(result.batch)
        if result.is_oom and by_line < beyond:
            found.append((result.batch, beyond))
        elif result.is_ok and not result.reserved_peak:
            size = min(max(by_line, bounds.limit - PRESSED), float(bounds.limit))
            found += [(result.batch, size)] if size != by_line else []
    return found


def _wanted(tried: Sequence[ProbeResult], bounds: Bounds) -> int | None:
    """The batch that should be the answer, by all that is known now; None: memory sets none."""
    passed = _passed(tried)
    highest, ceiling = max(passed), _ceiling(tried)
    edge = edge_of(tried, bounds)
    if len(passed) == 1:
        # About half of the memory. The first took more for each sample than those to come: what
        # libraries make at their first use is in it.
        half = edge.line.largest(bounds.base + _HALF * (bounds.limit - bounds.base))
        far = _FAR_AT_FIRST * highest
        wanted = max(2 * highest, far if half is None else min(half, far))
    else:
        hardly = edge.batch is None or edge.batch > FAR * highest
        if hardly and highest >= ENOUGH:
            return None
        wanted = edge.safe if edge.safe is not None else FAR * highest
        wanted = max(1, min(wanted, FAR * highest))
    if wanted > ceiling:
        wanted = int(ceiling) if len(passed) > 1 else int(math.sqrt(highest * ceiling))
    wanted = max(wanted, min(passed))
    return min(wanted, bounds.most) if bounds.most is not None else wanted


def _near(tried: Sequence[ProbeResult], best: int) -> float:
    """How near is near enough. Not so near, once one passed that should not have."""
    passed = _passed(tried)
    if len(tried) >= _SEARCHES:
        return _NEAR_IN_THE_END
    if any(batch > best / _ABOVE for batch in passed if batch <= _ceiling(tried)):
        return 0.0
    return _NEAR_ONCE_CERTAIN if passed[best] >= PASSES else _NEAR


def _proof_above(tried: Sequence[ProbeResult], best: int, most: int | None) -> int | None:
    """One that should fail, unless one has, or it is not to be: who passes tells a peak more."""
    above = int(best / _ABOVE) + 1
    others = {result.batch for result in tried if result.batch >= above}
    failed = any(not result.is_ok for result in tried if best < result.batch <= _TIGHT * above)
    if failed or len(others) >= 2 or (most is not None and above > most):
        return None
    return above if not others else int(max(others) / _ABOVE) + 1


def _passed(tried: Sequence[ProbeResult]) -> Counter[int]:
    return Counter(result.batch for result in tried if result.is_ok)


def _ceiling(tried: Sequence[ProbeResult]) -> float:
    lowest = min((result.batch for result in tried if not result.is_ok), default=None)
    return math.inf if lowest is None else _BELOW_FAILED * lowest
