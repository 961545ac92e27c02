"""Predictions for any batch and any memory size, from replays of two traced batches."""

from __future__ import annotations

from collections.abc import Mapping

from stepscope.analysis.memory.caching_allocator import (
    AllocationTrace,
    allocated_peak,
    trace_growth,
    workspaces,
)
from stepscope.analysis.memory.model import (
    MemoryLine,
    batches_by_lines,
    batches_by_replay,
    minimum_bytes,
    retry_free_bytes,
)
from stepscope.fit.thresholds import (
    RETRY_FREE_SEARCH_FACTOR,
    RETRY_FREE_SEARCH_STEP,
    UNREALISTIC_BATCH,
)

Batches = tuple[int, int]
"""The max batch, and the largest batch without an allocator retry."""


class Predictor:
    def __init__(self, traces: Mapping[int, AllocationTrace], fixed: float) -> None:
        """`fixed` is the memory, in bytes, that does not depend on the batch."""
        self._traces, self._fixed = traces, fixed
        self.retry_free = MemoryLine.through(
            [(batch, float(retry_free_bytes(trace))) for batch, trace in traces.items()], fixed
        )
        allocated = [(b, float(allocated_peak(t, workspaces(t)))) for b, t in traces.items()]
        self._allocated = MemoryLine.through(allocated, fixed)
        (small, one), (large, other) = min(traces.items()), max(traces.items())
        self._growth = trace_growth(one, small, other, large)

    def minimum(self) -> MemoryLine:
        """Return the memory that a batch needs at least. Takes seconds: it replays many times."""
        points = [(b, float(minimum_bytes(t, workspaces(t)))) for b, t in self._traces.items()]
        return MemoryLine.through(points, self._fixed)

    def at(
        self,
        limit: int,
        upper: int | None = None,
        thorough: bool = True,
        required_workspace: float = 0.0,
    ) -> Batches:
        """Predict both batches within `limit` bytes.

        `upper` is the largest batch allowed, `required_workspace` the share of the workspace that
        kernels need.
        """
        guess = batches_by_lines(self._allocated, self.retry_free, limit)
        if upper is not None:
            guess = min(guess[0], upper), min(guess[1], upper)
        if self._growth is None or not 0 < guess[0] < UNREALISTIC_BATCH:
            return guess
        return batches_by_replay(self._growth, limit, guess, upper, thorough, required_workspace)

    def retry_free_above(self, batch: int, upper: int, limit: int) -> list[int]:
        """Return batches above `batch` that should be retry-free, although one between is not."""
        if self._growth is None:
            return []
        stride = max(1, round(RETRY_FREE_SEARCH_STEP * batch))
        end = min(upper, round(RETRY_FREE_SEARCH_FACTOR * batch))
        candidates = range(batch + stride, end + 1, stride)
        return [each for each in candidates if retry_free_bytes(self._growth.at(each)) <= limit]
