"""Reads a study, one or several that were merged, into what its report shows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from stepscope.analysis.study.analyse import analyse
from stepscope.analysis.study.records import RESPONSES, Factor, Observation
from stepscope.report.study.sentences import block_reasons, trend_text
from stepscope.report.study.view import BlockLine, StudyContents, StudyView, study_view
from stepscope.studies.estimate import TrialDurations
from stepscope.studies.folder import StudyPaths, read_study_facts, running_now
from stepscope.studies.merge import parts_of
from stepscope.studies.results import MACHINE, Result, Results, spread_of
from stepscope.studies.study import Study, code_remarks
from stepscope.studies.trial_spec import TrialSpec, levels_text

_HOW_LONG = ("seconds", "steps", "epochs", "timeout", "hang", "seed")
"""Settings that may differ between merged studies without making a factor of their own."""


@dataclass(frozen=True)
class _StudyPart:
    """A study of one machine, and what of it counts."""

    machine: str
    study: Study

    def located(self, result: Result) -> Result:
        return result.on(self.machine) if self.machine else result

    @cached_property
    def counted(self) -> list[tuple[TrialSpec, Result]]:
        known = self.study.known
        best = ((s, known.best_known(s.key, repeat)) for s, repeat in self.study.grid.order)
        return [(spec, result) for spec, result in best if result is not None]


def read_view(folder: Path) -> StudyView:
    """A study, ready to be shown."""
    paths = StudyPaths(folder.absolute())
    return study_view(_contents(paths, list(parts_of(paths))))


def view_of(study: Study) -> StudyView:
    """A study that was just run, by what is known of it: nothing is read again."""
    return study_view(_contents(study.paths, [("", study)]))


def _contents(paths: StudyPaths, studies: Sequence[tuple[str, Study]]) -> StudyContents:
    facts = read_study_facts(paths)
    parts = [_StudyPart(machine, study) for machine, study in studies]
    first = parts[0].study
    is_merged = len(parts) > 1 or parts[0].machine != ""
    factors = _factors(parts, is_merged)
    results, counted, observations = [], [], []
    for part in parts:
        results += [part.located(result) for result in part.study.known.results]
        for spec, result in part.counted:
            counted.append(part.located(result))
            if result.is_ok and result.throughput:
                levels = {
                    each.name: part.machine if each.name == MACHINE else spec.get(each.name)
                    for each in factors
                }
                values = {key: value for key, value in result.values.items() if key in RESPONSES}
                name = levels_text(levels) or spec.workload.short_name
                observations.append(Observation(levels, values, name))
    wanted = [w.spec for part in parts for w in part.study.grid.next(part.study.known)]
    return StudyContents(
        name=facts.name or paths.folder.name,
        folder=paths.folder,
        machine=facts.machine or "several machines",
        design=first.design,
        planned=sum(part.study.grid.planned for part in parts),
        results=results,
        counted=counted,
        skipped=[(left.levels, left.why) for part in parts for left in part.study.skipped()],
        pending=len(wanted),
        blocks=[line for part in parts for line in _block_lines(part.study.known)],
        analysis=analyse(observations, factors, spread_of(results)),
        spent_s=sum(part.study.known.seconds for part in parts),
        left_s=TrialDurations(results).total(wanted),
        running=running_now(paths),
        remarks=[text for part in parts for text in _remarks(part.study)],
        disturbed=sum(
            part.study.known.is_disturbed(result) for part in parts for _, result in part.counted
        ),
    )


def _factors(parts: Sequence[_StudyPart], is_merged: bool) -> list[Factor]:
    """What was varied: by the designs, between them, and the machine where there are several."""
    designs = [part.study.design for part in parts]
    planned = {factor.name: factor.levels for design in designs for factor in design.factors}
    fixed = [design.fixed for design in designs]
    differ = [
        name
        for name in dict.fromkeys(name for settings in fixed for name in settings)
        if name not in _HOW_LONG and any(s.get(name) != fixed[0].get(name) for s in fixed)
    ]
    machines = tuple(dict.fromkeys(part.machine for part in parts))
    factors = [Factor(MACHINE, machines)] if is_merged else []
    for name in dict.fromkeys([*planned, *differ]):
        values = [spec.get(name) for part in parts for spec in part.study.points.chosen]
        found = {(type(value).__name__, value): value for value in values}.values()
        # As the design has them; what only others have comes after.
        first = [level for level in planned.get(name, ()) if level in found]
        if found:
            factors.append(Factor(name, (*first, *(lv for lv in found if lv not in first))))
    return factors


def _block_lines(known: Results) -> list[BlockLine]:
    last: dict[tuple[str, int], int] = {}
    for result in known.results:
        if result.is_trial and result.is_result:
            last[result.key, result.repeat] = result.attempt
    lines = []
    for number, results in sorted(known.in_blocks().items()):
        judged = known.judged.get(number)
        sentinel = [r.throughput for r in results if r.is_reference and r.throughput]
        trials = [r for r in results if r.is_trial]
        rate = sentinel[-1] if sentinel else None
        flagged = judged is not None and judged.flagged
        reasons = block_reasons(judged) if judged else ()
        rerun = any(last.get((r.key, r.repeat), 0) > r.attempt for r in trials if r.is_result)
        began = min(r.began for r in results)
        lines.append(BlockLine(number, len(trials), rate, flagged, reasons, rerun, began))
    return lines


def _remarks(study: Study) -> list[str]:
    known = study.known
    remarks = [*study.points.remarks, *study.found.remarks, *code_remarks(study.paths)]
    if known.trend:
        remarks.append(trend_text(known.trend))
    tried = {r.key for r in known.results if r.is_trial}
    others = tried - {spec.key for spec in study.points.chosen}
    if others:
        remarks.append(
            f"{len(others)} configurations in the folder are no part of the design any more: they "
            "are not in these tables"
        )
    return remarks
