"""The few numbers that stand above everything else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

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
)

_SOURCES = {
    "marks": "from the script's marks",
    "pattern": "from the output",
    "fit": "from Keras",
    "loader": "from the data loader",
}


@dataclass(frozen=True)
class Headline:
    """A number with its name, and a few words on it."""

    label: str
    value: str
    detail: str = ""


def headline_of(summary: Summary) -> tuple[Headline, ...]:
    """What a reader looks for first; one that is not known says so."""
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
    return tuple(make(summary) for make in makers)


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
    return Headline("Samples/s", rate_text(samples_per_second(summary.epochs)), detail)


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
