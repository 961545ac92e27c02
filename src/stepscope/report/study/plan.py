"""What a design comes to, before it is run and while it is: `stepscope study plan`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepscope.records.codec import to_json
from stepscope.report.kit.document import Document, Facts, Listing, Section
from stepscope.report.kit.format import seconds_text
from stepscope.report.kit.table import Column, Table
from stepscope.report.study.view import SkippedGroup, skipped_groups
from stepscope.report.study.words import counted
from stepscope.studies.design.records import Budget
from stepscope.studies.estimate import TrialDurations
from stepscope.studies.results import Results
from stepscope.studies.study import ScannedStudy
from stepscope.studies.trial_spec import level_text, levels_text


@dataclass(frozen=True)
class PlanView:
    """A plan, ready to be shown. All fields but `fixed` are keys of its JSON."""

    name: str
    folder: Path
    fixed: str
    factors: dict[str, str]
    combinations: int
    configurations: int
    available: int
    """Of these, on this machine."""
    repeats: int
    trials: int
    done: int
    to_come: int
    blocks: int
    sentinel: str
    """Its levels; empty without one."""
    seconds: float | None
    """That what is to come will take."""
    seconds_measured: bool
    """Whether by trials of this study that have finished."""
    spent_seconds: float
    budget: str
    skipped: tuple[SkippedGroup, ...]
    not_chosen: int
    remarks: tuple[str, ...]


def plan_view(scanned: ScannedStudy) -> PlanView:
    study, known = scanned.study, scanned.results
    design, points = study.design, study.points
    wanted = [each.spec for each in study.grid.next(known)]
    durations = TrialDurations(known.results)
    blocks = -(-len(wanted) // design.block)
    sentinel, sentinels = "", []
    if reference := scanned.reference:
        own = {factor.name: reference.get(factor.name) for factor in design.factors}
        sentinel, sentinels = levels_text(own), [reference] * blocks
    seconds = durations.total([*wanted, *sentinels])
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
        available=len(points.chosen) - len(study.grid.unavailable),
        repeats=design.repeats,
        trials=study.grid.planned,
        done=sum(known.answer(spec.key, repeat) is not None for spec, repeat in study.grid.order),
        to_come=len(wanted),
        blocks=blocks,
        sentinel=sentinel,
        seconds=seconds,
        seconds_measured=durations.is_measured,
        spent_seconds=known.seconds,
        budget=_budget(design.budget, known, len(wanted), seconds),
        skipped=skipped_groups(scanned.skipped()),
        not_chosen=points.not_chosen,
        remarks=(*points.remarks, *scanned.scan.remarks),
    )


def _budget(budget: Budget, known: Results, to_come: int, seconds: float | None) -> str:
    """What the budget leaves, where it does not cover all."""
    parts = []
    if budget.seconds is not None:
        left = max(0.0, budget.seconds - known.seconds)
        short = seconds is not None and seconds > left
        covers = f": enough for about {left / seconds:.0%} of them" if short and seconds else ""
        parts.append(f"{seconds_text(left)} of {seconds_text(budget.seconds)}{covers}")
    if budget.trials is not None:
        left_trials = max(0, budget.trials - known.tried)
        covers = f": enough for {left_trials} of {to_come}" if left_trials < to_come else ""
        parts.append(f"{left_trials} of {budget.trials} trials{covers}")
    return "; ".join(parts)


def headline(view: PlanView) -> str:
    """What a run of it will do, in a line."""
    if not view.trials:
        return f"{view.name}: nothing of it can be tried on this machine"
    if not view.to_come:
        return f"{view.name}: all {view.trials} trials are done"
    done = f", {view.done} {'is' if view.done == 1 else 'are'} done already" if view.done else ""
    took = "how long is not known before the first have finished"
    if view.seconds is not None:
        measured = view.seconds_measured
        basis = "by those that have finished" if measured else "a guess until one has finished"
        took = f"about {seconds_text(view.seconds)} ({basis})"
    return f"{view.name}: {counted(view.to_come, 'trial')} to run{done}; {took}"


def plan_document(view: PlanView) -> Document:
    of = f" of {view.combinations} combinations" if view.combinations > view.configurations else ""
    if view.available < view.configurations:
        of += f", of which {view.available} can be had here"
    order = f": each {view.repeats} times, in random order"
    before = f"each of {view.blocks} blocks" if view.blocks > 1 else "the only block"
    sentinel = view.sentinel and view.blocks and f"{view.sentinel}: before {before}"
    facts = {
        **view.factors,
        "fixed": view.fixed,
        "configurations": f"{view.configurations}{of}",
        "trials": f"{view.trials}{order if view.repeats > 1 else ', in random order'}",
        "sentinel": sentinel,
        "budget left": view.budget,
        "spent": view.spent_seconds and seconds_text(view.spent_seconds),
        "folder": str(view.folder),
    }
    skipped = [
        (counted(each.combinations, "combination"), each.why, each.example) for each in view.skipped
    ]
    if view.not_chosen:
        skipped.append((f"{view.not_chosen} combinations", "not chosen by the design", ""))
    columns = (Column("", number=False), *(Column("", number=False, wide=True),) * 2)
    return Document(
        name=headline(view),
        state="",
        tone="neutral",
        blocks=(
            Facts(tuple((name, str(text)) for name, text in facts.items() if text)),
            Section("Not tried", (Table(columns, tuple(skipped)),)),
            Section("Notes", (Listing.of(view.remarks),)),
        ),
        data=plan_dict(view),
    )


def plan_dict(view: PlanView) -> dict[str, Any]:
    told = to_json(view)
    return {"format": 1, **{key: value for key, value in told.items() if key != "fixed"}}
