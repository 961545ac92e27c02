"""The profile of a trial: which operators took the time, and the figures that stand beside them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepscope.analysis.trial import profile as profiles
from stepscope.analysis.trial.profile import Profile, ProfiledAmount, RankProfile
from stepscope.records.codec import to_json
from stepscope.report.kit.document import Block, Facts, Paragraph, Section, Verbatim
from stepscope.report.kit.format import (
    MISSING,
    bytes_text,
    count_text,
    is_known,
    rate_text,
    seconds_text,
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
    """The profile of a trial, whose traces are in `folder`."""
    tables = [operators_table(profile), kernels_table(profile), ranks_table(profile)]
    blocks: list[Block] = []
    if profile.ranks:
        span = profile.ranks[0].stretch
        every = [us for rank in profile.ranks for us in rank.step_us]
        ranks = f" of each of {len(profile.ranks)} ranks" if len(profile.ranks) > 1 else ""
        each = f"{_ms(_mean(every))} ms each under the profiler"
        head = f"Per step: mean of {count_text(span.steps)} steps{ranks}, {each}"
        if profile.per_epoch_is == "scaled":
            epochs = f"epochs of {count_text(span.steps_per_epoch)} steps"
            head = f"{head}; {epochs} are scaled from them"
        blocks = [Paragraph(head, "note")]
    blocks += [Section("", (table,)) for table in tables if table.rows]
    notes = [("Note", note) for note in notes_text(profile)]
    remarks: list[Block] = [Facts((*figures_text(profile), *notes))]
    for rank in profile.ranks:
        sizes = f"{bytes_text(rank.trace.bytes)}, unzipped {bytes_text(rank.trace.unzipped_bytes)}"
        remarks.append(Verbatim(f"{folder / rank.trace.file}  ({sizes})", "Trace"))
    if profile.ranks:
        remarks.append(Paragraph(f"Open a trace at {VIEWER}", "note"))
    return [*blocks, Section("", tuple(remarks))]


def profile_dict(profile: Profile) -> dict[str, Any]:
    """The profile as plain values. Times are microseconds; `mean` is over the ranks."""
    mean: dict[str, Any] = {"operators": profile.operators, "kernels": profile.kernels}
    mean |= {"sums": profile.sums, "copies": profile.copies if profile.has_device else None}
    found = {"memory": profile.memory, "ranks": profile.ranks, "failed": profile.failed}
    return dict(to_json({"per_epoch_is": profile.per_epoch_is, "mean": mean, **found}))


@dataclass(frozen=True)
class _Line:
    """A line of the table: an operator, or together all that have no line of their own."""

    name: str
    rows: Sequence[profiles.OperatorRow]

    def sum(self, figure: str, per: str = "per_step") -> float | None:
        figures = [getattr(row, figure) for row in self.rows]
        amounts = [getattr(each, per) for each in figures if each is not None]
        return None if not amounts or None in amounts else float(sum(amounts))

    def alone(self, figure: str) -> float | None:
        """Operators call each other: what several of them take in all cannot be added up."""
        return self.sum(figure) if len(self.rows) == 1 else None


def operators_table(profile: Profile) -> Table:
    """The operators that took longest, on the device if there is one; the others in one line.

    Figures are per step. Times are of the operators themselves, so that they add up.
    """
    operators = profile.operators
    time = "self_cuda_us" if profile.has_device else "self_cpu_us"
    whole = _Line("", operators).sum(time)
    basis = profile.per_epoch_is or ""
    lines = [_Line(row.name, [row]) for row in operators[:_MOST_OPERATORS]]
    if rest := operators[_MOST_OPERATORS:]:
        lines.append(_Line(f"{len(rest)} more", rest))

    def calls_per_epoch(line: _Line) -> str:
        return count_text(line.sum("calls", "per_epoch"))

    def epoch(line: _Line) -> str:
        us = line.sum(time, "per_epoch")
        return seconds_text(us / 1e6 if is_known(us) else None)

    columns: list[tuple[Column, Callable[[_Line], str]]] = [
        (Column("Operator", number=False, cut=True), lambda line: line.name),
        (Column("Calls"), lambda line: count_text(line.sum("calls"))),
        (Column("CPU ms"), lambda line: _ms(line.sum("self_cpu_us"))),
        (Column("CPU ms, total", spare=3), lambda line: _ms(line.alone("cpu_us"))),
        (Column("CUDA ms"), lambda line: _ms(line.sum("self_cuda_us"))),
        (Column("CUDA ms, total", spare=2), lambda line: _ms(line.alone("cuda_us"))),
        (Column("Share"), lambda line: _share(line.sum(time), whole)),
        (Column(f"Calls/epoch, {basis}", spare=4), calls_per_epoch),
        (Column(f"Epoch, {basis}", spare=1), epoch),
    ]
    return Table.of(lines, columns).known()


def kernels_table(profile: Profile) -> Table:
    whole = _per_step(profile.sums["kernel_us"])
    return Table.of(
        profile.kernels[:_MOST_KERNELS],
        [
            (Column("Kernel", number=False, cut=True), lambda row: row.name),
            (Column("Calls"), lambda row: count_text(row.calls.per_step)),
            (Column("CUDA ms"), lambda row: _ms(row.us.per_step)),
            (Column("Share"), lambda row: _share(row.us.per_step, whole)),
        ],
    )


def ranks_table(profile: Profile) -> Table:
    """What a step took on each rank; nothing to say where there is one."""

    def summed(rank: RankProfile, name: str) -> float | None:
        return _per_step(rank.sums.get(name))

    def copied(rank: RankProfile, direction: str) -> float | None:
        if rank.copies is None:
            return None
        return sum(row.us.per_step for row in rank.copies if row.direction == direction)

    def peak(rank: RankProfile) -> float | None:
        """Of its own device, which may be told with its number (`cuda:0`) or without."""
        own = [p.allocated for name, p in rank.memory.items() if name.startswith(rank.device)]
        return max(own, default=None)

    return Table.of(
        profile.ranks if len(profile.ranks) > 1 else (),
        [
            (Column("Rank"), lambda rank: f"{rank.rank}"),
            (Column("Device", number=False), lambda rank: rank.device),
            (Column("Step ms"), lambda rank: _ms(_mean(rank.step_us))),
            (Column("CPU ms"), lambda rank: _ms(summed(rank, "operator_cpu_us"))),
            (Column("CUDA ms"), lambda rank: _ms(summed(rank, "kernel_us"))),
            (Column("Kernels", spare=1), lambda rank: count_text(summed(rank, "kernels"))),
            (Column("To device ms", spare=3), lambda rank: _ms(copied(rank, "to_device"))),
            (Column("From device ms", spare=4), lambda rank: _ms(copied(rank, "from_device"))),
            (Column("Peak memory", spare=2), lambda rank: bytes_text(peak(rank))),
        ],
    ).known()


def figures_text(profile: Profile) -> tuple[tuple[str, str], ...]:
    """What stands beside the operators: a word, and what is to be said of it."""
    if not profile.ranks:
        return ()
    sums = {name: _per_step(figure) for name, figure in profile.sums.items()}
    ms = {name: _ms(us) for name, us in sums.items()}
    cpu, cuda = f"{ms['operator_cpu_us']} ms a step in operators", ""
    if profile.has_device:
        cpu += (
            f", {ms['runtime_cpu_us']} ms in calls into CUDA, {ms['synchronize_cpu_us']} ms "
            "waiting for the device"
        )
        kernels, launches = count_text(sums["kernels"]), count_text(sums["launches"])
        cuda = (
            f"{ms['kernel_us']} ms a step in {kernels} kernels ({launches} launches), "
            f"{ms['memcpy_us']} ms in copies, {ms['memset_us']} ms in memsets"
        )
    copies = []
    for row in profile.copies:
        slow = _per_step(row.pageable_us)
        pageable = f" ({_ms(slow)} ms of it from or to pageable memory)" if slow else ""
        copies.append(
            f"{_ms(row.us.per_step)} ms in {count_text(row.calls.per_step)} copies "
            f"{_DIRECTIONS.get(row.direction, row.direction)}{pageable}"
        )
    memory = []
    for device, peak in profile.memory.items():
        is_host = peak.reserved is None
        more = "beyond what was held before" if is_host else f"reserved {bytes_text(peak.reserved)}"
        memory.append(f"{bytes_text(peak.allocated)} on {device}, {more}")
    figures = {
        "CPU": cpu,
        "CUDA": cuda,
        "Copied": f"per step {', '.join(copies)}" if copies else "",
        "Memory": f"peak {'; '.join(memory)}" if memory else "",
    }
    return tuple((word, text) for word, text in figures.items() if text)


def notes_text(profile: Profile) -> tuple[str, ...]:
    missing = [f"rank {rank.rank}: {rank.missing}" for rank in profile.ranks if rank.missing]
    return (*missing, *(f"rank {rank}: {why}" for rank, why in profile.failed.items()))


def _per_step(figure: ProfiledAmount | None) -> float | None:
    return None if figure is None else figure.per_step


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _share(part: float | None, whole: float | None) -> str:
    return share_text(part / whole if part is not None and whole else None)


def _ms(us: float | None) -> str:
    return rate_text(us / 1e3) if is_known(us) else MISSING
