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
from stepscope.fit import thresholds
from stepscope.workloads.probing import ProbeResult


@dataclass(frozen=True)
class Bounds:
    limit: int
    """Bytes."""
    base: int
    """Bytes that any batch takes: before the first step, and what its first step makes to stay."""
    most: int | None = None
    """The largest batch that the data has."""


@dataclass(frozen=True)
class Edge:
    line: MemoryLine
    batch: int | None
    """On average; None where memory sets no limit."""
    noise: float
    """How much processes differ, as part of the batch."""

    @property
    def safe(self) -> int | None:
        """So far below that nearly all pass."""
        if self.batch is None:
            return None
        margin = min(
            thresholds.MOST_MARGIN,
            max(thresholds.LEAST_MARGIN, thresholds.NOISES_BELOW * self.noise),
        )
        return max(int((1 - margin) * self.batch), math.ceil(thresholds.ABOVE * self.batch))


def next_batch(tried: Sequence[ProbeResult], bounds: Bounds | None) -> int | None:
    """The next to try, by what was tried; None when all is known, or will not be.

    `bounds` are not known before one has passed.
    """
    passed = _passed(tried)
    if not tried:
        return thresholds.FIRST
    if not passed or bounds is None:
        lowest = min(result.batch for result in tried)
        return None if lowest <= 1 else 2 if lowest > 2 else 1
    if len(tried) >= thresholds.MOST_TRIALS:
        return None
    wanted = _wanted(tried, bounds)
    if wanted is None:
        return None
    near = min((1 + thresholds.NEAR) * wanted, _ceiling(tried))
    best = max((batch for batch in passed if batch <= near), default=None)
    if best is None or best < (1 - _near(tried, best)) * wanted:
        return wanted if wanted not in passed or passed[wanted] < thresholds.PASSES else None
    is_certain = best == bounds.most and well_below(tried, best, bounds.limit)
    if passed[best] < thresholds.PASSES and not is_certain:
        return best
    return _proof_above(tried, best, bounds.most)


def well_below(tried: Sequence[ProbeResult], batch: int, limit: int) -> bool:
    peaks = [result.reserved_peak for result in tried if result.batch == batch and result.is_ok]
    return all(0 < peak < thresholds.WELL_BELOW * limit for peak in peaks)


def answer(tried: Sequence[ProbeResult]) -> int | None:
    """The largest that has passed often enough, below all that failed; or the best there is."""
    passed, ceiling = _passed(tried), _ceiling(tried)
    below = [batch for batch in passed if batch <= ceiling]
    certain = [batch for batch in below if passed[batch] >= thresholds.PASSES]
    return max(certain or below, default=None)


def edge_of(tried: Sequence[ProbeResult], bounds: Bounds) -> Edge:
    """By the line through the larger of the batches, and how far they are from it."""
    points = [(t.batch, float(t.reserved_peak)) for t in tried if t.is_ok and t.reserved_peak]
    points = points or [(t.batch, float(bounds.limit)) for t in tried if t.is_ok]
    upper = [p for p in points if p[0] >= thresholds.UPPER * max(batch for batch, _ in points)]
    line = MemoryLine.through(upper, bounds.base)
    if line.per_sample <= 0 or len({batch for batch, _ in upper}) == 1:
        line = MemoryLine.through(points, bounds.base)
    contradicting = _hidden(tried, line, bounds)
    if contradicting:
        upper += contradicting
        line = MemoryLine.through(upper, bounds.base)
    batch = line.largest(bounds.limit)
    if not batch:
        return Edge(line, batch, thresholds.NOISE)
    # The standard deviation of a process, between what is usual and what was seen.
    per_batch = line.per_sample * batch
    squares = sum(((size - line.at(each)) / per_batch) ** 2 for each, size in upper)
    seen = max(0, len(upper) - 2)
    noise = math.sqrt(
        (squares + thresholds.NOISE_COUNTS * thresholds.NOISE**2) / (seen + thresholds.NOISE_COUNTS)
    )
    return Edge(line, batch, noise)


def _hidden(
    tried: Sequence[ProbeResult], line: MemoryLine, bounds: Bounds
) -> list[tuple[int, float]]:
    """Peaks that nobody saw, as near to the line as they can have been, where that is not on it:
    who failed took more than the limit, who passed without a peak took nearly all of it."""
    beyond = bounds.limit + thresholds.FAILED_BY * (bounds.limit - bounds.base)
    found = []
    for result in tried:
        by_line = line.at(result.batch)
        if result.is_oom and by_line < beyond:
            found.append((result.batch, beyond))
        elif result.is_ok and not result.reserved_peak:
            size = min(max(by_line, bounds.limit - thresholds.PRESSED), float(bounds.limit))
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
        half = edge.line.largest(bounds.base + thresholds.HALF * (bounds.limit - bounds.base))
        far = thresholds.FAR_AT_FIRST * highest
        wanted = max(2 * highest, far if half is None else min(half, far))
    else:
        hardly = edge.batch is None or edge.batch > thresholds.FAR * highest
        if hardly and highest >= thresholds.ENOUGH:
            return None
        wanted = edge.safe if edge.safe is not None else thresholds.FAR * highest
        wanted = max(1, min(wanted, thresholds.FAR * highest))
    if wanted > ceiling:
        wanted = int(ceiling) if len(passed) > 1 else int(math.sqrt(highest * ceiling))
    wanted = max(wanted, min(passed))
    return min(wanted, bounds.most) if bounds.most is not None else wanted


def _near(tried: Sequence[ProbeResult], best: int) -> float:
    """How near is near enough. Not so near, once one passed that should not have."""
    passed = _passed(tried)
    if len(tried) >= thresholds.MANY_TRIALS:
        return thresholds.NEAR_IN_THE_END
    if any(batch > best / thresholds.ABOVE for batch in passed if batch <= _ceiling(tried)):
        return 0.0
    return thresholds.NEAR_ONCE_CERTAIN if passed[best] >= thresholds.PASSES else thresholds.NEAR


def _proof_above(tried: Sequence[ProbeResult], best: int, most: int | None) -> int | None:
    """One that should fail, unless one has, or it is not to be: who passes tells a peak more."""
    above = int(best / thresholds.ABOVE) + 1
    others = {result.batch for result in tried if result.batch >= above}
    failed = any(
        not result.is_ok for result in tried if best < result.batch <= thresholds.TIGHT * above
    )
    if failed or len(others) >= 2 or (most is not None and above > most):
        return None
    return above if not others else int(max(others) / thresholds.ABOVE) + 1


def _passed(tried: Sequence[ProbeResult]) -> Counter[int]:
    return Counter(result.batch for result in tried if result.is_ok)


def _ceiling(tried: Sequence[ProbeResult]) -> float:
    lowest = min((result.batch for result in tried if not result.is_ok), default=None)
    return math.inf if lowest is None else thresholds.BELOW_FAILED * lowest
