"""The profile of a trial: operators and kernels by time, and totals per step."""

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
    plural,
    rate_text,
    share_text,
)
from stepscope.report.kit.table import Column, Table

VIEWER = "ui.perfetto.dev"

_MAX_OPERATORS = 12
_MAX_KERNELS = 5
_DIRECTIONS = {
    "to_device": "to the device",
    "from_device": "from the device",
    "within_device": "within the device",
    "between_devices": "between devices",
    "host": "from host to host",
    "other": "in other directions",
}


def profile_blocks(profile: Profile, folder: Path) -> list[Block]:
    """Return the tables of the first rank, and the traces of all ranks in `folder`."""
    blocks: list[Block] = []
    facts = [("Note", note) for note in notes_text(profile)]
    if profile.ranks:
        first, rank = next(iter(profile.ranks.items()))
        of_rank, other_ranks = "", ""
        if len(profile.ranks) + len(profile.failed) > 1:
            of_rank = f" of rank {first}"
            other_ranks = "; profile<rank>.json next to the trace has the profile of each rank"
        step = _ms(sum(rank.step_us) / len(rank.step_us) if rank.step_us else None)
        steps = f"{count_text(rank.steps)} steps{of_rank}, {step} ms per step under the profiler"
        tables = [operators_table(rank), kernels_table(rank)]
        blocks = [Paragraph(f"Means per step over {steps}{other_ranks}", "note")]
        blocks += [Section("", (table,)) for table in tables if table.rows]
        facts = [*totals_text(rank), *facts]
    traces: list[Block] = [Facts(tuple(facts))]
    for rank in profile.ranks.values():
        size, uncompressed = bytes_text(rank.trace.bytes), bytes_text(rank.trace.unzipped_bytes)
        sizes = f"{size}, uncompressed {uncompressed}"
        traces.append(Verbatim(f"{folder / rank.trace.file}  ({sizes})", "Trace"))
    if profile.ranks:
        traces.append(Paragraph(f"Open a trace at {VIEWER}", "note"))
    return [*blocks, Section("", tuple(traces))]


def profile_dict(profile: Profile) -> dict[str, Any]:
    """Return the profile of every rank as plain values. Times are in microseconds."""

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
    """Return the slowest operators, by device time if there is a device; the rest in one row.

    Values are per step. Shares use self time, so that they add up.
    """

    def time(row: ProfiledOperator) -> float:
        return row.self_cpu_us if rank.copies is None else row.self_cuda_us or 0.0

    def ms(us: float | None) -> str:
        return _ms(us, rank.steps)

    total = sum(map(time, rank.operators))
    rows = list(rank.operators[:_MAX_OPERATORS])
    if rest := rank.operators[_MAX_OPERATORS:]:
        cuda_us = [row.self_cuda_us for row in rest if row.self_cuda_us is not None]
        combined = ProfiledOperator(
            name=f"{len(rest)} more",
            kind="operator",
            calls=sum(row.calls for row in rest),
            self_cpu_us=sum(row.self_cpu_us for row in rest),
            cpu_us=math.nan,  # operators call each other, so total times cannot be added
            self_cuda_us=sum(cuda_us) if cuda_us else None,
        )
        rows.append(combined)
    columns: list[tuple[Column, Callable[[ProfiledOperator], str]]] = [
        (Column("Operator", number=False, elide=True), lambda row: row.name),
        (Column("Calls"), lambda row: count_text(row.calls / rank.steps)),
        (Column("CPU ms"), lambda row: ms(row.self_cpu_us)),
        (Column("CPU ms, total", drop=2), lambda row: ms(row.cpu_us)),
        (Column("CUDA ms"), lambda row: ms(row.self_cuda_us)),
        (Column("CUDA ms, total", drop=1), lambda row: ms(row.cuda_us)),
        (Column("Share"), lambda row: _share(time(row), total)),
    ]
    return Table.of(rows, columns).without_empty_columns()


def kernels_table(rank: RankProfile) -> Table:
    return Table.of(
        rank.kernels[:_MAX_KERNELS],
        [
            (Column("Kernel", number=False, elide=True), lambda row: row.name),
            (Column("Calls"), lambda row: count_text(row.calls / rank.steps)),
            (Column("CUDA ms"), lambda row: _ms(row.us, rank.steps)),
            (Column("Share"), lambda row: _share(row.us, rank.sums.kernel_us)),
        ],
    )


def totals_text(rank: RankProfile) -> list[tuple[str, str]]:
    """Return labels and texts with the totals per step."""
    sums = rank.sums

    def ms(us: float | None) -> str:
        return f"{_ms(us, rank.steps)} ms"

    def count(total: int | None) -> str:
        return count_text(None if total is None else total / rank.steps)

    totals = [("CPU", f"{ms(sums.operator_cpu_us)} per step in operators")]
    if rank.copies is not None:
        calls, waits = ms(sums.runtime_cpu_us), ms(sums.synchronize_cpu_us)
        host = f"{totals[0][1]}, {calls} in CUDA calls, {waits} waiting for the device"
        kernels = f"{count(sums.kernels)} kernels ({count(sums.launches)} launches)"
        copies = f"{ms(sums.memcpy_us)} in copies, {ms(sums.memset_us)} in memsets"
        device = f"{ms(sums.kernel_us)} per step in {kernels}, {copies}"
        totals = [("CPU", host), ("CUDA", device)]
    directions = []
    for direction, row in (rank.copies or {}).items():
        copies = plural(row.calls / rank.steps, "copy", "copies")
        text = (
            f"{ms(row.us)} in {count(row.calls)} {copies} {_DIRECTIONS.get(direction, direction)}"
        )
        if row.pageable_us:
            text += f" ({ms(row.pageable_us)} from or to pageable memory)"
        directions.append(text)
    if directions:
        totals.append(("Copies", f"{', '.join(directions)}, per step"))
    memory = []
    for name, peak in rank.memory.items():
        is_host = peak.reserved is None
        detail = (
            "added by the profiled steps" if is_host else f"{bytes_text(peak.reserved)} reserved"
        )
        memory.append(f"{bytes_text(peak.allocated)} on {name}, {detail}")
    if memory:
        totals.append(("Memory", f"peak {'; '.join(memory)}"))
    return totals


def notes_text(profile: Profile) -> tuple[str, ...]:
    missing = [f"rank {n}: {rank.missing}" for n, rank in profile.ranks.items() if rank.missing]
    return (*missing, *(f"rank {rank}: {reason}" for rank, reason in profile.failed.items()))


def _share(part: float | None, total: float | None) -> str:
    return share_text(part / total if part is not None and total else None)


def _ms(us: float | None, steps: int = 1) -> str:
    return rate_text(us / steps / 1e3) if is_known(us) else MISSING
