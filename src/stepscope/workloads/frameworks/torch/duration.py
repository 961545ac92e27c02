"""When a training ends: after so many steps or epochs, or when its seconds are over.

Ranks must take the same number of steps, or they would wait for each other forever. So seconds are
turned into steps: the first rank looks at its watch now and then, after each tenth more of steps,
and once the end is nearer than the next look, it says which step is the last.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from stepscope.workloads.spec import DEFAULT_SECONDS, LEAST_STEPS, Workload

_FIRST_LOOK = 4


class Duration:
    """Counts steps and knows the last one."""

    def __init__(
        self, workload: Workload, steps_per_epoch: int | None, agreed: Callable[[int], int]
    ) -> None:
        """`agreed` makes a number of the first rank known to all."""
        self._agreed = agreed
        self._taken = 0
        self._last: int | None = workload.steps
        self._look_at = _FIRST_LOOK
        self._seconds = workload.seconds or DEFAULT_SECONDS
        if workload.epochs is not None:
            if steps_per_epoch is None:
                raise ValueError("an epoch has no end")
            self._last = workload.epochs * steps_per_epoch

    @property
    def total(self) -> int | None:
        """How many steps it will be, once that is known."""
        return self._last

    def goes_on(self) -> bool:
        """Whether to take another step; call it once before each."""
        if self._taken == 1:
            self._began = time.monotonic()
        if self._last is None and self._taken == self._look_at:
            self._look()
        self._taken += 1
        return self._last is None or self._taken <= self._last

    def _look(self) -> None:
        """The first step, which may compile for minutes, is not of these seconds."""
        elapsed = max(time.monotonic() - self._began, 1e-9)
        expected = 1 + (self._taken - 1) * self._seconds / elapsed
        next_look = self._look_at + max(1, self._look_at // 10)
        near = expected <= next_look
        last = self._agreed(max(LEAST_STEPS, math.ceil(expected), self._taken) if near else 0)
        self._look_at = next_look
        if last:
            self._last = last
