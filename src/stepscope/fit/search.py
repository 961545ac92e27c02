"""What both searches know of the batches that they tried, and how an answer follows from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from stepscope.analysis.memory import bracket
from stepscope.analysis.memory.model import (
    MemoryLine,
    Parts,
    what_bf16,
    what_checkpointing,
    what_optimizer,
)
from stepscope.fit.answer import (
    Batch,
    CardPrediction,
    Change,
    Composition,
    Effort,
    Fit,
    Leak,
    LoaderMemory,
    MemoryBudget,
    Misfit,
    Note,
    NoteKind,
    TriedBatch,
    Verdict,
    WhatIf,
)
from stepscope.fit.prediction import Batches
from stepscope.fit.probes.contract import ProbeOutcome, Probes
from stepscope.fit.request import FitListener, FitRequest
from stepscope.fit.thresholds import HUGE, MANY_LAYERS
from stepscope.records.codec import to_json
from stepscope.workloads.probing import ProbeResult, Subject
from stepscope.workloads.spec import Workload

_OPTIMIZERS: dict[str, dict[str, str | float]] = {
    "sgd": {"optimizer": "sgd", "momentum": 0},
    "momentum": {"optimizer": "sgd"},
    "adamw": {"optimizer": "adamw"},
}
"""Settings of optimizers that differ in their state."""


@dataclass
class BatchSearch:
    """Results by batch, and what follows from them: the curve and the certificates."""

    probes: Probes
    budget: MemoryBudget
    listener: FitListener
    results: dict[int, list[ProbeResult]] = field(default_factory=dict)
    passed: dict[int, bool] = field(default_factory=dict)
    """Whether a batch passed every time: a failure counts for more than a pass."""
    passes: dict[int, int] = field(default_factory=dict)
    """In how many fresh processes a batch went through the whole cycle within the limit."""
    smooth: dict[int, bool] = field(default_factory=dict)
    """Whether it did so without an allocator retry."""
    rates: dict[int, float] = field(default_factory=dict)
    """Samples per second."""
    probed: int = 0
    ooms: int = 0
    notes: list[Note] = field(default_factory=list)
    proof: list[ProbeResult] = field(default_factory=list)

    def count(self, outcome: ProbeOutcome, within_limit: bool = True) -> None:
        self.probed += 1
        for result in outcome.results:
            if within_limit:
                self.results.setdefault(result.batch, []).append(result)
            self.ooms += result.is_oom
            self.notes += [Note(NoteKind.REPORTED, text) for text in result.notes]
        if outcome.host.enforced_by == "soft":
            self.notes.append(Note(NoteKind.SOFT_LIMIT))

    def succeeded(self, batch: int) -> list[ProbeResult]:
        return [result for result in self.results.get(batch, ()) if result.is_ok]

    @property
    def parts(self) -> dict[int, Parts]:
        """Of each batch that passed, as it was measured last."""
        passed = {batch: self.succeeded(batch) for batch in self.results}
        return {batch: results[-1].parts for batch, results in passed.items() if results}

    def peak(self, batch: int) -> int:
        """The most bytes that a process which passed held; 0 where none has."""
        return max((result.reserved_peak for result in self.succeeded(batch)), default=0)

    def held(self, batch: int) -> int:
        """The most bytes that any process held, also one that failed."""
        return max(result.reserved_peak for result in self.results[batch])

    def retries(self, batch: int) -> int:
        """Not those of a process that went through other batches before: there they add up."""
        if self.smooth.get(batch, True):
            return 0
        return max((result.retries for result in self.succeeded(batch)), default=0)

    def batch(self, size: int) -> Batch:
        """An answer with its certificate: what stays free, and the next above that failed."""
        peak = self.peak(size)
        above = min((b for b, ok in self.passed.items() if not ok and b > size), default=0)
        failures = (each for each in self.results.get(above, ()) if not each.is_ok)
        return Batch(
            size=size,
            free_bytes=max(0, self.budget.limit - peak) if peak else 0,
            passed=self.passes.get(size, 0),
            samples_per_second=self.rates.get(size),
            retried=not self.smooth.get(size, True),
            retries=self.retries(size),
            failure_above=next(failures, None),
        )

    def curve(self) -> tuple[TriedBatch, ...]:
        return tuple(
            TriedBatch(
                batch,
                passed=self.passed.get(batch, any(each.is_ok for each in results)),
                retried=not self.smooth.get(batch, True),
                samples_per_second=self.rates.get(batch),
                reserved=self.held(batch),
                retries=self.retries(batch),
            )
            for batch, results in sorted(self.results.items())
            if batch in self.passed or batch in self.rates
        )

    # What depends on the memory that is searched

    @property
    def most(self) -> int | None:
        """The largest batch that the data has samples for."""
        return self.probes.subject.samples

    @property
    def subject(self) -> Subject | None:
        return self.probes.subject

    def composition(self, found: SearchResult) -> Composition | None:
        """Of the memory of the answer, or of another batch that tells more."""
        return None


@dataclass(frozen=True)
class SearchResult:
    """What a search found out; `answer_of` makes the answer of it."""

    search: BatchSearch
    verdict: Verdict
    max_batch: int | None = None
    recommended_batch: int | None = None
    minimum: MemoryLine | None = None
    comfortable: MemoryLine | None = None
    predicted: Batches = (0, 0)
    """Both batches, before anything near them was probed."""
    cards: Mapping[int, Batches] = field(default_factory=dict)
    """Both batches by the size of a card."""
    card_limits: Mapping[int, int] = field(default_factory=dict)
    """Bytes for batches, by the size of a card."""
    leak: Leak | None = None
    misfit: Misfit | None = None


def answer_of(found: SearchResult, request: FitRequest, loader: LoaderMemory | None = None) -> Fit:
    search, workload = found.search, request.workload
    sizes = (found.max_batch, found.recommended_batch)
    largest, recommended = (search.batch(size) if size else None for size in sizes)
    notes = list(dict.fromkeys(search.notes))
    results = (result for batch in sorted(search.results) for result in search.results[batch])
    odd = next((result for result in results if not result.is_ok and not result.is_oom), None)
    if odd:
        notes.append(Note(NoteKind.BATCH_FAILED, odd.message, odd.batch))
    return Fit(
        verdict=found.verdict,
        model=workload.model,
        settings=to_json(workload),
        method=request.method,
        budget=search.budget,
        subject=search.subject,
        effort=Effort(0.0, search.probed, search.ooms),
        max_batch=largest,
        recommended_batch=recommended,
        curve=search.curve(),
        holes=bracket.holes(search.passed),
        composition=search.composition(found),
        minimum=found.minimum,
        comfortable=found.comfortable,
        cards=_cards(found),
        what_ifs=_what_ifs(found, workload),
        loader=loader,
        leak=found.leak,
        misfit=found.misfit,
        data_batch=search.most,
        proof=tuple(search.proof),
        notes=tuple(notes),
    )


def _cards(found: SearchResult) -> tuple[CardPrediction, ...]:
    """Both batches in other memory, by the same traces, corrected by how right they were here."""
    answers = (found.max_batch, found.recommended_batch)
    right = [
        answer / predicted if predicted and answer else 1.0
        for answer, predicted in zip(answers, found.predicted, strict=True)
    ]
    cards = []
    for size, (predicted, smooth) in found.cards.items():
        largest = int(predicted * right[0])
        if largest < HUGE:
            recommended = min(largest, int(smooth * right[1]))
            cards.append(CardPrediction(size, found.card_limits[size], largest, recommended))
    return tuple(cards)


def _what_ifs(found: SearchResult, workload: Workload) -> tuple[WhatIf, ...]:
    """Estimates, each as a part of what the present line gives, so that its error cancels out."""
    search, line, largest = found.search, found.minimum, found.max_batch
    limit, subject = search.budget.limit, search.probes.subject
    now = line.largest(limit) if line and search.budget.device == "gpu" else None
    if line is None or not now or not largest or not search.parts:
        return ()
    batch, parts = max(search.parts.items())
    changes: list[tuple[Change, dict[str, str | float], MemoryLine]] = []
    if workload.precision in ("fp32", "tf32"):
        changes.append(("precision", {"precision": "bf16"}, what_bf16(line, parts, batch)))
    if subject.layers > MANY_LAYERS:
        then = what_checkpointing(line, parts, batch, subject.layers)
        changes.append(("checkpointing", {}, then))
    if not subject.own_optimizer:
        present = {"adam": "adamw", "sgd": "momentum" if workload.momentum else "sgd"}
        for name, settings in _OPTIMIZERS.items():
            if name != present.get(workload.optimizer, workload.optimizer):
                changes.append(("optimizer", settings, what_optimizer(line, parts, name)))
    return tuple(
        WhatIf(change, settings, int(largest * (then.largest(limit) or 0) / now))
        for change, settings, then in changes
        if then.per_sample > 0
    )
