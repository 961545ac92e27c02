"""The answer for host memory: what was found, with the composition of the memory."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import replace

from stepscope.fit.answer import (
    Composition,
    Fit,
    Leak,
    MemoryBudget,
    Misfit,
    Note,
    NoteKind,
)
from stepscope.fit.host.next_batch import PASSES
from stepscope.fit.host.search import HostSearch
from stepscope.fit.probes.contract import Probes
from stepscope.workloads.probing import ProbeRequest, ProbeResult
from stepscope.workloads.spec import Workload

_MORE, _CLEARLY_MORE = 0.9, 1.1
"""Of what is free, and of the limit: what a trial may take that is to tell how much is missing."""
_MUCH_DATA = 0.25
"""Of the limit."""
_SAME = 0.005
"""Of a peak: processes that differ by less are alike."""


def fit_host(
    probes: Probes, workload: Workload, budget: MemoryBudget, listen: Callable[[ProbeResult], None]
) -> Fit:
    """From the first probe to the answer. BadWorkload where memory is not why it fails."""
    search = HostSearch(probes, budget, workload=workload, listen=listen)
    search.begin()
    if search.first is None:
        return _does_not_fit(search)
    if search.leak:
        first = search.first.last
        left = max(0, budget.limit - first.kept[-1])
        leak = Leak(first.batch, search.leak, round(left / search.leak))
        return replace(search.answer("cannot tell", workload), leak=leak)
    search.go_on()
    size = search.max_batch
    fit = replace(
        search.answer("no limit" if search.is_unbounded else "fits", workload),
        max_batch=search.batch(size),
        recommended_batch=search.batch(search.recommended_batch),
        composition=_composition(search, size),
        data_batch=search.most,
    )
    return fit if search.is_unbounded else _bounded(search, fit)


def _bounded(search: HostSearch, fit: Fit) -> Fit:
    """With the line that bounds it, and what the batch above the answer would need by it."""
    largest, line, notes = fit.max_batch, search.edge.line, fit.notes
    assert largest is not None
    if above := largest.failure_above:
        missing = max(0, round(line.at(above.batch) - search.budget.limit))
        largest = replace(largest, failure_above=replace(above, missing=missing))
    peaks = [result.reserved_peak for result in search.succeeded(largest.size)]
    peaks = [peak for peak in peaks if peak]
    if len(peaks) >= PASSES and max(peaks) - min(peaks) >= _SAME * statistics.median(peaks):
        differ = Note(NoteKind.PEAKS_DIFFER, batch=largest.size, low=min(peaks), high=max(peaks))
        notes = (*notes, differ)
    fast = fit.recommended_batch
    return replace(
        fit,
        max_batch=largest,
        recommended_batch=largest if fast and fast.size == largest.size else fast,
        minimum=line,
        notes=notes,
    )


def _does_not_fit(search: HostSearch) -> Fit:
    """How much is missing, by a trial within more memory, where there clearly is more."""
    budget, failed = search.budget, search.tried[-1]
    misfit = Misfit(failed)
    curve = search.curve()  # what runs beyond the limit is not part of it
    more = int(_MORE * budget.free)
    if more > _CLEARLY_MORE * budget.limit:
        outcome = search.probes.run([ProbeRequest((failed.batch,), more)])[0]
        search.count(outcome)
        missing = (outcome.last.reserved_peak or more) - budget.limit if outcome.last.is_ok else 0
        host = outcome.host
        misfit = Misfit(failed, max(0, missing), more, outcome.last, host.before, host.data_bytes)
    fit = search.answer("does not fit", search.workload)
    is_known = misfit.within_larger and misfit.within_larger.is_ok
    return replace(fit, curve=curve, misfit=misfit, subject=fit.subject if is_known else None)


def _composition(search: HostSearch, size: int) -> Composition:
    assert search.first is not None
    workload, fixed = search.workload, search.base
    if workload.ranks > 1 or workload.workers:  # there are others, which no rank tells of
        fixed = max(fixed, int(search.edge.line.fixed))
    first = search.first.last.parts
    grown = max(0, search.peak(size) - fixed)
    inputs = search.probes.subject.sample_bytes * size
    parts = replace(
        first,
        inputs=inputs,
        activations=max(0, grown - inputs),
        outside=max(0, fixed - first.state),
    )
    data = search.first.host.data_bytes * workload.ranks
    is_state = parts.state > parts.activations
    is_data = data > _MUCH_DATA * search.budget.limit
    return Composition(
        batch=size,
        parts=parts,
        fixed=fixed,
        per_sample=grown / size,
        dominant="data" if is_data else "state" if is_state else "activations",
        data_bytes=data,
    )
