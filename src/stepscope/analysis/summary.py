"""What a run consumed: statistics per metric, and a ledger with a line per epoch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property

import numpy as np

from stepscope.analysis.epochs import epochs_of, find_epochs, find_phases
from stepscope.analysis.gpus import (
    GpuUse,
    RecordedGpu,
    figures,
    gpus_of_run,
    recorded_gpus,
    use_of,
)
from stepscope.analysis.passes import Records, Timeline, find_passes, training_loaders
from stepscope.analysis.series import (
    EMPTY,
    Series,
    SeriesTable,
    integrate,
    memory_without_sharing,
    statistic,
)
from stepscope.analysis.steps import StepGroup, step_groups, steps_between
from stepscope.metrics import is_counter
from stepscope.records import EpochRow, Gpu, Span, Statistic, Summary

_GPU_BYTES = ("gpu_pcie_received", "gpu_pcie_sent", "gpu_nvlink_received", "gpu_nvlink_sent")


@dataclass(frozen=True)
class Recorded:
    """All that the summary is made of."""

    series: SeriesTable
    timelines: Sequence[Timeline]
    begin_ns: int
    end_ns: int
    cpu_allowed: float | None
    gpus: tuple[Gpu, ...] = ()
    """All that are known of, used or not."""

    def of(self, metric: str, entity: str = "tree") -> Series:
        return self.series.get((metric, entity), EMPTY)

    @cached_property
    def training_loaders(self) -> list[list[int]]:
        """Of each timeline the loaders that train: found once, asked for in every epoch."""
        return [training_loaders(timeline, find_passes(timeline)) for timeline in self.timelines]

    @cached_property
    def step_groups(self) -> list[StepGroup]:
        """Steps of processes and optimizers, those that stepped together put together."""
        return step_groups(self.timelines)

    @cached_property
    def all_gpus(self) -> tuple[RecordedGpu, ...]:
        return recorded_gpus(self.gpus, self.series)

    @cached_property
    def used_gpus(self) -> tuple[RecordedGpu, ...]:
        """The GPUs of the run."""
        return gpus_of_run(self.all_gpus)

    @cached_property
    def gpu_use(self) -> GpuUse:
        return use_of(self.all_gpus, self.used_gpus, self.begin_ns, self.end_ns)


MEMORY_FROM = ("rss", "processes", "pss")
"""What the derived `memory` is made of."""


def with_memory(series: SeriesTable) -> dict[tuple[str, str], Series]:
    """Add the derived `memory` of every entity that has RSS."""
    full = dict(series)
    for (metric, entity), rss in series.items():
        if metric == "rss" and rss.value.any():  # else it was only read when nobody was left
            processes = series.get(("processes", entity), EMPTY)
            pss = series.get(("pss", entity), EMPTY)
            full["memory", entity] = memory_without_sharing(rss, processes, pss)
    return full


def summarise(recorded: Recorded) -> Summary:
    """The summary of a run, complete or cut off."""
    source, epochs = find_epochs(recorded.timelines, recorded.begin_ns, recorded.end_ns)
    own_epochs = [epochs_of(timeline, source) for timeline in recorded.timelines]
    rows = tuple(_epoch_row(span, i, recorded, own_epochs) for i, span in enumerate(epochs))
    phases = find_phases(recorded.timelines, recorded.end_ns)
    samples = _total_samples(recorded)
    return Summary(
        seconds=(recorded.end_ns - recorded.begin_ns) / 1e9,
        cpu_allowed=recorded.cpu_allowed,
        core_seconds=_whole(recorded, "cpu"),
        steps=steps_between(recorded.step_groups, recorded.begin_ns, recorded.end_ns) or 0,
        samples=samples,
        epochs=rows,
        epoch_source=source,
        phases=_phase_totals(phases),
        statistics=tuple(_statistics(recorded)),
        roles=tuple(sorted({e for (m, e) in recorded.series if m == "cpu" and e != "tree"})),
        watcher=_watcher(recorded),
        totals=_totals(recorded),
    )


def _statistics(recorded: Recorded) -> list[Statistic]:
    found = [
        statistic(metric, entity, series, is_counter(metric), _tree_seconds(recorded, metric))
        for (metric, entity), series in recorded.series.items()
    ]
    return [each for each in found if each is not None]


def _tree_seconds(recorded: Recorded, metric: str) -> float:
    """How long the whole tree was watched: a role may have lived for a part of it only, and the
    means of the roles shall add up to that of the tree."""
    return float(recorded.of(metric).window.sum())


def _epoch_row(
    span: Span, position: int, recorded: Recorded, own_epochs: Sequence[Sequence[Span]]
) -> EpochRow:
    begin, end = span.begin_ns, span.end_ns
    samples = _samples_in(recorded, [_as_seen_by(own, span) for own in own_epochs])
    core_seconds = integrate(recorded.of("cpu"), begin, end)
    memory = recorded.of("memory").between(begin, end)
    read = integrate(recorded.of("read"), begin, end)
    written = integrate(recorded.of("write"), begin, end)
    gpu = figures(recorded.used_gpus, begin, end)
    return EpochRow(
        index=span.index if span.index is not None else position,
        begin_s=(begin - recorded.begin_ns) / 1e9,
        seconds=span.seconds,
        steps=steps_between(recorded.step_groups, begin, end, span.pid),
        samples=samples,
        samples_per_second=samples / span.seconds if samples and span.seconds > 0 else None,
        data_wait_share=_wait_share(recorded, begin, end),
        core_seconds=core_seconds,
        cores=core_seconds / span.seconds if core_seconds is not None and span.seconds else None,
        read_gb=None if read is None else read / 1e9,
        written_gb=None if written is None else written / 1e9,
        memory_peak_bytes=float(memory.value.max()) if len(memory) else None,
        complete=span.complete,
        samples_per_joule=samples / gpu.joules if samples and gpu.joules else None,
        **asdict(gpu),
    )


def _between(records: Records, begin: int, end: int) -> Records:
    t = records["t"]
    return records.take(np.flatnonzero((t >= begin) & (t <= end)))  # by a mask it takes longer


def _as_seen_by(own: Sequence[Span], span: Span) -> Span | None:
    """The same epoch in another process: ranks do not begin and end at the same instant."""
    if not own:
        return span

    def overlap(other: Span) -> int:
        return min(other.end_ns, span.end_ns) - max(other.begin_ns, span.begin_ns)

    nearest = max(own, key=overlap)
    return nearest if overlap(nearest) > 0 else None


def _samples_in(recorded: Recorded, epochs: Sequence[Span | None]) -> int | None:
    """Samples of all ranks, from each rank's busiest loader; None where a batch did not tell."""
    total = 0
    for timeline, numbers, epoch in zip(
        recorded.timelines, recorded.training_loaders, epochs, strict=True
    ):
        if epoch is None:
            continue
        batches = _between(timeline.batches, epoch.begin_ns, epoch.end_ns)
        batches = batches[np.isin(batches["number"], numbers)]
        if (batches["b"] < 0).any():
            return None
        per_loader = [int(batches["b"][batches["number"] == n].sum()) for n in numbers]
        total += max(per_loader, default=0)
    return total or None


def _total_samples(recorded: Recorded) -> int | None:
    """All samples that were trained on; loaders made anew for each epoch all count."""
    total, known = 0, False
    for timeline, numbers in zip(recorded.timelines, recorded.training_loaders, strict=True):
        batches = timeline.batches
        keep = np.isin(batches["number"], numbers)
        if keep.any():
            if (batches["b"][keep] < 0).any():
                return None
            total, known = total + int(batches["b"][keep].sum()), True
    return total if known else None


def _wait_share(recorded: Recorded, begin: int, end: int) -> float | None:
    """Share of the time in which the training process waited for a batch, mean over the ranks."""
    shares = []
    for timeline in recorded.timelines:
        batches = _between(timeline.batches, begin, end)
        if len(batches) and end > begin:
            edges = (timeline.loader_begins, timeline.loader_ends)
            told = [batches, *(_between(records, begin, end) for records in edges)]
            waited = sum(int(records["a"].sum()) for records in told)
            shares.append(min(1.0, waited / (end - begin)))
    return float(np.mean(shares)) if shares else None


def _phase_totals(phases: Sequence[Span]) -> tuple[tuple[str, int, float], ...]:
    names = list(dict.fromkeys(span.name for span in phases))
    return tuple(
        (
            name,
            sum(1 for span in phases if span.name == name),
            sum(span.seconds for span in phases if span.name == name),
        )
        for name in names
    )


def _whole(recorded: Recorded, metric: str, entity: str = "tree") -> float | None:
    """What a rate adds up to over all samples; the last may be a little after the end."""
    rate = recorded.of(metric, entity)
    return float((rate.value * rate.window).sum()) if len(rate) else None


def _totals(recorded: Recorded) -> dict[str, float]:
    """Sums over the whole run, in the unit times seconds; network over all namespaces, GPUs over
    those of the run."""
    found: dict[str, float] = {}
    for metric, entity in recorded.series:
        if not is_counter(metric) or (entity != "tree" and not entity.startswith("net:")):
            continue
        amount = _whole(recorded, metric, entity)
        if amount is not None:
            found[metric] = found.get(metric, 0.0) + amount
    return found | _gpu_totals(recorded)


def _gpu_totals(recorded: Recorded) -> dict[str, float]:
    amounts = {
        metric: [_whole(recorded, metric, each.gpu.uuid) for each in recorded.used_gpus]
        for metric in _GPU_BYTES
    }
    joules = [each.joules(recorded.begin_ns, recorded.end_ns) for each in recorded.used_gpus]
    known = {
        metric: [amount for amount in found if amount is not None]
        for metric, found in {**amounts, "gpu_energy": joules}.items()
    }
    return {metric: sum(found) for metric, found in known.items() if found}


def _watcher(recorded: Recorded) -> dict[str, float]:
    """What watching cost and how regular it was."""
    cpu, rss = recorded.of("watcher_cpu", "watcher"), recorded.of("watcher_rss", "watcher")
    times = recorded.of("rss").t
    cost: dict[str, float] = {}
    if len(cpu):
        cost["cores"] = float((cpu.value * cpu.window).sum() / max(1e-9, cpu.window.sum()))
    if len(rss):
        cost["rss_bytes"] = float(rss.value.max())
    if len(times) > 1:
        cost["longest_gap_s"] = float(np.diff(times).max()) / 1e9
    return cost
