"""What a search knows of the batches that it tried: the part that GPU and host share."""

from __future__ import annotations

from dataclasses import dataclass, field

from stepscope.analysis.memory import bracket
from stepscope.fit.answer import (
    Batch,
    Effort,
    Fit,
    MemoryBudget,
    Note,
    TriedBatch,
    Verdict,
)
from stepscope.fit.probes.contract import ProbeOutcome, Probes
from stepscope.records.codec import to_json
from stepscope.workloads.probing import ProbeResult
from stepscope.workloads.spec import Workload


@dataclass
class BatchSearch:
    """Results by batch, and what follows from them: the curve and the certificates."""

    probes: Probes
    budget: MemoryBudget
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

    def count(self, outcome: ProbeOutcome) -> None:
        self.probed += 1
        for result in outcome.results:
            self.results.setdefault(result.batch, []).append(result)
            self.ooms += result.is_oom

    def succeeded(self, batch: int) -> list[ProbeResult]:
        return [result for result in self.results.get(batch, ()) if result.is_ok]

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

    def failure_above(self, size: int) -> ProbeResult | None:
        above = min((b for b, ok in self.passed.items() if not ok and b > size), default=0)
        return next((each for each in self.results.get(above, ()) if not each.is_ok), None)

    def batch(self, size: int) -> Batch:
        """An answer with its certificate: what stays free, and the next above that failed."""
        peak = self.peak(size)
        return Batch(
            size=size,
            free_bytes=max(0, self.budget.limit - peak) if peak else 0,
            passed=self.passes.get(size, 0),
            samples_per_second=self.rates.get(size),
            retried=not self.smooth.get(size, True),
            retries=self.retries(size),
            failure_above=self.failure_above(size),
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

    def answer(self, verdict: Verdict, workload: Workload, method: str = "auto") -> Fit:
        """What every answer has."""
        return Fit(
            verdict,
            workload.model,
            to_json(workload),
            method,
            self.budget,
            self.probes.subject,
            Effort(0.0, self.probed, self.ooms),
            curve=self.curve(),
            holes=bracket.holes(self.passed),
            notes=tuple(dict.fromkeys(self.notes)),
        )
