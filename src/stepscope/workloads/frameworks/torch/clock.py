"""Times steps without holding them up, and knows which is the last.

On a CPU the host's clock tells everything. On a GPU the host only queues work: events in the
device's own queue tell when a copy, a computation and a step were complete, and are read when they
have happened, so that nobody ever waits for them.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from stepscope.steplog import Step, StepLog
from stepscope.workloads.spec import DEFAULT_SECONDS, LEAST_STEPS, Workload

_now = time.monotonic_ns


class StepClock:
    """For steps that do not count. The others time: `waited`, `copied` and `computed` come for
    each batch of a step, `done` when all its work is queued, `finish` after the last step."""

    def begin(self) -> None: ...
    def waited(self) -> None: ...
    def copied(self) -> None: ...
    def computed(self) -> None: ...
    def done(self) -> None: ...
    def finish(self) -> None: ...


class HostClock(StepClock):
    """Where the host computes, or nobody does."""

    def __init__(self, log: StepLog) -> None:
        self._log = log
        self._step = 0
        self.begin()

    def begin(self) -> None:
        self._wait = self._copy = self._compute = 0
        self._from = _now()

    def waited(self) -> None:
        self._wait += self._lap()

    def copied(self) -> None:
        self._copy += self._lap()

    def computed(self) -> None:
        self._compute += self._lap()

    def done(self) -> None:
        self._compute += self._lap()
        wait = self._wait
        self._log.add(Step(self._from, self._step, wait, self._copy, self._compute, wait))
        self._step += 1
        self.begin()  # what we write down is no part of the next step's wait

    def finish(self) -> None:
        self._log.flush()

    def _lap(self) -> int:
        before, self._from = self._from, _now()
        return self._from - before


@dataclass
class _Pending:
    """A step whose events have not all happened."""

    wait_ns: int = 0
    batches: list[tuple[Any, Any, Any]] = field(default_factory=list)
    """Events before the copy, after it, and after the computation of each batch."""
    end: Any = None


class DeviceClock(StepClock):
    """Where a GPU computes."""

    def __init__(self, log: StepLog, device: torch.device) -> None:
        self._log = log
        self._device = device
        self._free: list[Any] = []
        self._pending: deque[_Pending] = deque()
        self._step = 0
        self.begin()

    def begin(self) -> None:
        torch.cuda.synchronize(self._device)
        self._last = self._event()
        self._end_ns = self._from = _now()
        self._current = _Pending()

    def waited(self) -> None:
        self._current.wait_ns += _now() - self._from
        self._before = self._event()

    def copied(self) -> None:
        self._after = self._event()

    def computed(self) -> None:
        self._current.batches.append((self._before, self._after, self._event()))
        self._from = _now()

    def done(self) -> None:
        self._current.end = self._event()
        self._pending.append(self._current)
        self._current = _Pending()
        while self._pending and self._pending[0].end.query():
            self._resolve(self._pending.popleft())
        self._from = _now()

    def finish(self) -> None:
        torch.cuda.synchronize(self._device)
        while self._pending:
            self._resolve(self._pending.popleft())
        self._log.flush()

    def _event(self) -> Any:
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _resolve(self, step: _Pending) -> None:
        copy = compute = idle = 0
        before = self._last
        for begun, copied, computed in step.batches:
            idle += _ns_between(before, begun)
            copy += _ns_between(begun, copied)
            compute += _ns_between(copied, computed)
            before = computed
        compute += _ns_between(before, step.end)
        self._end_ns += _ns_between(self._last, step.end)
        stall = min(step.wait_ns, idle)
        self._log.add(Step(self._end_ns, self._step, step.wait_ns, copy, compute, stall))
        self._step += 1
        self._free += [self._last, *(event for batch in step.batches for event in batch)]
        self._last = step.end


def _ns_between(earlier: Any, later: Any) -> int:
    return int(earlier.elapsed_time(later) * 1e6)


class Duration:
    """Counts steps and knows the last one.

    Ranks must take the same number of steps, or they would wait for each other forever. So seconds
    are turned into steps: the first rank looks at its watch after each tenth more of steps, and
    once the end is nearer than the next look, it says which step is the last.
    """

    def __init__(
        self, workload: Workload, steps_per_epoch: int | None, agreed: Callable[[int], int]
    ) -> None:
        """`agreed` makes a number of the first rank known to all."""
        self._agreed = agreed
        self._taken = 0
        self.total: int | None = workload.steps
        """How many steps it will be, once that is known."""
        self._look_at = 4
        self._seconds = workload.seconds or DEFAULT_SECONDS
        if workload.epochs is not None:
            if steps_per_epoch is None:
                raise ValueError("an epoch has no end")
            self.total = workload.epochs * steps_per_epoch

    def goes_on(self) -> bool:
        """Whether to take another step; call it once before each."""
        if self._taken == 1:  # the first step, which may compile for minutes, does not count
            self._began = time.monotonic()
        if self.total is None and self._taken == self._look_at:
            elapsed = max(time.monotonic() - self._began, 1e-9)
            expected = 1 + (self._taken - 1) * self._seconds / elapsed
            self._look_at += max(1, self._look_at // 10)
            is_near = expected <= self._look_at
            last = max(LEAST_STEPS, math.ceil(expected), self._taken) if is_near else 0
            self.total = self._agreed(last) or None
        self._taken += 1
        return self.total is None or self._taken <= self.total
