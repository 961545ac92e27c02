"""The headline tiles of a run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from stepscope.analysis.run.gpus import GpuUse
from stepscope.records import EpochRow, Statistic, Summary
from stepscope.report.kit.document import Tile
from stepscope.report.kit.format import (
    MISSING,
    allowed_text,
    bytes_text,
    cores_text,
    count_text,
    joules_text,
    plural,
    rate_text,
    seconds_text,
    share_text,
)

_SOURCES = {
    "marks": "from marks",
    "pattern": "from the output",
    "fit": "from Keras",
    "loader": "from the DataLoader",
}


def headline_of(
    summary: Summary, gpus: GpuUse | None = None, steady_rate: float | None = None
) -> tuple[Tile, ...]:
    """Return the tiles of a run; those for GPUs only if it used any.

    `steady_rate` is the throughput of the steady steps of a trial; it replaces that of the run.
    """
    tiles = (*_progress(summary, steady_rate), *_resources(summary))
    return (*tiles, *_gpus(summary, gpus)) if gpus and gpus.used else tiles


def training_facts(summary: Summary, wait_is_shown: bool) -> Iterator[str]:
    """Yield throughput, epochs, steps and data wait, as far as they are known.

    The data wait is left out if a finding already shows it, for its own part of the run.
    """
    epochs = summary.epochs
    if throughput := samples_per_second(epochs):
        yield f"{rate_text(throughput)} samples/s"
    for count, noun in ((len(epochs), "epoch"), (summary.steps, "step")):
        if count:
            yield f"{count_text(count)} {plural(count, noun)}"
    if not wait_is_shown and (share := data_wait_share(epochs)) is not None:
        yield f"data wait {share_text(share)}"


def resource_facts(summary: Summary, gpus: GpuUse) -> Iterator[str]:
    """Yield the duration and the use of CPU, memory and GPUs."""
    yield seconds_text(summary.seconds)
    tiles = {tile.label: tile.value for tile in _resources(summary)}
    yield f"{tiles['Cores used']} cores"
    yield f"peak memory {tiles['Peak memory']}"
    if gpus.used:
        tiles = {tile.label: tile.value for tile in _gpus(summary, gpus)}
        busy = "SM activity" if "SM activity" in tiles else "GPU utilization"
        yield f"{busy} {tiles[busy]}"
        yield f"peak GPU memory {tiles['Peak GPU memory']}"


def samples_per_second(epochs: Sequence[EpochRow]) -> float | None:
    return _quotient((row.samples, row.seconds) for row in epochs)


def data_wait_share(epochs: Sequence[EpochRow]) -> float | None:
    """Return the data wait as a share of epoch time."""
    known = [
        (row.data_wait_share, row.seconds) for row in epochs if row.data_wait_share is not None
    ]
    seconds = sum(each for _, each in known)
    waited = sum(share * each for share, each in known)
    return waited / seconds if seconds else None


def samples_per_joule(epochs: Sequence[EpochRow]) -> float | None:
    return _quotient((row.samples, row.joules) for row in epochs)


def _quotient(parts: Iterable[tuple[float | None, float | None]]) -> float | None:
    """Divide the sums of numerators and denominators over the epochs that have both."""
    known = [(above, below) for above, below in parts if above and below and below > 0]
    return sum(above for above, _ in known) / sum(below for _, below in known) if known else None


def of_tree(summary: Summary, metric: str) -> Statistic | None:
    """Return the statistic of a metric over the whole process tree."""
    matches = (s for s in summary.statistics if (s.metric, s.entity) == (metric, "tree"))
    return next(matches, None)


def _progress(summary: Summary, steady_rate: float | None) -> Iterator[Tile]:
    epochs = summary.epochs
    detail = f"{seconds_text(sum(row.seconds for row in epochs))} in epochs" if epochs else ""
    yield Tile("Duration", seconds_text(summary.seconds), detail)
    if epochs:
        source = _SOURCES.get(summary.epoch_source or "", "")
        partial = sum(not row.complete for row in epochs)
        detail = f"{partial} partial, {source}" if partial else source
        yield Tile("Epochs", count_text(len(epochs)), detail)
    else:
        yield Tile("Epochs", MISSING, "none detected")
    if summary.steps:
        rate = _quotient((row.steps, row.seconds) for row in epochs)
        detail = "" if rate is None else f"{rate_text(rate)} steps/s"
        yield Tile("Steps", count_text(summary.steps), detail)
    else:
        yield Tile("Steps", MISSING, "none detected")
    detail = f"{count_text(summary.samples)} samples" if summary.samples else "unknown"
    if steady_rate is not None:
        yield Tile("Samples/s", rate_text(steady_rate), "in steady steps")
    else:
        yield Tile("Samples/s", rate_text(samples_per_second(epochs)), detail)


def _resources(summary: Summary) -> Iterator[Tile]:
    cpu, allowed = of_tree(summary, "cpu"), summary.cpu_allowed
    if cpu is not None and allowed:
        value = f"{cores_text(cpu.mean)} of {allowed_text(allowed)}"
        yield Tile("Cores used", value, f"mean, {share_text(cpu.mean / allowed)} of allowed cores")
    else:
        yield Tile("Cores used", cores_text(cpu.mean if cpu else None), "mean" if cpu else "")
    memory = of_tree(summary, "memory")
    detail = f"mean {bytes_text(memory.mean)}" if memory else ""
    yield Tile("Peak memory", bytes_text(memory.max if memory else None), detail)
    written = summary.totals.get("write")
    detail = "" if written is None else f"{bytes_text(written)} written"
    yield Tile("Disk reads", bytes_text(summary.totals.get("read")), detail)
    share = data_wait_share(summary.epochs)
    detail = "no batches detected" if share is None else "of epoch time"
    yield Tile("Data wait", share_text(share), detail)


def _gpus(summary: Summary, gpus: GpuUse) -> Iterator[Tile]:
    gpu, count = gpus.overall, len(gpus.used)
    mean = f"mean of {count} GPUs" if count > 1 else ""
    utilization = gpu.gpu_utilization
    # Utilization only means that some kernel ran: SM activity is more informative.
    if gpu.gpu_sm is None:
        detail = mean or ("" if utilization is None else "time with any kernel or copy")
        yield Tile("GPU utilization", share_text(utilization), detail)
    else:
        detail = mean if utilization is None else f"utilization {share_text(utilization)}"
        yield Tile("SM activity", share_text(gpu.gpu_sm), detail)
    if gpu.gpu_tensor is not None:
        detail = "" if gpu.gpu_dram is None else f"memory bandwidth {share_text(gpu.gpu_dram)}"
        yield Tile("Tensor core activity", share_text(gpu.gpu_tensor), detail)
    else:
        sent = gpu.pcie_from_gpu_bytes
        detail = "" if sent is None else f"{bytes_text(sent)} from GPU"
        yield Tile("PCIe to GPU", bytes_text(gpu.pcie_to_gpu_bytes), detail)
    sizes = {row.gpu.memory_bytes for row in gpus.used}
    size = sizes.pop() if len(sizes) == 1 else None
    parts = [f"of {bytes_text(size)}"] if size else []
    if count > 1:
        parts.append(f"highest of {count} GPUs")
    yield Tile("Peak GPU memory", bytes_text(gpu.gpu_memory_peak_bytes), ", ".join(parts))
    efficiency = samples_per_joule(summary.epochs)
    detail = f"{rate_text(efficiency)} samples/J in epochs" if efficiency else "GPUs only"
    yield Tile("Energy", joules_text(gpu.joules), detail)
