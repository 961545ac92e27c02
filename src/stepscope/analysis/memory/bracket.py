"""Bracket search for the largest batch size that passes.

The initial guess is accurate to a few percent, so the search starts close to it and doubles its
stride only when the guess was wrong. With several probes in parallel, each round divides the
bracket into more parts.
"""

from __future__ import annotations

from collections.abc import Mapping

TOLERANCE = 0.004
"""Width at which a bracket is closed, as a share of the batch; a width of 1 is always closed."""
_BEYOND_SHARES = (0.01, 0.02, 0.03)
"""Distances above the first failure at which to probe again: near the limit, larger batches may
pass."""


def edges(tried: Mapping[int, bool]) -> tuple[int, int | None]:
    """Return the largest batch that passed (0 if none) and the smallest failure above it."""
    low = max((batch for batch, passed in tried.items() if passed), default=0)
    high = min((b for b, passed in tried.items() if not passed and b > low), default=None)
    return low, high


def is_closed(tried: Mapping[int, bool], tolerance: float = TOLERANCE) -> bool:
    low, high = edges(tried)
    return high is not None and high - low <= 1 + int(tolerance * low)


def next_batches(
    tried: Mapping[int, bool],
    guess: float,
    parallel: int = 1,
    tolerance: float = TOLERANCE,
    upper: int | None = None,
) -> tuple[int, ...]:
    """Return up to `parallel` batches to try next.

    The result is empty when the bracket is closed or `upper`, the largest batch allowed, passed.
    """
    low, high = edges(tried)
    if is_closed(tried, tolerance) or (upper is not None and low >= upper):
        return ()
    start = max(1, round(guess))
    gap = 1 + int(tolerance * start)

    def strides(steps: int) -> list[int]:
        """Return strides, in gaps, after a number of steps in one direction: 1, 3, 6, 12, …"""
        return [(3 << max(0, steps) + n) >> 1 for n in range(parallel)]

    def usable(candidates: list[int]) -> tuple[int, ...]:
        """Return the untried candidates inside the bracket, in order."""
        capped = {min(batch, upper) if upper is not None else batch for batch in candidates}
        within = (b for b in capped if b > low and (high is None or b < high))
        return tuple(sorted(batch for batch in within if batch not in tried))

    if low < start and (high is None or start < high):
        candidates = [start, start + gap, start - 2 * gap, start + 3 * gap][:parallel]
    elif low >= start:
        steps_up = sum(passed and batch >= start for batch, passed in tried.items())
        candidates = [low + gap * stride for stride in strides(steps_up - 1)]
    else:
        assert high is not None
        steps_down = sum(not passed and batch <= start for batch, passed in tried.items())
        candidates = [high - gap * stride for stride in strides(steps_down)]
    if candidates and (candidates[0] <= low or (high is not None and candidates[0] >= high)):
        candidates = []
    top, parts = high or low + 2, parallel + 1
    between = [low + round((top - low) * n / parts) for n in range(1, parts)]
    return usable(candidates) or usable(between)


def batches_beyond(
    tried: Mapping[int, bool], parallel: int = 1, upper: int | None = None
) -> tuple[int, ...]:
    """Return batches just above the first failure, to check whether larger ones pass again."""
    _, high = edges(tried)
    if high is None:
        return ()
    shares = enumerate(_BEYOND_SHARES[:parallel])
    candidates = {max(high + n + 1, round(high * (1 + share))) for n, share in shares}
    return tuple(b for b in sorted(candidates) if b not in tried and (upper is None or b <= upper))


def failures_below_max(tried: Mapping[int, bool]) -> tuple[tuple[int, int], ...]:
    """Return each batch that fails although a larger one passes, with the smallest of those."""
    passed = [batch for batch, ok in sorted(tried.items()) if ok]
    failed = [batch for batch, ok in sorted(tried.items()) if not ok]
    larger = ((batch, next((p for p in passed if p > batch), None)) for batch in failed)
    return tuple((batch, above) for batch, above in larger if above is not None)
