"""The way up: batches that are tried one after the other, and what follows from them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from stepscope.advice.answer import Room
from stepscope.advice.hostprobe import HostProbes, HostTold
from stepscope.advice.hostsearch import FAR, Bounds, answer, edge_of, leaves_much, next_batch
from stepscope.analysis.memory_model import leak
from stepscope.errors import BadWorkload, CannotTry
from stepscope.trials.limits import size_text
from stepscope.workloads.probing import Told
from stepscope.workloads.spec import Workload

_FIRST_STEPS = 7
"""Of the first batch, which is small: a leak needs some to show."""
_SETTLES = 2
"""Of these, in which optimizer and libraries make what they keep."""
_LEAKS = 0.0025
"""Of the room, per step: less may be anything."""
_BEFORE_STEPS = ("start", "import", "data", "build")


@dataclass
class Search:
    """What was tried, and what follows from it."""

    probe: HostProbes
    workload: Workload
    room: Room
    tell: Callable[[str], None]
    tried: list[HostTold] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)

    def begin(self) -> None:
        """A small batch, and smaller ones where it does not fit."""
        while self.first is None and (batch := next_batch(self.told, None)) is not None:
            batch = min(batch, self.workload.samples or batch)
            if self.tried and self.tried[-1].reached in _BEFORE_STEPS:
                return  # no batch would have helped
            self._try_first(batch)

    def go_on(self) -> None:
        while (batch := next_batch(self.told, self.bounds)) is not None:
            self._try(batch)

    def _try_first(self, batch: int) -> None:
        """It shows what is wrong with a workload, beside memory."""
        try:
            tried = self.probe(batch, _FIRST_STEPS)
        except BadWorkload as error:
            if batch == 1 or "less than one batch" not in error.message:
                raise
            tried = self.probe(1, _FIRST_STEPS)
        self._note(tried)
        told = tried.told
        if told.kind == "timeout":
            raise CannotTry(
                f"Batch {told.batch} did not come to its end: {told.message}", told.hint
            )
        if not told.is_ok and not told.is_oom and len(self.tried) == 1:
            raise BadWorkload(
                f"A step of batch {told.batch} fails, and not for lack of memory: {told.message}",
                told.hint or "stepscope trial shows all that it said",
            )

    def _try(self, batch: int) -> None:
        self._note(self.probe(batch))

    def _note(self, tried: HostTold) -> None:
        self.tried.append(tried)
        told = tried.told
        if told.is_ok:
            peak = told.reserved_peak
            held = f"holds {size_text(peak)} at most" if peak else "just fits"
            self.tell(f"batch {told.batch:,} {held}")
        else:
            self.tell(f"batch {told.batch:,} {how_it_failed(told)}")

    @property
    def told(self) -> list[Told]:
        return [tried.told for tried in self.tried]

    @property
    def first(self) -> HostTold | None:
        """The first that passed: what it says of the workload holds for all."""
        return next((tried for tried in self.tried if tried.told.is_ok), None)

    @property
    def bounds(self) -> Bounds:
        return Bounds(self.room.limit, self.base, self.most)

    @property
    def base(self) -> int:
        """Bytes that any batch takes."""
        assert self.first is not None
        parts = self.first.told.parts
        return self.first.before + self.workload.ranks * (parts.gradients + parts.optimizer)

    @property
    def most(self) -> int | None:
        """The largest batch that the data has; random data is made as large as it must be."""
        first, workload = self.first, self.workload
        assert first is not None
        if first.samples is None or (first.data_bytes and workload.samples is None):
            return None
        return max(1, first.samples // workload.ranks)

    @property
    def leak(self) -> float | None:
        assert self.first is not None
        grows = leak(self.first.told.kept[_SETTLES:_FIRST_STEPS])
        return grows if grows and grows > _LEAKS * self.room.limit else None

    @property
    def largest(self) -> int | None:
        return answer(self.told)

    @property
    def is_unbounded(self) -> bool:
        """Whether memory sets no limit: the data set ends well below it, or memory hardly grows
        with the batch."""
        if self.largest is not None and self.largest == self.most:
            return leaves_much(self.told, self.largest, self.room.limit)
        edge = edge_of(self.told, self.bounds).batch
        return edge is None or edge > FAR * max(t.batch for t in self.told if t.is_ok)

    def rate(self, batch: int) -> float | None:
        """Samples per second of all ranks: that of the process that was disturbed least."""
        rates = [t.samples_per_second for t in self.told if t.batch == batch and t.is_ok]
        best = max((rate for rate in rates if rate), default=None)
        return best * self.workload.accumulate * self.workload.ranks if best else None

    def peak(self, batch: int) -> int:
        """The most that a process which passed held; the limit, where that hides it."""
        peaks = [t.reserved_peak for t in self.told if t.batch == batch and t.is_ok]
        return max((peak or self.room.limit for peak in peaks), default=0)


def how_it_failed(told: Told) -> str:
    if told.is_oom:
        return f"ran out of host memory {told.phase}".rstrip()
    return f"failed {told.phase}: {told.message}".replace(" :", ":")
