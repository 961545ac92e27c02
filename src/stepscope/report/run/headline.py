"""The few numbers that stand above everything else."""

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
    gigabytes_text,
    joules_text,
    rate_text,
    seconds_text,
    share_text,
)

_SOURCES = {
    "marks": "from the script's marks",
    "pattern": "from the output",
    "fit": "from Keras",
    "loader": "from the data loader",
}


def headline_of(
    summary: Summary, gpus: GpuUse | None = None, steady_rate: float | None = None
) -> tuple[Tile, ...]:
    """What a reader looks for first; one that is not known says so. Four more where GPUs ran.

    Of a trial, the rate is that of its steady steps, not that of all of the run.
    """
    tiles = (*_progress(summary, steady_rate), *_resources(summary))
    return (*tiles, *_gpus(summary, gpus)) if gpus and gpus.used else tiles


def samples_per_second(epochs: Sequence[EpochRow]) -> float | None:
    return _quotient((row.samples, row.seconds) for row in epochs)


def data_wait_share(epochs: Sequence[EpochRow]) -> float | None:
    """Share of the epochs' time in which training waited for a batch."""
    known = [
        (row.data_wait_share, row.seconds) for row in epochs if row.data_wait_share is not None
    ]
    seconds = sum(each for _, each in known)
    waited = sum(share * each for share, each in known)
    return waited / seconds if seconds else None


def samples_per_joule(epochs: Sequence[EpochRow]) -> float | None:
    return _quotient((row.samples, row.joules) for row in epochs)


def _quotient(parts: Iterable[tuple[float | None, float | None]]) -> float | None:
    """One sum over the other, of the epochs that tell both."""
    known = [(above, below) for above, below in parts if above and below and below > 0]
    return sum(above for above, _ in known) / sum(below for _, below in known) if known else None


def of_tree(summary: Summary, metric: str) -> Statistic | None:
    """A metric of all processes together, over the time that was sampled."""
    found = (s for s in summary.statistics if (s.metric, s.entity) == (metric, "tree"))
    return next(found, None)


def _progress(summary: Summary, steady_rate: float | None) -> Iterator[Tile]:
    epochs = summary.epochs
    inside = f"{seconds_text(sum(row.seconds for row in epochs))} in epochs" if epochs else ""
    yield Tile("Duration", seconds_text(summary.seconds), inside)
    if epochs:
        source = _SOURCES.get(summary.epoch_source or "", "")
        cut_off = sum(not row.complete for row in epochs)
        detail = f"{cut_off} cut off, {source}" if cut_off else source
        yield Tile("Epochs", count_text(len(epochs)), detail)
    else:
        yield Tile("Epochs", MISSING, "none seen")
    if summary.steps:
        rate = _quotient((row.steps, row.seconds) for row in epochs)
        detail = "" if rate is None else f"{rate_text(rate)} a second"
        yield Tile("Steps", count_text(summary.steps), detail)
    else:
        yield Tile("Steps", MISSING, "none seen")
    detail = f"{count_text(summary.samples)} samples" if summary.samples else "not told"
    if steady_rate is not None:
        yield Tile("Samples/s", rate_text(steady_rate), "over the steady steps")
    else:
        yield Tile("Samples/s", rate_text(samples_per_second(epochs)), detail)


def _resources(summary: Summary) -> Iterator[Tile]:
    cpu, allowed = of_tree(summary, "cpu"), summary.cpu_allowed
    if cpu is not None and allowed:
        value = f"{cores_text(cpu.mean)} of {allowed_text(allowed)}"
        yield Tile("Cores used", value, f"mean, {share_text(cpu.mean / allowed)} of the allowed")
    else:
        yield Tile("Cores used", cores_text(cpu.mean if cpu else None), "mean" if cpu else "")
    memory = of_tree(summary, "memory")
    detail = f"mean {bytes_text(memory.mean)}" if memory else ""
    yield Tile("Peak memory", bytes_text(memory.max if memory else None), detail)
    written = summary.totals.get("write")
    detail = "" if written is None else f"{bytes_text(written)} written"
    yield Tile("Read from disk", bytes_text(summary.totals.get("read")), detail)
    share = data_wait_share(summary.epochs)
    detail = "no batches seen" if share is None else "of the epochs' time"
    yield Tile("Waiting for data", share_text(share), detail)


def _gpus(summary: Summary, gpus: GpuUse) -> Iterator[Tile]:
    gpu, count = gpus.together, len(gpus.used)
    mean = f"mean of {count} GPUs" if count > 1 else ""
    utilisation = gpu.gpu_utilization
    # Utilisation tells only whether anything ran at all: the multiprocessors tell more.
    if gpu.gpu_sm is None:
        detail = mean or ("" if utilisation is None else "some kernel or copy ran")
        yield Tile("GPU utilisation", share_text(utilisation), detail)
    else:
        detail = mean if utilisation is None else f"utilisation says {share_text(utilisation)}"
        yield Tile("GPU busy (SM)", share_text(gpu.gpu_sm), detail)
    if gpu.gpu_tensor is not None:
        detail = "" if gpu.gpu_dram is None else f"memory bandwidth {share_text(gpu.gpu_dram)}"
        yield Tile("Tensor cores busy", share_text(gpu.gpu_tensor), detail)
    else:
        sent = gpu.pcie_from_gpu_gb
        detail = "" if sent is None else f"{gigabytes_text(sent)} from GPU"
        yield Tile("PCIe to GPU", gigabytes_text(gpu.pcie_to_gpu_gb), detail)
    sizes = {row.gpu.memory_bytes for row in gpus.used}
    size = sizes.pop() if len(sizes) == 1 else None
    parts = [f"of {bytes_text(size)}"] if size else []
    if count > 1:
        parts.append(f"fullest of {count}")
    yield Tile("GPU memory peak", bytes_text(gpu.gpu_memory_peak_bytes), ", ".join(parts))
    efficiency = samples_per_joule(summary.epochs)
    detail = f"{rate_text(efficiency)} samples/J in epochs" if efficiency else "of the GPUs"
    yield Tile("Energy", joules_text(gpu.joules), detail)
