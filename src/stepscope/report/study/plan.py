"""The plan of a study, before and while it runs: `stepscope study plan`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepscope.records.codec import to_json
from stepscope.report.kit.document import Document, Facts, Listing, Section
from stepscope.report.kit.format import seconds_text
from stepscope.report.kit.table import Column, Table
from stepscope.report.study.format import counted
from stepscope.report.study.pending import pending_trials
from stepscope.report.study.view import SkippedGroup, skipped_groups
from stepscope.studies.design.records import Budget
from stepscope.studies.estimate import TrialDurations
from stepscope.studies.results import Results
from stepscope.studies.study import ScannedStudy
from stepscope.studies.trial_spec import level_text, levels_text


@dataclass(frozen=True)
class PlanView:
    """The plan of a study. All fields but `fixed` are keys of its JSON; `remarks` are `notes`."""

    name: str  # name of the study
    folder: Path  # folder of the study
    fixed: str
    factors: dict[str, str]  # levels by factor name
    combinations: int  # number of all combinations of levels
    configurations: int  # number of combinations that the design includes
    available: int  # number of configurations that this machine can run
    repeats: int  # trials per configuration
    trials: int  # number of trials that this machine can run
    done: int  # number of trials with a result
    remaining: int  # number of trials without a result
    reruns: int  # number of trials with a result that run again
    blocks: int  # number of blocks that are still to run
    reference: str  # levels of the reference trial; empty if there is none
    remaining_seconds: float | None  # estimated duration of all that is still to run
    remaining_seconds_measured: bool  # whether finished trials are the basis of the estimate
    elapsed_seconds: float  # total duration of all finished trials
    budget: str  # what is left of the budget; empty without a budget
    skipped: tuple[SkippedGroup, ...]  # combinations that are not run, by reason
    not_chosen: int  # number of combinations that the design does not sample
    remarks: tuple[str, ...]  # remarks about the plan


def plan_view(scanned: ScannedStudy) -> PlanView:
    study, known = scanned.study, scanned.results
    design, points, grid = study.design, study.points, study.grid
    remaining, reruns = pending_trials(scanned)
    pending = [*remaining, *reruns]
    durations = TrialDurations(known.results)
    blocks = -(-len(pending) // design.block)
    reference, references = "", []
    if spec := scanned.reference:
        reference = levels_text({factor.name: spec.get(factor.name) for factor in design.factors})
        references = [spec] * blocks
    seconds = durations.total([*pending, *references])
    return PlanView(
        name=design.name,
        folder=study.paths.folder,
        fixed=levels_text(design.fixed),
        factors={
            factor.name: ", ".join(level_text(factor.name, level) for level in factor.levels)
            for factor in design.factors
        },
        combinations=points.combinations,
        configurations=len(points.chosen),
        available=len(points.chosen) - len(grid.unavailable),
        repeats=design.repeats,
        trials=grid.planned,
        done=sum(known.best_known(each.spec.key, each.repeat) is not None for each in grid.order),
        remaining=len(remaining),
        reruns=len(reruns),
        blocks=blocks,
        reference=reference,
        remaining_seconds=seconds,
        remaining_seconds_measured=durations.is_measured,
        elapsed_seconds=known.seconds,
        budget=_budget(design.budget, known, len(pending), seconds),
        skipped=skipped_groups(scanned.skipped()),
        not_chosen=points.not_chosen,
        remarks=(*points.remarks, *scanned.scan.remarks),
    )


def _budget(budget: Budget, known: Results, pending: int, seconds: float | None) -> str:
    """Return what is left of the budget, and how much of the study that covers."""
    parts = []
    if budget.seconds is not None:
        left = max(0.0, budget.seconds - known.seconds)
        short = seconds is not None and seconds > left
        covers = (
            (f", enough for about {left / seconds * 100:.0f}% of the remaining trials")
            if short and seconds
            else ""
        )
        parts.append(f"{seconds_text(left)} of {seconds_text(budget.seconds)}{covers}")
    if budget.trials is not None:
        left_trials = max(0, budget.trials - known.tried)
        covers = (
            f", enough for {left_trials} of the {pending} remaining"
            if left_trials < pending
            else ""
        )
        parts.append(f"{left_trials} of {budget.trials} trials{covers}")
    return "; ".join(parts)


def headline(view: PlanView) -> str:
    """`cnn: 8 of 12 trials done, 4 remaining, 2 reruns; about 6 min (from finished trials)`."""
    if not view.trials:
        return f"{view.name}: no trial can run on this machine"
    trials = counted(view.done + view.remaining, "trial")
    if not view.remaining and not view.reruns:
        return f"{view.name}: all {trials} done"
    parts = [f"{view.done} of {trials} done" if view.done else f"{trials} to run"]
    if view.done and view.remaining:
        parts.append(f"{view.remaining} remaining")
    if view.reruns:
        parts.append(counted(view.reruns, "rerun"))
    duration = "the duration is unknown until a trial has finished"
    if view.remaining_seconds is not None:
        measured = view.remaining_seconds_measured
        basis = "from finished trials" if measured else "rough estimate: no trial has finished yet"
        duration = f"about {seconds_text(view.remaining_seconds)} ({basis})"
    return f"{view.name}: {', '.join(parts)}; {duration}"


def plan_document(view: PlanView) -> Document:
    of = f" of {view.combinations} combinations" if view.combinations > view.configurations else ""
    if view.available < view.configurations:
        of += f", {view.available} available on this machine"
    repeats = f" ({view.repeats} repeats)" if view.repeats > 1 else ""
    start = f"each of {view.blocks} blocks" if view.blocks > 1 else "the block"
    reference = view.reference and view.blocks and f"{view.reference} (at the start of {start})"
    facts = {
        **view.factors,
        "Fixed": view.fixed,
        "Configurations": f"{view.configurations}{of}",
        "Trials": f"{view.trials}{repeats} in random order",
        "Reference trial": reference,
        "Remaining budget": view.budget,
        "Elapsed": view.elapsed_seconds and seconds_text(view.elapsed_seconds),
        "Folder": str(view.folder),
    }
    skipped = [
        (counted(each.combinations, "combination"), each.reason, each.example)
        for each in view.skipped
    ]
    if view.not_chosen:
        skipped.append((counted(view.not_chosen, "combination"), "not in the random selection", ""))
    columns = (Column("", number=False), *(Column("", number=False, wrap=True),) * 2)
    return Document(
        name=headline(view),
        state="",
        tone="neutral",
        blocks=(
            Facts(tuple((name, str(text)) for name, text in facts.items() if text)),
            Section("Skipped combinations", (Table(columns, tuple(skipped)),)),
            Section("Notes", (Listing.of(view.remarks),)),
        ),
        data=plan_dict(view),
    )


def plan_dict(view: PlanView) -> dict[str, Any]:
    fields = to_json(view)
    fields["notes"] = fields.pop("remarks")
    return {"format": 1, **{key: value for key, value in fields.items() if key != "fixed"}}
