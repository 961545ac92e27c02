"""Reads a study, one or several that were merged, into what its report shows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from stepscope.analysis.study.analyse import analyse
from stepscope.analysis.study.records import RESPONSES, Factor, Observation
from stepscope.report.study.sentences import block_reasons, trend_text
from stepscope.report.study.view import BlockLine, StudyView
from stepscope.studies.estimate import TrialDurations
from stepscope.studies.folder import StudyPaths, read_study_facts, running_now
from stepscope.studies.merge import parts_of
from stepscope.studies.results import MACHINE, Result, Results, noise_before
from stepscope.studies.study import ScannedStudy, code_remarks
from stepscope.studies.trial_spec import levels_text

_HOW_LONG = ("seconds", "steps", "epochs", "timeout", "hang", "seed")
"""Settings that may differ between merged studies without making a factor of their own."""


def read_view(folder: Path) -> StudyView:
    """A study, ready to be shown."""
    paths = StudyPaths(folder.absolute())
    return _view(paths, [(machine, study.scan()) for machine, study in parts_of(paths)])


def view_of(scanned: ScannedStudy) -> StudyView:
    """A study that was just run, by what is known of it: nothing is read again."""
    return _view(scanned.study.paths, [("", scanned)])


def _view(paths: StudyPaths, parts: Sequence[tuple[str, ScannedStudy]]) -> StudyView:
    """`parts` have the name of their machine, unless there is only one."""
    facts = read_study_facts(paths)
    factors = _factors(parts)
    results: list[Result] = []
    counted: list[Result] = []
    observations: list[Observation] = []
    disturbed = 0
    for machine, part in parts:
        known = part.results
        results += [result.on(machine) for result in known.results]
        for spec, repeat in part.study.grid.order:
            result = known.best_known(spec.key, repeat)
            if result is None:
                continue
            counted.append(result.on(machine))
            disturbed += known.is_disturbed(result)
            if result.is_ok and result.throughput:
                levels = {
                    each.name: machine if each.name == MACHINE else spec.get(each.name)
                    for each in factors
                }
                values = {key: value for key, value in result.values.items() if key in RESPONSES}
                name = levels_text(levels) or spec.workload.short_name
                observations.append(Observation(levels, values, name))
    wanted = [each.spec for _, part in parts for each in part.study.grid.next(part.results)]
    return StudyView(
        name=facts.name or paths.folder.name,
        folder=paths.folder,
        machine=facts.machine or "several machines",
        design=parts[0][1].study.design,
        planned=sum(part.study.grid.planned for _, part in parts),
        results=results,
        counted=counted,
        skipped=[point for _, part in parts for point in part.skipped()],
        pending=len(wanted),
        blocks=[line for _, part in parts for line in _block_lines(part.results)],
        analysis=analyse(observations, factors, noise_before(results)),
        spent_s=sum(part.results.seconds for _, part in parts),
        left_s=TrialDurations(results).total(wanted),
        running=running_now(paths),
        remarks=[text for _, part in parts for text in _remarks(part)],
        disturbed=disturbed,
    )


def _factors(parts: Sequence[tuple[str, ScannedStudy]]) -> list[Factor]:
    """What was varied: by the designs, between them, and the machine where there are several."""
    designs = [part.study.design for _, part in parts]
    planned = {factor.name: factor.levels for design in designs for factor in design.factors}
    fixed = [design.fixed for design in designs]
    differ = [
        name
        for name in dict.fromkeys(name for settings in fixed for name in settings)
        if name not in _HOW_LONG and any(s.get(name) != fixed[0].get(name) for s in fixed)
    ]
    machines = tuple(dict.fromkeys(machine for machine, _ in parts))
    factors = [Factor(MACHINE, machines)] if machines != ("",) else []
    for name in dict.fromkeys([*planned, *differ]):
        values = [spec.get(name) for _, part in parts for spec in part.study.points.chosen]
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
        judged = known.judged[number]
        rates = [r.throughput for r in results if r.is_reference and r.throughput]
        trials = [r for r in results if r.is_trial]
        lines.append(
            BlockLine(
                number=number,
                trials=len(trials),
                sentinel_rate=rates[-1] if rates else None,
                flagged=judged.flagged,
                reasons=block_reasons(judged),
                rerun=any(
                    last.get((r.key, r.repeat), 0) > r.attempt for r in trials if r.is_result
                ),
                began=min(r.began for r in results),
            )
        )
    return lines


def _remarks(part: ScannedStudy) -> list[str]:
    study, known = part.study, part.results
    remarks = [*study.points.remarks, *part.scan.remarks, *code_remarks(study.paths)]
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
