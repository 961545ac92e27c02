"""The tables of a report as text, drawn alike in a terminal and on a page."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from stepscope.analysis.series import statistic
from stepscope.analysis.summary import Recorded
from stepscope.metrics import BY_KEY
from stepscope.records import EpochRow, Statistic, Summary
from stepscope.report.format import (
    MISSING,
    allowed_text,
    bytes_text,
    cores_text,
    count_text,
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

    def compact(self) -> Table:
        """The table where space is short."""
        return self.without(i for i, column in enumerate(self.columns) if column.extra)


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
    (Column("Read"), lambda row: _gigabytes(row.read_gb)),
    (Column("Written", extra=True), lambda row: _gigabytes(row.written_gb)),
    (Column("Peak memory"), lambda row: bytes_text(row.memory_peak_bytes)),
)


def ledger(epochs: Sequence[EpochRow]) -> Table:
    """A line per epoch; a column that nothing is known of is left out."""
    rows = tuple(tuple(text(row) for _, text in _LEDGER) for row in epochs)
    table = Table(tuple(column for column, _ in _LEDGER), rows)
    unknown = [i for i in range(len(_LEDGER)) if rows and all(row[i] == MISSING for row in rows)]
    return table.without(unknown)


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
    return Table((Column("", number=False), *_STATISTIC_COLUMNS), tuple(rows))


def statistics(summary: Summary) -> Table:
    """Every metric of every entity, in the order of the table of metrics."""
    places = {key: place for place, key in enumerate(BY_KEY)}
    ordered = sorted(
        summary.statistics, key=lambda s: (places[s.metric], s.entity != "tree", s.entity)
    )
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


def _gigabytes(value: float | None) -> str:
    return MISSING if value is None else bytes_text(value * 1e9)
