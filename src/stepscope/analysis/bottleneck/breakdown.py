"""Where the time of the steps goes: the analyzed window and its parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from stepscope.analysis.run.data import Loader, StackLocation, Trainer
from stepscope.analysis.run.passes import Pass, Records, Timeline, find_passes, training_loaders
from stepscope.analysis.run.series import Floats, Ints, Series, amount_of, distinct
from stepscope.analysis.trial.steady import find_steady
from stepscope.records import CodeLocation

# fmt: off
_SAVES = ("torch.save(", "save_pretrained(", "save_checkpoint(", "pickle.dump(", "np.save(")
_COLLECTIVES = ("all_reduce(", "barrier(", "all_gather(", "broadcast(", "reduce_scatter(")
_COPIES = (".to(", ".cuda(", ".copy_(", "device_put(")
_LOGS = (
    "write(", "flush(", "fsync(", "dump(", "dumps(", "print(", "logger.", "logging.",
    "self.log(", "self.log_dict(", "log_metrics(", "add_scalar(", "add_histogram(",
    "histc(", "histogram(", "savefig(", "wandb.", "mlflow.",
)
_LOGGING_FILES = ("json/", "logging/", "tensorboard", "wandb/", "mlflow/", "csv.py")
_SYNCS = (".item(", ".cpu(", ".tolist(", ".numpy(", "synchronize(", ".nonzero(", "print(")
# fmt: on


@dataclass(frozen=True)
class Window:
    """A time span of a run, in monotonic ns."""

    begin_ns: int
    end_ns: int

    @property
    def seconds(self) -> float:
        return (self.end_ns - self.begin_ns) / 1e9


@dataclass(frozen=True)
class ThreadTime:
    """Time of the training thread in one kind of code, and the line that takes most of it."""

    seconds: float = 0.0
    location: CodeLocation | None = None


class StepBreakdown:
    """The time of one training process in the analyzed window: its steps after the warm-up."""

    def __init__(self, trainer: Trainer, times: Ints) -> None:
        """`times` are the end times of all steps, at least two."""
        timeline = trainer.timeline
        lengths = np.diff(times) / 1e9
        workers = max((loader.workers for loader in trainer.loaders.values()), default=0)
        self.warmup = warmup = find_steady(lengths, workers).warmup
        self.trainer = trainer
        self.window = window = Window(int(times[warmup]), int(times[-1]))
        self.steps = len(lengths) - warmup
        self.lengths = lengths[warmup:]  # of each step, in seconds

        passes = find_passes(timeline)
        training = training_loaders(timeline, passes)
        whole, waits = Window(int(times[0]), int(times[-1])), np.zeros(len(lengths))
        for loader_events in (timeline.batches, timeline.loader_begins, timeline.loader_ends):
            records = _inside(loader_events, whole, training)
            indices = np.searchsorted(times, records["t"], side="left") - 1
            np.add.at(waits, np.clip(indices, 0, len(waits) - 1), records["a"] / 1e9)
        without_wait = np.clip(lengths - waits, 0.0, None)
        self.lengths_without_wait = without_wait[warmup:]  # of each step, in seconds
        self.warmup_without_wait = without_wait[:warmup]

        # Only of training loaders, and only within the window.
        self.batches = _inside(timeline.batches, window, training)
        self.passes = [p for p in passes if p.number in training and p.begin_ns >= window.begin_ns]
        # Wait for batches of training loaders, and the part of it that is worker startup.
        self.wait_seconds = float(waits[warmup:].sum())
        self.startup_seconds = _startup_seconds(self.passes, self.batches, timeline.loader_begins)
        self.evaluation_seconds = _covered([p for p in passes if p.number not in training], window)
        # Kinds are "save", "sync", "copy", "backward", …
        samples = trainer.stack_samples.between(window.begin_ns, window.end_ns)
        self.time_by_kind = _by_kind(samples)
        self.sampled_seconds = sum(samples.values())

    @property
    def seconds(self) -> float:
        return self.window.seconds

    @property
    def wait_share(self) -> float:
        return min(1.0, self.wait_seconds / self.seconds) if self.seconds else 0.0

    @property
    def step_seconds(self) -> float:
        return self.seconds / self.steps if self.steps else 0.0

    @property
    def step_without_wait(self) -> float:
        """Mean seconds per step without data wait and evaluation."""
        rest = self.seconds - self.wait_seconds - self.evaluation_seconds
        return max(rest, 0.0) / self.steps if self.steps else 0.0

    def share(self, *kinds: str) -> float:
        """Return the share of the stack samples in code of these kinds."""
        total = sum(self.time_by_kind[kind].seconds for kind in kinds if kind in self.time_by_kind)
        return total / self.sampled_seconds if self.sampled_seconds else 0.0

    def location(self, kind: str) -> CodeLocation | None:
        """Return the line that takes most of the time of a kind."""
        return self.time_by_kind[kind].location if kind in self.time_by_kind else None

    @cached_property
    def loader(self) -> Loader | None:
        """The loader that delivered the most batches."""
        numbers, counts = np.unique(self.batches["number"], return_counts=True)
        if not len(numbers):
            return None
        return self.trainer.loaders.get(int(numbers[np.argmax(counts)]))

    @property
    def loader_location(self) -> CodeLocation | None:
        return self.loader.location if self.loader else None

    @property
    def workers(self) -> int:
        return self.loader.workers if self.loader else 0

    @cached_property
    def batch_size(self) -> int | None:
        sizes = self.batches["b"][self.batches["b"] > 0]
        if len(sizes):
            return int(_median(sizes))
        return self.loader.batch_size if self.loader else None

    @property
    def threads(self) -> int | None:
        """Number of threads of the framework, if reported."""
        return self.trainer.settings.threads


def breakdown_of(trainer: Trainer) -> StepBreakdown | None:
    """Return the breakdown of one process, or None if it has fewer than two steps."""
    times = _step_times(trainer.timeline)
    return StepBreakdown(trainer, times) if len(times) > 1 else None


def _step_times(timeline: Timeline) -> Ints:
    """Return the end times of steps: from the optimizer, else marks named "step", else batches.

    Steps of optimizers that are used one after another are concatenated: a loop over settings
    creates a new optimizer each time. An optimizer that steps at the same time as a busier one is
    part of the steps of the busier one.
    """
    steps = timeline.steps
    if not len(steps):
        marks = [m.t for m in timeline.marks if m.edge is None and m.name == "step"]
        if marks:
            return np.array(marks, np.int64)
        return np.ascontiguousarray(timeline.batches["t"]).astype(np.int64)
    streams = [
        np.asarray(steps["t"][steps["number"] == number], np.int64)
        for number in distinct(steps["number"])
    ]
    selected: list[Ints] = []
    for stream in sorted(streams, key=len, reverse=True):
        if all(stream[0] > other[-1] or stream[-1] < other[0] for other in selected):
            selected.append(stream)
    return np.sort(np.concatenate(selected))


def _inside(records: Records, window: Window, numbers: Sequence[int]) -> Records:
    keep = (records["t"] > window.begin_ns) & (records["t"] <= window.end_ns)
    return records.take(np.flatnonzero(keep & np.isin(records["number"], numbers)))


def _startup_seconds(passes: Sequence[Pass], batches: Records, begins: Records) -> float:
    """Return the time in `iter()` plus the excess wait for the first batch of each pass."""
    typical = _median(batches["a"]) if len(batches) else 0.0
    total = 0.0
    for number in {each.number for each in passes}:
        starts = [each.begin_ns for each in passes if each.number == number]
        total += float(_first_waits(begins, number, starts).sum())
        total += float(np.clip(_first_waits(batches, number, starts) - typical, 0.0, None).sum())
    return total / 1e9


def _first_waits(records: Records, number: int, starts: Sequence[int]) -> Ints:
    """Return the wait of a loader's first record after each start time."""
    rows = np.flatnonzero(records["number"] == number)
    first = np.searchsorted(records["t"][rows], starts)
    waits: Ints = records["a"][rows[first[first < len(rows)]]]
    return waits


def _median(values: Ints) -> float:
    # NumPy is a hundred times slower on integers that are nearly all equal than on floats.
    return float(np.median(values.astype(np.float64)))


def _covered(passes: Sequence[Pass], window: Window) -> float:
    """Return the seconds of the window inside passes; overlapping passes count once."""
    total, covered_until = 0, window.begin_ns
    for each in sorted(passes, key=lambda p: p.begin_ns):
        begin, end = max(each.begin_ns, covered_until), min(each.end_ns, window.end_ns)
        if end > begin:
            total, covered_until = total + end - begin, end
    return total / 1e9


def _by_kind(samples: Mapping[StackLocation, float]) -> dict[str, ThreadTime]:
    kinds: dict[str, dict[CodeLocation, float]] = {}
    for location, seconds in samples.items():
        lines = kinds.setdefault(kind_of(location), {})
        line = CodeLocation(location.where, location.code)
        lines[line] = lines.get(line, 0.0) + seconds
    return {
        kind: ThreadTime(sum(lines.values()), max(lines.items(), key=lambda item: item[1])[0])
        for kind, lines in kinds.items()
    }


def kind_of(location: StackLocation) -> str:
    """Classify what the training thread does at a location, based on the source code."""

    def has(code: str, calls: Sequence[str]) -> bool:
        return any(call in code for call in calls)

    code, inner, part = location.code, location.inner_code, location.part
    if part in ("loader", "save"):
        return part
    if has(code, _SAVES):
        return "save"
    if "sleep(" in code:
        return "sleep"
    if part == "ranks" or has(code, _COLLECTIVES):
        return "ranks" if part != "forward" else "forward"
    if part in ("backward", "optimizer"):
        return part
    if has(code, _COPIES) or has(inner, _COPIES):
        return "copy"
    if has(code, _LOGS) or location.inner.startswith(_LOGGING_FILES):
        return "logging"
    if has(code, _SYNCS) or has(inner, _SYNCS):
        return "sync"
    return part or "other"


def mean_in(series: Series, window: Window) -> float | None:
    """Return the mean of a rate over a window, or None if it was not sampled."""
    amount = amount_of(series, window.begin_ns, window.end_ns)
    return None if amount is None else amount.total / amount.seconds


def reading_in(
    series: Series, window: Window, statistic: Callable[[Floats], float] = np.mean
) -> float | None:
    """Return the mean (or another statistic) of a gauge in a window, or None without readings."""
    inside = series.between(window.begin_ns, window.end_ns)
    return float(statistic(inside.value)) if len(inside) else None
