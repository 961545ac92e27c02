"""Baseline: the estimate of Tripathi 2019, a line through two small batches.

Two fresh processes train batches of 10 and 50 for 20 iterations. The memory that the allocator
holds after each iteration, averaged over the last 15, gives the line. Her equation 4.1 with the
sizes of all layers is computed as well.
"""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean

from stepscope.analysis.memory.model import layers_2019, linear_2019
from stepscope.errors import WorkloadError
from stepscope.fit.probes.contract import Probes
from stepscope.fit.request import FitListener, FitRequest
from stepscope.fit.result import Batch, FitResult, Linear2019, MemoryBudget, Verdict
from stepscope.fit.search import BatchSearch, SearchResult, build_result
from stepscope.workloads.probing import ProbeRequest

GiB = 1 << 30
RESERVES = (0, GiB, 3 * GiB // 2)
BATCHES = (10, 50)
_ITERATIONS, _AVERAGED = 20, 15


def fit_2019(
    probes: Probes, budget: MemoryBudget, request: FitRequest, listener: FitListener
) -> FitResult:
    cap = budget.limit_bytes if budget.requested_bytes is not None else None
    search = BatchSearch(probes, budget, listener)
    small, large = BATCHES
    while True:
        listener.show(f"batch sizes {small} and {large}, {_ITERATIONS} iterations each")
        results = []
        for batch in (small, large):
            probe = ProbeRequest((batch,), cap, _ITERATIONS, cycle=False, layers=batch == small)
            outcome = probes.run([probe])[0]
            search.record(outcome)
            results.append(outcome.last)
        if all(each.is_ok for each in results):
            break
        failed = next((each for each in results if not each.is_ok and not each.is_oom), None)
        if failed:
            raise WorkloadError(f"Batch size {failed.batch} fails: {failed.message}", failed.hint)
        if large <= 2:
            return build_result(SearchResult(search, Verdict.DOES_NOT_FIT), request)
        small, large = max(1, small // 2), max(2, large // 2)
    reserved = [fmean(each.reserved_bytes[-_AVERAGED:]) for each in results]
    limit = budget.limit_bytes
    by_reserve = []
    for reserve in RESERVES:
        per_sample, fixed, batch_size = linear_2019(
            small, reserved[0], large, reserved[1], limit, reserve
        )
        by_reserve.append((reserve, batch_size or 0))
    layers, by_layers = results[0].layers, None
    if layers:
        sizes = [(layer.parameter_bytes, layer.output_bytes) for layer in layers]
        by_layers = layers_2019(sizes, probes.subject.sample_bytes, layers[-1].output_bytes, limit)
    estimate = Linear2019(
        small_batch=small,
        large_batch=large,
        small_batch_bytes=reserved[0],
        large_batch_bytes=reserved[1],
        per_sample_bytes=per_sample,
        fixed_bytes=fixed,
        max_batch_by_reserve=tuple(by_reserve),
        gpus=request.workload.ranks,
        layers=layers,
        max_batch_by_layers=by_layers,
    )
    size = by_reserve[0][1]
    verdict = Verdict.FITS if size else Verdict.DOES_NOT_FIT
    if per_sample <= 0:
        verdict = Verdict.UNKNOWN
    result = build_result(SearchResult(search, verdict), request)
    return replace(result, max_batch=Batch(size) if size else None, linear2019=estimate)
