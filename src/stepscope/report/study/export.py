"""Export of a study: one JSON object, and tables as CSV files.

Keys and columns are never renamed, only added. Numbers have full precision, and the unit is in the
name. A share is a fraction from 0 to 1. A missing value is null in JSON and empty in CSV. Tables
are deterministic: only `trials.csv` and `blocks.csv` depend on times and attempts.
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
    Configuration,
    Effects,
    Estimate,
    Level,
    ScalingCurve,
)
from stepscope.analysis.trial.throughput import CONFIDENCE
from stepscope.records.codec import to_json
from stepscope.report.bottleneck.messages import cause_title
from stepscope.report.study.configurations import STEP, level_order, levels_of, ordered
from stepscope.report.study.messages import (
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
"""Values by column name; columns without a value are empty."""
Table = tuple[Sequence[str], Iterable[Row]]
"""Column names and rows."""

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
"""Names of responses in JSON and CSV, with their unit."""

# Names of fields in JSON and CSV, for `_renamed`; fields with an empty name are left out.
_INTERVAL = {"low": "samples_per_second_low", "high": "samples_per_second_high"}
_SIGNIFICANT = {"is_significant": "significant"}
_CONFIGURATION = {
    **_INTERVAL,
    "ok": "trials_ok",
    "cause": "bottleneck",
    "outcome_text": "",
    "tone": "",
}
_BLOCK = {
    "number": "block",
    "started": "started_unix_seconds",
    "reference_throughput": "reference_samples_per_second",
}
_TRIAL = {
    **dict.fromkeys(("settings", "values", "interference", "cause"), ""),
    **_INTERVAL,
    "started": "started_unix_seconds",
    "seconds": "duration_seconds",
}
_KNEE = {"best": "", "fall": "", "is_certain": "certain"}


def write_tables(view: StudyView, folder: Path) -> list[Path]:
    """Write all tables to a folder, each of them atomically."""
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


def _with_units(values: Mapping[str, float]) -> Row:
    return {COLUMNS.get(key, key): value for key, value in values.items()}


def _estimate(name: str, estimate: Estimate) -> Row:
    return {name: estimate.value, f"{name}_low": estimate.low, f"{name}_high": estimate.high}


def _trials(view: StudyView) -> Table:
    """All attempts, including reference trials and those that do not count."""
    more = sorted({key for each in view.results for key in each.values} - COLUMNS.keys())
    columns = [
        *("folder", "key", "role", "repeat", "attempt", "block", "machine", "counted", "outcome"),
        *("reason", "infrastructure", "started_unix_seconds", "duration_seconds"),
        *(*_factor_columns(view), *COLUMNS.values(), *more, *_INTERVAL.values()),
        *("steady", "interference", "bottleneck"),
    ]
    counting = {(each.machine, each.place) for each in view.counted}
    return columns, (
        {
            **_renamed(each, **_TRIAL),
            "folder": each.place,
            "counted": (each.machine, each.place) in counting,
            "outcome": each.outcome.value,
            **_levels(view, levels_of(each, view.factors)),
            **_responses(each.values),
            **{key: each.values.get(key) for key in more},
            "interference": "; ".join(map(interference_text, each.interference)),
            "bottleneck": cause_title(each.cause),
        }
        for each in view.results
    )


def _configurations(view: StudyView) -> Table:
    columns = [
        *("key", *_factor_columns(view), "trials", "trials_ok", "outcome", *COLUMNS.values()),
        *(*_INTERVAL.values(), "step_seconds", "bottleneck"),
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
    """One row per level: its marginal mean, and the main effect of its factor."""
    columns = [
        *("response", "unit", "factor", "level", "mean", "mean_low", "mean_high", "trials"),
        *("scale", "effect", "effect_low", "effect_high"),
        *("highest_level", "lowest_level", "significant"),
    ]
    return columns, (
        {
            "response": COLUMNS[effects.response.key],
            "unit": effects.response.unit,
            "scale": effects.response.scale,
            **_renamed(each, low="mean_low", high="mean_high"),
            **_renamed(effect, levels="", size="", **_SIGNIFICANT),
            **_estimate("effect", effect.size),
        }
        for effects in view.analysis.effects
        for effect in effects.main
        for each in effect.levels
    )


def _interactions(view: StudyView) -> Table:
    columns = [
        *("response", "unit", "first", "second", "first_level", "second_level", "mean", "trials"),
        *("scale", "size", "size_low", "size_high", "significant", "summary"),
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
            "significant": pair.is_significant,
            "summary": interaction_text(pair, effects.response),
        }
        for effects in view.analysis.effects
        for pair in effects.interactions
        for cell in pair.cells
    )


def _sensitivity(view: StudyView) -> Table:
    size = ("ratio", "ratio_low", "ratio_high")
    columns = ("group", "rank", "factor", *size, "best_level", "worst_level", "significant")
    names = {"highest_level": "best_level", "lowest_level": "worst_level", **_SIGNIFICANT}
    return columns, (
        {
            "group": levels_text(ranking.group),
            "rank": rank,
            **_renamed(effect, levels="", size="", **names),
            **_estimate("ratio", effect.size),
        }
        for ranking in view.analysis.sensitivity
        for rank, effect in enumerate(ranking.effects, 1)
    )


def _scaling(view: StudyView) -> Table:
    columns = [
        *("factor", "group", "level", "samples_per_second", *_INTERVAL.values(), "trials"),
        *("knee", "knee_gain", "knee_gain_low", "knee_gain_high", "knee_certain", "summary"),
    ]
    rows: list[Row] = []
    for curve in view.analysis.curves:
        columns_of_knee: Row = {}
        if knee := curve.knee:
            columns_of_knee = {
                "knee": knee.level,
                **_estimate("knee_gain", knee.gain),
                "knee_certain": knee.is_certain,
            }
        rows += [
            {
                "factor": curve.factor,
                "group": levels_text(curve.group),
                **_renamed(each, mean="samples_per_second", **_INTERVAL),
                **columns_of_knee,
                "summary": curve_text(curve),
            }
            for each in curve.points
        ]
    return columns, rows


def _pareto(view: StudyView) -> Table:
    columns = ["front", "group", "rank", *_factor_columns(view), *COLUMNS.values(), "dominated"]
    return columns, (
        {
            "front": " ".join(COLUMNS[key] for key in front.responses),
            "group": levels_text(front.group),
            "rank": rank,
            **_levels(view, each.levels),
            **_responses(each.values),
            "dominated": front.dominated,
        }
        for front in view.analysis.fronts
        for rank, each in enumerate(front.configurations, 1)
    )


def _blocks(view: StudyView) -> Table:
    columns = [
        *("block", "started_unix_seconds", "trials", "reference_samples_per_second"),
        *("flagged", "rerun", "reasons"),
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
        running = {
            "pid": now.pid,
            "updated_unix_seconds": now.at,
            "trial": now.trial,
            "phase": now.phase,
            "progress_share": now.share,
        }
    best = [
        {
            "group": each.group,
            **_configuration_dict(each.configuration),
            "equivalent": each.equivalent,
        }
        for each in view.bests
    ]
    exported: dict[str, Any] = to_json(
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
                "done": len(view.counted),
                "remaining": view.remaining,
                "reruns": view.reruns,
                "attempts": len(view.results),
                "with_interference": view.with_interference,
                "outcomes": dict(sorted(outcomes.items())),
            },
            "elapsed_seconds": view.elapsed_s,
            "remaining_seconds": _sum(view.remaining_s, view.reruns_s),
            "running": running,
            "confidence_level": CONFIDENCE,
            "fixed": view.design.fixed,
            "factors": view.design.factors,
            "best": best,
            "sensitivity": [
                {
                    "group": each.group,
                    "summary": sensitivity_text(each),
                    "effects": [_renamed(effect, **_SIGNIFICANT) for effect in each.effects],
                }
                for each in analysis.sensitivity
            ],
            "effects": [_effects_dict(each) for each in analysis.effects],
            "curves": [_curve_dict(each) for each in analysis.curves],
            "fronts": [
                {
                    "group": front.group,
                    "responses": [COLUMNS[key] for key in front.responses],
                    "configurations": [_configuration_dict(each) for each in front.configurations],
                    "dominated": front.dominated,
                }
                for front in analysis.fronts
            ],
            "configurations": [
                {**_renamed(each, **_CONFIGURATION), "values": _with_units(each.values)}
                for each in view.configurations
            ],
            "blocks": [_renamed(each, **_BLOCK) for each in view.blocks],
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
            "notes": (*view.not_measured, *view.notes),
        }
    )
    return exported


def _renamed(record: Any, **names: str) -> dict[str, Any]:
    """Return the fields of a record by their new names, without those whose name is empty."""
    keys = {field.name: names.get(field.name, field.name) for field in fields(record)}
    return {key: getattr(record, name) for name, key in keys.items() if key}


def _configuration_dict(each: Configuration) -> dict[str, Any]:
    return {**_renamed(each, **_INTERVAL), "values": _with_units(each.values)}


def _sum(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else one + other


def _effects_dict(each: Effects) -> dict[str, Any]:
    return {
        "response": COLUMNS[each.response.key],
        "unit": each.response.unit,
        "scale": each.response.scale,
        "trials": each.trials,
        "configurations": each.configurations,
        "noise": each.noise,
        "explained_variance_share": each.explained_variance_share,
        "main": [_renamed(effect, **_SIGNIFICANT) for effect in each.main],
        "interactions": [
            {**_renamed(pair, **_SIGNIFICANT), "summary": interaction_text(pair, each.response)}
            for pair in each.interactions
        ],
        "notes": [remark_text(remark) for remark in each.remarks],
    }


def _curve_dict(curve: ScalingCurve) -> dict[str, Any]:
    return {
        "factor": curve.factor,
        "group": curve.group,
        "points": [_renamed(each, mean="samples_per_second", **_INTERVAL) for each in curve.points],
        "knee": curve.knee and _renamed(curve.knee, **_KNEE),
        "summary": curve_text(curve),
    }
