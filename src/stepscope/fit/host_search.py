"""The search in host memory: batches tried one after the other, each a trial within the limit.

A small batch tells what is there before any step and whether memory comes back after each; larger
ones tell how memory grows; one that passes in three fresh processes is the answer, and one above it
that fails is the proof.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from statistics import median

from stepscope.analysis.memory.model import leak
from stepscope.errors import BadWorkload, CannotTry, TooFewSamples
from stepscope.fit import thresholds
from stepscope.fit.answer import (
    Batch,
    Composition,
    Leak,
    MemoryBudget,
    Misfit,
    Note,
    NoteKind,
    Verdict,
)
from stepscope.fit.host_next_batch import Bounds, Edge, answer, edge_of, next_batch, well_below
from stepscope.fit.probes.contract import ProbeOutcome, Probes
from stepscope.fit.request import FitListener, FitRequest
from stepscope.fit.search import BatchSearch, SearchResult
from stepscope.workloads.probing import ProbeRequest, ProbeResult, Subject
from stepscope.workloads.spec import Workload

_BEFORE_STEPS = ("start", "import", "data", "build")


@dataclass(kw_only=True)
class HostSearch(BatchSearch):
    workload: Workload
    tried: list[ProbeResult] = field(default_factory=list)
    """In their order."""
    first: ProbeOutcome | None = None
    """The first that passed: what it says of the workload holds for all."""
    beyond: ProbeOutcome | None = None
    """The one that was tried within more memory than the limit."""

    def begin(self) -> None:
        """A small batch, and smaller ones where it does not fit."""
        while self.first is None and (batch := next_batch(self.tried, None)) is not None:
            batch = min(batch, self.workload.samples or batch)
            try:
                outcome = self.run(batch, thresholds.FIRST_STEPS)
            except TooFewSamples:
                if batch == 1:
                    raise
                outcome = self.run(1, thresholds.FIRST_STEPS)
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

    def run(self, batch: int, steps: int = thresholds.HOST_STEPS) -> ProbeOutcome:
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
        self.listener.tried(result)
        return outcome

    def peak(self, batch: int) -> int:
        """The most that a process which passed held; the limit, where that hides it."""
        peaks = (result.reserved_peak for result in self.succeeded(batch))
        return max((peak or self.budget.limit for peak in peaks), default=0)

    def held(self, batch: int) -> int:
        return self.peak(batch)

    def batch(self, size: int) -> Batch:
        """With how often the one above failed, since there is no sharp limit, and what it would
        need by the line that bounds the answer."""
        batch = super().batch(size)
        above = batch.failure_above
        if above is None:
            return batch
        if size == self.max_batch and not self.is_unbounded:
            missing = max(0, round(self.edge.line.at(above.batch) - self.budget.limit))
            above = replace(above, missing=missing)
        results = self.results[above.batch]
        failed = sum(not result.is_ok for result in results)
        return replace(batch, failure_above=above, attempts_above=(failed, len(results)))

    @property
    def base(self) -> int:
        assert self.first is not None
        parts = self.first.last.parts
        return self.first.host.before + self.workload.ranks * (parts.gradients + parts.optimizer)

    @property
    def most(self) -> int | None:
        samples = self.probes.subject.samples
        return None if samples is None else max(1, samples // self.workload.ranks)

    @property
    def bounds(self) -> Bounds:
        return Bounds(self.budget.limit, self.base, self.most)

    @property
    def edge(self) -> Edge:
        return edge_of(self.tried, self.bounds)

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
        near = thresholds.NEAR_MAX * largest
        usual = median([rate for batch, rate in rates if batch >= near] or [math.inf])
        faster = [
            batch
            for batch, rate in rates
            if batch < near and thresholds.HOST_FULL_SPEED * rate > usual
        ]
        return largest if len(faster) < thresholds.FASTER_PROBES else max(faster)

    @property
    def is_unbounded(self) -> bool:
        """Whether memory sets no limit: the data set ends well below it, or memory hardly grows
        with the batch."""
        if self.max_batch == self.most:
            return well_below(self.tried, self.max_batch, self.budget.limit)
        edge = self.edge.batch
        return edge is None or edge > thresholds.FAR * max(t.batch for t in self.tried if t.is_ok)

    @property
    def subject(self) -> Subject | None:
        passed = self.first or (self.beyond and self.beyond.last.is_ok)
        return self.probes.subject if passed else None

    def misfit(self) -> Misfit:
        """How much is missing, by a trial within more memory, where there clearly is more."""
        failed, limit = self.tried[-1], self.budget.limit
        more = int(thresholds.PART_OF_FREE * self.budget.free)
        if more <= thresholds.CLEARLY_MORE * limit:
            return Misfit(failed)
        self.beyond = self.probes.run([ProbeRequest((failed.batch,), more)])[0]
        self.count(self.beyond, within_limit=False)
        result, host = self.beyond.last, self.beyond.host
        missing = (result.reserved_peak or more) - limit if result.is_ok else 0
        return Misfit(
            failed,
            shortfall=max(0, missing),
            larger_limit=more,
            within_larger=result,
            before=host.before,
            data_bytes=host.data_bytes,
        )

    def composition(self, found: SearchResult) -> Composition | None:
        size = found.max_batch
        if size is None or self.first is None:
            return None
        workload, fixed = self.workload, self.base
        if workload.ranks > 1 or workload.workers:  # there are others, which no rank tells of
            fixed = max(fixed, int(self.edge.line.fixed))
        first = self.first.last.parts
        grown = max(0, self.peak(size) - fixed)
        inputs = self.probes.subject.sample_bytes * size
        parts = replace(
            first,
            inputs=inputs,
            activations=max(0, grown - inputs),
            outside=max(0, fixed - first.state),
        )
        data = self.first.host.data_bytes * workload.ranks
        is_state = parts.state > parts.activations
        is_data = data > thresholds.MUCH_DATA * self.budget.limit
        return Composition(
            batch=size,
            parts=parts,
            fixed=fixed,
            per_sample=grown / size,
            dominant="data" if is_data else "state" if is_state else "activations",
            data_bytes=data,
        )


def search_host(
    probes: Probes, budget: MemoryBudget, request: FitRequest, listener: FitListener
) -> SearchResult:
    """From the first probe to the answer. BadWorkload where memory is not why it fails."""
    search = HostSearch(probes, budget, listener, workload=request.workload)
    search.begin()
    if search.first is None:
        return SearchResult(search, Verdict.DOES_NOT_FIT, misfit=search.misfit())
    first = search.first.last
    growth = leak(first.kept[thresholds.SETTLING_STEPS : thresholds.FIRST_STEPS]) or 0.0
    if growth > thresholds.HOST_LEAK * budget.limit:
        left = max(0, budget.limit - first.kept[-1])
        leaks = Leak(first.batch, growth, round(left / growth))
        return SearchResult(search, Verdict.CANNOT_TELL, leak=leaks)
    while (batch := next_batch(search.tried, search.bounds)) is not None:
        search.run(batch)
    size, recommended = search.max_batch, search.recommended_batch
    if search.is_unbounded:
        return SearchResult(search, Verdict.NO_LIMIT, max_batch=size, recommended_batch=recommended)
    peaks = [result.reserved_peak for result in search.succeeded(size) if result.reserved_peak]
    difference = max(peaks, default=0) - min(peaks, default=0)
    if len(peaks) >= thresholds.PASSES and difference >= thresholds.SAME_PEAK * median(peaks):
        differ = Note(NoteKind.PEAKS_DIFFER, batch=size, low=min(peaks), high=max(peaks))
        search.notes.append(differ)
    return SearchResult(
        search,
        Verdict.FITS,
        max_batch=size,
        recommended_batch=recommended,
        minimum=search.edge.line,
    )
