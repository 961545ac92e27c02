"""Draws a frame of the live view for a screen of any size, or as plain text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from math import ceil

import numpy as np
from rich.cells import cell_len, set_cell_size
from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from stepscope.analysis.run.series import Floats
from stepscope.metrics import BY_KEY
from stepscope.report.kit.format import (
    TONE_COLOURS,
    count_text,
    is_known,
    plural,
    printable,
    rate_text,
    seconds_text,
    share_text,
    value_text,
)
from stepscope.report.live.traces import (
    DETAILS,
    ESSENTIAL,
    SECONDS_BACK,
    Block,
    LiveTrace,
    Row,
    columns,
)
from stepscope.report.live.view import Frame

_COLOURS = {
    "cores": "green",
    "share": "cyan",
    "bytes": "magenta",
    "bytes/s": "blue",
    "W": "yellow",
}
"""Of sparklines, by the unit."""

_LEVELS = "▁▂▃▄▅▆▇█"
_ASCII = str.maketrans(_LEVELS + "━─–…�°", "_.,-=+*##--.? ")
_VALUE, _NAME = 9, 7  # how wide "65.6 kB/s" and "written" are
_DETAIL = 16
_LEAST_SPAN_S = 60
_BAR = 40
_LONG_WAIT = 0.2

_WITH_DETAILS, _PAIRED = 56, 72  # widths from which on there is room for these
_TWO_COLUMNS = 2 * _PAIRED + 2
_WITH_FOOT, _WITH_COMMAND = 6, 20  # the same for heights


@dataclass(frozen=True)
class LiveScreen:
    """A frame as rich draws it: it fills the screen as it is at that moment."""

    frame: Frame

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        height = options.height or console.height
        screen = Text("\n").join(screen_lines(self.frame, options.max_width, height))
        if options.ascii_only:
            screen.plain = screen.plain.translate(_ASCII)
        yield screen


def plain_text(frame: Frame, width: int, ascii_only: bool = False) -> str:
    """The frame with all its rows, without colours."""
    lines = screen_lines(frame, width, None)
    text = "\n".join(line.plain.rstrip() for line in lines).rstrip() + "\n"
    return text.translate(_ASCII) if ascii_only else text


def ending_text(frame: Frame, report: str) -> str:
    """How a run ended, and where to read on."""
    parts = [frame.outcome, frame.ending.reason] if frame.ending.reason else [frame.outcome]
    ended = f"{frame.name} has ended: {', '.join(parts)} (after {seconds_text(frame.seconds)})"
    return f"{printable(ended)}\nReport    {printable(report)}\n"


def screen_lines(frame: Frame, width: int, height: int | None) -> list[Text]:
    """As many lines as there is room for, none wider than that; all, where there is no end."""
    state = [_progress(frame, width), _throughput(frame, width)]
    if height is None or height >= _WITH_COMMAND:
        command = Text(_cut(" ".join(frame.command.split()), width), style="dim")
        head = [_title(frame, width), command, Text(), *state, Text()]
    else:
        head = [_title(frame, width), *state]
    if height is None:
        return head + _body(frame, _Layout.of(frame, width), None)[0]
    foot_height = 1 if height >= _WITH_FOOT else 0
    room = max(0, height - len(head) - foot_height)
    crowded = bool(frame.gpus) and _height_of_all((frame.run, *frame.gpus)) > room
    split = crowded and width >= _TWO_COLUMNS
    layout = _Layout.of(frame, (width - 2) // 2 if split else width)
    body, left_out = (_two_columns if split else _body)(frame, layout, room)
    lines = (head + body)[: height - foot_height]
    if foot_height:
        lines += [Text()] * (height - 1 - len(lines))
        foot = ["q quits"]
        if layout.spark:
            foot.append(f"last {layout.spark * layout.seconds} s")
        if left_out:
            foot.append(f"not shown: {', '.join(left_out)}")
        lines.append(Text(_cut("   ".join(foot), width), style="dim"))
    return lines


def _title(frame: Frame, width: int) -> Text:
    """Name, outcome and time on the left, the cost of watching on the right."""
    minutes, seconds = divmod(int(frame.seconds), 60)
    clock = f"{minutes // 60}:{minutes % 60:02d}:{seconds:02d}"
    taken = cell_len(frame.outcome) + len(clock) + 4
    line = Text.assemble(
        (_cut(frame.name, max(8, width - taken)), "bold"),
        "  ",
        (frame.outcome, f"bold {TONE_COLOURS[frame.tone]}"),
        "  ",
        clock,
    )
    cost = f"watching takes {share_text(frame.watcher)} of a core"
    gap = width - line.cell_len - len(cost)
    if gap >= 2:
        line.append(" " * gap).append(cost, style="dim")
    line.truncate(width)
    return line


def _progress(frame: Frame, width: int) -> Text:
    epoch = frame.progress.epoch
    if epoch is None:
        return Text(_cut(f"epoch –  {frame.hint}", width), style="dim")
    line = Text.assemble("epoch ", (count_text(epoch.index), "bold"), f"  {epoch.phase}")
    if epoch.batches is not None:
        of = f" of {count_text(epoch.of)}" if epoch.of else ""
        done = f"{count_text(epoch.batches)}{of} batches"
        room = min(_BAR, width - line.cell_len - len(done) - 4)
        if epoch.of and room >= 4:
            full = min(room, round(room * epoch.batches / epoch.of))
            line.append("  ").append("━" * full, style="cyan").append("─" * (room - full), "dim")
        line.append(f"  {done}")
    line.truncate(width)
    return line


def _throughput(frame: Frame, width: int) -> Text:
    """What people look for first, dropped from the end where the line is short."""
    wait = frame.throughput.data_wait_share
    slow = is_known(wait) and wait >= _LONG_WAIT
    parts = [
        (f"{rate_text(frame.throughput.samples_per_second)} samples/s", "bold"),
        (f"{share_text(wait)} waiting for data", "bold yellow" if slow else ""),
        (f"{count_text(frame.progress.steps)} steps", ""),
        (f"{rate_text(frame.throughput.steps_per_second)} steps/s", ""),
    ]
    line = Text()
    for text, style in parts:
        if line.cell_len + len(text) + 3 <= width or not line:
            line.append("   " if line else "").append(text, style=style)
    line.truncate(width)
    return line


def _two_columns(
    frame: Frame, layout: _Layout, room: int | None
) -> tuple[list[Text], Sequence[str]]:
    """The run on the left, its GPUs on the right."""
    left, roles = _body(replace(frame, gpus=()), layout, room)
    right, gpus = _body(replace(frame, run=Block("", "", ())), layout, room)
    lines = []
    for of_run, of_gpus in zip_longest(left, right, fillvalue=Text()):
        gap = " " * (layout.width + 2 - of_run.cell_len)
        lines.append(Text.assemble(of_run, gap, of_gpus))
    return lines, [*roles, *gpus]


def _body(frame: Frame, layout: _Layout, room: int | None) -> tuple[list[Text], Sequence[str]]:
    """The rows that fit, and what is not among them."""
    run = replace(frame.run, rows=layout.split(frame.run.rows))
    gpus = _gpu_blocks(frame, layout, None if room is None else room - _essential(run))
    blocks = [block for block in (run, *gpus) if block.rows]
    chosen = blocks if room is None else _fitting(blocks, room)
    spaced = room is None or _height_of_all(chosen) <= room
    lines: list[Text] = []
    for block in chosen:
        if lines and spaced:
            lines.append(Text())
        if block.title:
            lines.append(layout.title(block))
        lines += [layout.line(row) for row in block.rows]
    return lines, _left_out(blocks, chosen)


def _gpu_blocks(frame: Frame, layout: _Layout, room: int | None) -> list[Block]:
    """A block for each GPU that the run uses, or a row where many would not fit; the GPUs of
    others get a row."""
    used = [replace(b, rows=layout.split(b.rows)) for b in frame.gpus if b.used]
    others = [block for block in frame.gpus if not block.used]
    if room is not None and len(used) > 1 and sum(map(_essential, used)) > room:
        used, others = [], list(frame.gpus)
    rows = [block.brief for block in others if block.brief is not None]
    return [*used, Block("", "", tuple(rows))]


def _essential(block: Block) -> int:
    """Lines below which a block is not worth its place."""
    rows = tuple(row for row in block.rows if row.rank < ESSENTIAL)
    return replace(block, rows=rows).height


def _height_of_all(blocks: Sequence[Block]) -> int:
    """With empty lines between them."""
    return sum(block.height for block in blocks) + len(blocks) - 1


def _fitting(blocks: Sequence[Block], room: int) -> list[Block]:
    """The rows that matter most, in the order in which they stand."""
    places = [(b, r) for b, block in enumerate(blocks) for r in range(len(block.rows))]
    chosen: list[set[int]] = [set() for _ in blocks]
    for b, r in sorted(places, key=lambda place: blocks[place[0]].rows[place[1]].rank):
        cost = 1 if chosen[b] or not blocks[b].title else 2  # the first row brings the title
        between = len(blocks) - 1 if blocks[b].rows[r].rank >= DETAILS else 0
        if cost + between <= room:
            room -= cost
            chosen[b].add(r)
    return [
        replace(block, rows=tuple(block.rows[r] for r in sorted(kept)))
        for block, kept in zip(blocks, chosen, strict=True)
        if kept
    ]


def _left_out(blocks: Sequence[Block], chosen: Sequence[Block]) -> list[str]:
    """What a reader would miss: roles and GPUs, not details of the machine."""
    kept = {id(row) for block in chosen for row in block.rows}
    missing = [row for block in blocks for row in block.rows if id(row) not in kept]
    titles = {block.title for block in blocks if block.title} - {b.title for b in chosen}
    roles = sum(row.part and row.rank < DETAILS for row in missing)
    gpus = len(titles) + sum(bool(row.text and row.traces) for row in missing)
    counts = ((roles, "role"), (gpus, "GPU"))
    return [f"{count} {plural(count, noun)}" for count, noun in counts if count]


@dataclass(frozen=True)
class _Layout:
    """Where things are on a line of some width."""

    width: int
    label: int
    spark: int  # columns of a sparkline; one of two on a line has half of it, and the same span
    seconds: int  # what a column stands for
    end_ns: int

    @classmethod
    def of(cls, frame: Frame, width: int) -> _Layout:
        label = 12 if width >= _PAIRED else min(13, width // 3)
        if width >= _PAIRED:
            spark = (width - label - 2 * (_VALUE + _NAME + 3)) // 2 * 2
        else:
            spark = width - label - _VALUE - 1 - (_DETAIL if width >= _WITH_DETAILS else 0)
        spark = max(0, min(spark, SECONDS_BACK))
        seconds = ceil(_LEAST_SPAN_S / spark) if spark else 1
        return cls(width=width, label=label, spark=spark, seconds=seconds, end_ns=frame.end_ns)

    def split(self, rows: Iterable[Row]) -> tuple[Row, ...]:
        """Rows of two traces become two where the line is too short for both."""
        found: list[Row] = []
        for row in rows:
            if len(row.traces) < 2 or self.width >= _PAIRED:
                found.append(row)
            else:
                found += [
                    replace(row, label=f"{row.label} {each.name}", traces=(each,))
                    for each in row.traces
                ]
        return tuple(found)

    def title(self, block: Block) -> Text:
        remark = "yellow" if block.slowed else "dim"
        line = Text.assemble((_cut(block.title, self.width), "bold"), "  ")
        line.append(_cut(block.remark, max(0, self.width - line.cell_len)), style=remark)
        line.truncate(self.width)
        return line

    def line(self, row: Row) -> Text:
        """One row, as wide as the screen at most."""
        label = _cut(f"  {row.label}" if row.part else row.label, self.label - 1)
        line = Text(label.ljust(self.label))
        half = self.spark // 2, 2 * self.seconds
        if len(row.traces) == 2:
            for number, each in enumerate(row.traces):
                drawn = columns(each.series, self.end_ns, *half)
                if number:
                    line.append("  ")
                line.append_text(self._spark(each, drawn))
                line.append(f" {each.text:>{_VALUE}}", "bold").append(
                    f" {each.name:<{_NAME}}", "dim"
                )
        elif row.text:
            for each in row.traces:
                drawn = columns(each.series, self.end_ns, *half)
                line.append_text(self._spark(each, drawn)).append(" ")
            line.append(_cut(row.text, max(0, self.width - line.cell_len)))
        else:
            (each,) = row.traces
            drawn = columns(each.series, self.end_ns, self.spark, self.seconds)
            line.append_text(self._spark(each, drawn)).append(f" {each.text:>{_VALUE}}", "bold")
            details = [each.detail] if each.detail else []
            if each.whole is None and np.isfinite(drawn).any():
                most = max(float(np.nanmax(drawn)), each.now or 0.0)  # a column is a mean
                details.append(f"max {value_text(most, BY_KEY[each.metric].unit)}")
            while details and len(", ".join(details)) > self.width - line.cell_len - 1:
                details.pop()
            line.append(" ").append(", ".join(details), style="dim")
        line.truncate(self.width)
        return line

    def _spark(self, each: LiveTrace, drawn: Floats) -> Text:
        known = np.isfinite(drawn)
        top = each.whole or (float(drawn[known].max()) if known.any() else 0.0)
        shares = np.where(known, drawn, 0.0) / (top or 1.0)
        heights = np.clip((shares * len(_LEVELS)).astype(int), 0, len(_LEVELS) - 1)
        text = "".join(
            _LEVELS[height] if there else " " for height, there in zip(heights, known, strict=True)
        )
        return Text(text, style=_COLOURS.get(BY_KEY[each.metric].unit, ""))


def _cut(text: str, width: int) -> str:
    """Printable, and no wider than so many cells."""
    safe = printable(text)
    if cell_len(safe) <= width:
        return safe
    return f"{set_cell_size(safe, width - 1).rstrip()}…" if width > 0 else ""
