"""Predictions for any batch in any memory, by replays of the traces of two batches."""

from __future__ import annotations

from collections.abc import Mapping

from stepscope.analysis.memory.caching_allocator import (
    AllocationTrace,
    allocated_peak,
    growth,
    scratch,
)
from stepscope.analysis.memory.model import (
    MemoryLine,
    batches_by_replay,
    batches_on_lines,
    comfortable_bytes,
    minimum_bytes,
)
from stepscope.fit.thresholds import ABOVE_SMOOTH, FURTHEST_ABOVE, HUGE

Batches = tuple[int, int]
"""The max batch, and the largest without an allocator retry."""


class Predictor:
    def __init__(self, traces: Mapping[int, AllocationTrace], fixed: float) -> None:
        """`fixed` are the bytes that any batch needs."""
        self._traces, self._fixed = traces, fixed
        self.comfortable = MemoryLine.through(
            [(batch, float(comfortable_bytes(trace))) for batch, trace in traces.items()], fixed
        )
        in_use = [(b, float(allocated_peak(t, scratch(t)))) for b, t in traces.items()]
        self._in_use = MemoryLine.through(in_use, fixed)
        (small, one), (large, other) = min(traces.items()), max(traces.items())
        self._growth = growth(one, small, other, large)

    def minimum(self) -> MemoryLine:
        """Bytes that a batch needs where memory is short. Takes seconds: it replays many times."""
        points = [(b, float(minimum_bytes(t, scratch(t)))) for b, t in self._traces.items()]
        return MemoryLine.through(points, self._fixed)

    def at(
        self, limit: int, most: int | None = None, thorough: bool = True, part: float = 0.0
    ) -> Batches:
        """Both batches within `limit`, if kernels can do without workspace but for a part of it."""
        guess = batches_on_lines(self._in_use, self.comfortable, limit)
        if most is not None:
            guess = min(guess[0], most), min(guess[1], most)
        if self._growth is None or not 0 < guess[0] < HUGE:
            return guess
        return batches_by_replay(self._growth, limit, guess, most, thorough, part)

    def smooth_above(self, batch: int, most: int, limit: int) -> list[int]:
        """Batches a little above one that should be smooth, though one between is not."""
        if self._growth is None:
            return []
        stride = max(1, round(ABOVE_SMOOTH * batch))
        further = range(batch + stride, min(most, round(FURTHEST_ABOVE * batch)) + 1, stride)
        return [each for each in further if comfortable_bytes(self._growth.at(each)) <= limit]
