"""Which batches to try next, to close in on the largest that passes.

The guess is good to some per cent, so the search begins close to it and doubles its stride only
where it was wrong. Several at once where there is memory: they divide the gap into more parts.
"""

from __future__ import annotations

from collections.abc import Mapping

FINE = 0.004
"""A gap of this part of the batch is small enough, or one of a single sample."""
_HOLES = (0.01, 0.02, 0.03)
"""How far above the first that fails others are tried: near the limit, some pass again."""


def edges(tried: Mapping[int, bool]) -> tuple[int, int | None]:
    """The largest that passed (0 if none did), and the smallest above it that failed."""
    low = max((batch for batch, passed in tried.items() if passed), default=0)
    high = min((b for b, passed in tried.items() if not passed and b > low), default=None)
    return low, high


def is_closed(tried: Mapping[int, bool], fine: float = FINE) -> bool:
    low, high = edges(tried)
    return high is not None and high - low <= 1 + int(fine * low)


def next_batches(
    tried: Mapping[int, bool],
    guess: float,
    lanes: int = 1,
    fine: float = FINE,
    most: int | None = None,
) -> tuple[int, ...]:
    """Up to `lanes` batches to try now; none when the edge is known, or `most` has passed."""
    low, high = edges(tried)
    if is_closed(tried, fine) or (most is not None and low >= most):
        return ()
    here = max(1, round(guess))
    gap = 1 + int(fine * here)

    def strides(steps: int) -> list[int]:
        """In gaps, after so many steps in this direction: 1, 3, 6, 12 and so on."""
        return [(3 << max(0, steps) + n) >> 1 for n in range(lanes)]

    def usable(wanted: list[int]) -> tuple[int, ...]:
        """Those that are new, above what passed and below what failed, in order."""
        capped = {min(batch, most) if most is not None else batch for batch in wanted}
        within = (b for b in capped if b > low and (high is None or b < high))
        return tuple(sorted(batch for batch in within if batch not in tried))

    if low < here and (high is None or here < high):
        wanted = [here, here + gap, here - 2 * gap, here + 3 * gap][:lanes]
    elif low >= here:
        right = sum(passed and batch >= here for batch, passed in tried.items())
        wanted = [low + gap * stride for stride in strides(right - 1)]
    else:
        assert high is not None
        wrong = sum(not passed and batch <= here for batch, passed in tried.items())
        wanted = [high - gap * stride for stride in strides(wrong)]
    if wanted and (wanted[0] <= low or (high is not None and wanted[0] >= high)):
        wanted = []
    top, parts = high or low + 2, lanes + 1
    between = [low + round((top - low) * n / parts) for n in range(1, parts)]
    return usable(wanted) or usable(between)


def beyond(tried: Mapping[int, bool], lanes: int = 1, most: int | None = None) -> tuple[int, ...]:
    """Batches just above the first that fails: is it a hole, or the end?"""
    _, high = edges(tried)
    if high is None:
        return ()
    wanted = {max(high + n + 1, round(high * (1 + part))) for n, part in enumerate(_HOLES[:lanes])}
    return tuple(b for b in sorted(wanted) if b not in tried and (most is None or b <= most))


def holes(tried: Mapping[int, bool]) -> tuple[tuple[int, int], ...]:
    """Batches that fail although a larger one passes, each with the smallest of those."""
    passed = [batch for batch, ok in sorted(tried.items()) if ok]
    failed = [batch for batch, ok in sorted(tried.items()) if not ok]
    larger = ((batch, next((p for p in passed if p > batch), None)) for batch in failed)
    return tuple((batch, above) for batch, above in larger if above is not None)
