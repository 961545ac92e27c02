"""What is shown of a trial, made once from its run folder; terminal and JSON only write it down."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepscope.analysis.throughput import Combined, combined
from stepscope.analysis.trial import Measurement, host_cpus, measure, samples_per_step
from stepscope.records import Ending, Outcome
from stepscope.report.outcomes import OUTCOMES, Tone
from stepscope.report.trialadvice import advice_for, when_idle, with_repeats
from stepscope.report.trialcause import causes
from stepscope.runs.reader import Run, open_run
from stepscope.runs.trial import known_spread, read_trial


@dataclass(frozen=True)
class TrialView:
    """A trial, ready to be shown. Texts are as they were recorded: whoever draws escapes them."""

    name: str
    folder: Path
    ending: Ending
    outcome: str
    tone: Tone
    workload: Mapping[str, Any]
    """All knobs, those that were left open as the trial resolved them."""
    told: Mapping[str, Any]
    """What its first rank said of itself."""
    limits: Mapping[str, Any]
    trial: Mapping[str, Any]
    global_batch: int | None
    measured: Measurement
    cause: tuple[str, ...]
    """What ended it, unless it ended well: the most telling first."""
    advice: str
    """What to do next: a line to read, and below it what is to be copied."""

    @property
    def is_ok(self) -> bool:
        return self.ending.outcome is Outcome.OK

    @property
    def warmup_steps(self) -> int:
        """All that were cut; the first step always is."""
        return min(self.measured.steps, self.measured.steady.warmup + 1)

    @property
    def samples_per_second(self) -> float | None:
        return self.measured.rate.per_second if self.measured.rate else None


def trial_view(run: Run | Path | str, ending: Ending | None = None) -> TrialView:
    """Read a trial, by its run or the folder of it, and compute all that is shown.

    `ending` is for one that is over but could not write that down: the disk was full.
    """
    if not isinstance(run, Run):
        run = open_run(run)
    if ending is not None and run.ending.outcome is Outcome.RUNNING:
        run.ending = ending
    record = read_trial(run)
    label, tone = OUTCOMES[run.ending.outcome]
    cpus = host_cpus(run.facts.get("environment"))
    measured = measure(record, run.recorded(), known_spread(record), cpus)
    return TrialView(
        name=run.name,
        folder=run.path,
        ending=run.ending,
        outcome=label,
        tone=tone,
        workload={**record.workload, **(record.told.get("knobs") or {})},
        told=record.told,
        limits=record.limits,
        trial=record.trial,
        global_batch=samples_per_step(record),
        measured=measured,
        cause=() if run.ending.outcome is Outcome.OK else tuple(causes(run.ending, record)),
        advice=advice_for(run, record, measured),
    )


def mean_of(views: Sequence[TrialView]) -> Combined | None:
    """The mean rate of repeats that ended well; None without two of them."""
    rates = [view.samples_per_second for view in views if view.is_ok]
    told = [rate for rate in rates if rate is not None]
    spread = next((view.measured.spread for view in views if view.measured.spread), None)
    return combined(told, spread) if len(told) > 1 and spread else None


def advice_of(views: Sequence[TrialView]) -> str:
    """What to do after repeats: what the first that failed asks for, then what the rates lack."""
    failed = next((view for view in views if not view.is_ok), None)
    if failed:
        return failed.advice
    if any(view.measured.is_disturbed for view in views):
        return when_idle(views[0].trial)
    unsteady = next((view for view in views if not view.measured.steady.steady), None)
    if unsteady:
        return unsteady.advice
    mean = mean_of(views)
    return with_repeats(views[0].trial, mean.spread, len(views)) if mean else ""
