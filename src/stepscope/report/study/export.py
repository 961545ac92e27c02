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
from stepscope.runs.files import replace_atomically
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
INTERVAL = {"low": "samples_per_second_low", "high": "samples_per_second_high"}
SIGNIFICANT = {"is_significant": "significant"}
CONFIGURATION = {
    **INTERVAL,
    "ok": "trials_ok",
    "cause": "bottleneck",
    "outcome_text": "",
    "tone": "",
}
BLOCK = {
    "number": "block",
    "started": "started_unix_seconds",
    "reference_throughput": "reference_samples_per_second",
}
_TRIAL = {
    **dict.fromkeys(("settings", "values", "interference", "cause"), ""),
    **INTERVAL,
    "started": "started_unix_seconds",
    "seconds": "duration_seconds",
}
KNEE = {"best": "", "fall": "", "is_certain": "certain"}


def write_tables(view: StudyView, folder: Path) -> list[Path]:
    """Write all tables to a folder, each of them atomically."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, table in TABLES.items():
        path = folder / name
        replace_atomically(path, csv_text(*table(view)), folder.parent)
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
        *(*_factor_columns(view), *COLUMNS.values(), *more, *INTERVAL.values()),
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
        *(*INTERVAL.values(), "step_seconds", "bottleneck"),
    ]
    return columns, (
        {
            **_renamed(each, levels="", values="", **CONFIGURATION),
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
            **_renamed(effect, levels="", size="", **SIGNIFICANT),
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
    names = {"highest_level": "best_level", "lowest_level": "worst_level", **SIGNIFICANT}
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
        *("factor", "group", "level", "samples_per_second", *INTERVAL.values(), "trials"),
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
                **_renamed(each, mean="samples_per_second", **INTERVAL),
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
        {**_renamed(each, **BLOCK), "reasons": "; ".join(each.reasons)} for each in view.blocks
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
            "pid": now.pid,  # process that runs the study
            "updated_unix_seconds": now.at,  # time of the last update
            "trial": now.trial,  # levels of the running trial
            "phase": now.phase,  # what the trial is doing
            "progress_share": now.share,  # completed share of the trial, 0 to 1
        }
    best = [
        {
            "group": each.group,  # levels that define the group; empty for all trials
            **_configuration_dict(each.configuration),
            "equivalent": each.equivalent,  # configurations not significantly slower
        }
        for each in view.bests
    ]
    exported: dict[str, Any] = to_json(
        {
            "format": FORMAT,  # schema version
            "name": view.name,  # name of the study
            "folder": view.folder,  # folder of the study
            "machine": view.machine,  # machine that the study ran on
            "state": view.state[0],  # `running`, `not finished` or `finished`
            "headline": view.headline,  # state in one line
            "warning": view.warning or None,  # what limits the conclusions; null if nothing
            "trials": {  # trial counts
                "planned": view.planned,  # trials of the design that the machine can run
                "done": len(view.counted),  # trials with a result
                "remaining": view.remaining,  # trials without a result that are still to run
                "reruns": view.reruns,  # trials with a result that run again
                "attempts": len(view.results),  # all attempts, including reference trials
                "with_interference": view.with_interference,  # trials in flagged blocks
                "outcomes": dict(sorted(outcomes.items())),  # number of trials by outcome
            },
            "elapsed_seconds": view.elapsed_s,  # total duration of all finished trials
            # estimated remaining time, in seconds; null if unknown
            "remaining_seconds": _sum(view.remaining_s, view.reruns_s),
            "running": running,  # the running trial; null if none
            "confidence_level": CONFIDENCE,  # confidence level of all intervals
            "fixed": view.design.fixed,  # settings and limits with one value
            "factors": view.design.factors,  # factors, each with name and levels
            "best": best,  # the fastest configuration of each group
            "sensitivity": [  # main effects on throughput, by group
                {
                    "group": each.group,  # levels that define the group; empty for all trials
                    "summary": sensitivity_text(each),  # which factors matter, as text
                    # main effects, the largest first
                    "effects": [_renamed(effect, **SIGNIFICANT) for effect in each.effects],
                }
                for each in analysis.sensitivity
            ],
            # effects on each response
            "effects": [effects_dict(each) for each in analysis.effects],
            # throughput by level of each numeric factor
            "curves": [curve_dict(each) for each in analysis.curves],
            "fronts": [  # Pareto fronts
                {
                    "group": front.group,  # the model if there are several
                    "responses": [COLUMNS[key] for key in front.responses],  # what is compared
                    # configurations on the front, the fastest first
                    "configurations": [_configuration_dict(each) for each in front.configurations],
                    "dominated": front.dominated,  # number of other configurations
                }
                for front in analysis.fronts
            ],
            "configurations": [  # every configuration that was run
                {**_renamed(each, **CONFIGURATION), "values": _with_units(each.values)}
                for each in view.configurations
            ],
            # blocks of trials
            "blocks": [_renamed(each, **BLOCK) for each in view.blocks],
            "failures": [  # attempts without a usable result
                {
                    "folder": each.place,  # run folder, relative to the study
                    "machine": each.machine,  # machine, in a merged study
                    "outcome": each.outcome,  # outcome of the trial
                    "reason": each.reason,  # reason for the outcome
                }
                for each in view.failures
            ],
            # combinations that are not run, each with levels and reason
            "skipped": [{"levels": each.levels, "reason": each.why} for each in view.skipped],
            "notes": (*view.not_measured, *view.notes),  # limitations, as text
        }
    )
    return exported


def _renamed(record: Any, **names: str) -> dict[str, Any]:
    """Return the fields of a record by their new names, without those whose name is empty."""
    keys = {field.name: names.get(field.name, field.name) for field in fields(record)}
    return {key: getattr(record, name) for name, key in keys.items() if key}


def _configuration_dict(each: Configuration) -> dict[str, Any]:
    return {**_renamed(each, name="key", **INTERVAL), "values": _with_units(each.values)}


def _sum(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else one + other


def effects_dict(each: Effects) -> dict[str, Any]:
    return {
        "response": COLUMNS[each.response.key],  # name of the response
        "unit": each.response.unit,  # unit of the response
        "scale": each.response.scale,  # `ratio` or `difference`: how sizes are expressed
        "trials": each.trials,  # number of successful trials
        "configurations": each.configurations,  # number of configurations
        "noise": each.noise,  # variation between identical trials
        "explained_variance_share": each.explained_variance_share,
        # effect of each factor, the largest first
        "main": [_renamed(effect, **SIGNIFICANT) for effect in each.main],
        "interactions": [  # how effects depend on other factors
            {
                **_renamed(pair, **SIGNIFICANT),
                "summary": interaction_text(pair, each.response),  # the interaction in a sentence
            }
            for pair in each.interactions
        ],
        "notes": [remark_text(remark) for remark in each.remarks],  # limitations, as text
    }


def curve_dict(curve: ScalingCurve) -> dict[str, Any]:
    return {
        "factor": curve.factor,  # name of the factor
        "group": curve.group,  # levels of other factors; empty for all trials
        # mean throughput by level
        "points": [_renamed(each, mean="samples_per_second", **INTERVAL) for each in curve.points],
        "knee": curve.knee and _renamed(curve.knee, **KNEE),  # the knee; null if there is none
        "summary": curve_text(curve),  # the curve in a sentence
    }
