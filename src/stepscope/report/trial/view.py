"""The view of a trial, computed once from its run folder; renderers only draw it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stepscope.analysis.run.data import RunData
from stepscope.analysis.trial.measurement import Measurement, TrialRecord, measure
from stepscope.analysis.trial.throughput import Combined, combined
from stepscope.records import ExitStatus, Outcome
from stepscope.report.kit.outcomes import OUTCOMES, Tone
from stepscope.report.trial.failure import failure_details
from stepscope.report.trial.recommendation import (
    RecommendationKind,
    TrialRecommendation,
    recommend,
    recommend_repeats,
    recommendation_text,
)
from stepscope.runs.load import load
from stepscope.runs.reader import Run, open_run
from stepscope.runs.trial import read_trial


@dataclass(frozen=True)
class TrialView:
    """A trial, ready to be shown. Texts are not escaped: renderers do that."""

    name: str
    folder: Path
    exit_status: ExitStatus
    outcome: str
    tone: Tone
    record: TrialRecord = field(compare=False, repr=False)
    measured: Measurement
    failure_details: tuple[str, ...]  # the most informative first; empty for outcome `ok`
    recommendation: TrialRecommendation
    run: Run = field(compare=False, repr=False)
    data: RunData = field(compare=False, repr=False)

    @property
    def is_ok(self) -> bool:
        return self.exit_status.outcome is Outcome.OK

    @property
    def workload(self) -> Mapping[str, Any]:
        """All settings, with defaults as the trial resolved them."""
        return {**self.record.workload, **self.record.first.settings}

    @property
    def recommendation_text(self) -> str:
        """The recommended next step: a sentence, and on the next line a command or path."""
        return recommendation_text(self.recommendation, self.record.trial.command)

    @property
    def no_throughput_reason(self) -> str:
        """Why there is no throughput; empty if there is one."""
        missing = self.measured.missing_rate
        if missing is None:
            return ""
        if missing.kind == "idle_rank":
            return f"rank {missing.number} completed no steps"
        if missing.kind == "unknown_batch":
            return "the number of samples per step is unknown"
        few = {0: "no steps were completed", 1: "only 1 step was completed"}
        return few.get(missing.number, f"only {missing.number} steps were completed")

    @property
    def warmup_steps(self) -> int:
        """Number of warm-up steps, including the first step."""
        return min(self.measured.steps, self.measured.steady.warmup + 1)

    @property
    def samples_per_second(self) -> float | None:
        return self.measured.rate.per_second if self.measured.rate else None


def trial_view(
    run: Run | Path | str, exit_status: ExitStatus | None = None, data: RunData | None = None
) -> TrialView:
    """Compute the view of a trial from its run or run folder.

    `exit_status` is for a trial that has ended but could not record it, because the disk was full.
    """
    if not isinstance(run, Run):
        run = open_run(run)
    if exit_status is not None and run.exit_status.outcome is Outcome.RUNNING:
        run.exit_status = exit_status
    record = read_trial(run)
    data = data or load(run)
    label, tone = OUTCOMES[run.exit_status.outcome]
    measured = measure(record, data)
    return TrialView(
        name=run.name,
        folder=run.path,
        exit_status=run.exit_status,
        outcome=label,
        tone=tone,
        record=record,
        measured=measured,
        failure_details=()
        if run.exit_status.outcome is Outcome.OK
        else tuple(failure_details(run.exit_status, record)),
        recommendation=recommend(run.exit_status, record, measured, run.paths),
        run=run,
        data=data,
    )


def mean_of(views: Sequence[TrialView]) -> Combined | None:
    """Return the mean throughput of the successful repeats, or None with fewer than two."""
    rates = [view.samples_per_second for view in views if view.is_ok and view.samples_per_second]
    noise = next((view.measured.noise for view in views if view.measured.noise), None)
    return combined(rates, noise) if len(rates) > 1 and noise else None


def recommendation_text_for(views: Sequence[TrialView]) -> str:
    """Return the recommended next step after repeats: about a failed repeat first."""
    if failed := next((view for view in views if not view.is_ok), None):
        return failed.recommendation_text
    recommendation = TrialRecommendation()
    if any(view.measured.has_interference for view in views):
        recommendation = TrialRecommendation(RecommendationKind.IDLE_MACHINE)
    elif unsteady := next((view for view in views if not view.measured.steady.steady), None):
        return unsteady.recommendation_text
    elif mean := mean_of(views):
        recommendation = recommend_repeats(mean.noise, len(views))
    return recommendation_text(recommendation, views[0].record.trial.command)
