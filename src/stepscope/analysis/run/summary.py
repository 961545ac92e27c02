"""The summary of a run: statistics per metric, and one row per epoch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from stepscope.analysis.run.data import RunData
from stepscope.analysis.run.epochs import epochs_of, find_epochs, find_phases
from stepscope.analysis.run.gpus import figures
from stepscope.analysis.run.passes import Records, Times
from stepscope.analysis.run.series import Series, integrate, statistic
from stepscope.analysis.run.steps import steps_between
from stepscope.metrics import is_counter
from stepscope.records import EpochRow, Span, Summary

_GPU_BYTES = ("gpu_pcie_received", "gpu_pcie_sent", "gpu_nvlink_received", "gpu_nvlink_sent")


def summarize(data: RunData) -> Summary:
    """Summarize a run, complete or cut off."""
    source, epochs = find_epochs(data.timelines, data.begin_ns, data.end_ns)
    own_epochs = [
        np.array([(span.begin_ns, span.end_ns) for span in epochs_of(timeline, source)], np.int64)
        for timeline in data.timelines
    ]
    phases: dict[str, list[float]] = {}
    for span in find_phases(data.timelines, data.end_ns):
        phases.setdefault(span.name, []).append(span.seconds)
    # The processes of a role may run for only a part of the run. Its mean is over the time that
    # the tree was sampled, so that the means of the roles add up to the mean of the tree.
    statistics = (
        statistic(metric, entity, series, is_counter(metric), float(data.of(metric).window.sum()))
        for (metric, entity), series in data.series.items()
    )
    return Summary(
        seconds=(data.end_ns - data.begin_ns) / 1e9,
        cpu_allowed=data.cpu_allowed,
        core_seconds=_amount(data.of("cpu")),
        steps=steps_between(data.step_groups, data.begin_ns, data.end_ns) or 0,
        samples=_total_samples(data),
        epochs=tuple(_epoch_row(span, data, own_epochs) for span in epochs),
        epoch_source=source,
        phases=tuple((name, len(each), sum(each)) for name, each in phases.items()),
        statistics=tuple(each for each in statistics if each is not None),
        roles=tuple(sorted({e for (m, e) in data.series if m == "cpu" and e != "tree"})),
        monitor=_overhead(data),
        totals=_totals(data),
    )


def _epoch_row(span: Span, data: RunData, own_epochs: Sequence[Times]) -> EpochRow:
    assert span.index is not None  # every epoch has a number
    begin, end = span.begin_ns, span.end_ns
    samples = _samples_in(data, span, own_epochs)
    core_seconds = integrate(data.of("cpu"), begin, end)
    memory = data.of("memory").between(begin, end)
    read = integrate(data.of("read"), begin, end)
    written = integrate(data.of("write"), begin, end)
    gpu = figures(data.used_gpus, begin, end)
    return EpochRow(
        index=span.index,
        begin_s=(begin - data.begin_ns) / 1e9,
        seconds=span.seconds,
        steps=steps_between(data.step_groups, begin, end, span.pid),
        samples=samples,
        samples_per_second=samples / span.seconds if samples and span.seconds > 0 else None,
        data_wait_share=_wait_share(data, begin, end),
        core_seconds=core_seconds,
        cores=core_seconds / span.seconds if core_seconds is not None and span.seconds else None,
        read_bytes=read,
        written_bytes=written,
        memory_peak_bytes=float(memory.value.max()) if len(memory) else None,
        complete=span.complete,
        samples_per_joule=samples / gpu.joules if samples and gpu.joules else None,
        **vars(gpu),
    )


def _between(records: Records, begin: int, end: int) -> Records:
    t = records["t"]
    return records.take(np.flatnonzero((t >= begin) & (t <= end)))  # faster than a mask


def _samples_in(data: RunData, span: Span, own_epochs: Sequence[Times]) -> int | None:
    """Return the samples of all ranks, from each rank's busiest loader.

    None if the size of a batch is unknown. Ranks do not start and end an epoch at the same time,
    so each rank counts its own epoch that overlaps most. `own_epochs` has their begins and ends.
    """
    total = 0
    for timeline, numbers, own in zip(
        data.timelines, data.training_loaders, own_epochs, strict=True
    ):
        begin, end = span.begin_ns, span.end_ns
        if len(own):
            begins, ends = own.T
            overlap = np.minimum(ends, end) - np.maximum(begins, begin)
            begin, end = own[np.argmax(overlap)]
            if overlap.max() <= 0:
                continue
        batches = _between(timeline.batches, begin, end)
        batches = batches[np.isin(batches["number"], numbers)]
        if (batches["b"] < 0).any():
            return None
        _, loader = np.unique(batches["number"], return_inverse=True)
        total += int(np.bincount(loader, batches["b"]).max(initial=0))
    return total or None


def _total_samples(data: RunData) -> int | None:
    """Return all samples trained on, over all loaders: some scripts create one per epoch."""
    total, known = 0, False
    for timeline, numbers in zip(data.timelines, data.training_loaders, strict=True):
        batches = timeline.batches
        keep = np.isin(batches["number"], numbers)
        if keep.any():
            if (batches["b"][keep] < 0).any():
                return None
            total, known = total + int(batches["b"][keep].sum()), True
    return total if known else None


def _wait_share(data: RunData, begin: int, end: int) -> float | None:
    """Return the share of time that training waited for a batch, mean over the ranks."""
    shares = []
    for timeline in data.timelines:
        batches = _between(timeline.batches, begin, end)
        if len(batches) and end > begin:
            edges = (timeline.loader_begins, timeline.loader_ends)
            waits = [batches, *(_between(records, begin, end) for records in edges)]
            waited = sum(int(records["a"].sum()) for records in waits)
            shares.append(min(1.0, waited / (end - begin)))
    return float(np.mean(shares)) if shares else None


def _amount(rate: Series) -> float | None:
    """Integrate a rate over all samples; the last may be slightly after the end of the run."""
    return float((rate.value * rate.window).sum()) if len(rate) else None


def _totals(data: RunData) -> dict[str, float]:
    """Return sums over the whole run: network over all namespaces, GPUs over the used ones."""
    gpus = {each.gpu.uuid for each in data.used_gpus}
    totals: dict[str, float] = {}
    for (metric, entity), rate in data.series.items():
        is_total = is_counter(metric) and (entity == "tree" or entity.startswith("net:"))
        if is_total or (metric in _GPU_BYTES and entity in gpus):
            totals[metric] = totals.get(metric, 0.0) + (_amount(rate) or 0.0)
    joules = [each.joules(data.begin_ns, data.end_ns) for each in data.used_gpus]
    known = [amount for amount in joules if amount is not None]
    return {**totals, "gpu_energy": sum(known)} if known else totals


def _overhead(data: RunData) -> dict[str, float]:
    cpu, rss = data.of("monitor_cpu", "monitor"), data.of("monitor_rss", "monitor")
    times = data.of("rss").t
    overhead: dict[str, float] = {}
    if len(cpu):
        overhead["cores"] = float((cpu.value * cpu.window).sum() / max(1e-9, cpu.window.sum()))
    if len(rss):
        overhead["rss_bytes"] = float(rss.value.max())
    if len(times) > 1:
        overhead["longest_gap_s"] = float(np.diff(times).max()) / 1e9
    return overhead
