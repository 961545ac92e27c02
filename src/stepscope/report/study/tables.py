"""The tables of a study."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime, timezone

from stepscope.analysis.study.records import RESPONSES, THROUGHPUT, Effects, Front, Sensitivity
from stepscope.report.kit.format import (
    MISSING,
    bytes_text,
    count_text,
    is_known,
    rate_text,
    seconds_text,
    share_text,
    significant,
    upper_first,
)
from stepscope.report.kit.table import Column, RowTone, Table
from stepscope.report.study.configurations import STEP, ConfigurationRow, levels_of, ordered
from stepscope.report.study.format import (
    INTERVAL,
    energy_text,
    interval_text,
    measured_text,
    rate_interval,
    size_interval,
    size_text,
    thinned,
)
from stepscope.report.study.messages import best_level, effect_text, significance_text
from stepscope.report.study.view import BlockLine, StudyView, skipped_groups
from stepscope.studies.results import Result
from stepscope.studies.trial_spec import level_text, levels_text

_MAX_FAILED = 5
"""Rows without a successful trial in a shortened table: an out-of-memory outcome is a result."""
_MAX_LEVELS = 16
"""Levels of a factor in a table; more are thinned evenly."""
_BAR_WIDTH = 18
_CONFIGURATION = Column("Configuration", number=False, wrap=True)
_REASON = Column("Reason", number=False, wrap=True)


def _step_text(seconds: float | None) -> str:
    if not is_known(seconds) or seconds >= 0.9995:
        return seconds_text(seconds)
    return f"{significant(seconds * 1000)} ms"


_RESULTS: tuple[tuple[Column, Callable[[ConfigurationRow], str]], ...] = (
    (Column("Trials", drop=4), lambda row: count_text(row.trials)),
    (Column("Samples/s"), lambda row: rate_text(row.throughput)),
    (Column(INTERVAL, drop=1), lambda row: rate_interval(row.low, row.high) or MISSING),
    (Column("Step time", drop=7), lambda row: _step_text(row.values.get(STEP))),
    (Column("GPU util.", drop=2), lambda row: share_text(row.values.get("gpu_utilization"))),
    (Column("SM activity", drop=9), lambda row: share_text(row.values.get("gpu_sm"))),
    (Column("CPU util.", drop=6), lambda row: share_text(row.values.get("cpu_share"))),
    (Column("Data wait", drop=5), lambda row: share_text(row.values.get("data_wait_share"))),
    (Column("Host memory", drop=2), lambda row: bytes_text(row.values.get("host_memory_peak"))),
    (Column("GPU memory", drop=2), lambda row: bytes_text(row.values.get("gpu_memory_peak"))),
    (Column("J/sample", drop=3), lambda row: energy_text(row.values.get("joules_per_sample"))),
    (Column("Outcome", number=False, colored=True), lambda row: row.outcome_text),
    (Column("Bottleneck", number=False, drop=8, wrap=True), lambda row: row.cause or MISSING),
)


def configurations(
    view: StudyView, rows: Sequence[ConfigurationRow], is_folded: bool = False
) -> Table:
    """One row per configuration and one column per factor, or all factors in the last column."""
    numeric = {
        factor.name: factor.is_numeric for factor in (*view.analysis.factors, *view.design.factors)
    }

    def level(name: str) -> Callable[[ConfigurationRow], str]:
        return lambda row: level_text(name, row.levels.get(name))

    factors = [(Column(name, numeric.get(name, False)), level(name)) for name in view.factors]
    table = Table.of(rows, [*factors, *_RESULTS])
    if is_folded:
        levels = (_CONFIGURATION, lambda row: levels_text(ordered(row.levels, view.factors)))
        table = Table.of(rows, [*_RESULTS, levels])
    return replace(table, tones=tuple(row.tone for row in rows)).without_empty_columns()


def first_rows(view: StudyView, most: int) -> Sequence[ConfigurationRow]:
    """Return the fastest rows, and some without a successful trial, if there are too many."""
    if len(view.configurations) <= most:
        return view.configurations
    failed = [row for row in view.configurations if not row.ok][:_MAX_FAILED]
    return [*view.configurations[: most - len(failed)], *failed]


def ranking(ranking: Sensitivity, with_bars: bool = False) -> Table:
    """Factors by the size of their main effect; the bars are logarithmic and start at 1×."""
    response = RESPONSES[THROUGHPUT]
    sizes = [effect.size.value for effect in ranking.effects]
    logs = [math.log(size) if is_known(size) and size > 0 else 0.0 for size in sizes]
    most = max(logs, default=0.0) or 1.0
    bars = ["█" * round(_BAR_WIDTH * max(0.0, each) / most) or "▏" for each in logs]
    columns = (
        Column("Factor", number=False),
        Column("Effect"),
        Column(INTERVAL),
        Column("Best level", number=False),
        Column("Significance", number=False),
        Column("", number=False, drop=1),
    )
    rows = tuple(
        (
            effect.factor,
            size_text(effect.size, response),
            size_interval(effect.size, response),
            best_level(effect, response),
            significance_text(effect.size, response) or "significant",
            bar,
        )
        for effect, bar in zip(ranking.effects, bars, strict=True)
    )
    tones: tuple[RowTone, ...] = tuple("" if e.is_significant else "weak" for e in ranking.effects)
    table = Table(columns, rows, tones)
    return table if with_bars else table.without([5])


def levels(effects: Effects) -> Table:
    """One row per level; the effect of a factor is in the row of its first level."""
    response = effects.response
    columns = (
        Column("Factor", number=False),
        Column("Level", number=False),
        Column(upper_first(response.label)),
        Column(INTERVAL),
        Column("Trials", drop=2),
        Column(f"Effect ({INTERVAL})", number=False, drop=1),
    )
    rows = []
    for effect in effects.main:
        factor, size = effect.factor, effect_text(effect, response)
        for each in thinned(effect.levels, _MAX_LEVELS):
            mean = measured_text(each.mean, response)
            interval = interval_text(each.low, each.high, response)
            level = level_text(effect.factor, each.level)
            rows.append((factor, level, mean, interval, f"{each.trials:,}", size))
            factor, size = "", ""
    return Table(columns, tuple(rows))


def front(view: StudyView, front: Front) -> Table:
    responses = [RESPONSES[key] for key in front.responses]
    columns = (*(Column(upper_first(each.label)) for each in responses), _CONFIGURATION)
    rows = []
    for rank, each in enumerate(front.configurations, 1):
        values = (measured_text(each.values.get(r.key), r) for r in responses)
        rows.append((str(rank), *values, levels_text(ordered(each.levels, view.factors))))
    return Table((Column(""), *columns), tuple(rows))


def blocks(blocks: Sequence[BlockLine]) -> Table:
    columns = (
        Column("Block"),
        Column("Started", number=False, drop=1),
        Column("Trials", drop=2),
        Column("Reference throughput"),
        Column("Flagged", number=False),
        _REASON,
    )
    rows = []
    for block in blocks:
        started = datetime.fromtimestamp(block.started, timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
        reference = (
            f"{rate_text(block.reference_throughput)} /s" if block.reference_throughput else MISSING
        )
        rows.append(
            (
                str(block.number),
                started if block.started else "",
                count_text(block.trials),
                reference,
                ", ".join(["yes"] * block.flagged + ["rerun"] * block.rerun),
                "; ".join(block.reasons),
            )
        )
    return Table(columns, tuple(rows))


def failures(view: StudyView, failed: Sequence[Result]) -> Table:
    columns = (
        Column("Outcome", number=False),
        Column("Attempt"),
        Column("Trial", number=False),
        _REASON,
    )
    rows = []
    for each in failed:
        outcome = "reference" if each.is_reference else each.outcome.value
        trial = levels_text(levels_of(each, view.factors))
        rows.append((outcome, str(each.attempt), trial, each.reason))
    return Table(columns, tuple(rows))


def skipped(view: StudyView) -> Table:
    columns = (Column("Combinations"), _REASON, Column("Example", number=False))
    groups = skipped_groups(view.skipped)
    return Table(columns, tuple((f"{g.combinations:,}", g.reason, g.example) for g in groups))
