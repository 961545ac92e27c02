"""The summary of a run in a terminal: 80 columns are enough, and so is plain text."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

from stepscope.report.format import TONE_COLOURS, printable
from stepscope.report.tables import Table
from stepscope.report.view import View

_MOST_EPOCHS = 12
_FIRST_EPOCHS = 6
_MOST_COMMAND = 240
_MARGIN = 10
"""How wide the words before the last lines are."""


def print_summary(console: Console, view: View, report: Path | None = None) -> None:
    """Write how a run ended, what it used and what watching it cost."""
    console.print(_head(view))
    console.print()
    console.print(_headline(view))
    console.print()
    for table in _tables(view, console.width):
        if table.rows:
            console.print(_grid(table))
            console.print()
    console.print(_remarks(view))
    if report is not None:
        # Not wrapped: a path must be one word to be clicked or copied.
        path = Text.assemble(("Report".ljust(_MARGIN), "dim"), printable(str(report)))
        console.print(path, soft_wrap=True)


def _tables(view: View, width: int) -> tuple[Table, ...]:
    """One GPU alone has all it could tell in the others."""
    ledger = shortened(view.ledger.compact(width))
    if len(view.gpus.rows) < 2:
        return view.overview, ledger
    return view.overview, view.gpus.compact(width), ledger


def shortened(ledger: Table) -> Table:
    """The first and the last epochs, with a row that says how many are between."""
    between = len(ledger.rows) - _MOST_EPOCHS
    if between <= 0:
        return ledger
    last = _MOST_EPOCHS - _FIRST_EPOCHS
    dots = ("…", f"{between} more", *("" for _ in ledger.columns[2:]))
    return Table(ledger.columns, (*ledger.rows[:_FIRST_EPOCHS], dots, *ledger.rows[-last:]))


def _head(view: View) -> Text:
    head = Text.assemble(
        (printable(view.name), "bold"), "  ", (view.outcome, f"bold {TONE_COLOURS[view.tone]}")
    )
    if view.ending.reason:
        head.append(f"  {printable(view.ending.reason)}")
    if view.command:
        command = printable(" ".join(view.command.split()))
        cut = command if len(command) <= _MOST_COMMAND else f"{command[:_MOST_COMMAND]}…"
        head.append(f"\n{cut}", style="dim")
    return head


def _headline(view: View) -> Grid:
    """Two numbers a line."""
    grid = Grid.grid(padding=(0, 3, 0, 0))
    for style in ("dim", "bold", "dim", "bold"):
        grid.add_column(style=style, no_wrap=True)
    half = (len(view.headline) + 1) // 2
    for left, right in zip(view.headline[:half], view.headline[half:], strict=True):
        grid.add_row(left.label, left.value, right.label, right.value)
    return grid


def _remarks(view: View) -> Grid:
    """What stands below the tables: a word, then a text that wraps beside it."""
    grid = Grid.grid(padding=(0, 1, 0, 0))
    grid.add_column(style="dim", width=_MARGIN - 1)
    grid.add_column()
    for name, times, seconds in view.phase_totals.rows:
        grid.add_row("Phase", _text(f"{name}: {times} times, {seconds} in all"))
    for note in view.notes:
        grid.add_row("Note", _text(note))
    if view.watching:
        grid.add_row("Watching", _text(view.watching))
    return grid


def _grid(table: Table) -> Grid:
    grid = Grid(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for column in table.columns:
        grid.add_column(column.title, justify="right" if column.number else "left", no_wrap=True)
    for row in table.rows:
        grid.add_row(*(_text(cell) for cell in row))
    return grid


def _text(text: str, style: str = "") -> Text:
    return Text(printable(text), style=style)
