"""The tables of a study as CSV files, for whoever goes on with them.

Columns are never renamed, only added. Numbers have all their digits, and their unit stands in the
name of the column; shares are parts of 1, what is missing is empty. The same results make the same
bytes: when and how often something was tried stands in `trials.csv` and `blocks.csv` alone.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from stepscope.analysis.study.records import Level
from stepscope.report.study import StudyView
from stepscope.report.studypoints import STEP, level_order, levels_of, ordered
from stepscope.runs.paths import replace_atomically
from stepscope.studies.spec import levels_text

Rows = Iterable[Sequence[Any]]

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
"""How a response is called in a table."""


def write_tables(view: StudyView, folder: Path) -> list[Path]:
    """Write all tables into a folder, each whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, table in TABLES.items():
        path = folder / name
        replace_atomically(path, csv_text(table(view)))
        written.append(path)
    return written


def csv_text(rows: Rows) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\r\n")
    writer.writerows([_cell(value) for value in row] for row in rows)
    return out.getvalue()


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return repr(value) if math.isfinite(value) else ""
    return "" if value is None else str(value)


def trial_rows(view: StudyView) -> Iterator[Sequence[Any]]:
    """Every attempt, also those of sentinels and those that do not count."""
    results = view.contents.results
    more = sorted({key for each in results for key in each.values} - COLUMNS.keys())
    counting = {(each.machine, each.place) for each in view.contents.counted}
    yield (
        "folder", "key", "role", "repeat", "attempt", "block", "machine", "counts", "outcome",
        "reason", "infrastructure", "began_unix_seconds", "took_seconds",
        *(f"factor_{name}" for name in view.factors), *COLUMNS.values(), *more,
        "samples_per_second_low", "samples_per_second_high", "steady", "disturbed_by",
        "held_back_by",
    )  # fmt: skip
    for each in results:
        yield (
            each.place, each.key, each.role, each.repeat, each.attempt, each.block, each.machine,
            (each.machine, each.place) in counting, each.outcome.value, each.reason,
            each.infrastructure, each.began, each.seconds,
            *levels_of(each, view.factors).values(), *_values(each.values),
            *(each.values.get(key) for key in more), each.low, each.high, each.steady,
            "; ".join(each.noise), each.cause,
        )  # fmt: skip


def configuration_rows(view: StudyView) -> Iterator[Sequence[Any]]:
    yield (
        "key", *(f"factor_{name}" for name in view.factors), "trials", "trials_ok", "outcome",
        *COLUMNS.values(), "samples_per_second_low", "samples_per_second_high", "step_seconds",
        "held_back_by",
    )  # fmt: skip
    for each in view.points:
        yield (
            each.key, *(each.levels.get(name) for name in view.factors), each.trials, each.ok,
            each.outcome.value, *_values(each.values), each.low, each.high,
            each.values.get(STEP), each.cause,
        )  # fmt: skip


def effect_rows(view: StudyView) -> Iterator[Sequence[Any]]:
    """The mean of every level; the effect of its factor beside each."""
    yield (
        "response", "unit", "factor", "level", "mean", "mean_low", "mean_high", "trials", "scale",
        "effect", "effect_low", "effect_high", "highest", "lowest", "told",
    )  # fmt: skip
    for effects in view.analysis.effects:
        response = effects.response
        for effect in effects.main:
            size = effect.size
            for each in effect.levels:
                yield (
                    COLUMNS[response.key], response.unit, effect.factor, each.level, each.mean,
                    each.low, each.high, each.trials, response.scale, size.value, size.low,
                    size.high, effect.highest, effect.lowest, effect.is_told,
                )  # fmt: skip


def interaction_rows(view: StudyView) -> Iterator[Sequence[Any]]:
    yield (
        "response", "unit", "first", "second", "first_level", "second_level", "mean", "trials",
        "scale", "size", "size_low", "size_high", "told", "says",
    )  # fmt: skip
    for effects in view.analysis.effects:
        response = effects.response
        for each in effects.interactions:
            size = each.size
            for cell in each.cells:
                yield (
                    COLUMNS[response.key], response.unit, each.first, each.second, cell.first,
                    cell.second, cell.mean, cell.trials, response.scale, size.value, size.low,
                    size.high, each.is_told, each.says,
                )  # fmt: skip


def sensitivity_rows(view: StudyView) -> Iterator[Sequence[Any]]:
    yield "group", "rank", "factor", "ratio", "ratio_low", "ratio_high", "best", "worst", "told"
    for each in view.analysis.sensitivity:
        for rank, effect in enumerate(each.effects, 1):
            size = effect.size
            yield (
                _group(each.group), rank, effect.factor, size.value, size.low, size.high,
                effect.highest, effect.lowest, effect.is_told,
            )  # fmt: skip


def scaling_rows(view: StudyView) -> Iterator[Sequence[Any]]:
    yield (
        "factor", "group", "level", "samples_per_second", "samples_per_second_low",
        "samples_per_second_high", "trials", "knee", "knee_gain", "knee_gain_low",
        "knee_gain_high", "knee_sure", "says",
    )  # fmt: skip
    for view_of in view.curves:
        curve, knee = view_of.curve, view_of.curve.knee
        told = (None,) * 5
        if knee:
            gain = knee.gain
            told = (knee.level, gain.value, gain.low, gain.high, knee.is_sure)  # type: ignore[assignment]
        for each in curve.points:
            yield (
                curve.factor, _group(curve.group), each.level, each.mean, each.low, each.high,
                each.trials, *told, view_of.says,
            )  # fmt: skip


def pareto_rows(view: StudyView) -> Iterator[Sequence[Any]]:
    yield (
        "front", "group", "place", *(f"factor_{name}" for name in view.factors),
        *COLUMNS.values(), "beaten",
    )  # fmt: skip
    for front in view.analysis.fronts:
        name = " ".join(COLUMNS[key] for key in front.responses)
        for place, each in enumerate(front.best, 1):
            levels = (each.levels.get(factor) for factor in view.factors)
            yield name, _group(front.group), place, *levels, *_values(each.values), front.beaten


def block_rows(view: StudyView) -> Iterator[Sequence[Any]]:
    yield (
        "block", "began_unix_seconds", "trials", "sentinel_samples_per_second", "flagged",
        "run_again", "reasons",
    )  # fmt: skip
    for each in view.blocks:
        yield (
            each.number, each.began, each.trials, each.sentinel_rate, each.flagged, each.rerun,
            "; ".join(each.reasons),
        )  # fmt: skip


def skipped_rows(view: StudyView) -> Iterator[Sequence[Any]]:
    yield *(f"factor_{name}" for name in view.factors), "reason"
    rows = ((ordered(levels, view.factors), why) for levels, why in view.contents.skipped)
    for levels, why in sorted(rows, key=lambda row: (level_order(row[0]), row[1])):
        yield *(levels.get(name) for name in view.factors), why


def _values(values: Mapping[str, float]) -> Iterator[float | None]:
    return (values.get(key) for key in COLUMNS)


def _group(group: Mapping[str, Level]) -> str:
    return levels_text(group) if group else ""


TABLES: dict[str, Callable[[StudyView], Iterator[Sequence[Any]]]] = {
    "trials.csv": trial_rows,
    "configurations.csv": configuration_rows,
    "effects.csv": effect_rows,
    "interactions.csv": interaction_rows,
    "sensitivity.csv": sensitivity_rows,
    "scaling.csv": scaling_rows,
    "pareto.csv": pareto_rows,
    "blocks.csv": block_rows,
    "skipped.csv": skipped_rows,
}
