"""What a design comes to, before it is run and while it is: `stepscope study plan`."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepscope.report.format import seconds_text
from stepscope.studies.estimate import Pace
from stepscope.studies.spec import level_text, levels_text
from stepscope.studies.study import Study

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True)
class PlanView:
    """A plan, ready to be shown."""

    name: str
    folder: Path
    fixed: str
    factors: tuple[tuple[str, str], ...]
    """Name and levels."""
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
    is_measured: bool
    """Whether by trials of this study that have finished."""
    spent_s: float
    budget: str
    skipped: tuple[tuple[str, int, str], ...]
    """Why, how many combinations, one of them."""
    not_chosen: int
    remarks: tuple[str, ...]


def plan_view(study: Study) -> PlanView:
    """What a study would do now."""
    design, points, known = study.design, study.points, study.known
    wanted = [each.spec for each in study.grid.next(known)]
    pace = Pace(known.results)
    blocks = -(-len(wanted) // design.block)
    sentinels = [study.sentinel] * blocks if study.sentinel else []
    reasons: Counter[str] = Counter()
    examples: dict[str, str] = {}
    for left in study.skipped():
        reasons[left.why] += 1
        examples.setdefault(left.why, levels_text(left.levels))
    seconds = pace.total([*wanted, *sentinels])
    return PlanView(
        name=design.name,
        folder=study.paths.folder,
        fixed=levels_text(design.fixed),
        factors=tuple(
            (factor.name, ", ".join(level_text(factor.name, level) for level in factor.levels))
            for factor in design.factors
        ),
        combinations=points.combinations,
        configurations=len(points.chosen),
        available=len(points.chosen) - len(study.grid.unavailable),
        repeats=design.repeats,
        trials=study.grid.planned,
        done=sum(known.answer(spec.key, repeat) is not None for spec, repeat in study.grid.order),
        to_come=len(wanted),
        blocks=blocks,
        sentinel=levels_text(_levels(study)) if study.sentinel else "",
        seconds=seconds,
        is_measured=pace.is_measured,
        spent_s=known.seconds,
        budget=_budget(study, len(wanted), seconds),
        skipped=tuple((why, count, examples[why]) for why, count in reasons.most_common()),
        not_chosen=points.not_chosen,
        remarks=(*points.remarks, *study.found.remarks),
    )


def _levels(study: Study) -> dict[str, Any]:
    assert study.sentinel is not None
    return {factor.name: study.sentinel.get(factor.name) for factor in study.design.factors}


def _budget(study: Study, to_come: int, seconds: float | None) -> str:
    """What the budget leaves, where it does not cover all."""
    budget, known = study.design.budget, study.known
    parts = []
    if budget.seconds is not None:
        left = max(0.0, budget.seconds - known.seconds)
        short = seconds is not None and seconds > left
        covers = f": enough for about {left / seconds:.0%} of them" if short and seconds else ""
        parts.append(f"{seconds_text(left)} of {seconds_text(budget.seconds)}{covers}")
    if budget.trials is not None:
        tried = sum(r.role == "trial" and r.is_result for r in known.results)
        left_trials = max(0, budget.trials - tried)
        short = left_trials < to_come
        covers = f": enough for {left_trials} of {to_come}" if short else ""
        parts.append(f"{left_trials} of {budget.trials} trials{covers}")
    return "; ".join(parts)


def headline(view: PlanView) -> str:
    """What a run of it will do, in a line."""
    if not view.trials:
        return f"{view.name}: nothing of it can be tried on this machine"
    if not view.to_come:
        return f"{view.name}: all {view.trials} trials are done"
    trials = f"{view.to_come} trial{'s' if view.to_come > 1 else ''}"
    done = f", {view.done} {'is' if view.done == 1 else 'are'} done already" if view.done else ""
    return f"{view.name}: {trials} to run{done}; {_time(view)}"


def _time(view: PlanView) -> str:
    if view.seconds is None:
        return "how long is not known before the first have finished"
    basis = "by those that have finished" if view.is_measured else "a guess until one has finished"
    return f"about {seconds_text(view.seconds)} ({basis})"


def print_plan(console: Console, view: PlanView) -> None:
    from rich.markup import escape
    from rich.table import Table

    def line(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    line(headline(view))
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    for name, levels in _rows(view):
        table.add_row(f"[dim]{escape(name)}[/dim]", escape(levels))
    console.print(table)
    if view.skipped or view.not_chosen:
        line("\nNot tried:")
        skipped = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
        for why, count, example in view.skipped:
            several = f"{count} combination{'s' if count > 1 else ''}"
            skipped.add_row(several, escape(why), f"[dim]{escape(example)}[/dim]")
        if view.not_chosen:
            skipped.add_row(f"{view.not_chosen} combinations", "not chosen by the design", "")
        console.print(skipped)
    for text in view.remarks:
        line(f"Note: {text}")


def _rows(view: PlanView) -> list[tuple[str, str]]:
    of = f" of {view.combinations} combinations" if view.combinations > view.configurations else ""
    of += (
        f", of which {view.available} can be had here"
        if view.available < view.configurations
        else ""
    )
    rows = [(name, levels) for name, levels in view.factors]
    if view.fixed:
        rows.append(("fixed", view.fixed))
    rows.append(("configurations", f"{view.configurations}{of}"))
    rows.append(("trials", f"{view.trials}: each {view.repeats} times, in random order"
                 if view.repeats > 1 else f"{view.trials}, in random order"))  # fmt: skip
    if view.sentinel and view.blocks:
        blocks = f"each of {view.blocks} blocks" if view.blocks > 1 else "the only block"
        rows.append(("sentinel", f"{view.sentinel}: before {blocks}"))
    if view.budget:
        rows.append(("budget left", view.budget))
    if view.spent_s:
        rows.append(("spent", seconds_text(view.spent_s)))
    rows.append(("folder", str(view.folder)))
    return rows


def plan_dict(view: PlanView) -> dict[str, Any]:
    """For JSON."""
    return {
        "format": 1,
        "name": view.name,
        "folder": str(view.folder),
        "factors": dict(view.factors),
        "combinations": view.combinations,
        "configurations": view.configurations,
        "available": view.available,
        "repeats": view.repeats,
        "trials": view.trials,
        "done": view.done,
        "to_come": view.to_come,
        "blocks": view.blocks,
        "sentinel": view.sentinel,
        "seconds": view.seconds,
        "seconds_measured": view.is_measured,
        "spent_seconds": view.spent_s,
        "budget": view.budget,
        "skipped": [
            {"why": why, "combinations": count, "example": example}
            for why, count, example in view.skipped
        ],
        "not_chosen": view.not_chosen,
        "remarks": list(view.remarks),
    }
