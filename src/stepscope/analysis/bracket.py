"""Which batches to try next, to close in on the largest that passes.

Pure: from what was tried and a guess to the next few. The guess is good to some per cent, so the
search begins close to it and doubles its stride only where it was wrong. Several at once where
there is room: they divide the gap into as many parts more.
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
    return high is not None and high - low <= _gap(low, fine)


def _gap(batch: float, fine: float) -> int:
    return 1 + int(fine * batch)


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
    gap = _gap(here, fine)
    if low < here and (high is None or here < high):
        wanted = [here, here + gap, here - 2 * gap, here + 3 * gap][:lanes]
    elif low >= here:
        right = sum(passed and batch >= here for batch, passed in tried.items())
        wanted = [low + gap * stride for stride in _strides(right - 1, lanes)]
    else:
        assert high is not None
        wrong = sum(not passed and batch <= here for batch, passed in tried.items())
        wanted = [high - gap * stride for stride in _strides(wrong, lanes)]
    if any(batch >= (high or batch + 1) or batch <= low for batch in wanted[:1]):
        wanted = []
    return _usable(tried, wanted, low, high, most) or _usable(
        tried, _between(low, high or low + 2, lanes), low, high, most
    )


def _strides(steps: int, lanes: int) -> list[int]:
    """How far to go, in gaps, after so many steps in this direction: 1, 3, 6, 12 and so on."""
    return [(3 << max(0, steps) + n) >> 1 for n in range(lanes)]


def _between(low: int, high: int, lanes: int) -> list[int]:
    parts = lanes + 1
    return [low + round((high - low) * n / parts) for n in range(1, parts)]


def _usable(
    tried: Mapping[int, bool], wanted: list[int], low: int, high: int | None, most: int | None
) -> tuple[int, ...]:
    """Those that are new, above what passed and below what failed, in order."""
    capped = {min(batch, most) if most is not None else batch for batch in wanted}
    return tuple(
        sorted(
            batch
            for batch in capped
            if batch > low and (high is None or batch < high) and batch not in tried
        )
    )


def beyond(tried: Mapping[int, bool], lanes: int = 1, most: int | None = None) -> tuple[int, ...]:
    """Batches just above the first that fails: is it a hole, or the end?"""
    _, high = edges(tried)
    if high is None:
        return ()
    wanted = {max(high + n + 1, round(high * (1 + part))) for n, part in enumerate(_HOLES[:lanes])}
    return tuple(b for b in sorted(wanted) if b not in tried and (most is None or b <= most))


def holes(tried: Mapping[int, bool]) -> tuple[tuple[int, int], ...]:
    """Batches that fail although a larger one passes, each with the smallest of those."""
    passed = sorted(batch for batch, ok in tried.items() if ok)
    found = []
    for batch in sorted(batch for batch, ok in tried.items() if not ok):
        larger = next((other for other in passed if other > batch), None)
        if larger is not None:
            found.append((batch, larger))
    return tuple(found)
