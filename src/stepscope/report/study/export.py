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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from stepscope.analysis.study.records import (
    Effects,
    Estimate,
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

Row = Mapping[str, Any]
"""A row of a table by the names of its columns; what is not in it is missing."""
Table = tuple[Sequence[str], Iterable[Row]]
"""Its columns in their order, and its rows."""

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

# Names of fields as columns and keys, for `_renamed`; what has an empty one is left out.
_INTERVAL = {"low": "samples_per_second_low", "high": "samples_per_second_high"}
_TOLD = {"is_significant": "told"}
_CONFIGURATION = {
    **_INTERVAL,
    "ok": "trials_ok",
    "cause": "held_back_by",
    "outcome_text": "",
    "tone": "",
}
_BLOCK = {
    "number": "block",
    "began": "began_unix_seconds",
    "sentinel_rate": "sentinel_samples_per_second",
    "rerun": "run_again",
}
_TRIAL = {
    **dict.fromkeys(("settings", "values", "noise", "cause"), ""),
    **_INTERVAL,
    "began": "began_unix_seconds",
    "seconds": "took_seconds",
}
_INTERACTION = {  # without what its sentence is made of
    **dict.fromkeys(("low", "high", "more", "less", "changes"), ""),
    "is_significant": "is_told",
}


def write_tables(view: StudyView, folder: Path) -> list[Path]:
    """Write all tables into a folder, each whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, table in TABLES.items():
        path = folder / name
        replace_atomically(path, csv_text(*table(view)))
        written.append(path)
    return written


def csv_text(columns: Sequence[str], rows: Iterable[Row]) -> str:
    def cell(value: Any) -> str:
        if isinstance(value, bool):
            return "true" if value else "false"
        if isinstance(value, float):
            return repr(value) if math.isfinite(value) else ""
        return "" if value is None else str(value)

    out = io.StringIO()
    writer = csv.DictWriter(out, columns, lineterminator="\r\n")
    writer.writeheader()
    writer.writerows({name: cell(value) for name, value in row.items()} for row in rows)
    return out.getvalue()


def _factor_columns(view: StudyView) -> list[str]:
    return [f"factor_{name}" for name in view.factors]


def _levels(view: StudyView, levels: Mapping[str, Level]) -> Row:
    return {f"factor_{name}": levels.get(name) for name in view.factors}


def _responses(values: Mapping[str, float]) -> Row:
    return {column: values.get(key) for key, column in COLUMNS.items()}


def _estimate(name: str, estimate: Estimate) -> Row:
    return {name: estimate.value, f"{name}_low": estimate.low, f"{name}_high": estimate.high}


def _trials(view: StudyView) -> Table:
    """Every attempt, also those of sentinels and those that do not count."""
    more = sorted({key for each in view.results for key in each.values} - COLUMNS.keys())
    columns = [
        *("folder", "key", "role", "repeat", "attempt", "block", "machine", "counts", "outcome"),
        *("reason", "infrastructure", "began_unix_seconds", "took_seconds"),
        *(*_factor_columns(view), *COLUMNS.values(), *more, *_INTERVAL.values()),
        *("steady", "disturbed_by", "held_back_by"),
    ]
    counting = {(each.machine, each.place) for each in view.counted}
    return columns, (
        {
            **_renamed(each, **_TRIAL),
            "folder": each.place,
            "counts": (each.machine, each.place) in counting,
            "outcome": each.outcome.value,
            **_levels(view, levels_of(each, view.factors)),
            **_responses(each.values),
            **{key: each.values.get(key) for key in more},
            "disturbed_by": "; ".join(map(interference_text, each.noise)),
            "held_back_by": cause_title(each.cause),
        }
        for each in view.results
    )


def _configurations(view: StudyView) -> Table:
    columns = [
        *("key", *_factor_columns(view), "trials", "trials_ok", "outcome", *COLUMNS.values()),
        *(*_INTERVAL.values(), "step_seconds", "held_back_by"),
    ]
    return columns, (
        {
            **_renamed(each, levels="", values="", **_CONFIGURATION),
            "outcome": each.outcome.value,
            **_levels(view, each.levels),
            **_responses(each.values),
            "step_seconds": each.values.get(STEP),
        }
        for each in view.configurations
    )


def _effects(view: StudyView) -> Table:
    """The mean of every level; the effect of its factor beside each."""
    columns = [
        *("response", "unit", "factor", "level", "mean", "mean_low", "mean_high", "trials"),
        *("scale", "effect", "effect_low", "effect_high", "highest", "lowest", "told"),
    ]
    return columns, (
        {
            "response": COLUMNS[effects.response.key],
            "unit": effects.response.unit,
            "scale": effects.response.scale,
            **_renamed(each, low="mean_low", high="mean_high"),
            **_renamed(effect, levels="", size="", **_TOLD),
            **_estimate("effect", effect.size),
        }
        for effects in view.analysis.effects
        for effect in effects.main
        for each in effect.levels
    )


def _interactions(view: StudyView) -> Table:
    columns = [
        *("response", "unit", "first", "second", "first_level", "second_level", "mean", "trials"),
        *("scale", "size", "size_low", "size_high", "told", "says"),
    ]
    return columns, (
        {
            "response": COLUMNS[effects.response.key],
            "unit": effects.response.unit,
            "first": pair.first,
            "second": pair.second,
            **_renamed(cell, first="first_level", second="second_level"),
            "scale": effects.response.scale,
            **_estimate("size", pair.size),
            "told": pair.is_significant,
            "says": interaction_text(pair, effects.response),
        }
        for effects in view.analysis.effects
        for pair in effects.interactions
        for cell in pair.cells
    )


def _sensitivity(view: StudyView) -> Table:
    size = ("ratio", "ratio_low", "ratio_high")
    columns = ("group", "rank", "factor", *size, "best", "worst", "told")
    return columns, (
        {
            "group": levels_text(found.group),
            "rank": rank,
            **_renamed(effect, levels="", size="", highest="best", lowest="worst", **_TOLD),
            **_estimate("ratio", effect.size),
        }
        for found in view.analysis.sensitivity
        for rank, effect in enumerate(found.effects, 1)
    )


def _scaling(view: StudyView) -> Table:
    columns = [
        *("factor", "group", "level", "samples_per_second", *_INTERVAL.values(), "trials"),
        *("knee", "knee_gain", "knee_gain_low", "knee_gain_high", "knee_sure", "says"),
    ]
    rows: list[Row] = []
    for curve in view.analysis.curves:
        knee: Row = {}
        if found := curve.knee:
            gain = _estimate("knee_gain", found.gain)
            knee = {"knee": found.level, **gain, "knee_sure": found.is_sure}
        rows += [
            {
                "factor": curve.factor,
                "group": levels_text(curve.group),
                **_renamed(each, mean="samples_per_second", **_INTERVAL),
                **knee,
                "says": curve_text(curve),
            }
            for each in curve.points
        ]
    return columns, rows


def _pareto(view: StudyView) -> Table:
    columns = ["front", "group", "place", *_factor_columns(view), *COLUMNS.values(), "beaten"]
    return columns, (
        {
            "front": " ".join(COLUMNS[key] for key in front.responses),
            "group": levels_text(front.group),
            "place": place,
            **_levels(view, each.levels),
            **_responses(each.values),
            "beaten": front.beaten,
        }
        for front in view.analysis.fronts
        for place, each in enumerate(front.best, 1)
    )


def _blocks(view: StudyView) -> Table:
    columns = [
        *("block", "began_unix_seconds", "trials", "sentinel_samples_per_second"),
        *("flagged", "run_again", "reasons"),
    ]
    return columns, (
        {**_renamed(each, **_BLOCK), "reasons": "; ".join(each.reasons)} for each in view.blocks
    )


def _skipped(view: StudyView) -> Table:
    rows = [(ordered(point.levels, view.factors), point.why) for point in view.skipped]
    rows.sort(key=lambda row: (level_order(row[0]), row[1]))
    columns = [*_factor_columns(view), "reason"]
    return columns, ({**_levels(view, levels), "reason": why} for levels, why in rows)


TABLES: dict[str, Callable[[StudyView], Table]] = {
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
                    "effects": [_renamed(effect, **_TOLD) for effect in each.effects],
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
            "configurations": [_renamed(each, **_CONFIGURATION) for each in view.configurations],
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
        "main": [_renamed(effect, **_TOLD) for effect in each.main],
        "interactions": [
            {**_renamed(pair, **_INTERACTION), "says": interaction_text(pair, each.response)}
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
