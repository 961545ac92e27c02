"""What is shown of a trial, made once from its run folder; renderers only draw it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stepscope.analysis.run.data import RunData
from stepscope.analysis.trial.measurement import Measurement, TrialRecord, measure
from stepscope.analysis.trial.throughput import Combined, combined
from stepscope.records import Ending, Outcome
from stepscope.report.kit.outcomes import OUTCOMES, Tone
from stepscope.report.trial.advice import (
    AdviceKind,
    TrialAdvice,
    advice_for,
    advice_text,
    repeat_advice,
)
from stepscope.report.trial.causes import causes
from stepscope.runs.load import load
from stepscope.runs.reader import Run, open_run
from stepscope.runs.trial import read_trial


@dataclass(frozen=True)
class TrialView:
    """A trial, ready to be shown. Texts are as they were recorded: renderers escape them."""

    name: str
    folder: Path
    ending: Ending
    outcome: str
    tone: Tone
    record: TrialRecord = field(compare=False, repr=False)
    measured: Measurement
    cause: tuple[str, ...]  # what ended it, unless it ended well: the most telling first
    recommendation: TrialAdvice
    run: Run = field(compare=False, repr=False)
    data: RunData = field(compare=False, repr=False)
    """What it was made of, for the report of the run."""

    @property
    def is_ok(self) -> bool:
        return self.ending.outcome is Outcome.OK

    @property
    def workload(self) -> Mapping[str, Any]:
        """All settings, those that were left open as the trial resolved them."""
        return {**self.record.workload, **self.record.first.knobs}

    @property
    def advice(self) -> str:
        """What to do next: a line to read, and below it what is to be copied."""
        return advice_text(self.recommendation, self.record.trial.command)

    @property
    def why_no_rate(self) -> str:
        """Empty where there is a throughput."""
        missing = self.measured.missing_rate
        if missing is None:
            return ""
        if missing.kind == "idle_rank":
            return f"rank {missing.number} took no step"
        if missing.kind == "unknown_batch":
            return "how many samples a step has was not told"
        few = {0: "no step was taken", 1: "one step was taken"}
        return few.get(missing.number, f"{missing.number} steps are too few")

    @property
    def warmup_steps(self) -> int:
        """All that were cut; the first step always is."""
        return min(self.measured.steps, self.measured.steady.warmup + 1)

    @property
    def samples_per_second(self) -> float | None:
        return self.measured.rate.per_second if self.measured.rate else None


def trial_view(
    run: Run | Path | str, ending: Ending | None = None, data: RunData | None = None
) -> TrialView:
    """Compute all that is shown of a trial, by its run or the folder of it.

    `ending` is for one that is over but could not write that down: the disk was full.
    """
    if not isinstance(run, Run):
        run = open_run(run)
    if ending is not None and run.ending.outcome is Outcome.RUNNING:
        run.ending = ending
    record = read_trial(run)
    data = data or load(run)
    label, tone = OUTCOMES[run.ending.outcome]
    measured = measure(record, data)
    return TrialView(
        name=run.name,
        folder=run.path,
        ending=run.ending,
        outcome=label,
        tone=tone,
        record=record,
        measured=measured,
        cause=() if run.ending.outcome is Outcome.OK else tuple(causes(run.ending, record)),
        recommendation=advice_for(run.ending, record, measured, run.paths),
        run=run,
        data=data,
    )


def mean_of(views: Sequence[TrialView]) -> Combined | None:
    """The mean throughput of repeats that ended well; None without two of them."""
    rates = [view.samples_per_second for view in views if view.is_ok and view.samples_per_second]
    noise = next((view.measured.noise for view in views if view.measured.noise), None)
    return combined(rates, noise) if len(rates) > 1 and noise else None


def advice_of(views: Sequence[TrialView]) -> str:
    """What to do after repeats: what the first that failed asks for, then what the rates lack."""
    if failed := next((view for view in views if not view.is_ok), None):
        return failed.advice
    recommendation = TrialAdvice()
    if any(view.measured.is_disturbed for view in views):
        recommendation = TrialAdvice(AdviceKind.IDLE_MACHINE)
    elif unsteady := next((view for view in views if not view.measured.steady.steady), None):
        return unsteady.advice
    elif mean := mean_of(views):
        recommendation = repeat_advice(mean.noise, len(views))
    return advice_text(recommendation, views[0].record.trial.command)
