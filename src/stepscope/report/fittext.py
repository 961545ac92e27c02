"""A fit in a terminal: the answer first, then what it follows from. 80 columns are enough."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.padding import Padding
from rich.table import Table as Grid
from rich.text import Text

from stepscope.report.fit import Answer, FitView
from stepscope.report.fitparts import Section
from stepscope.report.format import TONE_COLOURS, printable
from stepscope.report.tables import Table

_INDENT = 2
_MARGIN = 16


def print_fit(console: Console, view: FitView) -> None:
    """Write all of a fit."""
    console.print(_text(view.head, "bold"))
    if view.cached:
        console.print(_text(view.cached, "dim"))
    console.print()
    if view.says:
        console.print(_text(view.says, f"bold {TONE_COLOURS[view.tone]}"))
    if view.answers:
        console.print(Padding(_answers(view.answers), (0, 0, 0, _INDENT)))
    for line in view.certificate:
        _print_line(console, line)
    for line in view.warnings:
        _print_line(console, line, "yellow")
    for section in view.sections:
        _print_section(console, section)
    console.print()
    console.print(_named(view.facts))
    if view.command:
        # Not wrapped: it is to be copied.
        words = Text.assemble(("Try it".ljust(_MARGIN + 2), "dim"), printable(view.command))
        console.print(words, soft_wrap=True)


def _answers(answers: Sequence[Answer]) -> Grid:
    grid = Grid.grid(padding=(0, 2, 0, 0))
    for wraps in (False, False, True):
        grid.add_column(no_wrap=not wraps, overflow="fold")
    for answer in answers:
        style = f"bold {TONE_COLOURS[answer.tone]}"
        grid.add_row(_text(answer.word, "dim"), _text(answer.option, style), _text(answer.facts))
    return grid


def _print_section(console: Console, section: Section) -> None:
    console.print()
    console.print(_text(section.title, "dim"))
    if section.table is not None and section.table.rows:
        table = section.table.compact(console.width - _INDENT)
        console.print(Padding(_grid(table), (0, 0, 0, _INDENT)))
    for line in section.lines:
        _print_line(console, line)


def _grid(table: Table) -> Grid:
    """Numbers stay whole; texts wrap."""
    grid = Grid(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for column in table.columns:
        grid.add_column(
            Text(column.title), justify="right" if column.number else "left",
            no_wrap=column.number, overflow="fold",
        )  # fmt: skip
    for row in table.rows:
        grid.add_row(*(_text(cell) for cell in row))
    return grid


def _named(facts: Sequence[tuple[str, str]]) -> Grid:
    grid = Grid.grid(padding=(0, 1, 0, 0))
    grid.add_column(style="dim", width=_MARGIN + 1)
    grid.add_column(overflow="fold")
    for name, text in facts:
        grid.add_row(name, _text(text))
    return grid


def _print_line(console: Console, line: str, style: str = "") -> None:
    console.print(Padding(_text(line, style), (0, 0, 0, _INDENT)))


def _text(text: str, style: str = "") -> Text:
    """A user's text, which may have lines of its own but cannot steer the terminal."""
    words = "\n".join(printable(line) for line in text.splitlines())
    return Text(words, style=style, overflow="fold")
