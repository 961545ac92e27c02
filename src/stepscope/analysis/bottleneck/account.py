"""Where the time of the steps went: the stretch that is judged, and what it is made of."""

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
    """A stretch of a run, in monotonic ns."""

    begin_ns: int
    end_ns: int

    @property
    def seconds(self) -> float:
        return (self.end_ns - self.begin_ns) / 1e9


@dataclass(frozen=True)
class Spent:
    """Seconds of the training thread at one kind of place, and the line that took most."""

    seconds: float = 0.0
    location: CodeLocation | None = None


class Account:
    """What one training process did in the stretch that is judged: its steps after the warm-up."""

    def __init__(self, trainer: Trainer, times: Ints) -> None:
        """`times` are the ends of all steps, of which there are two at least."""
        timeline = trainer.timeline
        lengths = np.diff(times) / 1e9
        workers = max((loader.workers for loader in trainer.loaders.values()), default=0)
        self.warmup = warmup = find_steady(lengths, workers).warmup
        self.trainer = trainer
        self.stretch = stretch = Window(int(times[warmup]), int(times[-1]))
        self.steps = len(lengths) - warmup
        self.lengths = lengths[warmup:]  # of each step, in seconds

        passes = find_passes(timeline)
        training = training_loaders(timeline, passes)
        whole, waits = Window(int(times[0]), int(times[-1])), np.zeros(len(lengths))
        for waits_for in (timeline.batches, timeline.loader_begins, timeline.loader_ends):
            records = _inside(waits_for, whole, training)
            places = np.searchsorted(times, records["t"], side="left") - 1
            np.add.at(waits, np.clip(places, 0, len(waits) - 1), records["a"] / 1e9)
        own = np.clip(lengths - waits, 0.0, None)
        self.own = own[warmup:]  # of each step without the waits for data in it
        self.before = own[:warmup]  # the same of the warm-up

        # Those of training loaders, in the stretch.
        self.batches = _inside(timeline.batches, stretch, training)
        self.passes = [p for p in passes if p.number in training and p.begin_ns >= stretch.begin_ns]
        # For batches of training loaders, and the part of it for workers that were just started.
        self.waited = float(waits[warmup:].sum())
        self.starting = _starting(self.passes, self.batches, timeline.loader_begins)
        self.evaluated = _covered([p for p in passes if p.number not in training], stretch)
        # The training thread's own time by kind: "save", "sync", "copy", "backward", …
        samples = trainer.stack_samples.between(stretch.begin_ns, stretch.end_ns)
        self.spent = _by_kind(samples)
        self.sampled = sum(samples.values())  # seconds that the stack samples account for

    @property
    def seconds(self) -> float:
        return self.stretch.seconds

    @property
    def wait_share(self) -> float:
        return min(1.0, self.waited / self.seconds) if self.seconds else 0.0

    @property
    def step_seconds(self) -> float:
        return self.seconds / self.steps if self.steps else 0.0

    @property
    def rest(self) -> float:
        """Seconds of a step besides waiting for data and evaluation."""
        left = self.seconds - self.waited - self.evaluated
        return max(left, 0.0) / self.steps if self.steps else 0.0

    def share(self, *kinds: str) -> float:
        """The share of the stack samples that found the thread at such places."""
        total = sum(self.spent[kind].seconds for kind in kinds if kind in self.spent)
        return total / self.sampled if self.sampled else 0.0

    def location(self, kind: str) -> CodeLocation | None:
        """The line that took most of the time of a kind."""
        return self.spent[kind].location if kind in self.spent else None

    @cached_property
    def loader(self) -> Loader | None:
        """The loader that most batches came from."""
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
        """The framework's threads, where it told how many."""
        return self.trainer.settings.threads


def account_of(trainer: Trainer) -> Account | None:
    """The account of one process; None where it took no steps whose lengths are known."""
    times = _step_times(trainer.timeline)
    return Account(trainer, times) if len(times) > 1 else None


def _step_times(timeline: Timeline) -> Ints:
    """When steps ended: by the optimizer, else by marks named "step", else by batches.

    Several optimizers that step one after the other (a loop over settings makes a new one for
    each) are added up, beginning with the busiest; one that steps beside it belongs to its steps.
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
    taken: list[Ints] = []
    for stream in sorted(streams, key=len, reverse=True):
        if all(stream[0] > other[-1] or stream[-1] < other[0] for other in taken):
            taken.append(stream)
    return np.sort(np.concatenate(taken))


def _inside(records: Records, stretch: Window, numbers: Sequence[int]) -> Records:
    keep = (records["t"] > stretch.begin_ns) & (records["t"] <= stretch.end_ns)
    return records.take(np.flatnonzero(keep & np.isin(records["number"], numbers)))


def _starting(passes: Sequence[Pass], batches: Records, begins: Records) -> float:
    """Seconds for starting workers: in `iter()`, and until the first batch of each pass beyond
    what a batch takes otherwise."""
    usual = _median(batches["a"]) if len(batches) else 0.0
    total = 0.0
    for number in {each.number for each in passes}:
        since = [each.begin_ns for each in passes if each.number == number]
        total += float(_first_waits(begins, number, since).sum())
        total += float(np.clip(_first_waits(batches, number, since) - usual, 0.0, None).sum())
    return total / 1e9


def _first_waits(records: Records, number: int, since: Sequence[int]) -> Ints:
    """The wait of a loader's first record after each of these times."""
    own = np.flatnonzero(records["number"] == number)
    places = np.searchsorted(records["t"][own], since)
    waits: Ints = records["a"][own[places[places < len(own)]]]
    return waits


def _median(values: Ints) -> float:
    """As floats: of integers that are nearly all alike numpy takes a hundred times as long."""
    return float(np.median(values.astype(np.float64)))


def _covered(passes: Sequence[Pass], stretch: Window) -> float:
    """Seconds of the stretch inside of passes; those inside others count once."""
    total, reached = 0, stretch.begin_ns
    for each in sorted(passes, key=lambda p: p.begin_ns):
        begin, end = max(each.begin_ns, reached), min(each.end_ns, stretch.end_ns)
        if end > begin:
            total, reached = total + end - begin, end
    return total / 1e9


def _by_kind(samples: Mapping[StackLocation, float]) -> dict[str, Spent]:
    kinds: dict[str, dict[CodeLocation, float]] = {}
    for place, seconds in samples.items():
        lines = kinds.setdefault(kind_of(place), {})
        line = CodeLocation(place.where, place.code)
        lines[line] = lines.get(line, 0.0) + seconds
    return {
        kind: Spent(sum(lines.values()), max(lines.items(), key=lambda item: item[1])[0])
        for kind, lines in kinds.items()
    }


def kind_of(place: StackLocation) -> str:
    """What the training thread does at a place, as far as the user's code shows."""

    def has(code: str, calls: Sequence[str]) -> bool:
        return any(call in code for call in calls)

    code, inner, part = place.code, place.inner_code, place.part
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
    if has(code, _LOGS) or place.inner.startswith(_LOGGING_FILES):
        return "logging"
    if has(code, _SYNCS) or has(inner, _SYNCS):
        return "sync"
    return part or "other"


def mean_in(series: Series, stretch: Window) -> float | None:
    """The mean of a rate over a stretch; None where it was not sampled."""
    amount = amount_of(series, stretch.begin_ns, stretch.end_ns)
    return None if amount is None else amount.total / amount.seconds


def reading_in(
    series: Series, stretch: Window, pick: Callable[[Floats], float] = np.mean
) -> float | None:
    """The mean (or whatever is picked) of a gauge's readings in a stretch; None without any."""
    inside = series.between(stretch.begin_ns, stretch.end_ns)
    return float(pick(inside.value)) if len(inside) else None
