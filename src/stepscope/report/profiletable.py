"""The profile of a trial: which operators took the time, and the figures that stand beside them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

from stepscope.analysis.profile import Figure, OperatorRow, Profile, RankProfile
from stepscope.report.format import (
    MISSING,
    bytes_text,
    count_text,
    is_known,
    printable,
    rate_text,
    seconds_text,
    share_text,
)
from stepscope.report.tables import Column, Table

VIEWER = "ui.perfetto.dev"

_MOST_OPERATORS = 12
_MOST_KERNELS = 5
_GOOD_NAME, _LEAST_NAME = 30, 12
"""Characters of a name that are worth a column, and that the narrowest terminal leaves."""
_MARGIN = 10
"""How wide the words before the figures are."""

_DIRECTIONS = {
    "to_device": "to the device",
    "from_device": "from it",
    "within_device": "within it",
    "between_devices": "between devices",
    "host": "from host to host",
    "other": "elsewhere",
}


@dataclass(frozen=True)
class _Line:
    """A line of the table: an operator, or together all that have no line of their own."""

    name: str
    rows: Sequence[OperatorRow]

    def per_step(self, figure: str) -> float | None:
        return self._sum(figure, "per_step")

    def per_epoch(self, figure: str) -> float | None:
        return self._sum(figure, "per_epoch")

    def _sum(self, figure: str, per: str) -> float | None:
        figures = [getattr(row, figure) for row in self.rows]
        amounts = [getattr(each, per) for each in figures if each is not None]
        return None if not amounts or None in amounts else float(sum(amounts))


def operators_table(profile: Profile, most: int = _MOST_OPERATORS) -> Table:
    """The operators that took longest, on the device if there is one; the others in one line.

    Figures are per step. Times are of the operators themselves, so that they add up.
    """
    operators = profile.operators
    time = "self_cuda_us" if profile.has_device else "self_cpu_us"
    lines = [_Line(row.name, [row]) for row in operators[:most]]
    if len(operators) > most:
        lines.append(_Line(f"{len(operators) - most} more", operators[most:]))
    columns = _columns(time, _Line("", operators).per_step(time), profile.per_epoch_is or "")
    rows = tuple(tuple(text(line) for _, text in columns) for line in lines)
    return Table(tuple(column for column, _ in columns), rows).known()


def _columns(
    time: str, whole: float | None, basis: str
) -> tuple[tuple[Column, Callable[[_Line], str]], ...]:
    def share(line: _Line) -> float | None:
        part = line.per_step(time)
        return part / whole if part is not None and whole else None

    return (
        (Column("Operator", number=False), lambda line: line.name),
        (Column("Calls"), lambda line: count_text(line.per_step("calls"))),
        (Column("CPU ms"), lambda line: _ms(line.per_step("self_cpu_us"))),
        (Column("CPU ms, total", spare=3), lambda line: _total(line, "cpu_us")),
        (Column("CUDA ms"), lambda line: _ms(line.per_step("self_cuda_us"))),
        (Column("CUDA ms, total", spare=2), lambda line: _total(line, "cuda_us")),
        (Column("Share"), lambda line: share_text(share(line))),
        (
            Column(f"Calls/epoch, {basis}", spare=4),
            lambda line: count_text(line.per_epoch("calls")),
        ),
        (Column(f"Epoch, {basis}", spare=1), lambda line: _seconds(line.per_epoch(time))),
    )


def _total(line: _Line, figure: str) -> str:
    """Operators call each other: what several of them take in all cannot be added up."""
    return _ms(line.per_step(figure)) if len(line.rows) == 1 else MISSING


def kernels_table(profile: Profile, most: int = _MOST_KERNELS) -> Table:
    """The kernels that took longest on the device, per step."""
    whole = _per_step(profile.sums["kernel_us"])
    return Table(
        (Column("Kernel", number=False), Column("Calls"), Column("CUDA ms"), Column("Share")),
        tuple(
            (
                row.name,
                count_text(row.calls.per_step),
                _ms(row.us.per_step),
                share_text(row.us.per_step / whole if whole else None),
            )
            for row in profile.kernels[:most]
        ),
    )


def ranks_table(profile: Profile) -> Table:
    """What a step took on each rank; nothing to say where there is one."""
    rows = tuple(tuple(text(rank) for _, text in _RANKS) for rank in profile.ranks)
    head = tuple(column for column, _ in _RANKS)
    return Table(head, rows).known() if len(rows) > 1 else Table(head, ())


def _sum_of(name: str) -> Callable[[RankProfile], float | None]:
    return lambda rank: _per_step(rank.sums.get(name))


def _copied(direction: str) -> Callable[[RankProfile], str]:
    def text(rank: RankProfile) -> str:
        if rank.copies is None:
            return MISSING
        return bytes_text(sum(r.bytes.per_step for r in rank.copies if r.direction == direction))

    return text


_RANKS: tuple[tuple[Column, Callable[[RankProfile], str]], ...] = (
    (Column("Rank"), lambda rank: f"{rank.rank}"),
    (Column("Device", number=False), lambda rank: rank.device),
    (Column("Step ms"), lambda rank: _ms(_mean(rank.step_us))),
    (Column("CPU ms"), lambda rank: _ms(_sum_of("operator_cpu_us")(rank))),
    (Column("CUDA ms"), lambda rank: _ms(_sum_of("kernel_us")(rank))),
    (Column("Kernels", spare=1), lambda rank: count_text(_sum_of("kernels")(rank))),
    (Column("To device", spare=3), _copied("to_device")),
    (Column("From device", spare=4), _copied("from_device")),
    (Column("Peak memory", spare=2), lambda rank: bytes_text(_peak(rank))),
)


def figures_text(profile: Profile) -> tuple[tuple[str, str], ...]:
    """What stands beside the operators: a word, and what is to be said of it."""
    if not profile.ranks:
        return ()
    return tuple(
        (word, text)
        for word, text in (
            ("CPU", _cpu_text(profile)),
            ("CUDA", _cuda_text(profile)),
            ("Copied", _copies_text(profile)),
            ("Memory", _memory_text(profile)),
        )
        if text
    )


def notes_text(profile: Profile) -> tuple[str, ...]:
    """Why something is not known."""
    missing = [f"rank {rank.rank}: {rank.missing}" for rank in profile.ranks if rank.missing]
    return (*missing, *(f"rank {rank}: {why}" for rank, why in profile.failed.items()))


def print_profile(console: Console, profile: Profile, folder: Path) -> None:
    """Write the profile of a trial, whose traces are in `folder`."""
    if profile.ranks:
        console.print(Text(_head(profile), style="dim"))
        for table in (operators_table(profile), kernels_table(profile), ranks_table(profile)):
            if table.rows:
                console.print(_grid(fitted(table, console.width)))
                console.print()
    console.print(_remarks(figures_text(profile), notes_text(profile)))
    for rank in profile.ranks:
        # Not wrapped: a path must be one word to be clicked or copied.
        sizes = f"{bytes_text(rank.trace.bytes)}, unzipped {bytes_text(rank.trace.unzipped_bytes)}"
        path = printable(str(folder / rank.trace.file))
        trace = Text.assemble(("Trace".ljust(_MARGIN), "dim"), path, (f"  ({sizes})", "dim"))
        console.print(trace, soft_wrap=True)
    if profile.ranks:
        console.print(Text(f"{'':{_MARGIN}}open it at {VIEWER}", style="dim"))


def profile_dict(profile: Profile) -> dict[str, Any]:
    """The profile as plain values. Times are microseconds; `mean` is over the ranks."""
    return {
        "per_epoch_is": profile.per_epoch_is,
        "mean": {
            "operators": [dataclasses.asdict(row) for row in profile.operators],
            "kernels": [dataclasses.asdict(row) for row in profile.kernels],
            "sums": {name: _plain(figure) for name, figure in profile.sums.items()},
            "copies": [dataclasses.asdict(row) for row in profile.copies]
            if profile.has_device
            else None,
        },
        "memory": {name: dataclasses.asdict(peak) for name, peak in profile.memory.items()},
        "ranks": [dataclasses.asdict(rank) for rank in profile.ranks],
        "failed": {str(rank): why for rank, why in profile.failed.items()},
    }


def fitted(table: Table, width: int) -> Table:
    """The table in so many characters: names are cut, then columns left out, then names again."""
    kept = _named(table, _GOOD_NAME).compact(width).columns
    table = table.without(i for i, column in enumerate(table.columns) if column not in kept)
    longest = max((len(row[0]) for row in table.rows), default=0)
    return _named(table, max(_LEAST_NAME, longest - max(0, table.width - width)))


def _named(table: Table, width: int) -> Table:
    """With names of at most so many characters."""
    return Table(table.columns, tuple((_cut(row[0], width), *row[1:]) for row in table.rows))


def _cut(name: str, width: int) -> str:
    """Both ends tell: `autograd::engine…ConvolutionBackward0`."""
    if len(name) <= width:
        return name
    begin = (width - 1) // 2
    return f"{name[:begin]}…{name[begin + 1 - width :]}"


def _head(profile: Profile) -> str:
    stretch = profile.ranks[0].stretch
    every = [us for rank in profile.ranks for us in rank.step_us]
    ranks = f" of each of {len(profile.ranks)} ranks" if len(profile.ranks) > 1 else ""
    each = f"{_ms(_mean(every))} ms each under the profiler"
    head = f"Per step: mean of {count_text(stretch.steps)} steps{ranks}, {each}"
    if profile.per_epoch_is == "scaled":
        return f"{head}; epochs of {count_text(stretch.steps_per_epoch)} steps are scaled from them"
    return head


def _cpu_text(profile: Profile) -> str:
    sums = profile.sums
    text = f"{_ms(_per_step(sums['operator_cpu_us']))} ms a step in operators"
    if not profile.has_device:
        return text
    calls, waiting = sums["runtime_cpu_us"], sums["synchronize_cpu_us"]
    return (
        f"{text}, {_ms(_per_step(calls))} ms in calls into CUDA, "
        f"{_ms(_per_step(waiting))} ms waiting for the device"
    )


def _cuda_text(profile: Profile) -> str:
    if not profile.has_device:
        return ""
    per_step = {name: _per_step(figure) for name, figure in profile.sums.items()}
    kernels, launches = count_text(per_step["kernels"]), count_text(per_step["launches"])
    return (
        f"{_ms(per_step['kernel_us'])} ms a step in {kernels} kernels ({launches} launches), "
        f"{_ms(per_step['memcpy_us'])} ms in copies, {_ms(per_step['memset_us'])} ms in memsets"
    )


def _copies_text(profile: Profile) -> str:
    parts = []
    for row in profile.copies:
        pageable = f" ({bytes_text(row.pageable_bytes.per_step)} of it from or to pageable memory)"
        parts.append(
            f"{bytes_text(row.bytes.per_step)} {_DIRECTIONS.get(row.direction, row.direction)}"
            f"{pageable if row.pageable_bytes.total else ''}"
        )
    return f"per step {', '.join(parts)}" if parts else ""


def _memory_text(profile: Profile) -> str:
    parts = [
        f"{bytes_text(peak.allocated)} on {device}, reserved {bytes_text(peak.reserved)}"
        if peak.reserved is not None
        else f"{bytes_text(peak.allocated)} on {device}, beyond what was held before"
        for device, peak in profile.memory.items()
    ]
    return f"peak {'; '.join(parts)}" if parts else ""


def _remarks(figures: Iterable[tuple[str, str]], notes: Iterable[str]) -> Grid:
    grid = Grid.grid(padding=(0, 1, 0, 0))
    grid.add_column(style="dim", width=_MARGIN - 1)
    grid.add_column()
    for word, text in (*figures, *(("Note", note) for note in notes)):
        grid.add_row(word, Text(printable(text)))
    return grid


def _grid(table: Table) -> Grid:
    grid = Grid(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for column in table.columns:
        grid.add_column(column.title, justify="right" if column.number else "left", no_wrap=True)
    for row in table.rows:
        grid.add_row(*(Text(printable(cell)) for cell in row))
    return grid


def _peak(rank: RankProfile) -> float | None:
    """Of its own device, which may be told with its number (`cuda:0`) or without."""
    own = [p.allocated for name, p in rank.memory.items() if name.startswith(rank.device)]
    return max(own, default=None)


def _plain(figure: Figure | None) -> dict[str, Any] | None:
    return None if figure is None else dataclasses.asdict(figure)


def _per_step(figure: Figure | None) -> float | None:
    return None if figure is None else figure.per_step


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _ms(us: float | None) -> str:
    return rate_text(us / 1e3) if is_known(us) else MISSING


def _seconds(us: float | None) -> str:
    return seconds_text(us / 1e6 if is_known(us) else None)
