"""What the traces of two batches tell of any batch in any memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from stepscope.analysis.memory_model import (
    Line,
    Trace,
    allocated_peak,
    ease,
    foreseen,
    growth,
    need,
    predicted,
    scratch,
)

HUGE = 1 << 24
"""A batch that nobody trains: where memory would allow it, memory is not what limits."""
USUAL_CARDS = tuple(size << 30 for size in (11, 16, 24, 40, 80))
Answers = tuple[int, int]
"""The largest and the fast batch."""
NONE: Answers = (0, 0)
_APART, _FURTHER = 0.01, 1.06
"""How far apart, and how far above the smooth edge, others are looked for."""


class Foresight:
    """Both edges in any memory, by replays of the traces at any batch."""

    def __init__(self, traces: Mapping[int, Trace], fixed: float) -> None:
        self.traces, self.fixed = traces, fixed
        self.ease = Line.through([(b, float(ease(each))) for b, each in traces.items()], fixed)
        needed = [(b, float(allocated_peak(t, scratch(t)))) for b, t in traces.items()]
        self._need = Line.through(needed, fixed)
        (small, one), (large, other) = min(traces.items()), max(traces.items())
        self._grows = growth(one, small, other, large)

    def at(
        self, limit: int, most: int | None = None, thorough: bool = True, part: float = 0.0
    ) -> Answers:
        """The largest batch and the smooth one in so much memory, if kernels can do without
        workspace but for a part of it."""
        guess = predicted(self._need, self.ease, limit)
        if most is not None:
            guess = min(guess[0], most), min(guess[1], most)
        if self._grows is None or not 0 < guess[0] < HUGE:
            return guess
        return foreseen(self._grows, limit, guess, most, thorough, part)

    def smooth_above(self, batch: int, most: int, limit: int) -> list[int]:
        """Batches a little above one that should be smooth, though one between is not."""
        if self._grows is None:
            return []
        stride = max(1, round(_APART * batch))
        further = range(batch + stride, min(most, round(_FURTHER * batch)) + 1, stride)
        return [each for each in further if ease(self._grows.at(each)) <= limit]


@dataclass(frozen=True)
class Outlook:
    """What the traces tell of any batch in any memory."""

    need: Line
    """Bytes that a batch needs where memory is short."""
    ease: Line
    """Bytes that it takes where memory is not."""
    cards: Mapping[int, tuple[int, int]]
    """The largest batch and the smooth one, by the limit."""

    @classmethod
    def of(cls, foresight: Foresight, limits: Iterable[int]) -> Outlook:
        traces, fixed = foresight.traces, foresight.fixed
        needs = [(batch, float(need(each, scratch(each)))) for batch, each in traces.items()]
        cards = {limit: foresight.at(limit) for limit in limits if limit > 0}
        return cls(Line.through(needs, fixed), foresight.ease, cards)
