"""The GPU search: from a few small batches to the max and the recommended batch size.

    probe_small_batches   a few small batches measure the memory per sample and reveal errors
    trace_allocations     two larger batches record every allocation of a training cycle
    Predictor             replays the traces through a model of the allocator to predict both edges
    locate_edges          probes near the predictions, in fresh processes, locate both edges
    confirm               longer probes confirm the answers; a faster smaller batch is preferred

Every probe is a disposable process under the memory limit. Two edges are searched at once: the
largest batch that passes, and the largest that passes without an allocator retry. Probes run in
parallel if the GPU has memory for several of them; timed probes take turns.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

from stepscope.analysis.memory import bracket
from stepscope.analysis.memory.caching_allocator import AllocationTrace
from stepscope.analysis.memory.model import MemoryLine, leak_per_step
from stepscope.errors import TrialError, WorkloadError
from stepscope.fit import thresholds
from stepscope.fit.prediction import Batches, Predictor
from stepscope.fit.probes.contract import ProbeOutcome, Probes
from stepscope.fit.request import FitListener, FitRequest
from stepscope.fit.result import (
    FitFailure,
    Leak,
    MemoryBreakdown,
    MemoryBudget,
    Note,
    NoteKind,
    Verdict,
)
from stepscope.fit.search import BatchSearch, SearchResult
from stepscope.trials.limits.spec import size_text
from stepscope.workloads.probing import ProbeRequest, ProbeResult


@dataclass
class GpuSearch(BatchSearch):
    traces: dict[int, AllocationTrace] = field(default_factory=dict)
    context_bytes: int = 0
    passed_long: set[int] = field(default_factory=set)
    """Batches that passed a long probe."""
    tried_beyond: bool = False
    one_at_a_time: bool = False

    @property
    def cap(self) -> int | None:
        """The memory limit of a probe; None if the whole GPU may be used."""
        is_whole = self.budget.requested_bytes is None and not self.budget.headroom_bytes
        return None if is_whole else self.budget.limit_bytes

    @property
    def wide_cap(self) -> int | None:
        """The limit of probes that may exceed the budget.

        It is larger than `cap` only if the GPU has clearly more free memory than the limit, and
        leaves some of it to other processes.
        """
        free = self.budget.free_bytes - thresholds.ASSUMED_CONTEXT_BYTES
        limit = self.budget.limit_bytes
        if self.cap is None or free <= thresholds.WIDE_CAP_MIN_FREE_FACTOR * limit:
            return self.cap
        return int(min(thresholds.WIDE_CAP_FACTOR * limit, thresholds.WIDE_CAP_FREE_SHARE * free))

    @property
    def parallel_probes(self) -> int:
        """The number of probes under the limit that fit the free memory together."""
        if self.cap is None or self.one_at_a_time:
            return 1
        each = self.cap + max(self.context_bytes, thresholds.ASSUMED_CONTEXT_BYTES // 2)
        usable = int(self.budget.free_bytes * (1 - thresholds.PARALLEL_RESERVE_SHARE))
        return max(1, min(thresholds.MAX_PARALLEL_PROBES, usable // each))

    @property
    def fixed_bytes(self) -> float:
        """Memory that does not depend on the batch: weights, gradients and optimizer state."""
        return float(self.parts[max(self.parts)].state_bytes)

    @property
    def allocated_line(self) -> MemoryLine:
        """Allocated memory as a line through the two largest batches that passed."""
        points = [
            (batch, float(max(result.allocated_peak_bytes for result in self.succeeded(batch))))
            for batch in sorted(self.results)
            if self.succeeded(batch)
        ]
        return MemoryLine.through(points[-2:], self.fixed_bytes)

    def predicted_limits(self, sizes: Sequence[int]) -> dict[int, int]:
        """Return the bytes for batches by GPU memory size.

        Sizes that the user passes exclude the CUDA context, common GPU sizes include it.
        """
        context = 0 if sizes else self.context_bytes
        return {
            size: size - context - self.budget.headroom_bytes
            for size in sizes or thresholds.COMMON_GPU_MEMORY_BYTES
        }

    def run(self, requests: Sequence[ProbeRequest]) -> list[ProbeOutcome]:
        """Run probes, in parallel where memory allows, and record their results."""
        outcomes: list[ProbeOutcome] = []
        pending = list(requests)
        while pending:
            group, pending = pending[: self.parallel_probes], pending[self.parallel_probes :]
            self.listener.show(
                f"batch size {', '.join(f'{b:,}' for each in group for b in each.batches)}"
            )
            probed = self.probes.run(group)
            if len(group) > 1 and any(each.last.kind == "gpu_busy" for each in probed):
                self.one_at_a_time = True
                pending = [*group, *pending]
                continue
            # A kill says nothing about GPU memory and may be an accident: retry once, alone.
            killed = [each.request for each in probed if each.last.kind == "killed"]
            self.probe_count += len(killed)
            retried = [self.probes.run([request])[0] for request in killed]
            outcomes += [each for each in probed if each.last.kind != "killed"] + retried
        for outcome in outcomes:
            self.record(outcome)
            for result in outcome.results:
                if result.kind == "timeout":  # says nothing about memory: no answer is reliable
                    raise TrialError(
                        f"The probe at batch size {result.batch:,} stalled: {result.message}",
                        "Allow more time with --stall-timeout SECONDS",
                    )
                if result.is_ok and outcome.request.exclusive and result.samples_per_second:
                    self.throughput[result.batch] = result.samples_per_second
            if outcome.trace is not None and outcome.last.is_ok:
                self.traces[outcome.last.batch] = outcome.trace
            if len(outcome.request.batches) == 1:
                self._judge(outcome.request, outcome.last)
        return outcomes

    def _judge(self, request: ProbeRequest, result: ProbeResult) -> None:
        """Update what is known about a batch from a probe of that batch alone.

        A batch must pass every time, so a failure overrides earlier passes. A probe with a wider
        limit proves only a peak below the limit.
        """
        batch, is_retry_free = result.batch, result.is_ok and result.retries == 0
        if request.cap == self.cap:
            self.passed[batch] = result.is_ok and self.passed.get(batch, True)
            self.retry_free[batch] = is_retry_free and self.retry_free.get(batch, True)
            self.passes[batch] = self.passes.get(batch, 0) + (result.is_ok and request.cycle)
            if result.is_ok and request.steps_after >= thresholds.LONG_PROBE_STEPS:
                self.passed_long.add(batch)
        elif result.is_ok and result.reserved_peak_bytes <= self.budget.limit_bytes:
            self.passed.setdefault(batch, True)
            self.retry_free.setdefault(batch, True)
        elif result.is_ok:
            self.retry_free.setdefault(batch, False)
        elif not result.is_oom:  # it would fail with less memory too
            self.passed[batch] = self.retry_free[batch] = False

    def memory_breakdown(self, found: SearchResult) -> MemoryBreakdown | None:
        measured = max(self.parts, default=0)
        batch = found.recommended_batch or found.max_batch or measured
        if not self.succeeded(batch):
            batch = measured
        if not self.succeeded(batch):
            return None
        best = max(self.succeeded(batch), key=lambda result: len(result.allocated_bytes))
        parts = replace(best.parts, context_bytes=self.context_bytes)
        peak = best.allocated_peak_bytes
        named = parts.state_bytes + parts.inputs_bytes + parts.activations_bytes
        workspace = max(0, peak - named)
        line = found.minimum_memory or MemoryLine(float(peak), 0.0)
        is_state = parts.state_bytes > thresholds.STATE_DOMINANT_SHARE * max(1, peak)
        is_workspace = workspace > parts.activations_bytes
        return MemoryBreakdown(
            batch=batch,
            parts=parts,
            workspace_bytes=workspace,
            fragmentation_bytes=max(0, best.reserved_peak_bytes - peak),
            fixed_bytes=int(line.fixed_bytes),
            per_sample_bytes=line.per_sample_bytes,
            dominant="state" if is_state else "workspace" if is_workspace else "activations",
            allocated_peak_bytes=peak,
        )

    def too_large(self, smallest: ProbeResult) -> SearchResult:
        """Return the result if not even the smallest batch fits, with a bound of the shortfall."""
        limit = self.budget.limit_bytes
        shortfall = smallest.allocated_peak_bytes - limit
        if not smallest.is_ok:
            weights = 4 * self.probes.subject.parameters
            shortfall = max(smallest.shortfall_bytes or 0, 2 * weights - limit)
        return SearchResult(self, Verdict.DOES_NOT_FIT, failure=self.failure(shortfall))

    def failure(self, shortfall: int = 0) -> FitFailure:
        results = self.results.get(1)
        return FitFailure(results[-1] if results else None, shortfall)

    def leaking(self, per_step: float) -> SearchResult:
        batch = max(self.traces or self.parts)
        peak = max(each.allocated_peak_bytes for each in self.results[batch])
        steps_left = max(0, int((self.budget.limit_bytes - peak) / per_step))
        return SearchResult(self, Verdict.UNKNOWN, leak=Leak(batch, per_step, steps_left))


def search_gpu(
    probes: Probes, budget: MemoryBudget, request: FitRequest, listener: FitListener
) -> SearchResult:
    """Run the whole search."""
    search = GpuSearch(probes, budget, listener)
    sizes = request.predict_for if request.estimate else ()
    early = probe_small_batches(search) or trace_allocations(search, sizes)
    if early:
        return early
    predictor = Predictor(search.traces, search.fixed_bytes)
    predicted = predictor.at(search.budget.limit_bytes, search.data_set_limit)
    limits = search.predicted_limits(request.predict_for)

    def predict_other_sizes() -> tuple[MemoryLine, dict[int, Batches]]:
        predictions = {
            size: predictor.at(limit) if limit > 0 else (0, 0) for size, limit in limits.items()
        }
        return predictor.minimum(), predictions

    background = ThreadPoolExecutor(1)
    try:
        other_sizes = background.submit(predict_other_sizes)  # while probes run
        batches = predicted
        if not request.estimate:
            batches = refine(search, predictor, predicted, request.verify)
        minimum, predictions = other_sizes.result()
    finally:
        background.shutdown(wait=False, cancel_futures=True)
    max_batch, recommended = (batch or None for batch in batches)
    return SearchResult(
        search,
        Verdict.FITS if max_batch else Verdict.DOES_NOT_FIT,
        max_batch=max_batch,
        recommended_batch=recommended,
        minimum_memory=minimum,
        retry_free_memory=predictor.retry_free,
        predicted=predicted,
        predictions=predictions,
        predicted_limits=limits,
        failure=None if max_batch else search.failure(),
    )


def probe_small_batches(search: GpuSearch) -> SearchResult | None:
    """Probe small batches in one process, and set the final limit of the search.

    Return a result if the search ends here: not even the smallest batch fits, or memory does not
    grow with the batch.
    """
    budget, cap, data_set_limit = search.budget, search.wide_cap, search.data_set_limit
    small = tuple(
        batch
        for batch in thresholds.FIRST_BATCHES
        if data_set_limit is None or batch <= data_set_limit
    ) or (1,)
    free = budget.free_bytes
    first = search.run([ProbeRequest(small, cap, 2, cycle=False, free_before=free)])[0]
    smallest = first.results[0]
    _raise_unless_memory(smallest)
    if not smallest.is_ok or smallest.allocated_peak_bytes > budget.limit_bytes:
        request = ProbeRequest((1,), cap, 2, cycle=False, free_before=free)
        smallest = search.run([request])[0].last
        if not smallest.is_ok or smallest.allocated_peak_bytes > budget.limit_bytes:
            return search.too_large(smallest)
    search.context_bytes = max(parts.context_bytes for parts in search.parts.values())
    if search.context_bytes > 2 * thresholds.ASSUMED_CONTEXT_BYTES:
        # Another process started in between, so the measurement is wrong.
        search.context_bytes = thresholds.ASSUMED_CONTEXT_BYTES
    available = free - search.context_bytes
    if budget.requested_bytes is not None:
        available = min(budget.requested_bytes, available)
    limit = available - budget.headroom_bytes
    if limit <= 0:
        raise TrialError(
            f"`--headroom {size_text(budget.headroom_bytes)}` leaves no memory: "
            f"{size_text(free)} is free, and the CUDA context needs "
            f"{size_text(search.context_bytes)} of it",
            "Pass a smaller headroom",
        )
    search.budget = replace(budget, limit_bytes=limit)
    # Continue with larger batches while memory is mostly weights.
    for larger in thresholds.LARGER_BATCHES:
        largest = max(search.parts)
        predicted = search.allocated_line.max_batch(limit)
        if predicted is not None and predicted <= thresholds.MAX_EXTRAPOLATION * largest:
            return None
        if data_set_limit is not None and largest >= data_set_limit:
            return None
        if larger > largest:
            batch = min(larger, data_set_limit or larger)
            request = ProbeRequest((batch,), cap, 2, cycle=False)
            if not search.run([request])[0].last.is_ok:
                return None
    largest = max(search.parts)
    return SearchResult(search, Verdict.NO_LIMIT, max_batch=largest, recommended_batch=largest)


def trace_allocations(search: GpuSearch, sizes: Sequence[int]) -> SearchResult | None:
    """Record every allocation of a training cycle for two larger batches.

    `sizes` are the GPU memory sizes if only those are to be predicted; the two batches then cover
    their range. Return a result if the search ends here: memory leaks, or no batch fits.
    """
    limit, free, cap = search.budget.limit_bytes, search.budget.free_bytes, search.wide_cap
    low, high = (share * limit for share in thresholds.TRACED_LIMIT_SHARES)
    if sizes:
        # At most half of the GPU for each batch, because both run at once.
        most = max(int(0.9 * min(sizes)), min(int(0.9 * max(sizes)), int(0.45 * free)))
        low, high = int(0.8 * min(sizes)), most
        cap = None if cap is None else free - thresholds.ASSUMED_CONTEXT_BYTES

    def expected(size: float) -> int:
        batch = search.allocated_line.max_batch(size) or 1
        return max(min(search.parts), min(batch, search.data_set_limit or batch))

    def replacement(failed: ProbeResult) -> int:
        """Return a smaller batch to trace instead.

        After an out-of-memory error a sample needs more than predicted: take two thirds. After
        another error, take the middle between the batch and the largest one that passed.
        """
        if failed.is_oom:
            return max(1, failed.batch * 2 // 3)
        passed = max(
            (batch for batch in search.parts if batch < failed.batch), default=failed.batch
        )
        return int((passed * failed.batch) ** 0.5)

    batches = {expected(low), expected(high)}
    tried: set[int] = set()
    failed: list[ProbeResult] = []
    while batches:
        tried |= batches
        probed = search.run([ProbeRequest((batch,), cap, trace=True) for batch in sorted(batches)])
        growth = [leak_per_step(each.last.allocated_bytes[: each.request.steps]) for each in probed]
        leak = max((each for each in growth if each is not None), default=0.0)
        if leak > thresholds.GPU_LEAK_SHARE * limit:
            return search.leaking(leak)
        failed = [each.last for each in probed if not each.last.is_ok]
        batches = {replacement(each) for each in failed} - tried
        if len(search.traces) > 1 or (search.traces and 1 in search.traces):
            break
    if search.traces:
        return None
    _raise_unless_memory(failed[0])
    return search.too_large(failed[0])


def refine(search: GpuSearch, predictor: Predictor, predicted: Batches, verify: bool) -> Batches:
    """Locate and confirm both answers, and repeat as long as a confirmation fails."""
    answers = (0, 0)
    for _ in range(thresholds.MAX_ROUNDS):
        locate_edges(search, predictor, *predicted)
        max_batch = bracket.edges(search.passed)[0]
        if not max_batch:
            return (0, 0)
        requests, answers = confirm(search, max_batch)
        if not requests and (not verify or verified(search, answers)):
            return answers
        search.run(requests)
    search.notes.append(Note(NoteKind.EDGE_UNSTABLE))
    return answers


def locate_edges(search: GpuSearch, predictor: Predictor, max_batch: int, retry_free: int) -> None:
    """Probe near both predictions until both edges are known or the dataset ends."""

    def run(batches: Sequence[int]) -> None:
        search.run([ProbeRequest((batch,), search.cap, steps=2) for batch in batches])

    # A prediction above a known failure may still pass.
    predictions = ((max_batch, search.passed), (retry_free, search.retry_free))
    run(
        sorted(
            {b for b, tried in predictions if b not in tried and b > (bracket.edges(tried)[1] or b)}
        )
    )
    upper = search.data_set_limit
    for _ in range(thresholds.MAX_ROUNDS):
        parallel = max(1, search.parallel_probes // 2)
        batches = bracket.next_batches(search.passed, max_batch, parallel, upper=upper)
        if batches and batches[-1] < max_batch and search.passed.get(max_batch) is False:
            # The prediction was too high: kernels need some workspace.
            share = thresholds.REQUIRED_WORKSPACE_SHARE
            limit = search.budget.limit_bytes
            max_batch = min(max_batch, predictor.at(limit, max_batch, False, share)[0])
            batches = bracket.next_batches(search.passed, max_batch, parallel, upper=upper)
        if search.parallel_probes > 1 or not batches:
            low, high = bracket.edges(search.passed)
            batches += bracket.next_batches(
                search.retry_free,
                retry_free,
                parallel,
                thresholds.RETRY_FREE_TOLERANCE,
                low if high is not None and low else upper,
            )
        batches = batches or _batches_beyond(search, predictor)
        if not batches:
            return
        run(tuple(dict.fromkeys(batches)))


def _batches_beyond(search: GpuSearch, predictor: Predictor) -> tuple[int, ...]:
    """Return, once, batches above both edges: near the limit, larger batches may pass again."""
    if search.tried_beyond:
        return ()
    search.tried_beyond = True
    edge, retry_free = bracket.edges(search.passed)[0], bracket.edges(search.retry_free)[0]
    limit = search.budget.limit_bytes
    found = predictor.retry_free_above(retry_free, edge, limit) if retry_free else []
    batches = [batch for batch in found if batch not in search.retry_free][-2:]
    if search.parallel_probes > 1 and bracket.failures_below_max(search.passed):
        batches += bracket.batches_beyond(search.passed, 3, search.data_set_limit)
    return tuple(batches)


def confirm(search: GpuSearch, max_batch: int) -> tuple[list[ProbeRequest], Batches]:
    """Return the probes that are still needed, each exclusive, and the current answers."""
    retry_free = min(bracket.edges(search.retry_free)[0], max_batch)
    recommended, untimed = _fastest(search, retry_free) if retry_free else (max_batch, set())
    unconfirmed = [
        b for b in dict.fromkeys((max_batch, recommended)) if b not in search.passed_long
    ]
    requests = [
        ProbeRequest((batch,), search.cap, exclusive=True)
        for batch in sorted(untimed - set(unconfirmed))
    ]
    requests += [_long_probe(search, batch) for batch in unconfirmed]
    smaller = sorted({round(share * retry_free) for share in thresholds.COMPARED_SHARES})
    smaller = [batch for batch in smaller if batch not in (0, retry_free)]
    if smaller and not search.throughput:  # one process is enough to compare their speed
        requests.append(ProbeRequest(tuple(smaller), search.cap, 3, cycle=False, exclusive=True))
    return requests, (max_batch, recommended)


def _long_probe(search: GpuSearch, batch: int) -> ProbeRequest:
    """Return a probe with more steps: fragmentation grows over the first steps."""
    steps = thresholds.LONG_PROBE_STEPS
    return ProbeRequest((batch,), search.cap, steps, steps, exclusive=True)


def _fastest(search: GpuSearch, retry_free: int) -> tuple[int, set[int]]:
    """Return the largest retry-free batch at full speed, and batches to time next.

    Those lie between it and the next larger batch, which is too slow.
    """
    throughput = {
        batch: value
        for batch, value in search.throughput.items()
        if batch <= retry_free and search.retry_free.get(batch, True)
    }
    if retry_free not in throughput:
        return retry_free, {retry_free}
    full_speed = thresholds.GPU_FULL_SPEED_SHARE * max(throughput.values())
    fast = max(batch for batch, value in throughput.items() if value >= full_speed)
    slower = min((batch for batch in throughput if batch > fast), default=fast)
    if slower - fast > max(1, thresholds.SPEED_EDGE_TOLERANCE * fast):
        return fast, {(fast + slower) // 2}
    return fast, set()


def verified(search: GpuSearch, answers: Batches) -> bool:
    """Run both answers in three more long probes, and return whether both hold."""
    batches = [b for b in dict.fromkeys(answers) for _ in range(thresholds.REQUIRED_PASSES)]
    was_retry_free = search.retry_free.get(answers[1])
    outcomes = search.run([_long_probe(search, batch) for batch in batches])
    search.verification = [outcome.last for outcome in outcomes]
    all_passed = all(result.is_ok for result in search.verification)
    return all_passed and search.retry_free.get(answers[1]) == was_retry_free


def _raise_unless_memory(result: ProbeResult) -> None:
    """Raise WorkloadError for a failure that has nothing to do with memory."""
    if not (result.is_ok or result.is_oom):
        where = f" in {result.phase}" if result.phase else ""
        raise WorkloadError(
            f"Batch size {result.batch:,} fails{where}: {result.message}", result.hint
        )
