"""The search in host memory: batches tried one after the other, each a trial within the limit.

A small batch tells what is there before any step and whether memory comes back after each; larger
ones tell how memory grows; one that passes in three fresh processes is the answer, and one above it
that fails is the proof.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from stepscope.analysis.memory.model import leak
from stepscope.errors import BadWorkload, CannotTry, TooFewSamples
from stepscope.fit.answer import Batch, Note, NoteKind
from stepscope.fit.host.next_batch import FAR, Bounds, Edge, answer, edge_of, next_batch, well_below
from stepscope.fit.probes.contract import ProbeOutcome
from stepscope.fit.search import BatchSearch
from stepscope.workloads.probing import ProbeRequest, ProbeResult
from stepscope.workloads.spec import Workload

_STEPS, _FIRST_STEPS = 3, 7
"""The first batch is small, and a leak needs some steps to show."""
_SETTLES = 2
"""Of these, in which optimizer and libraries make what they keep."""
_LEAKS = 0.0025
"""Of the limit, per step: less may be anything."""
_BEFORE_STEPS = ("start", "import", "data", "build")
_FULL_SPEED = 0.85
"""Of a faster one's rate: on a CPU, processes that do the same differ by some 10 %."""
_NEAR_MAX = 0.9
_SUPPORT = 2
"""Probes that have to say that smaller batches are faster: one may be disturbed, or lucky."""


@dataclass(kw_only=True)
class HostSearch(BatchSearch):
    """What was tried, and what follows from it."""

    workload: Workload
    listen: Callable[[ProbeResult], None]
    tried: list[ProbeResult] = field(default_factory=list)
    """In their order."""
    first: ProbeOutcome | None = None
    """The first that passed: what it says of the workload holds for all."""

    def begin(self) -> None:
        """A small batch, and smaller ones where it does not fit."""
        while self.first is None and (batch := next_batch(self.tried, None)) is not None:
            batch = min(batch, self.workload.samples or batch)
            try:
                outcome = self.run(batch, _FIRST_STEPS)
            except TooFewSamples:
                if batch == 1:
                    raise
                outcome = self.run(1, _FIRST_STEPS)
            result = outcome.last
            if result.kind == "timeout":
                raise CannotTry(
                    f"Batch {result.batch} did not come to its end: {result.message}", result.hint
                )
            if not result.is_ok and not result.is_oom and len(self.tried) == 1:
                raise BadWorkload(
                    f"A step of batch {result.batch} fails, and not for lack of memory: "
                    f"{result.message}",
                    result.hint or "stepscope trial shows all that it said",
                )
            if outcome.host.reached in _BEFORE_STEPS:
                return  # no smaller batch would help

    def go_on(self) -> None:
        while (batch := next_batch(self.tried, self.bounds)) is not None:
            self.run(batch)

    def run(self, batch: int, steps: int = _STEPS) -> ProbeOutcome:
        outcome = self.probes.run([ProbeRequest((batch,), steps=steps)])[0]
        self.count(outcome)
        result = outcome.last
        self.tried.append(result)
        self.passed[result.batch] = result.is_ok and self.passed.get(result.batch, True)
        self.passes[result.batch] = self.passes.get(result.batch, 0) + result.is_ok
        if result.is_ok:
            self.first = self.first or outcome
            # The process that was disturbed least, for all ranks.
            of_all = self.workload.accumulate * self.workload.ranks
            rate = (result.samples_per_second or 0.0) * of_all
            if rate:
                self.rates[result.batch] = max(rate, self.rates.get(result.batch, 0.0))
        self.listen(result)
        return outcome

    def count(self, outcome: ProbeOutcome) -> None:
        super().count(outcome)
        self.notes += [Note(NoteKind.REPORTED, text) for text in outcome.last.notes]
        if outcome.host.enforced_by == "soft":
            self.notes.append(Note(NoteKind.SOFT_LIMIT))

    def peak(self, batch: int) -> int:
        """The most that a process which passed held; the limit, where that hides it."""
        peaks = (result.reserved_peak for result in self.succeeded(batch))
        return max((peak or self.budget.limit for peak in peaks), default=0)

    def held(self, batch: int) -> int:
        return self.peak(batch)

    def batch(self, size: int) -> Batch:
        """With how often the one above failed, since there is no sharp limit."""
        batch = super().batch(size)
        if batch.failure_above is None:
            return batch
        results = self.results[batch.failure_above.batch]
        failed = sum(not result.is_ok for result in results)
        return replace(batch, attempts_above=(failed, len(results)))

    @property
    def base(self) -> int:
        """Bytes that any batch takes."""
        assert self.first is not None
        parts = self.first.last.parts
        return self.first.host.before + self.workload.ranks * (parts.gradients + parts.optimizer)

    @property
    def most(self) -> int | None:
        """The largest batch that the data has samples for."""
        samples = self.probes.subject.samples
        return None if samples is None else max(1, samples // self.workload.ranks)

    @property
    def bounds(self) -> Bounds:
        return Bounds(self.budget.limit, self.base, self.most)

    @property
    def edge(self) -> Edge:
        return edge_of(self.tried, self.bounds)

    @property
    def leak(self) -> float | None:
        assert self.first is not None
        grows = leak(self.first.last.kept[_SETTLES:_FIRST_STEPS])
        return grows if grows and grows > _LEAKS * self.budget.limit else None

    @property
    def max_batch(self) -> int:
        size = answer(self.tried)
        assert size is not None
        return size

    @property
    def recommended_batch(self) -> int:
        """The max batch, unless more than one probe says that smaller ones are faster."""
        largest = self.max_batch
        rates = [
            (result.batch, result.samples_per_second)
            for result in self.tried
            if result.is_ok and result.batch <= largest and result.samples_per_second
        ]
        near = _NEAR_MAX * largest
        usual = statistics.median([rate for batch, rate in rates if batch >= near] or [math.inf])
        faster = [batch for batch, rate in rates if batch < near and _FULL_SPEED * rate > usual]
        return largest if len(faster) < _SUPPORT else max(faster)

    @property
    def is_unbounded(self) -> bool:
        """Whether memory sets no limit: the data set ends well below it, or memory hardly grows
        with the batch."""
        if self.max_batch == self.most:
            return well_below(self.tried, self.max_batch, self.budget.limit)
        edge = self.edge.batch
        return edge is None or edge > FAR * max(t.batch for t in self.tried if t.is_ok)
