"""Times steps without holding them up.

On a CPU the host's clock tells everything. On a GPU the host only queues work: events in the
device's own queue tell when a copy, a computation and a step were complete, and are read when they
have happened, so that nobody ever waits for them.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from stepscope.steplog import Step, StepLog

_now = time.monotonic_ns


class StepClock(Protocol):
    """A step is: wait, copy, compute for each of its batches; then it is done."""

    def begin(self) -> None: ...

    def waited(self) -> None:
        """The batch is here."""

    def copied(self) -> None:
        """The batch is on its way to the device."""

    def computed(self) -> None:
        """All of this batch's work is queued, or done where the host does it."""

    def done(self) -> None:
        """The step is complete; the next one begins."""

    def finish(self) -> None:
        """Wait for what is still under way."""


class NoClock:
    """For steps that do not count."""

    def begin(self) -> None: ...

    waited = copied = computed = done = finish = begin


class HostClock:
    """Where the host computes, or nobody does."""

    def __init__(self, log: StepLog) -> None:
        self._log = log
        self._step = 0
        self.begin()

    def begin(self) -> None:
        self._from = _now()
        self._reset()

    def _reset(self) -> None:
        self._wait = self._copy = self._compute = 0

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
        self._reset()
        self._from = _now()  # what we write down is no part of the next step's wait

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


class DeviceClock:
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
        event = self._free.pop() if self._free else _new_event()
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


def _new_event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _ns_between(earlier: Any, later: Any) -> int:
    return int(earlier.elapsed_time(later) * 1e6)


@contextmanager
def running(clock: StepClock) -> Iterator[None]:
    """From the first step to the last, also where one fails: the steps before it are kept."""
    clock.begin()
    try:
        yield
    except BaseException:
        with suppress(Exception):  # a device that failed may fail again: the first error counts
            clock.finish()
        raise
    clock.finish()
