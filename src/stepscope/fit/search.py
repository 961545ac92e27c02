"""Bookkeeping that both searches share, and the construction of the result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from stepscope.analysis.memory import bracket
from stepscope.analysis.memory.model import (
    MemoryLine,
    Parts,
    estimate_bf16,
    estimate_checkpointing,
    estimate_optimizer,
)
from stepscope.fit.prediction import Batches
from stepscope.fit.probes.contract import ProbeOutcome, Probes
from stepscope.fit.request import FitListener, FitRequest
from stepscope.fit.result import (
    Batch,
    Change,
    FitFailure,
    FitResult,
    GpuPrediction,
    Leak,
    LoaderMemory,
    MemoryBreakdown,
    MemoryBudget,
    Note,
    NoteKind,
    ProbedBatch,
    SearchCost,
    Verdict,
    WhatIf,
)
from stepscope.fit.thresholds import CHECKPOINTING_MIN_LAYERS, UNREALISTIC_BATCH
from stepscope.records.codec import to_json
from stepscope.workloads.probing import ProbeResult, Subject
from stepscope.workloads.spec import Workload

_OPTIMIZERS: dict[str, dict[str, str | float]] = {
    "sgd": {"optimizer": "sgd", "momentum": 0},
    "momentum": {"optimizer": "sgd"},
    "adamw": {"optimizer": "adamw"},
}
"""Settings of optimizers that differ in the size of their state."""


@dataclass
class BatchSearch:
    """Probe results by batch size, and the curve and answers that follow from them."""

    probes: Probes
    budget: MemoryBudget
    listener: FitListener
    results: dict[int, list[ProbeResult]] = field(default_factory=dict)
    passed: dict[int, bool] = field(default_factory=dict)
    """Whether every probe of a batch passed."""
    passes: dict[int, int] = field(default_factory=dict)
    """Number of fresh processes that passed a full training cycle within the limit."""
    retry_free: dict[int, bool] = field(default_factory=dict)
    """Whether every probe of a batch passed without an allocator retry."""
    throughput: dict[int, float] = field(default_factory=dict)
    """Samples per second."""
    probe_count: int = 0
    oom_count: int = 0
    notes: list[Note] = field(default_factory=list)
    verification: list[ProbeResult] = field(default_factory=list)

    def record(self, outcome: ProbeOutcome, within_limit: bool = True) -> None:
        self.probe_count += 1
        for result in outcome.results:
            if within_limit:
                self.results.setdefault(result.batch, []).append(result)
            self.oom_count += result.is_oom
            self.notes += [Note(NoteKind.REPORTED, text) for text in result.notes]
        if outcome.host.enforced_by == "soft":
            self.notes.append(Note(NoteKind.SOFT_LIMIT))

    def succeeded(self, batch: int) -> list[ProbeResult]:
        return [result for result in self.results.get(batch, ()) if result.is_ok]

    @property
    def parts(self) -> dict[int, Parts]:
        """The latest parts of each batch that passed."""
        passed = {batch: self.succeeded(batch) for batch in self.results}
        return {batch: results[-1].parts for batch, results in passed.items() if results}

    def peak(self, batch: int) -> int:
        """Return the largest peak, in bytes, of all probes that passed; 0 if none did."""
        return max((result.reserved_peak_bytes for result in self.succeeded(batch)), default=0)

    def peak_with_failures(self, batch: int) -> int:
        """Return the largest peak, in bytes, of all probes."""
        return max(result.reserved_peak_bytes for result in self.results[batch])

    def retries(self, batch: int) -> int:
        # A probe of several batches accumulates retries, so its count does not prove any.
        if self.retry_free.get(batch, True):
            return 0
        return max((result.retries for result in self.succeeded(batch)), default=0)

    def answer(self, size: int) -> Batch:
        """Return a batch with its evidence: the free memory, and the next failure above it."""
        peak = self.peak(size)
        above = min((b for b, ok in self.passed.items() if not ok and b > size), default=0)
        failures = (each for each in self.results.get(above, ()) if not each.is_ok)
        return Batch(
            size=size,
            free_bytes=max(0, self.budget.limit_bytes - peak) if peak else 0,
            passes=self.passes.get(size, 0),
            samples_per_second=self.throughput.get(size),
            retried=not self.retry_free.get(size, True),
            retries=self.retries(size),
            failure_above=next(failures, None),
        )

    def curve(self) -> tuple[ProbedBatch, ...]:
        return tuple(
            ProbedBatch(
                batch,
                passed=self.passed.get(batch, any(each.is_ok for each in results)),
                retried=not self.retry_free.get(batch, True),
                samples_per_second=self.throughput.get(batch),
                reserved_peak_bytes=self.peak_with_failures(batch),
                retries=self.retries(batch),
            )
            for batch, results in sorted(self.results.items())
            if batch in self.passed or batch in self.throughput
        )

    # Differs between GPU and host

    @property
    def data_set_limit(self) -> int | None:
        """The largest batch that the dataset has samples for."""
        return self.probes.subject.samples

    @property
    def subject(self) -> Subject | None:
        return self.probes.subject

    def memory_breakdown(self, found: SearchResult) -> MemoryBreakdown | None:
        """Return the memory breakdown of the answer, or of another batch if that one has none."""
        return None


@dataclass(frozen=True)
class SearchResult:
    """The outcome of a search, from which `build_result` makes the result of the fit."""

    search: BatchSearch
    verdict: Verdict
    max_batch: int | None = None
    recommended_batch: int | None = None
    minimum_memory: MemoryLine | None = None
    retry_free_memory: MemoryLine | None = None
    predicted: Batches = (0, 0)
    """Both batches as predicted before any probe near them."""
    predictions: Mapping[int, Batches] = field(default_factory=dict)
    """Both batches, by the memory size of a GPU in bytes."""
    predicted_limits: Mapping[int, int] = field(default_factory=dict)
    """Bytes for batches, by the memory size of a GPU in bytes."""
    leak: Leak | None = None
    failure: FitFailure | None = None


def build_result(
    found: SearchResult, request: FitRequest, loader: LoaderMemory | None = None
) -> FitResult:
    search, workload = found.search, request.workload
    sizes = (found.max_batch, found.recommended_batch)
    max_batch, recommended = (search.answer(size) if size else None for size in sizes)
    notes = list(dict.fromkeys(search.notes))
    results = (result for batch in sorted(search.results) for result in search.results[batch])
    failed = next((result for result in results if not result.is_ok and not result.is_oom), None)
    if failed:
        notes.append(Note(NoteKind.BATCH_FAILED, failed.message, failed.batch))
    return FitResult(
        verdict=found.verdict,
        model=workload.model,
        settings=to_json(workload),
        method=request.method,
        budget=search.budget,
        subject=search.subject,
        cost=SearchCost(0.0, search.probe_count, search.oom_count),
        max_batch=max_batch,
        recommended_batch=recommended,
        curve=search.curve(),
        failures_below_max=bracket.failures_below_max(search.passed),
        memory_breakdown=search.memory_breakdown(found),
        minimum_memory=found.minimum_memory,
        retry_free_memory=found.retry_free_memory,
        predictions=_predictions(found),
        what_ifs=_what_ifs(found, workload),
        loader=loader,
        leak=found.leak,
        failure=found.failure,
        data_set_limit=search.data_set_limit,
        verification=tuple(search.verification),
        notes=tuple(notes),
    )


def _predictions(found: SearchResult) -> tuple[GpuPrediction, ...]:
    """Return both batches for other GPUs, corrected by the prediction error on this GPU."""
    answers = (found.max_batch, found.recommended_batch)
    corrections = [
        answer / predicted if predicted and answer else 1.0
        for answer, predicted in zip(answers, found.predicted, strict=True)
    ]
    predictions = []
    for size, (predicted, retry_free) in found.predictions.items():
        max_batch = int(predicted * corrections[0])
        if max_batch < UNREALISTIC_BATCH:
            recommended = min(max_batch, int(retry_free * corrections[1]))
            predictions.append(
                GpuPrediction(size, found.predicted_limits[size], max_batch, recommended)
            )
    return tuple(predictions)


def _what_ifs(found: SearchResult, workload: Workload) -> tuple[WhatIf, ...]:
    """Return estimates, each relative to the present line, so that its error cancels out."""
    search, line, max_batch = found.search, found.minimum_memory, found.max_batch
    limit, subject = search.budget.limit_bytes, search.probes.subject
    present = line.max_batch(limit) if line and search.budget.device == "gpu" else None
    if line is None or not present or not max_batch or not search.parts:
        return ()
    batch, parts = max(search.parts.items())
    changes: list[tuple[Change, dict[str, str | float], MemoryLine]] = []
    if workload.precision in ("fp32", "tf32"):
        changes.append(("precision", {"precision": "bf16"}, estimate_bf16(line, parts, batch)))
    if subject.layers >= CHECKPOINTING_MIN_LAYERS:
        estimate = estimate_checkpointing(line, parts, batch, subject.layers)
        changes.append(("checkpointing", {}, estimate))
    if not subject.custom_optimizer:
        state = {"adam": "adamw", "sgd": "momentum" if workload.momentum else "sgd"}
        for name, settings in _OPTIMIZERS.items():
            if name != state.get(workload.optimizer, workload.optimizer):
                changes.append(("optimizer", settings, estimate_optimizer(line, parts, name)))
    return tuple(
        WhatIf(change, settings, int(max_batch * (estimate.max_batch(limit) or 0) / present))
        for change, settings, estimate in changes
        if estimate.per_sample_bytes > 0
    )
