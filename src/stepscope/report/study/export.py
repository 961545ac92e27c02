"""A study for programs: one JSON object, and tables as CSV files.

Keys and columns are never renamed, only added. Numbers have all their digits, and their unit stands
in the name of the column; shares are parts of 1; what is missing is null, in a table empty. The
same results make the same bytes: when and how often something was tried stands in `trials.csv` and
`blocks.csv` alone.
"""

from __future__ import annotations

import csv
import io
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, fields
from pathlib import Path
from typing import Any

from stepscope.analysis.study.records import (
    Effects,
    Level,
    ScalingCurve,
)
from stepscope.analysis.trial.throughput import CONFIDENCE
from stepscope.records.codec import to_json
from stepscope.report.bottleneck.words import cause_title
from stepscope.report.study.configurations import STEP, level_order, levels_of, ordered
from stepscope.report.study.sentences import (
    curve_text,
    interaction_text,
    interference_text,
    remark_text,
    sensitivity_text,
)
from stepscope.report.study.view import StudyView
from stepscope.runs.paths import replace_atomically
from stepscope.studies.trial_spec import levels_text

FORMAT = 1

Rows = Iterator[Sequence[Any]]
"""The names of the columns first."""

COLUMNS: dict[str, str] = {
    "samples_per_second": "samples_per_second",
    "gpu_utilization": "gpu_utilization_share",
    "gpu_sm": "gpu_sm_share",
    "cpu_share": "cpu_share",
    "data_wait_share": "data_wait_share",
    "host_memory_peak": "host_memory_peak_bytes",
    "gpu_memory_peak": "gpu_memory_peak_bytes",
    "joules_per_sample": "joules_per_sample",
}
"""What the column of a response is called."""


_INTERVAL = {"low": "samples_per_second_low", "high": "samples_per_second_high"}
_NOT_TOLD = {"outcome_text": "", "tone": ""}
_NOT_SHOWN = dict.fromkeys(("low", "high", "more", "less", "changes"), "")
"""What an interaction's sentence is made of."""


def write_tables(view: StudyView, folder: Path) -> list[Path]:
    """Write all tables into a folder, each whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, table in TABLES.items():
        path = folder / name
        replace_atomically(path, csv_text(table(view)))
        written.append(path)
    return written


def csv_text(rows: Iterable[Sequence[Any]]) -> str:
    def cell(value: Any) -> str:
        if isinstance(value, bool):
            return "true" if value else "false"
        if isinstance(value, float):
            return repr(value) if math.isfinite(value) else ""
        return "" if value is None else str(value)

    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\r\n")
    writer.writerows([cell(value) for value in row] for row in rows)
    return out.getvalue()


def _names(text: str) -> list[str]:
    return text.split()


def _factors(view: StudyView) -> list[str]:
    return [f"factor_{name}" for name in view.factors]


def _levels(view: StudyView, levels: Mapping[str, Level]) -> list[Level]:
    return [levels.get(name) for name in view.factors]


def _responses(values: Mapping[str, float]) -> list[float | None]:
    return [values.get(key) for key in COLUMNS]


def _trials(view: StudyView) -> Rows:
    """Every attempt, also those of sentinels and those that do not count."""
    results = view.results
    more = sorted({key for each in results for key in each.values} - COLUMNS.keys())
    counting = {(each.machine, each.place) for each in view.counted}
    yield [
        *_names(
            "folder key role repeat attempt block machine counts outcome reason"
            " infrastructure began_unix_seconds took_seconds"
        ),
        *(*_factors(view), *COLUMNS.values(), *more),
        *_names("samples_per_second_low samples_per_second_high steady disturbed_by held_back_by"),
    ]
    for each in results:
        counts = (each.machine, each.place) in counting
        yield [
            *(each.place, each.key, each.role, each.repeat, each.attempt, each.block),
            *(each.machine, counts, each.outcome.value, each.reason),
            *(each.infrastructure, each.began, each.seconds),
            *_levels(view, levels_of(each, view.factors)),
            *(*_responses(each.values), *(each.values.get(key) for key in more)),
            *(
                each.low,
                each.high,
                each.steady,
                "; ".join(map(interference_text, each.noise)),
                cause_title(each.cause),
            ),
        ]


def _configurations(view: StudyView) -> Rows:
    yield [
        *("key", *_factors(view), "trials", "trials_ok", "outcome", *COLUMNS.values()),
        *_names("samples_per_second_low samples_per_second_high step_seconds held_back_by"),
    ]
    for each in view.configurations:
        yield [
            *(each.key, *_levels(view, each.levels), each.trials, each.ok, each.outcome.value),
            *(*_responses(each.values), each.low, each.high, each.values.get(STEP), each.cause),
        ]


def _effects(view: StudyView) -> Rows:
    """The mean of every level; the effect of its factor beside each."""
    yield _names(
        "response unit factor level mean mean_low mean_high trials"
        " scale effect effect_low effect_high highest lowest told"
    )
    for effects in view.analysis.effects:
        response = effects.response
        for effect in effects.main:
            size = (*astuple(effect.size), effect.highest, effect.lowest, effect.is_told)
            for each in effect.levels:
                level = (COLUMNS[response.key], response.unit, effect.factor, *astuple(each))
                yield [*level, response.scale, *size]


def _interactions(view: StudyView) -> Rows:
    yield _names(
        "response unit first second first_level second_level mean trials"
        " scale size size_low size_high told says"
    )
    for effects in view.analysis.effects:
        response = effects.response
        for pair in effects.interactions:
            factors = (COLUMNS[response.key], response.unit, pair.first, pair.second)
            size = (*astuple(pair.size), pair.is_told, interaction_text(pair, response))
            for cell in pair.cells:
                yield [*factors, *astuple(cell), response.scale, *size]


def _sensitivity(view: StudyView) -> Rows:
    yield _names("group rank factor ratio ratio_low ratio_high best worst told")
    for found in view.analysis.sensitivity:
        for rank, effect in enumerate(found.effects, 1):
            size = (*astuple(effect.size), effect.highest, effect.lowest, effect.is_told)
            yield [levels_text(found.group), rank, effect.factor, *size]


def _scaling(view: StudyView) -> Rows:
    yield _names(
        "factor group level samples_per_second samples_per_second_low samples_per_second_high"
        " trials knee knee_gain knee_gain_low knee_gain_high knee_sure says"
    )
    for curve in view.analysis.curves:
        knee: tuple[Any, ...] = (None,) * 5
        if found := curve.knee:
            knee = (found.level, *astuple(found.gain), found.is_sure)
        group, says = levels_text(curve.group), curve_text(curve)
        for each in curve.points:
            yield [curve.factor, group, *astuple(each), *knee, says]


def _pareto(view: StudyView) -> Rows:
    yield ["front", "group", "place", *_factors(view), *COLUMNS.values(), "beaten"]
    for front in view.analysis.fronts:
        name = " ".join(COLUMNS[key] for key in front.responses)
        group = levels_text(front.group)
        for place, each in enumerate(front.best, 1):
            told = (*_levels(view, each.levels), *_responses(each.values))
            yield [name, group, place, *told, front.beaten]


def _blocks(view: StudyView) -> Rows:
    yield _names(
        "block began_unix_seconds trials sentinel_samples_per_second flagged run_again reasons"
    )
    for each in view.blocks:
        sentinel = (each.sentinel_rate, each.flagged, each.rerun, "; ".join(each.reasons))
        yield [each.number, each.began, each.trials, *sentinel]


def _skipped(view: StudyView) -> Rows:
    yield [*_factors(view), "reason"]
    rows = [(ordered(point.levels, view.factors), point.why) for point in view.skipped]
    for levels, why in sorted(rows, key=lambda row: (level_order(row[0]), row[1])):
        yield [*_levels(view, levels), why]


TABLES: dict[str, Callable[[StudyView], Rows]] = {
    "trials.csv": _trials,
    "configurations.csv": _configurations,
    "effects.csv": _effects,
    "interactions.csv": _interactions,
    "sensitivity.csv": _sensitivity,
    "scaling.csv": _scaling,
    "pareto.csv": _pareto,
    "blocks.csv": _blocks,
    "skipped.csv": _skipped,
}


def study_dict(view: StudyView) -> dict[str, Any]:
    analysis = view.analysis
    outcomes = Counter(each.outcome.value for each in view.counted)
    running = None
    if now := view.running:
        where = {"trial": now.trial, "share": now.share, "phase": now.phase}
        running = {"pid": now.pid, "since": now.at, **where}
    best = [
        {"group": each.group, **_renamed(each.configuration, **_INTERVAL), "as_good": each.as_good}
        for each in view.bests
    ]
    told: dict[str, Any] = to_json(
        {
            "format": FORMAT,
            "name": view.name,
            "folder": view.folder,
            "machine": view.machine,
            "state": view.state[0],
            "headline": view.headline,
            "warning": view.warning or None,
            "trials": {
                "planned": view.planned,
                "finished": len(view.counted),
                "pending": view.pending,
                "attempts": len(view.results),
                "disturbed": view.disturbed,
                "outcomes": dict(sorted(outcomes.items())),
            },
            "spent_seconds": view.spent_s,
            "left_seconds": view.left_s,
            "running": running,
            "confidence": CONFIDENCE,
            "fixed": view.design.fixed,
            "factors": view.design.factors,
            "best": best,
            "sensitivity": [
                {
                    "group": each.group,
                    "says": sensitivity_text(each),
                    "effects": [_renamed(effect, is_told="told") for effect in each.effects],
                }
                for each in analysis.sensitivity
            ],
            "effects": [_effects_dict(each) for each in analysis.effects],
            "curves": [_curve_dict(each) for each in analysis.curves],
            "fronts": [
                {
                    "group": front.group,
                    "responses": front.responses,
                    "best": [_renamed(each, **_INTERVAL) for each in front.best],
                    "beaten": front.beaten,
                }
                for front in analysis.fronts
            ],
            "configurations": [
                _renamed(each, **_INTERVAL, ok="trials_ok", cause="held_back_by", **_NOT_TOLD)
                for each in view.configurations
            ],
            "blocks": view.blocks,
            "failures": [
                {
                    "folder": each.place,
                    "machine": each.machine,
                    "outcome": each.outcome,
                    "reason": each.reason,
                }
                for each in view.failures
            ],
            "skipped": [{"levels": each.levels, "reason": each.why} for each in view.skipped],
            "remarks": (*view.not_measured, *view.notes),
        }
    )
    return told


def _renamed(record: Any, **names: str) -> dict[str, Any]:
    """The fields of a record; some under another name, and those with an empty name left out."""
    keys = {field.name: names.get(field.name, field.name) for field in fields(record)}
    return {key: getattr(record, name) for name, key in keys.items() if key}


def _effects_dict(each: Effects) -> dict[str, Any]:
    return {
        "response": each.response.key,
        "unit": each.response.unit,
        "scale": each.response.scale,
        "trials": each.trials,
        "configurations": each.configurations,
        "noise": each.noise,
        "explained": each.explained,
        "main": [_renamed(effect, is_told="told") for effect in each.main],
        "interactions": [
            {**_renamed(pair, **_NOT_SHOWN), "says": interaction_text(pair, each.response)}
            for pair in each.interactions
        ],
        "remarks": [remark_text(remark) for remark in each.remarks],
    }


def _curve_dict(curve: ScalingCurve) -> dict[str, Any]:
    knee, says = curve.knee, curve_text(curve)
    return {
        "factor": curve.factor,
        "group": curve.group,
        "points": curve.points,
        "knee": knee and {**_renamed(knee, best="", fall=""), "says": says},
        "why_no_knee": "" if knee else says,
    }
