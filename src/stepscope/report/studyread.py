"""Reads a study, one or several that were merged, into what its report shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from stepscope.analysis.study.analyse import analyse
from stepscope.analysis.study.records import RESPONSES, Factor, Level, Observation
from stepscope.report.study import BlockLine, RunningNow, StudyContents, StudyView, study_view
from stepscope.studies.estimate import Pace
from stepscope.studies.folder import StudyPaths
from stepscope.studies.known import Known, spread_of
from stepscope.studies.merge import parts_of
from stepscope.studies.result import MACHINE, Result
from stepscope.studies.spec import Spec, level_text, levels_text
from stepscope.studies.study import Study, code_remarks, facts_of, running_now

_HOW_LONG = ("seconds", "steps", "epochs", "timeout", "hang", "seed")
"""Settings that may differ between merged studies without making a factor of their own."""


@dataclass(frozen=True)
class _Part:
    """A study of one machine, and what of it counts."""

    study: Study
    machine: str
    counted: Sequence[tuple[Spec, Result]]


def read_view(folder: Path) -> StudyView:
    """A study, ready to be shown."""
    paths = StudyPaths(folder.absolute())
    return study_view(_contents(paths, list(parts_of(paths))))


def view_of(study: Study) -> StudyView:
    """A study that was just run, by what is known of it: nothing is read again."""
    return study_view(_contents(study.paths, [("", study)]))


def _contents(paths: StudyPaths, studies: Sequence[tuple[str, Study]]) -> StudyContents:
    facts = facts_of(paths)
    parts = [_part(study, machine) for machine, study in studies]
    first = parts[0].study
    is_merged = len(parts) > 1 or parts[0].machine != ""
    factors = _factors(parts, is_merged)
    results = [r for part in parts for r in _on(part.machine, part.study.known.results)]
    counted = [r for part in parts for r in _on(part.machine, [r for _, r in part.counted])]
    observations = [
        observation
        for part in parts
        for spec, result in part.counted
        if (observation := _observation(spec, result, factors, part.machine)) is not None
    ]
    wanted = [w.spec for part in parts for w in part.study.grid.next(part.study.known)]
    return StudyContents(
        name=str(facts.get("name") or paths.folder.name),
        folder=paths.folder,
        machine=str(facts.get("machine") or "several machines"),
        design=first.design,
        planned=sum(part.study.grid.planned for part in parts),
        results=results,
        counted=counted,
        skipped=[(left.levels, left.why) for part in parts for left in part.study.skipped()],
        pending=len(wanted),
        blocks=[line for part in parts for line in _block_lines(part.study.known)],
        analysis=analyse(observations, factors, spread_of(results), level_text),
        spent_s=sum(part.study.known.seconds for part in parts),
        left_s=Pace(results).total(wanted),
        running=_running(paths),
        remarks=[text for part in parts for text in _remarks(part.study)],
        disturbed=sum(
            part.study.known.is_disturbed(result) for part in parts for _, result in part.counted
        ),
    )


def _part(study: Study, machine: str) -> _Part:
    known = study.known
    counted = [
        (spec, result)
        for spec, repeat in study.grid.order
        if (result := known.best_known(spec.key, repeat)) is not None
    ]
    return _Part(study, machine, counted)


def _on(machine: str, results: Sequence[Result]) -> Sequence[Result]:
    return [result.on(machine) for result in results] if machine else results


def _factors(parts: Sequence[_Part], is_merged: bool) -> tuple[Factor, ...]:
    """What was varied: by the designs, between them, and the machine where there are several."""
    levels: dict[str, dict[tuple[str, Level], Level]] = {}
    if is_merged:
        levels[MACHINE] = {("str", part.machine): part.machine for part in parts}
    for name in _varied(parts):
        for part in parts:
            for spec in part.study.points.chosen:
                value = spec.get(name)
                levels.setdefault(name, {})[type(value).__name__, value] = value
    named = {factor.name: factor for part in parts for factor in part.study.design.factors}
    return tuple(
        Factor(name, _in_order(tuple(found.values()), named.get(name)))
        for name, found in levels.items()
    )


def _varied(parts: Sequence[_Part]) -> list[str]:
    names = [factor.name for part in parts for factor in part.study.design.factors]
    fixed = [part.study.design.fixed for part in parts]
    every = dict.fromkeys(name for settings in fixed for name in settings)
    differ = [
        name
        for name in every
        if name not in _HOW_LONG and any(s.get(name) != fixed[0].get(name) for s in fixed)
    ]
    return list(dict.fromkeys([*names, *differ]))


def _in_order(found: tuple[Level, ...], factor: Factor | None) -> tuple[Level, ...]:
    """As the design has them; what only others have comes after."""
    if factor is None:
        return found
    first = [level for level in factor.levels if level in found]
    return (*first, *(level for level in found if level not in first))


def _observation(
    spec: Spec, result: Result, factors: Sequence[Factor], machine: str
) -> Observation | None:
    if not result.is_ok or not result.throughput:
        return None
    levels: Mapping[str, Level] = {
        factor.name: machine if factor.name == MACHINE else spec.get(factor.name)
        for factor in factors
    }
    values = {key: value for key, value in result.values.items() if key in RESPONSES}
    return Observation(levels, values, levels_text(levels) or spec.workload.short_name)


def _block_lines(known: Known) -> list[BlockLine]:
    last: dict[tuple[str, int], int] = {}
    for result in known.results:
        if result.role == "trial" and result.is_result:
            last[result.key, result.repeat] = result.attempt
    lines = []
    for number, results in sorted(known.in_blocks().items()):
        judged = known.judged.get(number)
        sentinel = [r.throughput for r in results if r.role == "sentinel" and r.throughput]
        trials = [r for r in results if r.role == "trial"]
        lines.append(
            BlockLine(
                number,
                len(trials),
                sentinel[-1] if sentinel else None,
                judged is not None and judged.flagged,
                judged.reasons if judged else (),
                any(last.get((r.key, r.repeat), 0) > r.attempt for r in trials if r.is_result),
                min(r.began for r in results),
            )
        )
    return lines


def _running(paths: StudyPaths) -> RunningNow | None:
    now = running_now(paths)
    if now is None:
        return None
    share = now.get("share")
    return RunningNow(
        int(now.get("pid") or 0),
        float(now.get("at") or 0.0),
        str(now.get("trial") or "starting"),
        float(share) if isinstance(share, int | float) else None,
        str(now.get("phase") or ""),
    )


def _remarks(study: Study) -> list[str]:
    known = study.known
    remarks = [*study.points.remarks, *study.found.remarks, *code_remarks(study.paths)]
    if drifts := known.trend:
        remarks.append(drifts)
    tried = {r.key for r in known.results if r.role == "trial"}
    others = tried - {spec.key for spec in study.points.chosen}
    if others:
        remarks.append(
            f"{len(others)} configurations in the folder are no part of the design any more: they "
            "are not in these tables"
        )
    return remarks
