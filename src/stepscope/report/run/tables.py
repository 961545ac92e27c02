"""The tables of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from stepscope.analysis.run.data import RunData
from stepscope.analysis.run.gpus import GpuRow, side_by_side
from stepscope.analysis.run.series import Combine, statistic, together
from stepscope.metrics import BY_KEY, is_counter
from stepscope.records import EpochRow, Statistic, Summary
from stepscope.report.kit.format import (
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
from stepscope.report.kit.table import Column, Table
from stepscope.report.run.panels import drawn_roles, network, roles_in_order


def _peak_of_size(row: GpuRow) -> str:
    peak = bytes_text(row.figures.gpu_memory_peak_bytes)
    size = row.gpu.memory_bytes
    return f"{peak} of {bytes_text(size)}" if size and peak != MISSING else peak


# fmt: off
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
    (Column("Peak GPU memory", spare=3, gpu=True), lambda r: bytes_text(r.gpu_memory_peak_bytes)),
    (Column("PCIe to GPU", extra=True, gpu=True), lambda r: gigabytes_text(r.pcie_to_gpu_gb)),
    (Column("PCIe from GPU", extra=True, gpu=True), lambda r: gigabytes_text(r.pcie_from_gpu_gb)),
    (Column("Energy", gpu=True), lambda row: joules_text(row.joules)),
    (Column("Samples/J", spare=2, gpu=True), lambda row: rate_text(row.samples_per_joule)),
)
_GPUS: tuple[tuple[Column, Callable[[GpuRow], str]], ...] = (
    (Column("GPU", number=False), lambda row: row.gpu.label),
    (Column("Name", number=False, extra=True), lambda row: row.gpu.model or MISSING),
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
_OVER_GPUS: tuple[tuple[str, Combine, str], ...] = (
    ("gpu_sm", np.nanmean, "mean of"),
    ("gpu_tensor", np.nanmean, "mean of"),
    ("gpu_dram", np.nanmean, "mean of"),
    ("gpu_utilization", np.nanmean, "mean of"),
    ("gpu_power", np.nansum, "all"),
    ("gpu_pcie_received", np.nansum, "all"),
    ("gpu_pcie_sent", np.nansum, "all"),
)
# fmt: on
_LESS_THAN_GPUS = frozenset({"Steps", "Read", "Peak memory"})
_STATISTIC_COLUMNS = (Column("Mean"), Column("p95"), Column("Max"))
_MOST_EPOCHS, _FIRST_EPOCHS = 12, 6


def ledger(epochs: Sequence[EpochRow]) -> Table:
    """A line per epoch; a column that nothing is known of is left out.

    Where GPUs trained, what they did is told first, and utilisation only where nothing better is.
    """
    table = Table.of(epochs, _LEDGER).known()
    titles = {column.title for column in table.columns}
    if not table.rows or not any(column.gpu for column in table.columns):
        return table
    extra = _LESS_THAN_GPUS | ({"Utilisation"} if "SM" in titles else set())
    columns = (replace(c, extra=c.extra or c.title in extra) for c in table.columns)
    return replace(table, columns=tuple(columns))


def shortened(ledger: Table) -> Table:
    """The first and the last epochs, with a row that says how many are between."""
    between = len(ledger.rows) - _MOST_EPOCHS
    if between <= 0:
        return ledger
    last = _MOST_EPOCHS - _FIRST_EPOCHS
    named = 1 + next(i for i, column in enumerate(ledger.columns[1:]) if not column.extra)
    dots = ["…", *("" for _ in ledger.columns[1:])]
    dots[named] = f"{between} more"
    return replace(ledger, rows=(*ledger.rows[:_FIRST_EPOCHS], tuple(dots), *ledger.rows[-last:]))


def gpus(used: Sequence[GpuRow]) -> Table:
    """A line per GPU of the run, over the whole of it."""
    return Table.of(used, _GPUS).known()


def phases(summary: Summary) -> Table:
    """What the run spent its time on besides its epochs."""
    return Table(
        (Column("Phase", number=False), Column("Times"), Column("Time in all")),
        tuple((name, count_text(n), seconds_text(s)) for name, n, s in summary.phases),
    )


def roles(recorded: RunData, summary: Summary) -> Table:
    """What each part of the process tree took; nothing to say where the tree is one role."""
    of = {(each.metric, each.entity): each for each in summary.statistics}

    def cell(metric: str, role: str, part: str) -> str:
        found = of.get((metric, role))
        return MISSING if found is None else value_text(getattr(found, part), BY_KEY[metric].unit)

    columns = (
        ("Processes at most", "processes", "max"),
        ("CPU mean", "cpu", "mean"),
        ("CPU max", "cpu", "max"),
        ("RSS mean", "rss", "mean"),
        ("RSS max", "rss", "max"),
        ("Disk read mean", "read", "mean"),
    )
    found = roles_in_order(recorded)
    rows = ((role, *(cell(m, role, part) for _, m, part in columns)) for role in found)
    head = (Column("Role", number=False), *(Column(title) for title, _, _ in columns))
    return Table(head, tuple(rows) if len(found) > 1 else ())


def overview(recorded: RunData, summary: Summary) -> Table:
    """The metrics everybody asks for; CPU both as cores and as a share of what is allowed."""
    of = {(each.metric, each.entity): each for each in summary.statistics}
    rows: list[tuple[str, ...]] = []

    def add(found: Statistic | None, label: str) -> None:
        if found is not None:
            suffix = " cores" if BY_KEY[found.metric].unit == "cores" else ""
            rows.append((label, *(f"{text}{suffix}" for text in _mean_p95_max(found))))

    cpu, allowed = of.get(("cpu", "tree")), summary.cpu_allowed
    add(cpu, "CPU")
    if cpu is not None and allowed:
        shares = (share_text(value / allowed) for value in (cpu.mean, cpu.p95, cpu.max))
        rows.append((f"CPU, share of {allowed_text(allowed)}", *shares))
    for role in drawn_roles(recorded):
        add(of.get(("cpu", role)), f"CPU of {role}")
    add(of.get(("memory", "tree")), "memory")
    add(of.get(("read", "tree")), "disk read")
    add(of.get(("write", "tree")), "disk written")
    for metric in ("net_received", "net_sent"):
        summed = statistic(metric, "all", network(recorded, metric), is_rate=True)
        add(summed, BY_KEY[metric].label)
    add(of.get(("host_cpu", "host")), "host CPU")
    used = recorded.used_gpus
    for metric, combine, how in _OVER_GPUS:
        label = BY_KEY[metric].label + (f", {how} {len(used)}" if len(used) > 1 else "")
        series = side_by_side(used, metric, combine)
        add(statistic(metric, "all", series, is_counter(metric)), label)
    fullest = together([gpu.memory for gpu in used], np.nanmax)
    label = f"GPU memory, fullest of {len(used)}" if len(used) > 1 else "GPU memory"
    add(statistic("gpu_memory", "all", fullest, is_rate=False), label)
    return Table((Column("", number=False), *_STATISTIC_COLUMNS), tuple(rows))


def statistics(summary: Summary, names: Mapping[str, str] | None = None) -> Table:
    """Every metric of every entity, in the order of the table of metrics.

    `names` are those that people have for some entities: of a GPU its label.
    """
    names = names or {}
    places = {key: place for place, key in enumerate(BY_KEY)}
    named = [replace(s, entity=names.get(s.entity, s.entity)) for s in summary.statistics]
    ordered = sorted(named, key=lambda s: (places[s.metric], s.entity != "tree", s.entity))
    head = (Column(title, number=False) for title in ("Metric", "Of", "Unit"))
    rows = (
        (
            BY_KEY[each.metric].label,
            each.entity,
            BY_KEY[each.metric].unit,
            *_mean_p95_max(each),
            count_text(each.count),
        )
        for each in ordered
    )
    return Table((*head, *_STATISTIC_COLUMNS, Column("Samples")), tuple(rows))


def _mean_p95_max(found: Statistic) -> list[str]:
    unit = BY_KEY[found.metric].unit
    return [value_text(value, unit) for value in (found.mean, found.p95, found.max)]
