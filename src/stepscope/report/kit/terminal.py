"""Renders a document for a terminal of 80 columns or more, also as plain text."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from functools import singledispatchmethod

from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

from stepscope.report.kit.document import (
    Block,
    Charts,
    Document,
    Facts,
    Figure,
    Listing,
    Paragraph,
    Section,
    SideBySide,
    Tiles,
    Verbatim,
    is_empty,
)
from stepscope.report.kit.format import TONE_COLORS, printable_lines
from stepscope.report.kit.table import Table

_EMPHASIS = {"": "", "lead": "", "strong": "bold", "note": "dim", "warning": "yellow"}
_WIDTH = 80


def render(document: Document) -> str:
    """Return the document as plain text."""
    out = io.StringIO()
    draw(Console(file=out, width=_WIDTH, color_system=None), document)
    return out.getvalue()


def draw(console: Console, document: Document) -> None:
    """Write the whole document."""
    color = f"bold {TONE_COLORS[document.tone]}"
    head = Text(printable_lines(document.name), "bold", overflow="fold")
    if document.state:
        head = Text.assemble(head, "  ", (printable_lines(document.state), color), overflow="fold")
    if document.reason:
        head.append(f"  {printable_lines(document.reason)}")
    console.print(head)
    _Terminal(console, document.header).draw(document.header)
    draw_blocks(console, document.blocks)
    if document.footer:
        draw_blocks(console, [Paragraph(document.footer, "note")])


def draw_blocks(console: Console, blocks: Sequence[Block]) -> None:
    """Write blocks, each after an empty line."""
    for block in blocks:
        if not isinstance(block, Section | SideBySide | Charts) and not is_empty(block):
            console.print()
        _Terminal(console, [block]).draw([block])


class _Terminal:
    """Draws blocks with a common label width: that of their longest label."""

    def __init__(self, console: Console, blocks: Iterable[Block]) -> None:
        self._console = console
        longest = max((len(label) for label in _labels(blocks)), default=0)
        self._margin = min(longest, console.width // 3)

    def draw(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            if not is_empty(block):
                self._draw(block)

    @singledispatchmethod
    def _draw(self, block: Block) -> None:
        raise NotImplementedError(type(block).__name__)

    @_draw.register
    def _(self, block: Paragraph) -> None:
        style = f"bold {TONE_COLORS[block.tone]}" if block.tone else _EMPHASIS[block.emphasis]
        if block.badge:
            self._console.print(_text(block.badge, style))
            style = ""
        text = _text(block.text, style)
        if block.label:
            text = Text.assemble(
                (f"{printable_lines(block.label)}: ", "dim"), text, overflow="fold"
            )
        self._console.print(text)

    @_draw.register
    def _(self, block: Verbatim) -> None:
        label = printable_lines(block.label).ljust(self._margin + 2) if block.label else ""
        line = Text.assemble((label, "dim"), printable_lines(block.text))
        self._console.print(line, soft_wrap=True)

    @_draw.register
    def _(self, block: Listing) -> None:
        grid = Grid.grid(padding=(0, 1, 0, 0))
        grid.add_column(justify="right", no_wrap=True)
        grid.add_column(overflow="fold")
        for number, item in enumerate(block.items, 1):
            place = "  ".join(filter(None, (item.where, " ".join(item.code.split()))))
            more = [_text(place, "cyan")] if place else []
            if item.why:
                more.append(_text(item.why))
            lines = [_text(item.text, "bold" if more else ""), *more]
            grid.add_row(f"{number}." if block.numbered else "·", Text("\n").join(lines))
        self._console.print(grid)

    @_draw.register
    def _(self, block: Facts) -> None:
        grid = Grid.grid(padding=(0, 2, 0, 0))
        grid.add_column(style="dim", width=self._margin, overflow="fold")
        grid.add_column(overflow="fold")
        for name, text in block.rows:
            grid.add_row(_text(name), _text(text))
        self._console.print(grid)

    @_draw.register
    def _(self, block: Tiles) -> None:
        """Two tiles per line, ordered by column. There is no space for their details."""
        grid = Grid.grid(padding=(0, 3, 0, 0))
        for style in ("dim", "bold", "dim", "bold"):
            grid.add_column(style=style, overflow="fold")
        half = (len(block.tiles) + 1) // 2
        for i, left in enumerate(block.tiles[:half]):
            right = block.tiles[half + i : half + i + 1]
            cells = [text for tile in (left, *right) for text in (tile.label, tile.value)]
            grid.add_row(*map(_text, cells))
        self._console.print(grid)

    @_draw.register
    def _(self, block: Table) -> None:
        self._console.print(grid_of(block.compact(self._console.width)))

    @_draw.register
    def _(self, block: Figure) -> None:
        title = ": ".join(filter(None, (block.title, block.caption)))
        self.draw([Paragraph(title), Paragraph(block.description, "note")])

    @_draw.register
    def _(self, block: Charts) -> None:
        """A list of the panels, since a terminal cannot draw them."""
        rows = []
        for panel in block.panels:
            names = ", ".join(line.label for line in panel.lines)
            rows.append((panel.title, ", ".join(filter(None, (panel.unit, panel.detail, names)))))
        self._draw(Section(block.title, (Facts(tuple(rows)),)))

    @_draw.register
    def _(self, block: Section) -> None:
        self._console.print()
        if block.title:
            color = TONE_COLORS[block.tone] if block.tone else ""
            self._console.print(_text(block.title, f"bold {color}"))
        self.draw(block.blocks)

    @_draw.register
    def _(self, block: SideBySide) -> None:
        self.draw(block.blocks)


def grid_of(table: Table) -> Grid:
    """Return a rich table: numbers do not wrap, texts do."""
    grid = Grid(
        box=None,
        pad_edge=False,
        header_style="dim",
        padding=(0, 2, 0, 0),
        show_header=table.has_header,
    )
    for column in table.columns:
        grid.add_column(
            _text(column.title),
            justify="right" if column.number else "left",
            no_wrap=column.number,
            overflow="fold",
        )
    has_colored = any(column.colored for column in table.columns)
    tones = table.tones or [""] * len(table.rows)
    for row, tone in zip(table.rows, tones, strict=True):
        style = "dim" if tone == "weak" else TONE_COLORS[tone] if tone else ""
        grid.add_row(
            *(
                _text(text, style if column.colored or not has_colored else "")
                for column, text in zip(table.columns, row, strict=True)
            )
        )
    return grid


def _labels(blocks: Iterable[Block]) -> Iterable[str]:
    for block in blocks:
        match block:
            case Facts(rows):
                yield from (name for name, _ in rows)
            case Verbatim():
                yield block.label
            case Charts():
                yield from (panel.title for panel in block.panels)
            case Section() | SideBySide():
                yield from _labels(block.blocks)


def _text(text: str, style: str = "") -> Text:
    return Text(printable_lines(text), style=style, overflow="fold")
