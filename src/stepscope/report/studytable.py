"""A study in a terminal: what it came to on a screen, or all of it in tables."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

from stepscope.records import Outcome
from stepscope.report.format import TONE_COLOURS, is_known, printable
from stepscope.report.study import Best, StudyView
from stepscope.report.studyeffects import EffectsView, Ranking
from stepscope.report.studypoints import Point
from stepscope.report.studytables import (
    CONFIGURATION,
    OUTCOME,
    block_table,
    configuration_table,
    failure_table,
    first_points,
    folded_table,
    front_table,
    level_table,
    ranking_table,
)
from stepscope.report.studywords import counted
from stepscope.report.tables import Table

_MARGIN = 16
_MOST_SHOWN = 20
_MOST_WRAPPED = 8
"""Rows of a table whose last column needs several lines."""
_FEW = 5
_BAR = 18
_WIDE = 84
"""From so many columns on there are bars beside the ranking."""
_LEAST_LAST = 28
"""What a last column that wraps needs to be read."""


def print_study(console: Console, view: StudyView, full: bool = False) -> None:
    """Write what a study came to; `full` has the tables too."""
    _print_head(console, view)
    if view.lack:
        console.print(f"\n{view.lack}")
    _print_facts(console, _best_rows(view))
    _print_rankings(console, view, full)
    if full:
        for each in view.effects:
            _print_effects(console, each)
    _print_facts(console, _knee_rows(view, full), "Scaling")
    if full:
        _print_fronts(console, view)
        _print_configurations(console, view)
        _print_noise(console, view)
    _print_facts(console, _problem_rows(view, full), "Noted" if full else "")


def _print_head(console: Console, view: StudyView) -> None:
    head = Text.assemble(
        (printable(view.name), "bold"), "  ", (view.state, f"bold {TONE_COLOURS[view.tone]}")
    )
    console.print(head)
    console.print(_text(view.headline))
    if view.about:
        console.print(_text(view.about, "dim"))
    if view.warning:
        console.print(_text(f"{view.warning}.", "yellow"))
    if view.now:
        console.print(Text.assemble(("Now  ", "dim"), printable(view.now)))


def _best_rows(view: StudyView) -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    for best in view.bests:
        rows.append((f"Best of {best.group}" if best.group else "Best", best.rate))
        rows.append(("", best.levels))
        rows.append(("", best.beats))
        rows += _as_good_rows(best)
    return rows


def _as_good_rows(best: Best) -> Iterator[tuple[str, str]]:
    if not best.as_good:
        return
    few = best.as_good[:_FEW]
    yield "", f"as good, as far as one can tell, with {few[0]}"
    for each in few[1:]:
        yield "", f"  or with {each}"
    if len(best.as_good) > _FEW:
        yield "", f"  or as {len(best.as_good) - _FEW:,} more do"


def _print_rankings(console: Console, view: StudyView, full: bool) -> None:
    if not view.rankings:
        return
    first, *others = view.rankings
    _print_title(console, "What matters for throughput")
    _print_ranking(console, first)
    if not full:
        for each in others:
            console.print(_text(each.says))
        return
    for each in others:
        _print_title(console, f"What matters for {each.title}")
        _print_ranking(console, each)


def _print_ranking(console: Console, ranking: Ranking) -> None:
    table = ranking_table(ranking)
    grid = _grid(table)
    bars = _bars(ranking) if console.width >= _WIDE else None
    if bars:
        grid.add_column("")
    for place, (row, told) in enumerate(zip(table.rows, ranking.rows, strict=True)):
        style = "" if told.is_told else "dim"
        cells = [_text(cell, style) for cell in row]
        if bars:
            cells.append(Text(bars[place], "cyan" if told.is_told else "dim"))
        grid.add_row(*cells)
    console.print(grid)


def _bars(ranking: Ranking) -> list[str]:
    """How far each is from no effect, by its logarithm; the first is the longest."""
    sizes = [row.effect.size.value for row in ranking.rows]
    logs = [math.log(size) if is_known(size) and size > 0 else 0.0 for size in sizes]
    most = max(logs, default=0.0) or 1.0
    return ["█" * round(_BAR * max(0.0, each) / most) or "▏" for each in logs]


def _print_effects(console: Console, view: EffectsView) -> None:
    _print_title(console, view.title)
    console.print(_text(view.about, "dim"))
    _print_table(console, level_table(view).compact(console.width))
    for says in (*view.interactions, *view.remarks):
        console.print(_text(f"· {says}"))


def _knee_rows(view: StudyView, full: bool) -> list[tuple[str, str]]:
    """Of all curves; on one screen only those of all trials and those that have a knee."""
    curves = [each for each in view.curves if each.says]
    if not full:
        curves = [each for each in curves if each.has_knee or not each.curve.group]
    shown = curves if full else curves[: 2 * _FEW]
    rows = [(each.title, each.says) for each in shown[:_MOST_SHOWN]]
    if len(curves) > len(rows):
        rows.append(("", f"and {len(curves) - len(rows):,} more, in scaling.csv"))
    return rows


def _print_fronts(console: Console, view: StudyView) -> None:
    for each in view.fronts:
        _print_title(console, each.title)
        table = front_table(each)
        most = _MOST_SHOWN if table.width <= console.width else _MOST_WRAPPED
        _print_table(console, Table(table.columns, table.rows[:most]))
        console.print(_text(each.says, "dim"))
    for says in view.not_measured if view.points else ():
        console.print()
        console.print(_text(says, "dim"))


def _print_configurations(console: Console, view: StudyView) -> None:
    if not view.points:
        return
    _print_title(console, "Configurations")
    shown = first_points(view, _MOST_SHOWN)
    table = configuration_table(view, shown).compact(console.width)
    if table.width > console.width:
        shown = first_points(view, _MOST_WRAPPED)
        table = _folded(view, shown, console.width)
    _print_table(console, table, {point.outcome_text: TONE_COLOURS[point.tone] for point in shown})
    if len(view.points) > len(shown):
        more = len(view.points) - len(shown)
        console.print(_text(f"and {more:,} more, in configurations.csv", "dim"))


def _folded(view: StudyView, shown: Sequence[Point], width: int) -> Table:
    """Few numbers, and the levels in what they leave."""
    table = folded_table(view, shown)
    numbers = table.without([len(table.columns) - 1]).compact(width - _LEAST_LAST - 2)
    kept = {CONFIGURATION, *(column.title for column in numbers.columns)}
    return table.without(i for i, column in enumerate(table.columns) if column.title not in kept)


def _print_noise(console: Console, view: StudyView) -> None:
    if view.blocks:
        _print_title(console, "Blocks")
        console.print(_text(view.noise, "dim"))
        shown = view.blocks if len(view.blocks) <= _MOST_SHOWN else view.flagged[:_MOST_SHOWN]
        if shown:
            _print_table(console, block_table(shown).compact(console.width))
    if view.failures:
        _print_title(console, "Attempts that answered nothing")
        _print_table(console, failure_table(view, view.failures[:_MOST_SHOWN]))
        if len(view.failures) > _MOST_SHOWN:
            console.print(_text(f"and {len(view.failures) - _MOST_SHOWN:,} more, in trials.csv"))


def _problem_rows(view: StudyView, full: bool) -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    if not full:
        rows += _noise_rows(view)
    rows += _crash_rows(view)
    for place, group in enumerate(view.skipped[: _MOST_SHOWN if full else _FEW]):
        text = f"{counted(group.count, 'combination')}: {group.why}"
        rows.append(("Skipped" if place == 0 else "", text))
    rows += [("Note" if place == 0 else "", each) for place, each in enumerate(view.remarks)]
    return rows


def _crash_rows(view: StudyView) -> Iterator[tuple[str, str]]:
    """What ended trials that did not run out of memory: the first words of it."""
    crashed = [r for r in view.contents.counted if r.outcome in (Outcome.CRASHED, Outcome.TIMEOUT)]
    for place, result in enumerate(crashed[:_FEW]):
        text = f"{result.reason.strip()} ({result.place}/stderr.log)"
        yield "Crashed" if place == 0 else "", text
    if len(crashed) > _FEW:
        yield "", f"and {len(crashed) - _FEW:,} more, in trials.csv"


def _noise_rows(view: StudyView) -> Iterator[tuple[str, str]]:
    for place, block in enumerate(view.flagged[:_FEW]):
        why = "; ".join(block.reasons) or "disturbed"
        again = " (run again)" if block.rerun else ""
        yield "Disturbed" if place == 0 else "", f"block {block.number}: {why}{again}"
    if len(view.flagged) > _FEW:
        yield "", f"and {counted(len(view.flagged) - _FEW, 'block')} more"
    if view.failures:
        last = view.failures[-1]
        told = counted(len(view.failures), "attempt")
        yield "Failed", f"{told}, the last: {last.reason or last.outcome.value}"


def _print_title(console: Console, title: str) -> None:
    console.print()
    console.print(_text(title, "bold"))


def _print_facts(console: Console, rows: Sequence[tuple[str, str]], title: str = "") -> None:
    """A word, then a text that wraps beside it."""
    told = [(name, text) for name, text in rows if text]
    if not told:
        return
    if title:
        _print_title(console, title)
    else:
        console.print()
    wide = min(max(len(name) for name, _ in told), console.width // 3)
    grid = Grid.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="dim", width=max(wide, _MARGIN if not title else 0), overflow="fold")
    grid.add_column(overflow="fold")
    for name, text in told:
        grid.add_row(_text(name), _text(text))
    console.print(grid)


def _print_table(console: Console, table: Table, colours: dict[str, str] | None = None) -> None:
    """Only what is last may wrap, so that numbers stand below each other."""
    grid = _grid(table)
    for row in table.rows:
        cells = []
        for column, cell in zip(table.columns, row, strict=True):
            is_outcome = column.title == OUTCOME and colours is not None
            cells.append(_text(cell, (colours or {}).get(cell, "") if is_outcome else ""))
        grid.add_row(*cells)
    console.print(grid)


def _grid(table: Table) -> Grid:
    grid = Grid(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for place, column in enumerate(table.columns):
        is_last = place == len(table.columns) - 1
        grid.add_column(
            _text(column.title),
            justify="right" if column.number else "left",
            no_wrap=not is_last,
            overflow="fold" if is_last else "ellipsis",
        )
    return grid


def _text(text: str, style: str = "") -> Text:
    return Text(printable(text), style=style)
