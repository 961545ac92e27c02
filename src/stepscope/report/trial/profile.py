"""The profile of a trial: which operators took the time, and the figures that stand beside them."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stepscope.records.codec import to_json
from stepscope.records.profile import Profile, ProfiledOperator, RankProfile
from stepscope.report.kit.document import Block, Facts, Paragraph, Section, Verbatim
from stepscope.report.kit.format import (
    MISSING,
    bytes_text,
    count_text,
    is_known,
    rate_text,
    share_text,
)
from stepscope.report.kit.table import Column, Table

VIEWER = "ui.perfetto.dev"

_MOST_OPERATORS = 12
_MOST_KERNELS = 5
_DIRECTIONS = {
    "to_device": "to the device",
    "from_device": "from it",
    "within_device": "within it",
    "between_devices": "between devices",
    "host": "from host to host",
    "other": "elsewhere",
}


def profile_blocks(profile: Profile, folder: Path) -> list[Block]:
    """The profile of a trial, whose traces are in `folder`: of its first rank, and what there is of
    the others."""
    blocks: list[Block] = []
    facts = [("Note", note) for note in notes_text(profile)]
    if profile.ranks:
        first, rank = next(iter(profile.ranks.items()))
        whose, others = "", ""
        if len(profile.ranks) + len(profile.failed) > 1:
            whose = f" of rank {first}"
            others = "; each rank has a file of its own, profile<rank>.json, beside its trace"
        each = _ms(sum(rank.step_us) / len(rank.step_us) if rank.step_us else None)
        head = f"Per step: mean of {count_text(rank.steps)} steps{whose}, {each} ms each under"
        tables = [operators_table(rank), kernels_table(rank)]
        blocks = [Paragraph(f"{head} the profiler{others}", "note")]
        blocks += [Section("", (table,)) for table in tables if table.rows]
        facts = [*figures_text(rank), *facts]
    remarks: list[Block] = [Facts(tuple(facts))]
    for rank in profile.ranks.values():
        sizes = f"{bytes_text(rank.trace.bytes)}, unzipped {bytes_text(rank.trace.unzipped_bytes)}"
        remarks.append(Verbatim(f"{folder / rank.trace.file}  ({sizes})", "Trace"))
    if profile.ranks:
        remarks.append(Paragraph(f"Open a trace at {VIEWER}", "note"))
    return [*blocks, Section("", tuple(remarks))]


def profile_dict(profile: Profile) -> dict[str, Any]:
    """The profile as plain values, of every rank. Times are microseconds."""

    def with_per_step(row: dict[str, Any], steps: int) -> dict[str, Any]:
        totals = {name: value for name, value in row.items() if isinstance(value, int | float)}
        return row | {name: {"total": v, "per_step": v / steps} for name, v in totals.items()}

    ranks = []
    for number, rank in profile.ranks.items():
        plain = to_json(rank)
        if rank.copies is not None:
            plain["copies"] = [{"direction": to, **row} for to, row in plain["copies"].items()]
        for name in ("operators", "kernels", "copies"):
            plain[name] = plain[name] and [with_per_step(row, rank.steps) for row in plain[name]]
        plain["sums"] = with_per_step(plain["sums"], rank.steps)
        ranks.append({"rank": number, **plain})
    return {"ranks": ranks, "failed": to_json(profile.failed)}


def operators_table(rank: RankProfile) -> Table:
    """The operators that took longest, on the device if there is one; the others in one line.

    Figures are per step. Times are of the operators themselves, so that they add up.
    """

    def time(row: ProfiledOperator) -> float:
        return row.self_cpu_us if rank.copies is None else row.self_cuda_us or 0.0

    def ms(us: float | None) -> str:
        return _ms(us, rank.steps)

    whole = sum(map(time, rank.operators))
    rows = list(rank.operators[:_MOST_OPERATORS])
    if rest := rank.operators[_MOST_OPERATORS:]:
        cuda_us = [row.self_cuda_us for row in rest if row.self_cuda_us is not None]
        together = ProfiledOperator(
            name=f"{len(rest)} more",
            kind="operator",
            calls=sum(row.calls for row in rest),
            self_cpu_us=sum(row.self_cpu_us for row in rest),
            cpu_us=math.nan,  # operators call each other: what they take in all does not add up
            self_cuda_us=sum(cuda_us) if cuda_us else None,
        )
        rows.append(together)
    columns: list[tuple[Column, Callable[[ProfiledOperator], str]]] = [
        (Column("Operator", number=False, cut=True), lambda row: row.name),
        (Column("Calls"), lambda row: count_text(row.calls / rank.steps)),
        (Column("CPU ms"), lambda row: ms(row.self_cpu_us)),
        (Column("CPU ms, total", spare=2), lambda row: ms(row.cpu_us)),
        (Column("CUDA ms"), lambda row: ms(row.self_cuda_us)),
        (Column("CUDA ms, total", spare=1), lambda row: ms(row.cuda_us)),
        (Column("Share"), lambda row: _share(time(row), whole)),
    ]
    return Table.of(rows, columns).known()


def kernels_table(rank: RankProfile) -> Table:
    return Table.of(
        rank.kernels[:_MOST_KERNELS],
        [
            (Column("Kernel", number=False, cut=True), lambda row: row.name),
            (Column("Calls"), lambda row: count_text(row.calls / rank.steps)),
            (Column("CUDA ms"), lambda row: _ms(row.us, rank.steps)),
            (Column("Share"), lambda row: _share(row.us, rank.sums.kernel_us)),
        ],
    )


def figures_text(rank: RankProfile) -> list[tuple[str, str]]:
    """What stands beside the operators: a word, and what is to be said of it."""
    sums = rank.sums

    def ms(us: float | None) -> str:
        return f"{_ms(us, rank.steps)} ms"

    def count(total: int | None) -> str:
        return count_text(None if total is None else total / rank.steps)

    figures = [("CPU", f"{ms(sums.operator_cpu_us)} a step in operators")]
    if rank.copies is not None:
        calls, waits = ms(sums.runtime_cpu_us), ms(sums.synchronize_cpu_us)
        host = f"{figures[0][1]}, {calls} in calls into CUDA, {waits} waiting for the device"
        kernels = f"{count(sums.kernels)} kernels ({count(sums.launches)} launches)"
        moved = f"{ms(sums.memcpy_us)} in copies, {ms(sums.memset_us)} in memsets"
        figures = [("CPU", host), ("CUDA", f"{ms(sums.kernel_us)} a step in {kernels}, {moved}")]
    copies = []
    for direction, row in (rank.copies or {}).items():
        where = _DIRECTIONS.get(direction, direction)
        text = f"{ms(row.us)} in {count(row.calls)} copies {where}"
        if row.pageable_us:
            text += f" ({ms(row.pageable_us)} of it from or to pageable memory)"
        copies.append(text)
    if copies:
        figures.append(("Copied", f"per step {', '.join(copies)}"))
    memory = []
    for device, peak in rank.memory.items():
        is_host = peak.reserved is None
        more = "beyond what was held before" if is_host else f"reserved {bytes_text(peak.reserved)}"
        memory.append(f"{bytes_text(peak.allocated)} on {device}, {more}")
    if memory:
        figures.append(("Memory", f"peak {'; '.join(memory)}"))
    return figures


def notes_text(profile: Profile) -> tuple[str, ...]:
    missing = [f"rank {n}: {rank.missing}" for n, rank in profile.ranks.items() if rank.missing]
    return (*missing, *(f"rank {rank}: {why}" for rank, why in profile.failed.items()))


def _share(part: float | None, whole: float | None) -> str:
    return share_text(part / whole if part is not None and whole else None)


def _ms(us: float | None, steps: int = 1) -> str:
    return rate_text(us / steps / 1e3) if is_known(us) else MISSING
