"""Tripathi's estimate of 2019, exactly, as the baseline: a line through two small batches.

Two fresh processes train batches of 10 and 50 for 20 iterations; what the allocator holds at the
end of each, averaged over the last 15, gives the line. Beside it, her equation 4.1 with the sizes
of all layers in place of measurements.
"""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean

from stepscope.analysis.memory.model import layers_2019, linear_2019
from stepscope.errors import BadWorkload
from stepscope.fit.answer import Batch, Fit, Linear2019, MemoryBudget, Verdict
from stepscope.fit.probes.contract import Probes
from stepscope.fit.request import FitListener, FitRequest
from stepscope.fit.search import BatchSearch, SearchResult, answer_of
from stepscope.workloads.probing import ProbeRequest

GiB = 1 << 30
RESERVES = (0, GiB, 3 * GiB // 2)
BATCHES = (10, 50)
_ITERATIONS, _AVERAGED = 20, 15


def fit_2019(
    probes: Probes, budget: MemoryBudget, request: FitRequest, listener: FitListener
) -> Fit:
    cap = budget.limit if budget.requested is not None else None
    search = BatchSearch(probes, budget, listener)
    small, large = BATCHES
    while True:
        listener.show(f"batches {small} and {large}, {_ITERATIONS} iterations each")
        results = []
        for batch in (small, large):
            asked = ProbeRequest((batch,), cap, _ITERATIONS, cycle=False, layers=batch == small)
            outcome = probes.run([asked])[0]
            search.count(outcome)
            results.append(outcome.last)
        if all(each.is_ok for each in results):
            break
        odd = next((each for each in results if not each.is_ok and not each.is_oom), None)
        if odd:
            raise BadWorkload(f"A batch of {odd.batch} failed: {odd.message}", odd.hint)
        if large <= 2:
            return answer_of(SearchResult(search, Verdict.DOES_NOT_FIT), request)
        small, large = max(1, small // 2), max(2, large // 2)
    held = [fmean(each.reserved[-_AVERAGED:]) for each in results]
    by_reserve = []
    for reserve in RESERVES:
        per_sample, fixed, left = linear_2019(small, held[0], large, held[1], budget.limit, reserve)
        by_reserve.append((reserve, left or 0))
    layers, by_layers = results[0].layers, None
    if layers:
        sizes = [(layer.parameters, layer.output) for layer in layers]
        sample_bytes = probes.subject.sample_bytes
        by_layers = layers_2019(sizes, sample_bytes, layers[-1].output, budget.limit)
    linear = Linear2019(
        small=small,
        large=large,
        small_bytes=held[0],
        large_bytes=held[1],
        per_sample=per_sample,
        fixed=fixed,
        by_reserve=tuple(by_reserve),
        gpus=request.workload.ranks,
        layers=layers,
        by_layers=by_layers,
    )
    size = by_reserve[0][1]
    verdict = Verdict.FITS if size else Verdict.DOES_NOT_FIT
    if per_sample <= 0:
        verdict = Verdict.CANNOT_TELL
    answer = answer_of(SearchResult(search, verdict), request)
    return replace(answer, max_batch=Batch(size) if size else None, linear=linear)
