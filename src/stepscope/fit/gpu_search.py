"""The search on a GPU: from a few small batches to the max and the recommended batch size.

    climb      small batches tell what a sample takes, and whether anything is wrong
    trace      two larger ones keep every allocation of a whole cycle of training
    predict    replayed through a model of the allocator, for any batch, these tell both edges
    close in   real probes at those edges, in fresh processes, until each is known
    settle     the answers pass once more, the max for longer; a faster smaller batch wins

Every probe is a disposable process under the limit. Two edges are sought at once: that of the
batches which pass, and that of those which pass *smoothly*, without an allocator retry. Where the
GPU has memory for several probes of the limit, they run at once; those that are timed take turns.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

from stepscope.analysis.memory import bracket
from stepscope.analysis.memory.caching_allocator import AllocationTrace
from stepscope.analysis.memory.model import MemoryLine, leak
from stepscope.errors import BadWorkload, CannotTry
from stepscope.fit import thresholds
from stepscope.fit.answer import Composition, Leak, MemoryBudget, Misfit, Note, NoteKind, Verdict
from stepscope.fit.prediction import Batches, Predictor
from stepscope.fit.probes.contract import ProbeOutcome, Probes
from stepscope.fit.request import FitListener, FitRequest
from stepscope.fit.search import BatchSearch, SearchResult
from stepscope.trials.limits.spec import size_text
from stepscope.workloads.probing import ProbeRequest, ProbeResult


@dataclass
class GpuSearch(BatchSearch):
    traces: dict[int, AllocationTrace] = field(default_factory=dict)
    outside: int = 0
    """Bytes of a context."""
    lasted: set[int] = field(default_factory=set)
    """Batches that passed for longer."""
    looked_beyond: bool = False
    one_at_a_time: bool = False

    @property
    def cap(self) -> int | None:
        """The limit of probes near it; a whole GPU limits them by itself."""
        is_whole = self.budget.requested is None and not self.budget.headroom
        return None if is_whole else self.budget.limit

    @property
    def wide(self) -> int | None:
        """The limit of probes that may be larger than allowed, where the GPU has clearly more
        memory than the limit: not all of a GPU that others use too."""
        beside, limit = self.budget.free - thresholds.CONTEXT, self.budget.limit
        if self.cap is None or beside <= thresholds.CLEARLY_WIDER * limit:
            return self.cap
        return int(min(thresholds.WIDE * limit, thresholds.SHARED * beside))

    @property
    def lanes(self) -> int:
        """How many probes of the limit have memory beside each other."""
        if self.cap is None or self.one_at_a_time:
            return 1
        each = self.cap + max(self.outside, thresholds.CONTEXT // 2)
        return max(
            1, min(thresholds.MOST_LANES, int(self.budget.free * (1 - thresholds.SPARED)) // each)
        )

    @property
    def fixed_bytes(self) -> float:
        """What any batch needs: weights, their gradients, and the optimizer's state."""
        return float(self.parts[max(self.parts)].state)

    @property
    def allocated_line(self) -> MemoryLine:
        """Bytes in use, by the two largest batches that passed."""
        points = [
            (batch, float(max(result.allocated_peak for result in self.succeeded(batch))))
            for batch in sorted(self.results)
            if self.succeeded(batch)
        ]
        return MemoryLine.through(points[-2:], self.fixed_bytes)

    def card_limits(self, sizes: Sequence[int]) -> dict[int, int]:
        """By size of a card, its bytes for batches: of the usual ones, all but the context."""
        context = 0 if sizes else self.outside
        return {
            size: size - context - self.budget.headroom for size in sizes or thresholds.USUAL_CARDS
        }

    def run(self, requests: Sequence[ProbeRequest]) -> list[ProbeOutcome]:
        """Probe, as many at once as have memory beside each other, and note the results."""
        outcomes: list[ProbeOutcome] = []
        waiting = list(requests)
        while waiting:
            some, waiting = waiting[: self.lanes], waiting[self.lanes :]
            self.listener.show(
                f"batch {', '.join(f'{b:,}' for each in some for b in each.batches)}"
            )
            probed = self.probes.run(some)
            if len(some) > 1 and any(each.last.kind == "gpu_busy" for each in probed):
                self.one_at_a_time = True  # this GPU takes no second process
                waiting = [*some, *waiting]
                continue
            # A kill says nothing of this GPU's memory, and may be an accident: once more, alone.
            killed = [each.request for each in probed if each.last.kind == "killed"]
            self.probed += len(killed)
            again = [self.probes.run([request])[0] for request in killed]
            outcomes += [each for each in probed if each.last.kind != "killed"] + again
        for outcome in outcomes:
            self.count(outcome)
            for result in outcome.results:
                if result.kind == "timeout":  # says nothing of memory: no answer could be trusted
                    raise CannotTry(
                        f"A batch of {result.batch:,} hangs: {result.message}",
                        "Give it longer: --hang S",
                    )
                if result.is_ok and outcome.request.turn and result.samples_per_second:
                    self.rates[result.batch] = result.samples_per_second
            if outcome.trace is not None and outcome.last.is_ok:
                self.traces[outcome.last.batch] = outcome.trace
            if len(outcome.request.batches) == 1:
                self._judge(outcome.request, outcome.last)
        return outcomes

    def _judge(self, request: ProbeRequest, result: ProbeResult) -> None:
        """What a process of its own proves. One without the limit proves only what stays below it;
        and since a batch must pass every time, a failure counts for more than what passed."""
        batch, is_smooth = result.batch, result.is_ok and result.retries == 0
        if request.cap == self.cap:
            self.passed[batch] = result.is_ok and self.passed.get(batch, True)
            self.smooth[batch] = is_smooth and self.smooth.get(batch, True)
            self.passes[batch] = self.passes.get(batch, 0) + (result.is_ok and request.cycle)
            if result.is_ok and request.again >= thresholds.LASTING:
                self.lasted.add(batch)
        elif result.is_ok and result.reserved_peak <= self.budget.limit:
            self.passed.setdefault(batch, True)
            self.smooth.setdefault(batch, True)
        elif result.is_ok:
            self.smooth.setdefault(batch, False)
        elif not result.is_oom:  # more memory was no help
            self.passed[batch] = self.smooth[batch] = False

    def composition(self, found: SearchResult) -> Composition | None:
        measured = max(self.parts, default=0)
        batch = found.recommended_batch or found.max_batch or measured
        if not self.succeeded(batch):
            batch = measured
        if not self.succeeded(batch):
            return None
        best = max(self.succeeded(batch), key=lambda result: len(result.kept))
        parts = replace(best.parts, outside=self.outside)
        workspace = max(0, best.allocated_peak - parts.state - parts.inputs - parts.activations)
        line = found.minimum or MemoryLine(float(best.allocated_peak), 0.0)
        is_state = parts.state > thresholds.MOSTLY_STATE * max(1, best.allocated_peak)
        is_workspace = workspace > parts.activations
        return Composition(
            batch=batch,
            parts=parts,
            workspace=workspace,
            fragmentation=max(0, best.reserved_peak - best.allocated_peak),
            fixed=int(line.fixed),
            per_sample=line.per_sample,
            dominant="state" if is_state else "workspace" if is_workspace else "activations",
            peak=best.allocated_peak,
        )

    def too_large(self, one: ProbeResult) -> SearchResult:
        """Not even `one` fits. How much more it would need, at least, is told where it is known."""
        missing = one.allocated_peak - self.budget.limit
        if not one.is_ok:
            weights = 4 * self.probes.subject.parameters
            missing = max(one.missing or 0, 2 * weights - self.budget.limit)
        return SearchResult(self, Verdict.DOES_NOT_FIT, misfit=self.misfit(missing))

    def misfit(self, shortfall: int = 0) -> Misfit:
        ones = self.results.get(1)
        return Misfit(ones[-1] if ones else None, shortfall)

    def leaking(self, per_step: float) -> SearchResult:
        batch = max(self.traces or self.parts)
        left = self.budget.limit - max(each.allocated_peak for each in self.results[batch])
        leaks = Leak(batch, per_step, max(0, int(left / per_step)))
        return SearchResult(self, Verdict.CANNOT_TELL, leak=leaks)


def search_gpu(
    probes: Probes, budget: MemoryBudget, request: FitRequest, listener: FitListener
) -> SearchResult:
    """The story, from the first small batch to both answers."""
    search = GpuSearch(probes, budget, listener)
    early = climb(search) or trace(search, request.cards if request.estimate else ())
    if early:
        return early
    predictor = Predictor(search.traces, search.fixed_bytes)
    predicted = predictor.at(search.budget.limit, search.most)
    limits = search.card_limits(request.cards)

    def predict_others() -> tuple[MemoryLine, dict[int, Batches]]:
        cards = {size: predictor.at(left) if left > 0 else (0, 0) for size, left in limits.items()}
        return predictor.minimum(), cards

    background = ThreadPoolExecutor(1)
    try:
        others = background.submit(predict_others)  # while probes run
        batches = predicted
        if not request.estimate:
            batches = seek(search, predictor, predicted, request.prove)
        minimum, cards = others.result()
    finally:
        background.shutdown(wait=False, cancel_futures=True)
    max_batch, recommended = (batch or None for batch in batches)
    return SearchResult(
        search,
        Verdict.FITS if max_batch else Verdict.DOES_NOT_FIT,
        max_batch=max_batch,
        recommended_batch=recommended,
        minimum=minimum,
        comfortable=predictor.comfortable,
        predicted=predicted,
        cards=cards,
        card_limits=limits,
        misfit=None if max_batch else search.misfit(),
    )


def climb(search: GpuSearch) -> SearchResult | None:
    """Small batches in one process: what is wrong with a workload shows before it is large."""
    budget, cap = search.budget, search.wide
    small = tuple(
        batch for batch in thresholds.SMALL if search.most is None or batch <= search.most
    ) or (1,)
    first = search.run([ProbeRequest(small, cap, 2, cycle=False, free_before=budget.free)])[0]
    _raise_unless_memory(first.results[0])
    if not first.results[0].is_ok or first.results[0].allocated_peak > budget.limit:
        request = ProbeRequest((1,), cap, 2, cycle=False, free_before=budget.free)
        one = search.run([request])[0].last
        if not one.is_ok or one.allocated_peak > budget.limit:
            return search.too_large(one)
    search.outside = max(parts.outside for parts in search.parts.values())
    if search.outside > 2 * thresholds.CONTEXT:  # somebody else came meanwhile
        search.outside = thresholds.CONTEXT
    most = budget.free - search.outside
    limit = (most if budget.requested is None else min(budget.requested, most)) - budget.headroom
    if limit <= 0:
        raise CannotTry(
            f"--headroom {size_text(budget.headroom)} leaves nothing: {size_text(budget.free)} are "
            f"free, of which the context takes {size_text(search.outside)}",
            "Give less",
        )
    search.budget = replace(budget, limit=limit)
    # Further, while batches take hardly more than the weights; where they never do, none is max.
    for larger in thresholds.LARGER:
        tried = max(search.parts)
        predicted = search.allocated_line.largest(limit)
        if predicted is not None and predicted <= thresholds.TELLING * tried:
            return None
        if search.most is not None and tried >= search.most:
            return None
        if larger > tried:
            request = ProbeRequest((min(larger, search.most or larger),), cap, 2, cycle=False)
            if not search.run([request])[0].last.is_ok:
                return None
    largest = max(search.parts)
    return SearchResult(search, Verdict.NO_LIMIT, max_batch=largest, recommended_batch=largest)


def trace(search: GpuSearch, cards: Sequence[int]) -> SearchResult | None:
    """Every allocation of a whole cycle, of two larger batches. A leak shows in them too.

    Where only `cards` are to be predicted, they lie between both batches.
    """
    limit, free, cap = search.budget.limit, search.budget.free, search.wide
    low, high = thresholds.TRACED[0] * limit, thresholds.TRACED[1] * limit
    if cards:
        # At most half of the GPU for each, since both are there at once.
        most = max(int(0.9 * min(cards)), min(int(0.9 * max(cards)), int(0.45 * free)))
        low, high = int(0.8 * min(cards)), most
        cap = None if cap is None else free - thresholds.CONTEXT

    def expected(size: float) -> int:
        batch = search.allocated_line.largest(size) or 1
        return max(min(search.parts), min(batch, search.most or batch))

    def instead_of(failed: ProbeResult) -> int:
        """A sample took more than the small batches showed; or, if it was not for memory, midway
        to what went well."""
        if failed.is_oom:
            return max(1, failed.batch * 2 // 3)
        well = max((batch for batch in search.parts if batch < failed.batch), default=failed.batch)
        return int((well * failed.batch) ** 0.5)

    wanted = {expected(low), expected(high)}
    tried: set[int] = set()
    failed: list[ProbeResult] = []
    while wanted:
        tried |= wanted
        probed = search.run([ProbeRequest((batch,), cap, trace=True) for batch in sorted(wanted)])
        growing = [leak(each.last.kept[: each.request.steps]) for each in probed]
        leaking = max((each for each in growing if each is not None), default=0.0)
        if leaking > thresholds.GPU_LEAK * limit:
            return search.leaking(leaking)
        failed = [each.last for each in probed if not each.last.is_ok]
        wanted = {instead_of(each) for each in failed} - tried
        if len(search.traces) > 1 or (search.traces and 1 in search.traces):
            break
    if search.traces:
        return None
    _raise_unless_memory(failed[0])
    return search.too_large(failed[0])


def seek(search: GpuSearch, predictor: Predictor, predicted: Batches, prove: bool) -> Batches:
    """From what was predicted to what is true, as often as an answer does not hold."""
    answers = (0, 0)
    for _ in range(thresholds.MOST_ROUNDS):
        close_in(search, predictor, *predicted)
        largest = bracket.edges(search.passed)[0]
        if not largest:
            return (0, 0)
        requests, answers = settle(search, largest)
        if not requests and (not prove or proven(search, answers)):
            return answers
        search.run(requests)
    search.notes.append(Note(NoteKind.EDGE_UNSTABLE))
    return answers


def close_in(search: GpuSearch, predictor: Predictor, largest: int, smooth: int) -> None:
    """Probe at both predicted edges until each is known, or the data has no more samples."""

    def run(batches: Sequence[int]) -> None:
        search.run([ProbeRequest((batch,), search.cap, steps=2) for batch in batches])

    edges = ((largest, search.passed), (smooth, search.smooth))
    hidden = {b for b, tried in edges if b not in tried and b > (bracket.edges(tried)[1] or b)}
    run(sorted(hidden))  # beyond a hole, perhaps
    for _ in range(thresholds.MOST_ROUNDS):
        lanes = max(1, search.lanes // 2)
        wanted = bracket.next_batches(search.passed, largest, lanes, most=search.most)
        if wanted and wanted[-1] < largest and search.passed.get(largest) is False:
            # It was too much: some workspace has to be there.
            largest = min(
                largest,
                predictor.at(search.budget.limit, largest, False, thresholds.NEEDED_WORKSPACE)[0],
            )
            wanted = bracket.next_batches(search.passed, largest, lanes, most=search.most)
        if search.lanes > 1 or not wanted:
            low, high = bracket.edges(search.passed)
            most = low if high is not None and low else search.most
            wanted += bracket.next_batches(
                search.smooth, smooth, lanes, thresholds.FINE_SMOOTH, most
            )
        wanted = wanted or _beyond(search, predictor)
        if not wanted:
            return
        run(tuple(dict.fromkeys(wanted)))


def _beyond(search: GpuSearch, predictor: Predictor) -> tuple[int, ...]:
    """Once: batches above both edges that may pass again, since near the limit some do."""
    if search.looked_beyond:
        return ()
    search.looked_beyond = True
    edge, smooth = bracket.edges(search.passed)[0], bracket.edges(search.smooth)[0]
    found = predictor.smooth_above(smooth, edge, search.budget.limit) if smooth else []
    further = [batch for batch in found if batch not in search.smooth][-2:]
    if search.lanes > 1 and bracket.holes(search.passed):
        further += bracket.beyond(search.passed, 3, search.most)
    return tuple(further)


def settle(search: GpuSearch, largest: int) -> tuple[list[ProbeRequest], Batches]:
    """What is still to be tried, each alone on the GPU, and both answers as they are by now."""
    smooth = min(bracket.edges(search.smooth)[0], largest)
    fast, wanted = _fastest(search, smooth) if smooth else (largest, set())
    lasting = [batch for batch in dict.fromkeys((largest, fast)) if batch not in search.lasted]
    requests = [
        ProbeRequest((batch,), search.cap, turn=True) for batch in sorted(wanted - set(lasting))
    ]
    requests += [_lasting(search, batch) for batch in lasting]
    smaller = sorted({round(part * smooth) for part in thresholds.RATED} - {0, smooth})
    if smaller and not search.rates:  # in one process: is any of them faster?
        requests.append(ProbeRequest(tuple(smaller), search.cap, 3, cycle=False, turn=True))
    return requests, (largest, fast)


def _lasting(search: GpuSearch, batch: int) -> ProbeRequest:
    """What passes for a moment may not after some steps more, while memory still gets scattered."""
    return ProbeRequest((batch,), search.cap, thresholds.LASTING, thresholds.LASTING, turn=True)


def _fastest(search: GpuSearch, smooth: int) -> tuple[int, set[int]]:
    """The largest batch whose rate is as good as the best, among those without a retry; and what
    to try between it and the next, which was too slow."""
    rates = {
        batch: rate
        for batch, rate in search.rates.items()
        if batch <= smooth and search.smooth.get(batch, True)
    }
    if smooth not in rates:
        return smooth, {smooth}
    enough = thresholds.GPU_FULL_SPEED * max(rates.values())
    fast = max(batch for batch, rate in rates.items() if rate >= enough)
    slower = min((batch for batch in rates if batch > fast), default=fast)
    if slower - fast > max(1, thresholds.NEAR_SLOWER * fast):
        return fast, {(fast + slower) // 2}
    return fast, set()


def proven(search: GpuSearch, answers: Batches) -> bool:
    """Whether both pass in three more fresh processes, for longer; the second without a retry."""
    batches = [batch for batch in dict.fromkeys(answers) for _ in range(thresholds.PASSES)]
    was_smooth = search.smooth.get(answers[1])
    search.proof = [each.last for each in search.run([_lasting(search, b) for b in batches])]
    all_passed = all(result.is_ok for result in search.proof)
    return all_passed and search.smooth.get(answers[1]) == was_smooth


def _raise_unless_memory(result: ProbeResult) -> None:
    """A failure for another reason than memory has nothing to do with the batch."""
    if not (result.is_ok or result.is_oom):
        where = result.phase or "its process"
        raise BadWorkload(
            f"A batch of {result.batch} failed in {where}: {result.message}", result.hint
        )
