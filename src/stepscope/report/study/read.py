"""Reading of a study, or of a merged one, into its view."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from stepscope.analysis.study.analyze import analyze
from stepscope.analysis.study.records import RESPONSES, Factor, Observation
from stepscope.report.study.format import counted
from stepscope.report.study.messages import block_reasons, trend_text
from stepscope.report.study.pending import pending_trials
from stepscope.report.study.view import BlockLine, StudyView
from stepscope.studies.estimate import TrialDurations
from stepscope.studies.folder import StudyPaths, read_study_facts, running_now
from stepscope.studies.merge import parts_of
from stepscope.studies.results import MACHINE, Result, Results, noise_before
from stepscope.studies.study import ScannedStudy, code_remarks
from stepscope.studies.trial_spec import levels_text

_NOT_FACTORS = ("seconds", "steps", "epochs", "timeout", "stall_timeout", "seed")
"""Settings that do not become factors if they differ between merged studies."""


def read_view(folder: Path) -> StudyView:
    """Read the view of a study from its folder."""
    paths = StudyPaths(folder.absolute())
    return _view(paths, [(machine, study.scan()) for machine, study in parts_of(paths)])


def view_of(scanned: ScannedStudy) -> StudyView:
    """Return the view of a study that was just run, without reading its folder again."""
    return _view(scanned.study.paths, [("", scanned)])


def _view(paths: StudyPaths, parts: Sequence[tuple[str, ScannedStudy]]) -> StudyView:
    """`parts` are studies by the name of their machine, which is empty if there is only one."""
    facts = read_study_facts(paths)
    factors = _factors(parts)
    results: list[Result] = []
    counting: list[Result] = []
    observations: list[Observation] = []
    with_interference = 0
    for machine, part in parts:
        known = part.results
        results += [result.on(machine) for result in known.results]
        for spec, repeat in part.study.grid.order:
            result = known.best_known(spec.key, repeat)
            if result is None:
                continue
            counting.append(result.on(machine))
            with_interference += known.has_interference(result)
            if result.is_ok and result.throughput:
                levels = {
                    each.name: machine if each.name == MACHINE else spec.get(each.name)
                    for each in factors
                }
                values = {key: value for key, value in result.values.items() if key in RESPONSES}
                name = levels_text(levels) or spec.workload.short_name
                observations.append(Observation(levels, values, name))
    pending = [pending_trials(part) for _, part in parts]
    remaining = [spec for specs, _ in pending for spec in specs]
    reruns = [spec for _, specs in pending for spec in specs]
    durations = TrialDurations(results)
    return StudyView(
        name=facts.name or paths.folder.name,
        folder=paths.folder,
        machine=facts.machine or "several machines",
        design=parts[0][1].study.design,
        planned=sum(part.study.grid.planned for _, part in parts),
        results=results,
        counted=counting,
        skipped=[point for _, part in parts for point in part.skipped()],
        remaining=len(remaining),
        reruns=len(reruns),
        blocks=[line for _, part in parts for line in _block_lines(part.results)],
        analysis=analyze(observations, factors, noise_before(results)),
        elapsed_s=sum(part.results.seconds for _, part in parts),
        remaining_s=durations.total(remaining),
        reruns_s=durations.total(reruns),
        running=running_now(paths),
        remarks=[text for _, part in parts for text in _remarks(part)],
        with_interference=with_interference,
    )


def _factors(parts: Sequence[tuple[str, ScannedStudy]]) -> list[Factor]:
    """Return the factors: of the designs, of differences between them, and the machine."""
    designs = [part.study.design for _, part in parts]
    planned = {factor.name: factor.levels for design in designs for factor in design.factors}
    fixed = [design.fixed for design in designs]
    different = [
        name
        for name in dict.fromkeys(name for settings in fixed for name in settings)
        if name not in _NOT_FACTORS and any(s.get(name) != fixed[0].get(name) for s in fixed)
    ]
    machines = tuple(dict.fromkeys(machine for machine, _ in parts))
    factors = [Factor(MACHINE, machines)] if machines != ("",) else []
    for name in dict.fromkeys([*planned, *different]):
        values = [spec.get(name) for _, part in parts for spec in part.study.points.chosen]
        levels = {(type(value).__name__, value): value for value in values}.values()
        # In the order of the last design that has the factor; further levels follow.
        first = [level for level in planned.get(name, ()) if level in levels]
        if levels:
            factors.append(Factor(name, (*first, *(lv for lv in levels if lv not in first))))
    return factors


def _block_lines(known: Results) -> list[BlockLine]:
    last: dict[tuple[str, int], int] = {}
    for result in known.results:
        if result.is_trial and result.is_result:
            last[result.key, result.repeat] = result.attempt
    lines = []
    for number, results in sorted(known.in_blocks().items()):
        judged = known.judged[number]
        references = [r.throughput for r in results if r.is_reference and r.throughput]
        trials = [r for r in results if r.is_trial]
        lines.append(
            BlockLine(
                number=number,
                trials=len(trials),
                reference_throughput=references[-1] if references else None,
                flagged=judged.flagged,
                reasons=block_reasons(judged),
                rerun=any(
                    last.get((r.key, r.repeat), 0) > r.attempt for r in trials if r.is_result
                ),
                started=min(r.started for r in results),
            )
        )
    return lines


def _remarks(part: ScannedStudy) -> list[str]:
    study, known = part.study, part.results
    remarks = [*study.points.remarks, *part.scan.remarks, *code_remarks(study.paths)]
    if known.trend:
        remarks.append(trend_text(known.trend))
    keys = {r.key for r in known.results if r.is_trial}
    removed = keys - {spec.key for spec in study.points.chosen}
    if removed:
        configurations = counted(len(removed), "configuration")
        remarks.append(f"{configurations} in the folder excluded: no longer in the design")
    return remarks
