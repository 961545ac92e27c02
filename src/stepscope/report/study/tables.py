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
)
from stepscope.report.kit.table import Column, RowTone, Table
from stepscope.report.study.configurations import STEP, ConfigurationRow, levels_of, ordered
from stepscope.report.study.sentences import best_level, effect_text
from stepscope.report.study.view import BlockLine, StudyView, skipped_groups
from stepscope.report.study.words import (
    BETWEEN,
    energy_text,
    interval_text,
    measured_text,
    rate_interval,
    size_interval,
    size_text,
    thinned,
    upper_first,
)
from stepscope.studies.results import Result
from stepscope.studies.trial_spec import level_text, levels_text

_FAILED_SHOWN = 5
"""So many that never trained are shown of a table that is cut: an OOM is a result."""
_MOST_LEVELS = 16
"""Of a factor: more are thinned, evenly."""
_BAR = 18
_CONFIGURATION = Column("Configuration", number=False, wide=True)
_WHY = Column("Why", number=False, wide=True)


def _step_text(seconds: float | None) -> str:
    if not is_known(seconds) or seconds >= 0.9995:
        return seconds_text(seconds)
    return f"{significant(seconds * 1000)} ms"


_RESULTS: tuple[tuple[Column, Callable[[ConfigurationRow], str]], ...] = (
    (Column("Trials", spare=4), lambda row: count_text(row.trials)),
    (Column("Samples/s"), lambda row: rate_text(row.rate)),
    (Column(BETWEEN, spare=1), lambda row: rate_interval(row.low, row.high) or MISSING),
    (Column("Step", spare=7), lambda row: _step_text(row.values.get(STEP))),
    (Column("GPU use", spare=2), lambda row: share_text(row.values.get("gpu_utilization"))),
    (Column("SM", spare=9), lambda row: share_text(row.values.get("gpu_sm"))),
    (Column("CPU use", spare=6), lambda row: share_text(row.values.get("cpu_share"))),
    (Column("Data wait", spare=5), lambda row: share_text(row.values.get("data_wait_share"))),
    (Column("Host memory", spare=2), lambda row: bytes_text(row.values.get("host_memory_peak"))),
    (Column("GPU memory", spare=2), lambda row: bytes_text(row.values.get("gpu_memory_peak"))),
    (Column("J/sample", spare=3), lambda row: energy_text(row.values.get("joules_per_sample"))),
    (Column("Outcome", number=False, toned=True), lambda row: row.outcome_text),
    (Column("What held it back", number=False, spare=8, wide=True), lambda r: r.cause or MISSING),
)


def configurations(
    view: StudyView, rows: Sequence[ConfigurationRow], is_folded: bool = False
) -> Table:
    """A line per configuration, a column per factor; for many factors, all in the last one."""
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
    return replace(table, tones=tuple(row.tone for row in rows)).known()


def first_rows(view: StudyView, most: int) -> Sequence[ConfigurationRow]:
    """The fastest, and some of those that never trained, where not all can be shown."""
    if len(view.configurations) <= most:
        return view.configurations
    failed = [row for row in view.configurations if not row.ok][:_FAILED_SHOWN]
    return [*view.configurations[: most - len(failed)], *failed]


def ranking(found: Sensitivity, with_bars: bool = False) -> Table:
    """Factors by how much they matter; bars show how far each is from no effect."""
    response = RESPONSES[THROUGHPUT]
    sizes = [effect.size.value for effect in found.effects]
    logs = [math.log(size) if is_known(size) and size > 0 else 0.0 for size in sizes]
    most = max(logs, default=0.0) or 1.0
    bars = ["█" * round(_BAR * max(0.0, each) / most) or "▏" for each in logs]
    columns = (
        Column("Factor", number=False),
        Column("Matters"),
        Column(BETWEEN),
        Column("Best", number=False),
        Column("", number=False),
        Column("", number=False, spare=1),
    )
    rows = tuple(
        (
            effect.factor,
            size_text(effect.size, response),
            size_interval(effect.size, response),
            best_level(effect, response),
            "" if effect.is_significant else "may be nothing",
            bar,
        )
        for effect, bar in zip(found.effects, bars, strict=True)
    )
    tones: tuple[RowTone, ...] = tuple("" if e.is_significant else "weak" for e in found.effects)
    table = Table(columns, rows, tones)
    return table if with_bars else table.without([5])


def levels(effects: Effects) -> Table:
    """A line per level; the size of the effect beside the first level of its factor."""
    response = effects.response
    columns = (
        Column("Factor", number=False),
        Column("Level", number=False),
        Column(upper_first(response.label)),
        Column(BETWEEN),
        Column("Trials", spare=2),
        Column(f"Effect ({BETWEEN})", number=False, spare=1),
    )
    rows = []
    for effect in effects.main:
        factor, size = effect.factor, effect_text(effect, response)
        for each in thinned(effect.levels, _MOST_LEVELS):
            mean = measured_text(each.mean, response)
            between = interval_text(each.low, each.high, response)
            level = level_text(effect.factor, each.level)
            rows.append((factor, level, mean, between, f"{each.trials:,}", size))
            factor, size = "", ""
    return Table(columns, tuple(rows))


def front(view: StudyView, front: Front) -> Table:
    responses = [RESPONSES[key] for key in front.responses]
    columns = (*(Column(upper_first(each.label)) for each in responses), _CONFIGURATION)
    rows = []
    for place, each in enumerate(front.best, 1):
        values = (measured_text(each.values.get(r.key), r) for r in responses)
        rows.append((str(place), *values, levels_text(ordered(each.levels, view.factors))))
    return Table((Column(""), *columns), tuple(rows))


def blocks(blocks: Sequence[BlockLine]) -> Table:
    columns = (
        Column("Block"),
        Column("Began", number=False, spare=1),
        Column("Trials", spare=2),
        Column("Sentinel"),
        Column("Flagged", number=False),
        _WHY,
    )
    rows = []
    for block in blocks:
        began = datetime.fromtimestamp(block.began, timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
        rate = f"{rate_text(block.sentinel_rate)} /s" if block.sentinel_rate else MISSING
        flags = ["yes"] * block.flagged + ["run again"] * block.rerun
        name, trials = str(block.number), count_text(block.trials)
        why = "; ".join(block.reasons)
        rows.append((name, began if block.began else "", trials, rate, ", ".join(flags), why))
    return Table(columns, tuple(rows))


def failures(view: StudyView, failed: Sequence[Result]) -> Table:
    columns = (
        Column("Outcome", number=False),
        Column("Attempt"),
        Column("Trial", number=False),
        _WHY,
    )
    rows = []
    for each in failed:
        outcome = "sentinel" if each.is_reference else each.outcome.value
        trial = levels_text(levels_of(each, view.factors))
        rows.append((outcome, str(each.attempt), trial, each.reason))
    return Table(columns, tuple(rows))


def skipped(view: StudyView) -> Table:
    columns = (Column("Combinations"), _WHY, Column("For example", number=False))
    groups = skipped_groups(view.skipped)
    return Table(columns, tuple((f"{g.combinations:,}", g.why, g.example) for g in groups))
