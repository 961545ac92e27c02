"""The answer for a GPU: certificates, composition of the memory, other cards, what-ifs."""

from __future__ import annotations

from dataclasses import replace

from stepscope.analysis.memory.model import (
    MemoryLine,
    what_bf16,
    what_checkpointing,
    what_optimizer,
)
from stepscope.fit.answer import (
    CardPrediction,
    Change,
    Composition,
    Fit,
    Leak,
    LoaderMemory,
    Misfit,
    Note,
    NoteKind,
    Verdict,
    WhatIf,
)
from stepscope.fit.gpu_search import SearchResult
from stepscope.fit.prediction import HUGE
from stepscope.fit.request import FitRequest
from stepscope.workloads.spec import Workload

_MOSTLY = 0.5
_OPTIMIZERS: dict[str, dict[str, str | float]] = {
    "sgd": {"optimizer": "sgd", "momentum": 0},
    "momentum": {"optimizer": "sgd"},
    "adamw": {"optimizer": "adamw"},
}
"""Settings of optimizers that differ in their state."""


_VERDICTS: dict[str, Verdict] = {
    "too large": "does not fit",
    "no limit": "no limit",
    "leaks": "cannot tell",
}


def gpu_answer(found: SearchResult, request: FitRequest, loader: LoaderMemory | None) -> Fit:
    search, workload = found.search, request.workload
    verdict: Verdict = "fits" if found.max_batch else "does not fit"
    if found.trouble:
        verdict = _VERDICTS[found.trouble]
    fit = search.answer(verdict, workload)
    sizes = (found.max_batch, found.recommended_batch)
    largest, recommended = (search.batch(size) if size else None for size in sizes)
    leak = misfit = None
    if found.trouble == "leaks":
        batch = max(search.traces or search.parts)
        left = search.budget.limit - max(each.allocated_peak for each in search.results[batch])
        leak = Leak(batch, found.amount, max(0, int(left / found.amount)))
    if verdict == "does not fit":
        ones = search.results.get(1)
        misfit = Misfit(ones[-1] if ones else None, int(found.amount))
    results = (result for batch in sorted(search.results) for result in search.results[batch])
    odd = next((each for each in results if each.kind in ("error", "workload", "killed")), None)
    failed = (Note(NoteKind.BATCH_FAILED, odd.message, odd.batch),) if odd else ()
    return replace(
        fit,
        notes=(*fit.notes, *failed),
        max_batch=largest,
        recommended_batch=recommended,
        composition=_composition(found),
        minimum=found.minimum,
        comfortable=found.comfortable,
        cards=_cards(found, request),
        what_ifs=_what_ifs(found, workload),
        loader=loader,
        leak=leak,
        misfit=misfit,
        data_batch=search.most,
        proof=tuple(search.proof),
    )


def _composition(found: SearchResult) -> Composition | None:
    search = found.search
    measured = max(search.parts, default=0)
    batch = found.recommended_batch or found.max_batch or measured
    results = search.succeeded(batch)
    if not results:
        batch, results = measured, search.succeeded(measured)
    if not results:
        return None
    best = max(results, key=lambda result: len(result.kept))
    parts = replace(best.parts, outside=search.outside)
    workspace = max(0, best.allocated_peak - parts.state - parts.inputs - parts.activations)
    line = found.minimum or MemoryLine(float(best.allocated_peak), 0.0)
    is_state = parts.state > _MOSTLY * max(1, best.allocated_peak)
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


def _cards(found: SearchResult, request: FitRequest) -> tuple[CardPrediction, ...]:
    """Both batches in other memory, by the same traces, corrected by how right they were here."""
    if found.minimum is None:
        return ()
    answers = (found.max_batch, found.recommended_batch)
    right = [
        answer / predicted if predicted and answer else 1.0
        for answer, predicted in zip(answers, found.predicted, strict=True)
    ]
    cards = []
    for size, limit in found.search.card_limits(request.cards).items():
        largest, smooth = found.cards.get(size, (0, 0))
        largest, smooth = int(largest * right[0]), int(smooth * right[1])
        if largest < HUGE:
            cards.append(CardPrediction(size, limit, largest, min(largest, smooth)))
    return tuple(cards)


def _what_ifs(found: SearchResult, workload: Workload) -> tuple[WhatIf, ...]:
    """Estimates, each as a part of what the present line gives, so that its error cancels out."""
    search, line, limit = found.search, found.minimum, found.search.budget.limit
    now = line.largest(limit) if line else None
    if line is None or not now or not found.max_batch or not search.parts:
        return ()
    batch = max(search.parts)
    parts = search.parts[batch]
    largest = found.max_batch
    what_ifs = []

    def add(change: Change, settings: dict[str, str | float], then: MemoryLine) -> None:
        if then.per_sample > 0:
            what_ifs.append(
                WhatIf(change, settings, int(largest * (then.largest(limit) or 0) / now))
            )

    subject = search.probes.subject
    if workload.precision in ("fp32", "tf32"):
        add("precision", {"precision": "bf16"}, what_bf16(line, parts, batch))
    if subject.layers > 4:
        add("checkpointing", {}, what_checkpointing(line, parts, batch, subject.layers))
    if not subject.own_optimizer:
        present = {"adam": "adamw", "sgd": "momentum" if workload.momentum else "sgd"}
        for name, settings in _OPTIMIZERS.items():
            if name != present.get(workload.optimizer, workload.optimizer):
                add("optimizer", settings, what_optimizer(line, parts, name))
    return tuple(what_ifs)
