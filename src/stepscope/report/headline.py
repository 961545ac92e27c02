"""The few numbers that stand above everything else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from stepscope.analysis.gpus import GpuFigures, GpuUse
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
)

_SOURCES = {
    "marks": "from the script's marks",
    "pattern": "from the output",
    "fit": "from Keras",
    "loader": "from the data loader",
}


THROUGHPUT = "Samples/s"


@dataclass(frozen=True)
class Headline:
    """A number with its name, and a few words on it."""

    label: str
    value: str
    detail: str = ""


def headline_of(summary: Summary, gpus: GpuUse | None = None) -> tuple[Headline, ...]:
    """What a reader looks for first; one that is not known says so. Four more where GPUs ran."""
    makers: tuple[Callable[[Summary], Headline], ...] = (
        _duration,
        _epochs,
        _steps,
        _throughput,
        _cores,
        _memory,
        _read,
        _data_wait,
    )
    headline = tuple(make(summary) for make in makers)
    return (*headline, *_of_gpus(summary, gpus)) if gpus and gpus.used else headline


def samples_per_second(epochs: Sequence[EpochRow]) -> float | None:
    """Samples over time, of the epochs that tell how many they had."""
    told = [row for row in epochs if row.samples and row.seconds > 0]
    seconds = sum(row.seconds for row in told)
    return sum(row.samples or 0 for row in told) / seconds if seconds else None


def data_wait_share(epochs: Sequence[EpochRow]) -> float | None:
    """Share of the epochs' time in which training waited for a batch."""
    told = [row for row in epochs if row.data_wait_share is not None]
    seconds = sum(row.seconds for row in told)
    waited = sum((row.data_wait_share or 0.0) * row.seconds for row in told)
    return waited / seconds if seconds else None


def samples_per_joule(epochs: Sequence[EpochRow]) -> float | None:
    """Samples over energy, of the epochs that tell both."""
    told = [row for row in epochs if row.samples and row.joules]
    joules = sum(row.joules or 0.0 for row in told)
    return sum(row.samples or 0 for row in told) / joules if joules else None


def mean_cores(summary: Summary) -> float | None:
    """Cores in use, over the time that was sampled."""
    found = _tree(summary, "cpu")
    return None if found is None else found.mean


def peak_memory(summary: Summary) -> float | None:
    found = _tree(summary, "memory")
    return None if found is None else found.max


def _tree(summary: Summary, metric: str) -> Statistic | None:
    found = (s for s in summary.statistics if (s.metric, s.entity) == (metric, "tree"))
    return next(found, None)


def _duration(summary: Summary) -> Headline:
    inside = sum(row.seconds for row in summary.epochs)
    detail = f"{seconds_text(inside)} in epochs" if summary.epochs else ""
    return Headline("Duration", seconds_text(summary.seconds), detail)


def _epochs(summary: Summary) -> Headline:
    if not summary.epochs:
        return Headline("Epochs", MISSING, "none seen")
    cut_off = sum(not row.complete for row in summary.epochs)
    source = _SOURCES.get(summary.epoch_source or "", "")
    detail = f"{cut_off} cut off, {source}" if cut_off else source
    return Headline("Epochs", count_text(len(summary.epochs)), detail)


def _steps(summary: Summary) -> Headline:
    if not summary.steps:
        return Headline("Steps", MISSING, "none seen")
    inside = [row for row in summary.epochs if row.steps and row.seconds > 0]
    seconds = sum(row.seconds for row in inside)
    rate = sum(row.steps or 0 for row in inside) / seconds if seconds else None
    detail = "" if rate is None else f"{rate_text(rate)} a second"
    return Headline("Steps", count_text(summary.steps), detail)


def _throughput(summary: Summary) -> Headline:
    detail = f"{count_text(summary.samples)} samples" if summary.samples else "not told"
    return Headline(THROUGHPUT, rate_text(samples_per_second(summary.epochs)), detail)


def _cores(summary: Summary) -> Headline:
    used, allowed = mean_cores(summary), summary.cpu_allowed
    if used is None or not allowed:
        return Headline("Cores used", cores_text(used), "" if used is None else "mean")
    value = f"{cores_text(used)} of {allowed_text(allowed)}"
    return Headline("Cores used", value, f"mean, {share_text(used / allowed)} of the allowed")


def _memory(summary: Summary) -> Headline:
    found = _tree(summary, "memory")
    detail = "" if found is None else f"mean {bytes_text(found.mean)}"
    return Headline("Peak memory", bytes_text(peak_memory(summary)), detail)


def _read(summary: Summary) -> Headline:
    written = summary.totals.get("write")
    detail = "" if written is None else f"{bytes_text(written)} written"
    return Headline("Read from disk", bytes_text(summary.totals.get("read")), detail)


def _data_wait(summary: Summary) -> Headline:
    share = data_wait_share(summary.epochs)
    detail = "no batches seen" if share is None else "of the epochs' time"
    return Headline("Waiting for data", share_text(share), detail)


def _of_gpus(summary: Summary, gpus: GpuUse) -> tuple[Headline, ...]:
    together = gpus.together
    return (
        _gpu_busy(together, len(gpus.used)),
        _tensor(together) if together.gpu_tensor is not None else _pcie(together),
        _gpu_memory(gpus),
        _energy(summary, together),
    )


def _gpu_busy(gpu: GpuFigures, count: int) -> Headline:
    """By its multiprocessors; utilisation tells only whether anything ran at all."""
    mean = f"mean of {count} GPUs" if count > 1 else ""
    utilisation = share_text(gpu.gpu_utilization)
    if gpu.gpu_sm is None:
        what = "some kernel or copy ran" if utilisation != MISSING else ""
        return Headline("GPU utilisation", utilisation, mean or what)
    detail = f"utilisation says {utilisation}" if utilisation != MISSING else mean
    return Headline("GPU busy (SM)", share_text(gpu.gpu_sm), detail)


def _tensor(gpu: GpuFigures) -> Headline:
    bandwidth = share_text(gpu.gpu_dram)
    detail = f"memory bandwidth {bandwidth}" if bandwidth != MISSING else ""
    return Headline("Tensor cores busy", share_text(gpu.gpu_tensor), detail)


def _pcie(gpu: GpuFigures) -> Headline:
    sent = gigabytes_text(gpu.pcie_from_gpu_gb)
    detail = f"{sent} from GPU" if sent != MISSING else ""
    return Headline("PCIe to GPU", gigabytes_text(gpu.pcie_to_gpu_gb), detail)


def _gpu_memory(gpus: GpuUse) -> Headline:
    peak = gpus.together.gpu_memory_peak_bytes
    sizes = {row.gpu.memory_bytes for row in gpus.used}
    size = sizes.pop() if len(sizes) == 1 else None
    detail = f"of {bytes_text(size)}" if size else ""
    if len(gpus.used) > 1:
        detail = f"{detail}, fullest of {len(gpus.used)}".removeprefix(", ")
    return Headline("GPU memory peak", bytes_text(peak), detail)


def _energy(summary: Summary, gpu: GpuFigures) -> Headline:
    efficiency = samples_per_joule(summary.epochs)
    detail = f"{rate_text(efficiency)} samples/J in epochs" if efficiency else "of the GPUs"
    return Headline("Energy", joules_text(gpu.joules), detail)
