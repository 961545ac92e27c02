"""The tables of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from stepscope.analysis.run.data import RunData
from stepscope.analysis.run.gpus import GpuRow, combined_metric
from stepscope.analysis.run.series import Combine, combined, statistic
from stepscope.metrics import BY_KEY, is_counter
from stepscope.records import EpochRow, Statistic, Summary
from stepscope.report.kit.format import (
    MISSING,
    allowed_text,
    bytes_text,
    cores_text,
    count_text,
    joules_text,
    rate_text,
    seconds_text,
    share_text,
    upper_first,
    value_text,
)
from stepscope.report.kit.table import Column, Table
from stepscope.report.run.panels import drawn_roles, network, roles_in_order


def _peak_of_size(row: GpuRow) -> str:
    peak = bytes_text(row.figures.gpu_memory_peak_bytes)
    size = row.gpu.memory_bytes
    return f"{peak} of {bytes_text(size)}" if size and peak != MISSING else peak


_STEPS, _DISK_READS, _PEAK_MEMORY = Column("Steps"), Column("Disk reads"), Column("Peak memory")
_SM, _UTILIZATION = Column("SM", gpu=True), Column("Utilization", gpu=True)
_REPLACED_BY_GPU_METRICS = frozenset({_STEPS, _DISK_READS, _PEAK_MEMORY})
# fmt: off
_EPOCH_COLUMNS: tuple[tuple[Column, Callable[[EpochRow], str]], ...] = (
    (Column("Epoch"), lambda row: f"{row.index}" if row.complete else f"{row.index} (partial)"),
    (Column("Start", page_only=True), lambda row: seconds_text(row.begin_s)),
    (Column("Time"), lambda row: seconds_text(row.seconds)),
    (_STEPS, lambda row: count_text(row.steps)),
    (Column("Samples", page_only=True), lambda row: count_text(row.samples)),
    (Column("Samples/s"), lambda row: rate_text(row.samples_per_second)),
    (Column("Data wait"), lambda row: share_text(row.data_wait_share)),
    (Column("Cores"), lambda row: cores_text(row.cores)),
    (Column("Core-seconds", page_only=True), lambda row: rate_text(row.core_seconds)),
    (_DISK_READS, lambda row: bytes_text(row.read_bytes)),
    (Column("Disk writes", page_only=True), lambda row: bytes_text(row.written_bytes)),
    (_PEAK_MEMORY, lambda row: bytes_text(row.memory_peak_bytes)),
    (_SM, lambda row: share_text(row.gpu_sm)),
    (Column("Tensor cores", drop=1, gpu=True), lambda row: share_text(row.gpu_tensor)),
    (Column("Memory bandwidth", page_only=True, gpu=True), lambda row: share_text(row.gpu_dram)),
    (_UTILIZATION, lambda row: share_text(row.gpu_utilization)),
    (Column("Peak GPU memory", drop=3, gpu=True), lambda r: bytes_text(r.gpu_memory_peak_bytes)),
    (Column("PCIe to GPU", page_only=True, gpu=True), lambda r: bytes_text(r.pcie_to_gpu_bytes)),
    (Column("PCIe from GPU", page_only=True, gpu=True),
     lambda row: bytes_text(row.pcie_from_gpu_bytes)),
    (Column("Energy", gpu=True), lambda row: joules_text(row.joules)),
    (Column("Samples/J", drop=2, gpu=True), lambda row: rate_text(row.samples_per_joule)),
)
_GPU_COLUMNS: tuple[tuple[Column, Callable[[GpuRow], str]], ...] = (
    (Column("GPU", number=False), lambda row: row.gpu.label),
    (Column("Model", number=False, page_only=True), lambda row: row.gpu.model or MISSING),
    (Column("SM"), lambda row: share_text(row.figures.gpu_sm)),
    (Column("Tensor cores"), lambda row: share_text(row.figures.gpu_tensor)),
    (Column("Memory bandwidth", page_only=True), lambda row: share_text(row.figures.gpu_dram)),
    (Column("Utilization", drop=2), lambda row: share_text(row.figures.gpu_utilization)),
    (Column("Peak memory"), _peak_of_size),
    (Column("Power"), lambda row: value_text(row.power_watts, "W")),
    (Column("Energy"), lambda row: joules_text(row.figures.joules)),
    (Column("PCIe to GPU", drop=4), lambda row: bytes_text(row.figures.pcie_to_gpu_bytes)),
    (Column("PCIe from GPU", drop=5), lambda row: bytes_text(row.figures.pcie_from_gpu_bytes)),
    (Column("Power throttling", page_only=True), lambda row: share_text(row.throttled_power)),
    (Column("Thermal throttling", page_only=True), lambda row: share_text(row.throttled_thermal)),
    (
        Column("Uncorrectable ECC errors", page_only=True),
        lambda row: count_text(row.ecc_uncorrected),
    ),
)
_COMBINED_GPU_METRICS: tuple[tuple[str, Combine, str], ...] = (
    ("gpu_sm", np.nanmean, "mean of"),
    ("gpu_tensor", np.nanmean, "mean of"),
    ("gpu_dram", np.nanmean, "mean of"),
    ("gpu_utilization", np.nanmean, "mean of"),
    ("gpu_power", np.nansum, "sum of"),
    ("gpu_pcie_received", np.nansum, "sum of"),
    ("gpu_pcie_sent", np.nansum, "sum of"),
)
# fmt: on
_STATISTIC_COLUMNS = (Column("Mean"), Column("p95"), Column("Max"))
_MAX_EPOCHS, _FIRST_EPOCHS = 12, 6


def epochs_table(epochs: Sequence[EpochRow]) -> Table:
    """Return one row per epoch, without empty columns.

    With GPUs, a terminal shows GPU metrics instead of some host metrics, and utilization only
    without SM activity.
    """
    table = Table.of(epochs, _EPOCH_COLUMNS).without_empty_columns()
    if not table.rows or not any(column.gpu for column in table.columns):
        return table
    page_only = _REPLACED_BY_GPU_METRICS | ({_UTILIZATION} if _SM in table.columns else set())
    columns = (replace(c, page_only=c.page_only or c in page_only) for c in table.columns)
    return replace(table, columns=tuple(columns))


def shortened(table: Table) -> Table:
    """Return the first and the last epochs, with a row for those in between."""
    omitted = len(table.rows) - _MAX_EPOCHS
    if omitted <= 0:
        return table
    last = _MAX_EPOCHS - _FIRST_EPOCHS
    visible = 1 + next(i for i, column in enumerate(table.columns[1:]) if not column.page_only)
    dots = ["…", *("" for _ in table.columns[1:])]
    dots[visible] = f"{omitted} more"
    return replace(table, rows=(*table.rows[:_FIRST_EPOCHS], tuple(dots), *table.rows[-last:]))


def gpus(used: Sequence[GpuRow]) -> Table:
    """Return one row per GPU that the run used."""
    return Table.of(used, _GPU_COLUMNS).without_empty_columns()


def phases(summary: Summary) -> Table:
    """Return the count and the total time of each phase."""
    return Table(
        (Column("Phase", number=False), Column("Count"), Column("Total time")),
        tuple((name, count_text(n), seconds_text(s)) for name, n, s in summary.phases),
    )


def roles(recorded: RunData, summary: Summary) -> Table:
    """Return one row per role; empty if there is only one."""
    by_key = {(each.metric, each.entity): each for each in summary.statistics}

    def cell(metric: str, role: str, part: str) -> str:
        each = by_key.get((metric, role))
        return MISSING if each is None else value_text(getattr(each, part), BY_KEY[metric].unit)

    columns = (
        ("Max processes", "processes", "max"),
        ("Mean CPU", "cpu", "mean"),
        ("Max CPU", "cpu", "max"),
        ("Mean RSS", "rss", "mean"),
        ("Max RSS", "rss", "max"),
        ("Mean disk reads", "read", "mean"),
    )
    names = roles_in_order(recorded)
    rows = ((role, *(cell(m, role, part) for _, m, part in columns)) for role in names)
    head = (Column("Role", number=False), *(Column(title) for title, _, _ in columns))
    return Table(head, tuple(rows) if len(names) > 1 else ())


def overview(recorded: RunData, summary: Summary) -> Table:
    """Return the most important metrics; CPU both in cores and as a share of the allowed ones."""
    by_key = {(each.metric, each.entity): each for each in summary.statistics}
    rows: list[tuple[str, ...]] = []

    def add(each: Statistic | None, label: str) -> None:
        if each is not None:
            suffix = " cores" if BY_KEY[each.metric].unit == "cores" else ""
            rows.append((upper_first(label), *(f"{text}{suffix}" for text in _mean_p95_max(each))))

    cpu, allowed = by_key.get(("cpu", "tree")), summary.cpu_allowed
    add(cpu, "CPU")
    if cpu is not None and allowed:
        shares = (share_text(value / allowed) for value in (cpu.mean, cpu.p95, cpu.max))
        rows.append((f"CPU, % of {allowed_text(allowed)} cores", *shares))
    for role in drawn_roles(recorded):
        add(by_key.get(("cpu", role)), f"CPU, {role}")
    add(by_key.get(("memory", "tree")), "Memory")
    add(by_key.get(("read", "tree")), "Disk reads")
    add(by_key.get(("write", "tree")), "Disk writes")
    for metric in ("net_received", "net_sent"):
        summed = statistic(metric, "all", network(recorded, metric), is_rate=True)
        add(summed, BY_KEY[metric].label)
    add(by_key.get(("host_cpu", "host")), "Host CPU")
    used = recorded.used_gpus
    for metric, combine, how in _COMBINED_GPU_METRICS:
        label = BY_KEY[metric].label + (f", {how} {len(used)}" if len(used) > 1 else "")
        series = combined_metric(used, metric, combine)
        add(statistic(metric, "all", series, is_counter(metric)), label)
    highest = combined([gpu.memory for gpu in used], np.nanmax)
    label = f"GPU memory, max of {len(used)}" if len(used) > 1 else "GPU memory"
    add(statistic("gpu_memory", "all", highest, is_rate=False), label)
    return Table((Column("", number=False), *_STATISTIC_COLUMNS), tuple(rows))


def statistics(summary: Summary, names: Mapping[str, str] | None = None) -> Table:
    """Return every metric of every entity, in the order of the metrics table.

    `names` maps entities to display names, such as the UUID of a GPU to its label.
    """
    names = names or {}
    order = {key: position for position, key in enumerate(BY_KEY)}
    named = [replace(s, entity=names.get(s.entity, s.entity)) for s in summary.statistics]
    ordered = sorted(named, key=lambda s: (order[s.metric], s.entity != "tree", s.entity))
    head = (Column(title, number=False) for title in ("Metric", "Entity", "Unit"))
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


def _mean_p95_max(each: Statistic) -> list[str]:
    unit = BY_KEY[each.metric].unit
    return [value_text(value, unit) for value in (each.mean, each.p95, each.max)]
