"""The tables of a study as text, drawn alike in a terminal and on a page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime, timezone

from stepscope.analysis.study.records import RESPONSES
from stepscope.report.format import (
    MISSING,
    bytes_text,
    count_text,
    is_known,
    rate_text,
    seconds_text,
    share_text,
    significant,
)
from stepscope.report.study import BlockLine, StudyView
from stepscope.report.studyeffects import EffectsView, FrontView, Ranking
from stepscope.report.studypoints import STEP, Point, levels_of, ordered
from stepscope.report.studywords import BETWEEN, energy_text, rate_interval, thinned, upper_first
from stepscope.report.tables import Column, Table
from stepscope.studies.result import Result
from stepscope.studies.spec import level_text, levels_text

_FAILED_SHOWN = 5
"""So many that never trained are shown of a table that is cut: an OOM is a result."""
_MOST_LEVELS = 16
"""Of a factor: more are thinned, evenly."""
OUTCOME = "Outcome"
CONFIGURATION = "Configuration"

_RESULTS: tuple[tuple[Column, Callable[[Point], str]], ...] = (
    (Column("Trials", spare=4), lambda p: count_text(p.trials)),
    (Column("Samples/s"), lambda p: rate_text(p.rate)),
    (Column(BETWEEN, spare=1), lambda p: rate_interval(p.low, p.high) or MISSING),
    (Column("Step", spare=7), lambda p: _step_text(p.values.get(STEP))),
    (Column("GPU use", spare=2), lambda p: share_text(p.values.get("gpu_utilization"))),
    (Column("SM", spare=9), lambda p: share_text(p.values.get("gpu_sm"))),
    (Column("CPU use", spare=6), lambda p: share_text(p.values.get("cpu_share"))),
    (Column("Data wait", spare=5), lambda p: share_text(p.values.get("data_wait_share"))),
    (Column("Host memory", spare=2), lambda p: bytes_text(p.values.get("host_memory_peak"))),
    (Column("GPU memory", spare=2), lambda p: bytes_text(p.values.get("gpu_memory_peak"))),
    (Column("J/sample", spare=3), lambda p: energy_text(p.values.get("joules_per_sample"))),
    (Column(OUTCOME, number=False), lambda p: p.outcome_text),
    (Column("What held it back", number=False, spare=8), lambda p: p.cause or MISSING),
)


def configuration_table(view: StudyView, points: Sequence[Point]) -> Table:
    """A line per configuration, a column per factor."""
    columns = [Column(name, number=_is_numeric(view, name)) for name in view.factors]
    rows = (
        (
            *(level_text(name, point.levels.get(name)) for name in view.factors),
            *(text(point) for _, text in _RESULTS),
        )
        for point in points
    )
    return Table((*columns, *(column for column, _ in _RESULTS)), tuple(rows)).known()


def folded_table(view: StudyView, points: Sequence[Point]) -> Table:
    """The same with all levels in one column, the last: for many factors."""
    rows = (
        (*(text(point) for _, text in _RESULTS), levels_text(ordered(point.levels, view.factors)))
        for point in points
    )
    last = Column(CONFIGURATION, number=False)
    return Table((*(column for column, _ in _RESULTS), last), tuple(rows)).known()


def first_points(view: StudyView, most: int) -> Sequence[Point]:
    """The fastest, and some of those that never trained, where not all can be shown."""
    if len(view.points) <= most:
        return view.points
    failed = [point for point in view.points if not point.ok][:_FAILED_SHOWN]
    return [*view.points[: most - len(failed)], *failed]


def ranking_table(ranking: Ranking) -> Table:
    columns = (
        Column("Factor", number=False),
        Column("Matters"),
        Column(BETWEEN),
        Column("Best", number=False),
        Column("", number=False),
    )
    rows = (
        (row.factor, row.size, row.interval, row.best, "" if row.is_told else "may be nothing")
        for row in ranking.rows
    )
    return Table(columns, tuple(rows))


def level_table(view: EffectsView) -> Table:
    """A line per level; the size of the effect beside the first level of its factor."""
    columns = (
        Column("Factor", number=False),
        Column("Level", number=False),
        Column(upper_first(view.response.label)),
        Column(BETWEEN),
        Column("Trials", spare=2),
        Column(f"Effect ({BETWEEN})", number=False, spare=1),
    )
    rows = []
    for effect in view.rows:
        own = [row[1:] for row in view.levels if row[0] == effect.factor]
        for place, row in enumerate(thinned(own, _MOST_LEVELS)):
            rows.append((effect.factor if not place else "", *row, "" if place else effect.text))
    return Table(columns, tuple(rows))


def front_table(view: FrontView) -> Table:
    responses = [Column(upper_first(RESPONSES[key].label)) for key in view.front.responses]
    rows = tuple((str(place), *row) for place, row in enumerate(view.rows, 1))
    columns = (Column(""), *responses, Column(CONFIGURATION, number=False))
    return Table(columns, rows)


def block_table(blocks: Sequence[BlockLine]) -> Table:
    columns = (
        Column("Block"),
        Column("Began", number=False, spare=1),
        Column("Trials", spare=2),
        Column("Sentinel"),
        Column("Flagged", number=False),
        Column("Why", number=False),
    )
    rows = (
        (
            str(block.number),
            _when(block.began),
            count_text(block.trials),
            f"{rate_text(block.sentinel_rate)} /s" if is_known(block.sentinel_rate) else MISSING,
            _flagged_text(block),
            "; ".join(block.reasons),
        )
        for block in blocks
    )
    return Table(columns, tuple(rows))


def failure_table(view: StudyView, failures: Sequence[Result]) -> Table:
    columns = (
        Column(OUTCOME, number=False),
        Column("Attempt"),
        Column("Trial", number=False),
        Column("Why", number=False),
    )
    rows = (
        (
            "sentinel" if each.role == "sentinel" else each.outcome.value,
            str(each.attempt),
            levels_text(levels_of(each, view.factors)),
            each.reason,
        )
        for each in failures
    )
    return Table(columns, tuple(rows))


def _flagged_text(block: BlockLine) -> str:
    if not block.flagged:
        return "run again" if block.rerun else ""
    return "yes, run again" if block.rerun else "yes"


def _step_text(seconds: float | None) -> str:
    if not is_known(seconds) or seconds >= 0.9995:
        return seconds_text(seconds)
    return f"{significant(seconds * 1000)} ms"


def _when(began: float) -> str:
    if not began:
        return ""
    return datetime.fromtimestamp(began, timezone.utc).strftime("%Y-%m-%d %H:%M UTC")


def _is_numeric(view: StudyView, name: str) -> bool:
    factors = (*view.contents.design.factors, *view.analysis.factors)
    return any(factor.is_numeric for factor in factors if factor.name == name)
