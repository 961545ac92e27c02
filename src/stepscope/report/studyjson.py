"""A study for programs. Keys are never renamed, only added; missing is null, shares parts of 1."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from stepscope.analysis.study.records import Configuration, Effects, MainEffect
from stepscope.analysis.throughput import CONFIDENCE
from stepscope.report.study import StudyContents, StudyView
from stepscope.report.studypoints import Point

FORMAT = 1


def study_dict(view: StudyView) -> dict[str, Any]:
    """All that a study tells, as plain values."""
    contents, analysis = view.contents, view.analysis
    told = {
        "format": FORMAT,
        "name": view.name,
        "folder": contents.folder,
        "machine": contents.machine,
        "state": view.state,
        "headline": view.headline,
        "warning": view.warning or None,
        "trials": _trials(contents),
        "spent_seconds": contents.spent_s,
        "left_seconds": contents.left_s,
        "running": contents.running,
        "confidence": CONFIDENCE,
        "fixed": contents.design.fixed,
        "factors": contents.design.factors,
        "best": [_best(each.configuration, each.group, each.as_good) for each in view.bests],
        "sensitivity": [
            {"group": each.group, "says": each.says, "effects": [_effect(e) for e in each.effects]}
            for each in analysis.sensitivity
        ],
        "effects": [_effects(each) for each in analysis.effects],
        "curves": analysis.curves,
        "fronts": [
            {
                "group": front.group,
                "responses": front.responses,
                "best": [_configuration(each) for each in front.best],
                "beaten": front.beaten,
            }
            for front in analysis.fronts
        ],
        "configurations": [_point(each) for each in view.points],
        "blocks": contents.blocks,
        "failures": [
            {
                "folder": each.place,
                "machine": each.machine,
                "outcome": each.outcome,
                "reason": each.reason,
            }
            for each in view.failures
        ],
        "skipped": [{"levels": levels, "reason": why} for levels, why in contents.skipped],
        "remarks": (*view.not_measured, *view.remarks),
    }
    plain: dict[str, Any] = _plain(told)
    return plain


def _trials(contents: StudyContents) -> dict[str, Any]:
    outcomes = Counter(each.outcome.value for each in contents.counted)
    return {
        "planned": contents.planned,
        "finished": len(contents.counted),
        "pending": contents.pending,
        "attempts": len(contents.results),
        "disturbed": contents.disturbed,
        "outcomes": dict(sorted(outcomes.items())),
    }


def _best(configuration: Configuration, group: str, as_good: tuple[str, ...]) -> dict[str, Any]:
    return {"group": group, **_configuration(configuration), "as_good": as_good}


def _configuration(each: Configuration) -> dict[str, Any]:
    return {
        "name": each.name,
        "levels": each.levels,
        "trials": each.trials,
        "values": each.values,
        "samples_per_second_low": each.low,
        "samples_per_second_high": each.high,
    }


def _point(each: Point) -> dict[str, Any]:
    return {
        "key": each.key,
        "levels": each.levels,
        "trials": each.trials,
        "trials_ok": each.ok,
        "outcome": each.outcome,
        "values": each.values,
        "samples_per_second_low": each.low,
        "samples_per_second_high": each.high,
        "held_back_by": each.cause,
    }


def _effects(each: Effects) -> dict[str, Any]:
    return {
        "response": each.response.key,
        "unit": each.response.unit,
        "scale": each.response.scale,
        "trials": each.trials,
        "configurations": each.configurations,
        "noise": each.noise,
        "explained": each.explained,
        "main": [_effect(effect) for effect in each.main],
        "interactions": each.interactions,
        "remarks": each.remarks,
    }


def _effect(effect: MainEffect) -> dict[str, Any]:
    return {
        "factor": effect.factor,
        "size": effect.size,
        "told": effect.is_told,
        "highest": effect.highest,
        "lowest": effect.lowest,
        "levels": effect.levels,
    }


def _plain(value: Any) -> Any:
    """Values that JSON has: records become tables, what is no number becomes null."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if dataclasses.is_dataclass(value):
        fields = dataclasses.fields(value)
        return {field.name: _plain(getattr(value, field.name)) for field in fields}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return str(value) if isinstance(value, Path) else value
