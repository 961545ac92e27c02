"""The tables of a report as text, drawn alike in a terminal and on a page."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from stepscope.analysis.gpus import GpuRow, side_by_side
from stepscope.analysis.series import Combine, statistic, together
from stepscope.analysis.summary import Recorded
from stepscope.metrics import BY_KEY, is_counter
from stepscope.records import EpochRow, Statistic, Summary
from stepscope.report.format import (
    MISSING,
    allowed_text,
    bytes_text,
    cores_text,
    count_text,
    gigabytes_text,
    joules_text,
    rate_text,
    seconds_text,
    share_text,
    value_text,
)
from stepscope.report.panels import drawn_roles, network, roles_in_order


@dataclass(frozen=True)
class Column:
    """A heading; numbers stand on the right. What is `extra` is left out where space is short."""

    title: str
    number: bool = True
    extra: bool = False
    spare: int = 0
    """Left out where even so there is no space, those with the highest first; 0 stays."""
    gpu: bool = False
    """Whether it is about GPUs, in a table of other things too."""


@dataclass(frozen=True)
class Table:
    """Rows of text under headings."""

    columns: tuple[Column, ...]
    rows: tuple[tuple[str, ...], ...]

    def without(self, dropped: Iterable[int]) -> Table:
        """The same table less the columns at these positions."""
        gone = set(dropped)
        return Table(
            tuple(c for i, c in enumerate(self.columns) if i not in gone),
            tuple(tuple(t for i, t in enumerate(row) if i not in gone) for row in self.rows),
        )

    def compact(self, width: int | None = None) -> Table:
        """The table where space is short, in so many characters if that can be done."""
        table = self.without(i for i, column in enumerate(self.columns) if column.extra)
        while width is not None and table.width > width:
            spares = [column.spare for column in table.columns]
            if not any(spares):
                break
            table = table.without([spares.index(max(spares))])
        return table

    def parts(self) -> tuple[Table, Table]:
        """What is about anything else, and what is about GPUs; both with the first column."""
        of_gpus = {i for i, column in enumerate(self.columns) if column.gpu}
        others = set(range(1, len(self.columns))) - of_gpus
        return self.without(of_gpus), self.without(others)

    def known(self) -> Table:
        """The table less the columns that nothing is known of."""
        places = range(len(self.columns))
        return self.without(
            i for i in places if self.rows and all(row[i] == MISSING for row in self.rows)
        )

    @property
    def width(self) -> int:
        """How wide it is as text, with two blanks between columns."""
        lines = [[column.title for column in self.columns], *self.rows]
        widest = (max(len(line[i]) for line in lines) for i in range(len(self.columns)))
        return sum(widest) + 2 * (len(self.columns) - 1)


_LEDGER: tuple[tuple[Column, Callable[[EpochRow], str]], ...] = (
    (Column("Epoch"), lambda row: f"{row.index}" if row.complete else f"{row.index} (cut)"),
    (Column("Start", extra=True), lambda row: seconds_text(row.begin_s)),
    (Column("Time"), lambda row: seconds_text(row.seconds)),
    (Column("Steps"), lambda row: count_text(row.steps)),
    (Column("Samples", extra=True), lambda row: count_text(row.samples)),
    (Column("Samples/s"), lambda row: rate_text(row.samples_per_second)),
    (Column("Data wait"), lambda row: share_text(row.data_wait_share)),
    (Column("Cores"), lambda row: cores_text(row.cores)),
    (Column("Core-seconds", extra=True), lambda row: rate_text(row.core_seconds)),
    (Column("Read"), lambda row: gigabytes_text(row.read_gb)),
    (Column("Written", extra=True), lambda row: gigabytes_text(row.written_gb)),
    (Column("Peak memory"), lambda row: bytes_text(row.memory_peak_bytes)),
    (Column("SM", gpu=True), lambda row: share_text(row.gpu_sm)),
    (Column("Tensor", spare=1, gpu=True), lambda row: share_text(row.gpu_tensor)),
    (Column("Memory bandwidth", extra=True, gpu=True), lambda row: share_text(row.gpu_dram)),
    (Column("Utilisation", gpu=True), lambda row: share_text(row.gpu_utilization)),
    (
        Column("Peak GPU memory", spare=3, gpu=True),
        lambda row: bytes_text(row.gpu_memory_peak_bytes),
    ),
    (Column("PCIe to GPU", extra=True, gpu=True), lambda row: gigabytes_text(row.pcie_to_gpu_gb)),
    (
        Column("PCIe from GPU", extra=True, gpu=True),
        lambda row: gigabytes_text(row.pcie_from_gpu_gb),
    ),
    (Column("Energy", gpu=True), lambda row: joules_text(row.joules)),
    (Column("Samples/J", spare=2, gpu=True), lambda row: rate_text(row.samples_per_joule)),
)
_LESS_THAN_GPUS = frozenset({"Steps", "Read", "Peak memory"})


def ledger(epochs: Sequence[EpochRow]) -> Table:
    """A line per epoch; a column that nothing is known of is left out.

    Where GPUs trained, what they did is told first, and utilisation only where nothing better is.
    """
    rows = tuple(tuple(text(row) for _, text in _LEDGER) for row in epochs)
    table = Table(tuple(column for column, _ in _LEDGER), rows).known()
    titles = {column.title for column in table.columns}
    if not rows or not any(column.gpu for column in table.columns):
        return table
    extra = _LESS_THAN_GPUS | ({"Utilisation"} if "SM" in titles else set())
    columns = (replace(c, extra=c.extra or c.title in extra) for c in table.columns)
    return replace(table, columns=tuple(columns))


def _peak_of_size(row: GpuRow) -> str:
    peak = bytes_text(row.figures.gpu_memory_peak_bytes)
    size = row.gpu.memory_bytes
    return f"{peak} of {bytes_text(size)}" if size and peak != MISSING else peak


_GPUS: tuple[tuple[Column, Callable[[GpuRow], str]], ...] = (
    (Column("GPU", number=False), lambda row: row.gpu.label),
    (Column("Name", number=False, extra=True), lambda row: row.gpu.name or MISSING),
    (Column("SM"), lambda row: share_text(row.figures.gpu_sm)),
    (Column("Tensor"), lambda row: share_text(row.figures.gpu_tensor)),
    (Column("Memory bandwidth", extra=True), lambda row: share_text(row.figures.gpu_dram)),
    (Column("Utilisation", spare=2), lambda row: share_text(row.figures.gpu_utilization)),
    (Column("Memory peak"), _peak_of_size),
    (Column("Power"), lambda row: value_text(row.power_watts, "W")),
    (Column("Energy"), lambda row: joules_text(row.figures.joules)),
    (Column("PCIe to GPU", spare=4), lambda row: gigabytes_text(row.figures.pcie_to_gpu_gb)),
    (Column("PCIe from GPU", spare=5), lambda row: gigabytes_text(row.figures.pcie_from_gpu_gb)),
    (Column("Slowed by power", extra=True), lambda row: share_text(row.slowed_power)),
    (Column("Slowed by heat", extra=True), lambda row: share_text(row.slowed_heat)),
    (Column("ECC uncorrected", extra=True), lambda row: count_text(row.ecc_uncorrected)),
)


def gpus(used: Sequence[GpuRow]) -> Table:
    """A line per GPU of the run, over the whole of it."""
    rows = tuple(tuple(text(row) for _, text in _GPUS) for row in used)
    return Table(tuple(column for column, _ in _GPUS), rows).known()


def phases(summary: Summary) -> Table:
    """What the run spent its time on besides its epochs."""
    return Table(
        (Column("Phase", number=False), Column("Times"), Column("Time in all")),
        tuple((name, count_text(n), seconds_text(s)) for name, n, s in summary.phases),
    )


def roles(recorded: Recorded, summary: Summary) -> Table:
    """What each part of the process tree took; nothing to say where the tree is one role."""
    of = {(each.metric, each.entity): each for each in summary.statistics}
    found = roles_in_order(recorded)
    columns = ("Processes at most", "CPU mean", "CPU max", "RSS mean", "RSS max", "Disk read mean")
    rows = tuple(
        (
            role,
            _part(of.get(("processes", role)), "max"),
            _part(of.get(("cpu", role)), "mean"),
            _part(of.get(("cpu", role)), "max"),
            _part(of.get(("rss", role)), "mean"),
            _part(of.get(("rss", role)), "max"),
            _part(of.get(("read", role)), "mean"),
        )
        for role in found
    )
    head = (Column("Role", number=False), *(Column(title) for title in columns))
    return Table(head, rows if len(found) > 1 else ())


def overview(recorded: Recorded, summary: Summary) -> Table:
    """The metrics everybody asks for; CPU both as cores and as a share of what is allowed."""
    of = {(each.metric, each.entity): each for each in summary.statistics}
    rows = [*_cpu_rows(of.get(("cpu", "tree")), summary.cpu_allowed)]
    for role in drawn_roles(recorded):
        rows += _row(of.get(("cpu", role)), f"CPU of {role}")
    rows += _row(of.get(("memory", "tree")), "memory")
    rows += _row(of.get(("read", "tree")), "disk read")
    rows += _row(of.get(("write", "tree")), "disk written")
    for metric in ("net_received", "net_sent"):
        summed = statistic(metric, "all", network(recorded, metric), is_rate=True)
        rows += _row(summed, BY_KEY[metric].label)
    rows += _row(of.get(("host_cpu", "host")), "host CPU")
    rows += _gpu_rows(recorded)
    return Table((Column("", number=False), *_STATISTIC_COLUMNS), tuple(rows))


_OVER_GPUS: tuple[tuple[str, Combine, str], ...] = (
    ("gpu_sm", np.nanmean, "mean of"),
    ("gpu_tensor", np.nanmean, "mean of"),
    ("gpu_dram", np.nanmean, "mean of"),
    ("gpu_utilization", np.nanmean, "mean of"),
    ("gpu_power", np.nansum, "all"),
    ("gpu_pcie_received", np.nansum, "all"),
    ("gpu_pcie_sent", np.nansum, "all"),
)


def _gpu_rows(recorded: Recorded) -> list[tuple[str, ...]]:
    """What everybody asks for of GPUs, those of the run together; their memory is the fullest's."""
    used = recorded.used_gpus
    rows: list[tuple[str, ...]] = []
    for metric, combine, how in _OVER_GPUS:
        label = BY_KEY[metric].label + (f", {how} {len(used)}" if len(used) > 1 else "")
        series = side_by_side(used, metric, combine)
        rows += _row(statistic(metric, "all", series, is_counter(metric)), label)
    fullest = together([gpu.memory for gpu in used], np.nanmax)
    label = f"GPU memory, fullest of {len(used)}" if len(used) > 1 else "GPU memory"
    return rows + _row(statistic("gpu_memory", "all", fullest, is_rate=False), label)


def statistics(summary: Summary, names: Mapping[str, str] | None = None) -> Table:
    """Every metric of every entity, in the order of the table of metrics. `names` are those that
    people have for some entities: of a GPU its label."""
    names = names or {}
    places = {key: place for place, key in enumerate(BY_KEY)}
    named = [replace(s, entity=names.get(s.entity, s.entity)) for s in summary.statistics]
    ordered = sorted(named, key=lambda s: (places[s.metric], s.entity != "tree", s.entity))
    head = (
        Column("Metric", number=False),
        Column("Of", number=False),
        Column("Unit", number=False),
    )
    return Table(
        (*head, *_STATISTIC_COLUMNS, Column("Samples")),
        tuple(
            (
                BY_KEY[s.metric].label,
                s.entity,
                BY_KEY[s.metric].unit,
                *_three(s),
                count_text(s.count),
            )
            for s in ordered
        ),
    )


_STATISTIC_COLUMNS = (Column("Mean"), Column("p95"), Column("Max"))


def _cpu_rows(cpu: Statistic | None, allowed: float | None) -> list[tuple[str, ...]]:
    if cpu is None:
        return []
    rows = _row(cpu, "CPU")
    if allowed:
        shares = (share_text(value / allowed) for value in (cpu.mean, cpu.p95, cpu.max))
        rows.append((f"CPU, share of {allowed_text(allowed)}", *shares))
    return rows


def _row(found: Statistic | None, label: str) -> list[tuple[str, ...]]:
    if found is None:
        return []
    suffix = " cores" if BY_KEY[found.metric].unit == "cores" else ""
    return [(label, *(f"{text}{suffix}" for text in _three(found)))]


def _three(found: Statistic) -> tuple[str, str, str]:
    unit = BY_KEY[found.metric].unit
    return (
        value_text(found.mean, unit),
        value_text(found.p95, unit),
        value_text(found.max, unit),
    )


def _part(found: Statistic | None, part: str) -> str:
    return MISSING if found is None else value_text(getattr(found, part), BY_KEY[found.metric].unit)
