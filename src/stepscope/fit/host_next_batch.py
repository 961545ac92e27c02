"""The host search, as a pure function from the probes so far to the next batch.

The same batch needs a few percent more memory in one process than in another, because malloc keeps
freed memory and the amount depends on the order of events. There is no sharp edge to bisect.
Instead, a line through the peaks below the limit gives the batch at which an average process
reaches the limit, and the noise between processes gives a margin. The answer is below that edge by
the margin, so that three fresh processes pass; the last probes only confirm it.
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
    limit_bytes: int
    base_bytes: int
    """Memory independent of the batch: before the first step, plus what that step keeps."""
    data_set_limit: int | None = None
    """The largest batch that the dataset has samples for."""


@dataclass(frozen=True)
class Edge:
    """The batch at which an average process reaches the limit."""

    line: MemoryLine
    batch: int | None
    """None if memory sets no limit."""
    noise: float
    """Standard deviation between processes, as a share of the batch."""

    @property
    def safe_batch(self) -> int | None:
        """The batch at which nearly all processes pass."""
        if self.batch is None:
            return None
        margin = thresholds.MARGIN_DEVIATIONS * self.noise
        margin = min(thresholds.MAX_MARGIN, max(thresholds.MIN_MARGIN, margin))
        return max(int((1 - margin) * self.batch), math.ceil(thresholds.ANSWER_SHARE * self.batch))


def next_batch(tried: Sequence[ProbeResult], bounds: Bounds | None) -> int | None:
    """Return the next batch to try, or None when the search is complete.

    `bounds` are unknown until a probe has passed.
    """
    passed = _passes(tried)
    if not tried:
        return thresholds.FIRST_HOST_BATCH
    if not passed or bounds is None:
        lowest = min(result.batch for result in tried)
        return None if lowest <= 1 else 2 if lowest > 2 else 1
    if len(tried) >= thresholds.MAX_HOST_PROBES:
        return None
    target = _target(tried, bounds)
    if target is None:
        return None
    highest = min((1 + thresholds.HOST_TOLERANCE) * target, _upper_bound(tried))
    best = max((batch for batch in passed if batch <= highest), default=None)
    if best is None or best < (1 - _tolerance(tried, best)) * target:
        return target if passed.get(target, 0) < thresholds.REQUIRED_PASSES else None
    is_certain = best == bounds.data_set_limit and clearly_below(tried, best, bounds.limit_bytes)
    if passed[best] < thresholds.REQUIRED_PASSES and not is_certain:
        return best
    return _proof_above(tried, best, bounds.data_set_limit)


def clearly_below(tried: Sequence[ProbeResult], batch: int, limit: int) -> bool:
    """Return whether all peaks of a batch are so low that it passes in every process."""
    peaks = [r.reserved_peak_bytes for r in tried if r.batch == batch and r.is_ok]
    return all(0 < peak < thresholds.CLEARLY_BELOW_SHARE * limit for peak in peaks)


def answer(tried: Sequence[ProbeResult]) -> int | None:
    """Return the largest batch below all failures that passed often enough, or else passed."""
    passed, upper_bound = _passes(tried), _upper_bound(tried)
    below = [batch for batch in passed if batch <= upper_bound]
    confirmed = [batch for batch in below if passed[batch] >= thresholds.REQUIRED_PASSES]
    return max(confirmed or below, default=None)


def edge_of(tried: Sequence[ProbeResult], bounds: Bounds) -> Edge:
    """Fit a line to the peaks of the larger batches, and estimate the noise from the residuals."""
    points = [(r.batch, float(r.reserved_peak_bytes)) for r in tried if r.is_ok]
    points = [point for point in points if point[1]]
    points = points or [(r.batch, float(bounds.limit_bytes)) for r in tried if r.is_ok]
    largest = max(batch for batch, _ in points)
    upper = [point for point in points if point[0] >= thresholds.FITTED_SHARE * largest]
    line = MemoryLine.through(upper, bounds.base_bytes)
    if line.per_sample_bytes <= 0 or len({batch for batch, _ in upper}) == 1:
        line = MemoryLine.through(points, bounds.base_bytes)
    contradicting = _hidden_peaks(tried, line, bounds)
    if contradicting:
        upper += contradicting
        line = MemoryLine.through(upper, bounds.base_bytes)
    batch = line.max_batch(bounds.limit_bytes)
    if not batch:
        return Edge(line, batch, thresholds.PRIOR_NOISE)
    # The standard deviation, as a weighted mean of the prior and of the residuals.
    scale = line.per_sample_bytes * batch
    squares = sum(((size - line.at(each)) / scale) ** 2 for each, size in upper)
    prior = thresholds.PRIOR_NOISE_WEIGHT * thresholds.PRIOR_NOISE**2
    observations = max(0, len(upper) - 2) + thresholds.PRIOR_NOISE_WEIGHT
    return Edge(line, batch, math.sqrt((squares + prior) / observations))


def _hidden_peaks(
    tried: Sequence[ProbeResult], line: MemoryLine, bounds: Bounds
) -> list[tuple[int, float]]:
    """Return bounds of unmeasured peaks that contradict the line.

    A process that failed needed more than the limit; one that passed without a known peak needed
    nearly all of it. Each bound is as close to the line as possible.
    """
    limit = bounds.limit_bytes
    beyond = limit + thresholds.MIN_EXCESS_SHARE * (limit - bounds.base_bytes)
    peaks = []
    for result in tried:
        on_line = line.at(result.batch)
        if result.is_oom and on_line < beyond:
            peaks.append((result.batch, beyond))
        elif result.is_ok and not result.reserved_peak_bytes:
            size = min(max(on_line, limit - thresholds.HIDDEN_PEAK_BYTES), float(limit))
            peaks += [(result.batch, size)] if size != on_line else []
    return peaks


def _target(tried: Sequence[ProbeResult], bounds: Bounds) -> int | None:
    """Return the batch that should be the answer; None if memory sets no limit."""
    passed = _passes(tried)
    largest, upper_bound = max(passed), _upper_bound(tried)
    edge = edge_of(tried, bounds)
    if len(passed) == 1:
        # The first batch overestimates the memory per sample: it includes what libraries allocate
        # on first use. So try a batch that should use half of the memory.
        share = thresholds.SECOND_PROBE_SHARE * (bounds.limit_bytes - bounds.base_bytes)
        half = edge.line.max_batch(bounds.base_bytes + share)
        furthest = thresholds.MAX_FIRST_STEP_FACTOR * largest
        target = max(2 * largest, furthest if half is None else min(half, furthest))
    else:
        furthest = thresholds.MAX_STEP_FACTOR * largest
        hardly_grows = edge.batch is None or edge.batch > furthest
        if hardly_grows and largest >= thresholds.NO_LIMIT_BATCH:
            return None
        target = edge.safe_batch if edge.safe_batch is not None else furthest
        target = max(1, min(target, furthest))
    if target > upper_bound:
        target = int(upper_bound) if len(passed) > 1 else int(math.sqrt(largest * upper_bound))
    target = max(target, min(passed))
    return target if bounds.data_set_limit is None else min(target, bounds.data_set_limit)


def _tolerance(tried: Sequence[ProbeResult], best: int) -> float:
    """Return the relative distance to the target that is close enough.

    It is 0 if a batch passed that should have failed: the answer is too low then.
    """
    passed = _passes(tried)
    if len(tried) >= thresholds.MANY_HOST_PROBES:
        return thresholds.HOST_TOLERANCE_AFTER_MANY
    should_fail = best / thresholds.ANSWER_SHARE
    if any(batch > should_fail for batch in passed if batch <= _upper_bound(tried)):
        return 0.0
    if passed[best] >= thresholds.REQUIRED_PASSES:
        return thresholds.HOST_TOLERANCE_ONCE_PASSED
    return thresholds.HOST_TOLERANCE


def _proof_above(tried: Sequence[ProbeResult], best: int, data_set_limit: int | None) -> int | None:
    """Return a larger batch that should fail, or None if one did or the dataset is too small.

    If it passes, its peak improves the line.
    """
    above = int(best / thresholds.ANSWER_SHARE) + 1
    larger = {result.batch for result in tried if result.batch >= above}
    highest = thresholds.PROOF_TOLERANCE * above
    has_failed = any(not result.is_ok for result in tried if best < result.batch <= highest)
    if has_failed or len(larger) >= 2 or (data_set_limit is not None and above > data_set_limit):
        return None
    return above if not larger else int(max(larger) / thresholds.ANSWER_SHARE) + 1


def _passes(tried: Sequence[ProbeResult]) -> Counter[int]:
    return Counter(result.batch for result in tried if result.is_ok)


def _upper_bound(tried: Sequence[ProbeResult]) -> float:
    lowest = min((result.batch for result in tried if not result.is_ok), default=None)
    return math.inf if lowest is None else thresholds.BELOW_FAILURE_SHARE * lowest
