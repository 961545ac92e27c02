"""The host search: batches are tried one after another, each in a trial under the memory limit.

A small batch measures the memory before the first step and detects a leak. Larger batches measure
how memory grows. The answer passes in three fresh processes, and a larger batch that fails confirms
it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from statistics import median

from stepscope.analysis.memory.model import leak_per_step
from stepscope.errors import TooFewSamples, TrialError, WorkloadError
from stepscope.fit import thresholds
from stepscope.fit.host_next_batch import Bounds, Edge, answer, clearly_below, edge_of, next_batch
from stepscope.fit.probes.contract import ProbeOutcome, Probes
from stepscope.fit.request import FitListener, FitRequest
from stepscope.fit.result import (
    Batch,
    FitFailure,
    Leak,
    MemoryBreakdown,
    MemoryBudget,
    Note,
    NoteKind,
    Verdict,
)
from stepscope.fit.search import BatchSearch, SearchResult
from stepscope.workloads.probing import ProbeRequest, ProbeResult, Subject
from stepscope.workloads.spec import Workload

_BEFORE_STEPS = ("start", "import", "data", "build")


@dataclass(kw_only=True)
class HostSearch(BatchSearch):
    workload: Workload
    tried: list[ProbeResult] = field(default_factory=list)
    """All probes in order."""
    first: ProbeOutcome | None = None
    """The first probe that passed."""
    beyond: ProbeOutcome | None = None
    """The probe with more memory than the limit."""

    def begin(self) -> None:
        """Try a small batch, and smaller ones if it does not fit."""
        while self.first is None and (batch := next_batch(self.tried, None)) is not None:
            batch = min(batch, self.workload.samples or batch)
            try:
                outcome = self.run(batch, thresholds.HOST_FIRST_PROBE_STEPS)
            except TooFewSamples:
                if batch == 1:
                    raise
                outcome = self.run(1, thresholds.HOST_FIRST_PROBE_STEPS)
            result = outcome.last
            if result.kind == "timeout":
                raise TrialError(
                    f"The probe at batch size {result.batch} stalled: {result.message}", result.hint
                )
            if not result.is_ok and not result.is_oom and len(self.tried) == 1:
                raise WorkloadError(
                    f"Batch size {result.batch} fails for a reason other than memory: "
                    f"{result.message}",
                    result.hint or "Run `stepscope trial` to see the full output",
                )
            if outcome.host.last_phase in _BEFORE_STEPS:
                return  # a smaller batch would not help

    def run(self, batch: int, steps: int = thresholds.HOST_PROBE_STEPS) -> ProbeOutcome:
        outcome = self.probes.run([ProbeRequest((batch,), steps=steps)])[0]
        self.record(outcome)
        result = outcome.last
        self.tried.append(result)
        self.passed[result.batch] = result.is_ok and self.passed.get(result.batch, True)
        self.passes[result.batch] = self.passes.get(result.batch, 0) + result.is_ok
        if result.is_ok:
            self.first = self.first or outcome
            # Of all ranks. The fastest process had the least interference.
            factor = self.workload.accumulate * self.workload.ranks
            throughput = (result.samples_per_second or 0.0) * factor
            if throughput:
                best = self.throughput.get(result.batch, 0.0)
                self.throughput[result.batch] = max(throughput, best)
        self.listener.tried(result)
        return outcome

    def peak(self, batch: int) -> int:
        """Return the largest peak of all probes that passed; the limit if the peak is unknown."""
        peaks = (result.reserved_peak_bytes for result in self.succeeded(batch))
        return max((peak or self.budget.limit_bytes for peak in peaks), default=0)

    def peak_with_failures(self, batch: int) -> int:
        return self.peak(batch)

    def answer(self, size: int) -> Batch:
        """Add how often the failure above occurred, and its shortfall according to the line."""
        batch = super().answer(size)
        above = batch.failure_above
        if above is None:
            return batch
        if size == self.max_batch and not self.is_unbounded:
            needed = round(self.edge.line.at(above.batch))
            above = replace(above, shortfall_bytes=max(0, needed - self.budget.limit_bytes))
        results = self.results[above.batch]
        failed = sum(not result.is_ok for result in results)
        return replace(batch, failure_above=above, attempts_above=(failed, len(results)))

    @property
    def base_bytes(self) -> int:
        assert self.first is not None
        parts = self.first.last.parts
        per_rank = parts.gradients_bytes + parts.optimizer_bytes
        return self.first.host.before_bytes + self.workload.ranks * per_rank

    @property
    def data_set_limit(self) -> int | None:
        samples = self.probes.subject.samples
        return None if samples is None else max(1, samples // self.workload.ranks)

    @property
    def bounds(self) -> Bounds:
        return Bounds(self.budget.limit_bytes, self.base_bytes, self.data_set_limit)

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
        """The max batch, unless several probes of smaller batches are faster."""
        max_batch = self.max_batch
        throughput = [
            (result.batch, result.samples_per_second)
            for result in self.tried
            if result.is_ok and result.batch <= max_batch and result.samples_per_second
        ]
        near = thresholds.NEAR_MAX_SHARE * max_batch
        typical = median([value for batch, value in throughput if batch >= near] or [math.inf])
        faster = [
            batch
            for batch, value in throughput
            if batch < near and thresholds.HOST_FULL_SPEED_SHARE * value > typical
        ]
        return max_batch if len(faster) < thresholds.MIN_FASTER_PROBES else max(faster)

    @property
    def is_unbounded(self) -> bool:
        """Whether memory sets no limit.

        Either the dataset ends clearly below the limit, or memory hardly grows with the batch.
        """
        if self.max_batch == self.data_set_limit:
            return clearly_below(self.tried, self.max_batch, self.budget.limit_bytes)
        edge, largest = self.edge.batch, max(r.batch for r in self.tried if r.is_ok)
        return edge is None or edge > thresholds.MAX_STEP_FACTOR * largest

    @property
    def subject(self) -> Subject | None:
        passed = self.first or (self.beyond and self.beyond.last.is_ok)
        return self.probes.subject if passed else None

    def failure(self) -> FitFailure:
        """Measure the shortfall with a larger limit, if there is clearly more free memory."""
        failed, limit = self.tried[-1], self.budget.limit_bytes
        larger = int(thresholds.SHORTFALL_FREE_SHARE * self.budget.free_bytes)
        if larger <= thresholds.SHORTFALL_MIN_FACTOR * limit:
            return FitFailure(failed)
        self.beyond = self.probes.run([ProbeRequest((failed.batch,), larger)])[0]
        self.record(self.beyond, within_limit=False)
        result, host = self.beyond.last, self.beyond.host
        shortfall = (result.reserved_peak_bytes or larger) - limit if result.is_ok else 0
        return FitFailure(
            failed,
            shortfall_bytes=max(0, shortfall),
            larger_limit_bytes=larger,
            larger_limit_result=result,
            before_bytes=host.before_bytes,
            data_bytes=host.data_bytes,
        )

    def memory_breakdown(self, found: SearchResult) -> MemoryBreakdown | None:
        size = found.max_batch
        if size is None or self.first is None:
            return None
        workload, fixed = self.workload, self.base_bytes
        if workload.ranks > 1 or workload.workers:  # ranks do not report the other processes
            fixed = max(fixed, int(self.edge.line.fixed_bytes))
        first = self.first.last.parts
        grown = max(0, self.peak(size) - fixed)
        inputs = self.probes.subject.sample_bytes * size
        parts = replace(
            first,
            inputs_bytes=inputs,
            activations_bytes=max(0, grown - inputs),
            context_bytes=max(0, fixed - first.state_bytes),
        )
        data = self.first.host.data_bytes * workload.ranks
        is_state = parts.state_bytes > parts.activations_bytes
        is_data = data > thresholds.DATA_DOMINANT_SHARE * self.budget.limit_bytes
        return MemoryBreakdown(
            batch=size,
            parts=parts,
            fixed_bytes=fixed,
            per_sample_bytes=grown / size,
            dominant="data" if is_data else "state" if is_state else "activations",
            data_bytes=data,
        )


def search_host(
    probes: Probes, budget: MemoryBudget, request: FitRequest, listener: FitListener
) -> SearchResult:
    """Run the whole search. Raise WorkloadError if it fails for a reason other than memory."""
    search = HostSearch(probes, budget, listener, workload=request.workload)
    search.begin()
    if search.first is None:
        return SearchResult(search, Verdict.DOES_NOT_FIT, failure=search.failure())
    first = search.first.last
    measured = slice(thresholds.HOST_SETTLING_STEPS, thresholds.HOST_FIRST_PROBE_STEPS)
    per_step = leak_per_step(first.allocated_bytes[measured]) or 0.0
    if per_step > thresholds.HOST_LEAK_SHARE * budget.limit_bytes:
        free = max(0, budget.limit_bytes - first.allocated_bytes[-1])
        leak = Leak(first.batch, per_step, round(free / per_step))
        return SearchResult(search, Verdict.UNKNOWN, leak=leak)
    while (batch := next_batch(search.tried, search.bounds)) is not None:
        search.run(batch)
    size, recommended = search.max_batch, search.recommended_batch
    if search.is_unbounded:
        return SearchResult(search, Verdict.NO_LIMIT, max_batch=size, recommended_batch=recommended)
    known = (result.reserved_peak_bytes for result in search.succeeded(size))
    peaks = [peak for peak in known if peak]
    difference = max(peaks, default=0) - min(peaks, default=0)
    if len(
        peaks
    ) >= thresholds.REQUIRED_PASSES and difference >= thresholds.PEAK_TOLERANCE * median(peaks):
        low, high = min(peaks), max(peaks)
        note = Note(NoteKind.PEAKS_DIFFER, batch=size, low_bytes=low, high_bytes=high)
        search.notes.append(note)
    return SearchResult(
        search,
        Verdict.FITS,
        max_batch=size,
        recommended_batch=recommended,
        minimum_memory=search.edge.line,
    )
