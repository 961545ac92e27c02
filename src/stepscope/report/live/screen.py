"""Draws a frame of the live view, for a screen of any size or as plain text."""

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
    TONE_COLORS,
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

_COLORS = {
    "cores": "green",
    "share": "cyan",
    "bytes": "magenta",
    "bytes/s": "blue",
    "W": "yellow",
}
"""Color of a sparkline by unit."""

_LEVELS = "▁▂▃▄▅▆▇█"
_ASCII = str.maketrans(_LEVELS + "━─–…�°", "_.,-=+*##--.? ")
_VALUE, _NAME = 10, 6  # widths of "65.6 KiB/s" and "write "
_DETAIL = 16
_MIN_SPAN_S = 60
_BAR = 40
_LONG_WAIT = 0.2

_WITH_DETAILS, _PAIRED = 56, 72  # minimum widths
_TWO_COLUMNS = 2 * _PAIRED + 2
_WITH_FOOTER, _WITH_COMMAND = 6, 20  # minimum heights


@dataclass(frozen=True)
class LiveScreen:
    """A frame as a rich renderable that fills the screen."""

    frame: Frame

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        height = options.height or console.height
        screen = Text("\n").join(screen_lines(self.frame, options.max_width, height))
        if options.ascii_only:
            screen.plain = screen.plain.translate(_ASCII)
        yield screen


def plain_text(frame: Frame, width: int, ascii_only: bool = False) -> str:
    """Return the frame with all its rows, without colors."""
    lines = screen_lines(frame, width, None)
    text = "\n".join(line.plain.rstrip() for line in lines).rstrip() + "\n"
    return text.translate(_ASCII) if ascii_only else text


def ending_text(frame: Frame, report: str) -> str:
    """Return the outcome of a run and where its report is."""
    outcome = ", ".join(filter(None, (frame.outcome, frame.exit_status.reason)))
    ended = f"{frame.name} ended after {seconds_text(frame.seconds)}: {outcome}"
    return f"{printable(ended)}\nReport    {printable(report)}\n"


def screen_lines(frame: Frame, width: int, height: int | None) -> list[Text]:
    """Return the lines that fit a screen; all lines if `height` is None."""
    state = [_progress(frame, width), _throughput(frame, width)]
    if height is None or height >= _WITH_COMMAND:
        command = Text(_cut(" ".join(frame.command.split()), width), style="dim")
        head = [_title(frame, width), command, Text(), *state, Text()]
    else:
        head = [_title(frame, width), *state]
    if height is None:
        return head + _body(frame, _Layout.of(frame, width), None)[0]
    footer_height = 1 if height >= _WITH_FOOTER else 0
    available = max(0, height - len(head) - footer_height)
    too_high = bool(frame.gpus) and _total_height((frame.run, *frame.gpus)) > available
    split = too_high and width >= _TWO_COLUMNS
    layout = _Layout.of(frame, (width - 2) // 2 if split else width)
    body, omitted = (_two_columns if split else _body)(frame, layout, available)
    lines = (head + body)[: height - footer_height]
    if footer_height:
        lines += [Text()] * (height - 1 - len(lines))
        footer = ["q: quit"]
        if layout.spark:
            footer.append(f"last {layout.spark * layout.seconds} s")
        if omitted:
            footer.append(f"not shown: {', '.join(omitted)}")
        lines.append(Text(_cut("   ".join(footer), width), style="dim"))
    return lines


def _title(frame: Frame, width: int) -> Text:
    """Name, outcome and time on the left, the monitoring overhead on the right."""
    minutes, seconds = divmod(int(frame.seconds), 60)
    clock = f"{minutes // 60}:{minutes % 60:02d}:{seconds:02d}"
    taken = cell_len(frame.outcome) + len(clock) + 4
    line = Text.assemble(
        (_cut(frame.name, max(8, width - taken)), "bold"),
        "  ",
        (frame.outcome, f"bold {TONE_COLORS[frame.tone]}"),
        "  ",
        clock,
    )
    overhead = f"Monitoring overhead {share_text(frame.monitor)} of one core"
    gap = width - line.cell_len - len(overhead)
    if gap >= 2:
        line.append(" " * gap).append(overhead, style="dim")
    line.truncate(width)
    return line


def _progress(frame: Frame, width: int) -> Text:
    epoch = frame.progress.epoch
    if epoch is None:
        return Text(_cut(f"epoch –  {frame.hint}", width), style="dim")
    line = Text.assemble("epoch ", (count_text(epoch.index), "bold"), f"  {epoch.phase}")
    if epoch.batches is not None:
        total = epoch.total_batches
        of_total = f" of {count_text(total)}" if total else ""
        done = f"{count_text(epoch.batches)}{of_total} batches"
        bar = min(_BAR, width - line.cell_len - len(done) - 4)
        if total and bar >= 4:
            full = min(bar, round(bar * epoch.batches / total))
            line.append("  ").append("━" * full, style="cyan").append("─" * (bar - full), "dim")
        line.append(f"  {done}")
    line.truncate(width)
    return line


def _throughput(frame: Frame, width: int) -> Text:
    """The most important numbers; the last ones are dropped on a narrow screen."""
    wait = frame.throughput.data_wait_share
    slow = is_known(wait) and wait >= _LONG_WAIT
    parts = [
        (f"{rate_text(frame.throughput.samples_per_second)} samples/s", "bold"),
        (f"data wait {share_text(wait)}", "bold yellow" if slow else ""),
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
    frame: Frame, layout: _Layout, height: int | None
) -> tuple[list[Text], Sequence[str]]:
    """The run on the left, its GPUs on the right."""
    run_lines, roles = _body(replace(frame, gpus=()), layout, height)
    gpu_lines, gpus = _body(replace(frame, run=Block("", "", ())), layout, height)
    lines = []
    for left, right in zip_longest(run_lines, gpu_lines, fillvalue=Text()):
        gap = " " * (layout.width + 2 - left.cell_len)
        lines.append(Text.assemble(left, gap, right))
    return lines, [*roles, *gpus]


def _body(frame: Frame, layout: _Layout, height: int | None) -> tuple[list[Text], Sequence[str]]:
    """Return the rows that fit, and the names of what does not."""
    run = replace(frame.run, rows=layout.split(frame.run.rows))
    gpus = _gpu_blocks(frame, layout, None if height is None else height - _essential(run))
    blocks = [block for block in (run, *gpus) if block.rows]
    chosen = blocks if height is None else _fitting(blocks, height)
    spaced = height is None or _total_height(chosen) <= height
    lines: list[Text] = []
    for block in chosen:
        if lines and spaced:
            lines.append(Text())
        if block.title:
            lines.append(layout.title(block))
        lines += [layout.line(row) for row in block.rows]
    return lines, _omitted(blocks, chosen)


def _gpu_blocks(frame: Frame, layout: _Layout, height: int | None) -> list[Block]:
    """Return a block per used GPU, or a row each if they would not fit; other GPUs get a row."""
    used = [replace(b, rows=layout.split(b.rows)) for b in frame.gpus if b.used]
    others = [block for block in frame.gpus if not block.used]
    if height is not None and len(used) > 1 and sum(map(_essential, used)) > height:
        used, others = [], list(frame.gpus)
    rows = [block.brief for block in others if block.brief is not None]
    return [*used, Block("", "", tuple(rows))]


def _essential(block: Block) -> int:
    """Return the smallest useful height of a block."""
    rows = tuple(row for row in block.rows if row.priority < ESSENTIAL)
    return replace(block, rows=rows).height


def _total_height(blocks: Sequence[Block]) -> int:
    """Return the height of blocks with empty lines between them."""
    return sum(block.height for block in blocks) + len(blocks) - 1


def _fitting(blocks: Sequence[Block], height: int) -> list[Block]:
    """Return the blocks with the most important rows that fit, in their original order."""
    positions = [(b, r) for b, block in enumerate(blocks) for r in range(len(block.rows))]
    chosen: list[set[int]] = [set() for _ in blocks]
    for b, r in sorted(positions, key=lambda at: blocks[at[0]].rows[at[1]].priority):
        needed = 1 if chosen[b] or not blocks[b].title else 2  # the first row brings the title
        between = len(blocks) - 1 if blocks[b].rows[r].priority >= DETAILS else 0
        if needed + between <= height:
            height -= needed
            chosen[b].add(r)
    return [
        replace(block, rows=tuple(block.rows[r] for r in sorted(kept)))
        for block, kept in zip(blocks, chosen, strict=True)
        if kept
    ]


def _omitted(blocks: Sequence[Block], chosen: Sequence[Block]) -> list[str]:
    """Return how many roles and GPUs are not shown; details of the machine do not count."""
    kept = {id(row) for block in chosen for row in block.rows}
    missing = [row for block in blocks for row in block.rows if id(row) not in kept]
    titles = {block.title for block in blocks if block.title} - {b.title for b in chosen}
    roles = sum(row.indented and row.priority < DETAILS for row in missing)
    gpus = len(titles) + sum(bool(row.text and row.traces) for row in missing)
    counts = ((roles, "role"), (gpus, "GPU"))
    return [f"{count} {plural(count, noun)}" for count, noun in counts if count]


@dataclass(frozen=True)
class _Layout:
    """The layout of a line."""

    width: int
    label: int
    spark: int  # columns of a sparkline; with two on a line, each has half, for the same span
    seconds: int  # per column
    end_ns: int

    @classmethod
    def of(cls, frame: Frame, width: int) -> _Layout:
        label = 12 if width >= _PAIRED else min(13, width // 3)
        if width >= _PAIRED:
            spark = (width - label - 2 * (_VALUE + _NAME + 3)) // 2 * 2
        else:
            spark = width - label - _VALUE - 1 - (_DETAIL if width >= _WITH_DETAILS else 0)
        spark = max(0, min(spark, SECONDS_BACK))
        seconds = ceil(_MIN_SPAN_S / spark) if spark else 1
        return cls(width=width, label=label, spark=spark, seconds=seconds, end_ns=frame.end_ns)

    def split(self, rows: Iterable[Row]) -> tuple[Row, ...]:
        """Split rows with two traces into two rows if the screen is too narrow for both."""
        split: list[Row] = []
        for row in rows:
            if len(row.traces) < 2 or self.width >= _PAIRED:
                split.append(row)
            else:
                split += [
                    replace(row, label=f"{row.label} {each.name}", traces=(each,))
                    for each in row.traces
                ]
        return tuple(split)

    def title(self, block: Block) -> Text:
        style = "yellow" if block.throttled else "dim"
        line = Text.assemble((_cut(block.title, self.width), "bold"), "  ")
        line.append(_cut(block.detail, max(0, self.width - line.cell_len)), style=style)
        line.truncate(self.width)
        return line

    def line(self, row: Row) -> Text:
        """Return a row, at most as wide as the screen."""
        label = _cut(f"  {row.label}" if row.indented else row.label, self.label - 1)
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
            if each.full_scale is None and np.isfinite(drawn).any():
                highest = max(float(np.nanmax(drawn)), each.now or 0.0)  # a column is a mean
                details.append(f"max {value_text(highest, BY_KEY[each.metric].unit)}")
            while details and len(", ".join(details)) > self.width - line.cell_len - 1:
                details.pop()
            line.append(" ").append(", ".join(details), style="dim")
        line.truncate(self.width)
        return line

    def _spark(self, each: LiveTrace, drawn: Floats) -> Text:
        known = np.isfinite(drawn)
        top = each.full_scale or (float(drawn[known].max()) if known.any() else 0.0)
        shares = np.clip(np.where(known, drawn, 0.0), 0.0, top) / (top or 1.0)
        heights = np.minimum((shares * len(_LEVELS)).astype(int), len(_LEVELS) - 1)
        text = "".join(
            _LEVELS[height] if is_set else " "
            for height, is_set in zip(heights, known, strict=True)
        )
        return Text(text, style=_COLORS.get(BY_KEY[each.metric].unit, ""))


def _cut(text: str, width: int) -> str:
    """Return printable text of at most `width` cells."""
    safe = printable(text)
    if cell_len(safe) <= width:
        return safe
    return f"{set_cell_size(safe, width - 1).rstrip()}…" if width > 0 else ""
