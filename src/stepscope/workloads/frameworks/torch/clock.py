"""Clocks that time steps without slowing them down, and the duration of a training.

On a CPU the host clock is sufficient. On a GPU the host only queues work: CUDA events mark the end
of a copy, a computation and a step. They are read after they have happened, so that the host never
waits for them.
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
    """The interface, and a clock that measures nothing.

    `waited`, `copied` and `computed` are called for each batch of a step, `done` when all work of
    the step is queued, and `finish` after the last step.
    """

    def begin(self) -> None: ...
    def waited(self) -> None: ...
    def copied(self) -> None: ...
    def computed(self) -> None: ...
    def done(self) -> None: ...
    def finish(self) -> None: ...


class HostClock(StepClock):
    """For computation on the CPU, or none."""

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
        self.begin()  # writing the log is not part of the next wait

    def finish(self) -> None:
        self._log.flush()

    def _lap(self) -> int:
        before, self._from = self._from, _now()
        return self._from - before


@dataclass
class _Pending:
    """A step with events that may not have happened yet."""

    wait_ns: int = 0
    batches: list[tuple[Any, Any, Any]] = field(default_factory=list)
    """For each batch, the events before the copy, after the copy and after the computation."""
    end: Any = None


class DeviceClock(StepClock):
    """For computation on a GPU."""

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
        for started, copied, computed in step.batches:
            idle += _ns_between(before, started)
            copy += _ns_between(started, copied)
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
    """Counts steps and determines the last one.

    All ranks must take the same number of steps, or they would wait for each other forever.
    Seconds are therefore converted into steps: rank 0 checks the time whenever the number of steps
    has grown by a tenth. When the end is nearer than the next check, it sets the last step.
    """

    def __init__(
        self, workload: Workload, steps_per_epoch: int | None, broadcast: Callable[[int], int]
    ) -> None:
        """`broadcast` returns the number that rank 0 passes to it."""
        self._broadcast = broadcast
        self._taken = 0
        self.total: int | None = workload.steps
        """Total number of steps, None until it is known."""
        self._next_check = 4
        self._seconds = workload.seconds or DEFAULT_SECONDS
        if workload.epochs is not None:
            if steps_per_epoch is None:
                raise ValueError("the length of an epoch is unknown")
            self.total = workload.epochs * steps_per_epoch

    def take_step(self) -> bool:
        """Count one more step; False if the training is complete."""
        if self._taken == 1:  # the first step may compile for minutes and does not count
            self._start = time.monotonic()
        if self.total is None and self._taken == self._next_check:
            elapsed = max(time.monotonic() - self._start, 1e-9)
            expected = 1 + (self._taken - 1) * self._seconds / elapsed
            self._next_check += max(1, self._next_check // 10)
            is_near = expected <= self._next_check
            last = max(LEAST_STEPS, math.ceil(expected), self._taken) if is_near else 0
            self.total = self._broadcast(last) or None
        self._taken += 1
        return self.total is None or self._taken <= self.total
