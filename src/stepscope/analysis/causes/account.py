"""Where the time of the steps went: the stretch that is judged, and what it is made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from stepscope.analysis.observed import Floats, Ints, Loader, Place, Trainer
from stepscope.analysis.passes import Pass, Records, find_passes, training_loaders
from stepscope.analysis.series import Series, amount_of
from stepscope.analysis.steady import find_steady

_SYNC = (".item(", ".cpu(", ".tolist(", ".numpy(", "synchronize(", ".nonzero(", "print(")
_COPY = (".to(", ".cuda(", ".copy_(", "device_put(")
_RANKS = ("all_reduce(", "barrier(", "all_gather(", "broadcast(", "reduce_scatter(")
_LOGGING = (
    "write(", "flush(", "fsync(", "dump(", "dumps(", "print(", "logger.", "logging.", "self.log(",
    "self.log_dict(", "log_metrics(", "add_scalar(", "add_histogram(", "histc(", "histogram(",
    "savefig(", "wandb.", "mlflow.",
)  # fmt: skip
_LOGGING_FILES = ("json/", "logging/", "tensorboard", "wandb/", "mlflow/", "csv.py")
_SAVES = ("torch.save(", "save_pretrained(", "save_checkpoint(", "pickle.dump(", "np.save(")


@dataclass(frozen=True)
class Stretch:
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
    where: str | None = None
    line: str | None = None


@dataclass(frozen=True)
class Account:
    """What one training process did in the stretch that is judged."""

    trainer: Trainer
    stretch: Stretch
    steps: int
    lengths: Floats
    """Of each step in it, in seconds."""
    own: Floats
    """Of each step without the waits for data in it."""
    before: Floats
    """Of the steps before the stretch, the warm-up, without their waits."""
    batches: Records
    """Those of training loaders, in the stretch."""
    passes: tuple[Pass, ...]
    """Over training loaders, that began in the stretch."""
    waited: float
    """For batches of training loaders, starting workers included."""
    starting: float
    """Of that: for workers that had just been started."""
    evaluated: float
    spent: Mapping[str, Spent] = field(default_factory=dict)
    """The training thread's own time by kind: "save", "sync", "copy", "backward", …"""
    looked: float = 0.0
    """Seconds that the looks account for."""

    @property
    def seconds(self) -> float:
        return self.stretch.seconds

    @property
    def warmup(self) -> int:
        return len(self.before)

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
        """The share of the looks that found the thread at such places."""
        total = sum(self.spent[kind].seconds for kind in kinds if kind in self.spent)
        return total / self.looked if self.looked else 0.0

    @cached_property
    def loader(self) -> Loader | None:
        """The loader that most batches came from."""
        numbers, counts = np.unique(self.batches["number"], return_counts=True)
        if not len(numbers):
            return None
        return self.trainer.loaders.get(int(numbers[np.argmax(counts)]))

    @cached_property
    def batch_size(self) -> int | None:
        told = self.batches["b"][self.batches["b"] > 0]
        if len(told):
            return int(_median(told))
        return self.loader.batch_size if self.loader else None


def account_of(trainer: Trainer) -> Account | None:
    """The account of one process; None where it took no steps whose lengths are known."""
    times = _step_times(trainer)
    if len(times) < 2:
        return None
    lengths = np.diff(times) / 1e9
    workers = max((loader.workers for loader in trainer.loaders.values()), default=0)
    warmup = find_steady(lengths, workers).warmup
    stretch = Stretch(int(times[warmup]), int(times[-1]))
    passes = find_passes(trainer.timeline)
    training = training_loaders(trainer.timeline, passes)
    batches = _inside(trainer.timeline.batches, stretch, training)
    own = tuple(p for p in passes if p.number in training and p.begin_ns >= stretch.begin_ns)
    others = [p for p in passes if p.number not in training]
    looks = trainer.looks.between(stretch.begin_ns, stretch.end_ns)
    starting = _starting(trainer, own, batches)
    own_lengths, waited = _without_waits(trainer, times, training)
    return Account(
        trainer=trainer,
        stretch=stretch,
        steps=len(times) - 1 - warmup,
        lengths=lengths[warmup:],
        own=own_lengths[warmup:],
        before=own_lengths[:warmup],
        batches=batches,
        passes=own,
        waited=float(waited[warmup:].sum()),
        starting=starting,
        evaluated=_evaluated(others, stretch),
        spent=_by_kind(looks),
        looked=sum(looks.values()),
    )


def _step_times(trainer: Trainer) -> Ints:
    """When steps ended: of the optimizer that stepped most, else of marks named "step"."""
    steps = trainer.timeline.steps
    if len(steps):
        return _one_after_the_other(steps)
    marks = [m.t for m in trainer.timeline.marks if m.edge is None and m.name == "step"]
    if marks:
        return np.array(marks, np.int64)
    return np.ascontiguousarray(trainer.timeline.batches["t"]).astype(np.int64)


def _one_after_the_other(steps: Records) -> Ints:
    """The steps of the busiest optimizer, and of those that stepped before or after it: a loop
    over settings makes a new one for each. One that steps beside it belongs to the same step."""
    streams = [
        np.asarray(steps["t"][steps["number"] == number], np.int64)
        for number in np.unique(steps["number"])
    ]
    taken: list[Ints] = []
    for stream in sorted(streams, key=len, reverse=True):
        if all(stream[0] > other[-1] or stream[-1] < other[0] for other in taken):
            taken.append(stream)
    return np.sort(np.concatenate(taken))


def _inside(records: Records, stretch: Stretch, numbers: Sequence[int]) -> Records:
    keep = (records["t"] > stretch.begin_ns) & (records["t"] <= stretch.end_ns)
    return records.take(np.flatnonzero(keep & np.isin(records["number"], numbers)))


def _without_waits(trainer: Trainer, times: Ints, training: Sequence[int]) -> tuple[Floats, Floats]:
    """The length of each step without its waits for data, and those waits."""
    whole, timeline = Stretch(int(times[0]), int(times[-1])), trainer.timeline
    told = (timeline.batches, timeline.loader_begins, timeline.loader_ends)
    waits = _by_step(times, [_inside(records, whole, training) for records in told])
    return np.clip(np.diff(times) / 1e9 - waits, 0.0, None), waits


def _by_step(times: Ints, waits: Sequence[Records]) -> Floats:
    """Seconds that were waited within each step."""
    found = np.zeros(len(times) - 1)
    for records in waits:
        places = np.searchsorted(times, records["t"], side="left") - 1
        np.add.at(found, np.clip(places, 0, len(found) - 1), records["a"] / 1e9)
    return found


def _starting(trainer: Trainer, passes: Sequence[Pass], batches: Records) -> float:
    """Seconds for starting workers: in `iter()`, and until the first batch of each pass beyond
    what a batch takes otherwise."""
    usual = _median(batches["a"]) if len(batches) else 0.0
    begins = trainer.timeline.loader_begins
    total = 0.0
    for number in {each.number for each in passes}:
        of_loader = _of_number(batches, number), _of_number(begins, number)
        for each in passes:
            if each.number == number:
                first, inside = (_waited_first(own, each.begin_ns) for own in of_loader)
                total += inside + max(0.0, first - usual)
    return total / 1e9


def _median(values: Ints) -> float:
    """As floats: of integers that are nearly all alike numpy takes a hundred times as long."""
    return float(np.median(values.astype(np.float64)))


def _of_number(records: Records, number: int) -> tuple[Ints, Ints]:
    """Times and waits of one loader."""
    own = np.flatnonzero(records["number"] == number)
    return records["t"][own], records["a"][own]


def _waited_first(records: tuple[Ints, Ints], since_ns: int) -> float:
    times, waits = records
    place = int(np.searchsorted(times, since_ns))
    return float(waits[place]) if place < len(waits) else 0.0


def _evaluated(passes: Sequence[Pass], stretch: Stretch) -> float:
    """Seconds of the stretch inside of passes that do not train; those inside others count once."""
    total, reached = 0, stretch.begin_ns
    for each in sorted(passes, key=lambda p: p.begin_ns):
        begin, end = max(each.begin_ns, reached), min(each.end_ns, stretch.end_ns)
        if end > begin:
            total, reached = total + end - begin, end
    return total / 1e9


def _by_kind(looks: Mapping[Place, float]) -> dict[str, Spent]:
    kinds: dict[str, dict[Place, float]] = {}
    for place, seconds in looks.items():
        kinds.setdefault(kind_of(place), {})[place] = seconds
    return {kind: _spent(places) for kind, places in kinds.items()}


def _spent(places: Mapping[Place, float]) -> Spent:
    by_line: dict[tuple[str, str], float] = {}
    for place, seconds in places.items():
        key = place.where, place.code
        by_line[key] = by_line.get(key, 0.0) + seconds
    where, line = max(by_line, key=lambda key: by_line[key])
    return Spent(sum(places.values()), where or None, line or None)


def kind_of(place: Place) -> str:
    """What the training thread does at a place, as far as the code shows."""
    if place.part in ("loader", "save"):
        return place.part
    code, inner = place.code, place.inner
    if _has(code, _SAVES):
        return "save"
    if "sleep(" in code:
        return "sleep"
    if place.part == "ranks" or _has(code, _RANKS):
        return "ranks" if place.part != "forward" else "forward"
    if place.part in ("backward", "optimizer"):
        return place.part
    if _has(code, _COPY) or _has(place.inner_code, _COPY):
        return "copy"
    if _has(code, _LOGGING) or inner.startswith(_LOGGING_FILES):
        return "logging"
    if _has(code, _SYNC) or _has(place.inner_code, _SYNC):
        return "sync"
    return place.part or "other"


def _has(code: str, words: Sequence[str]) -> bool:
    return any(word in code for word in words)


def mean_in(series: Series, stretch: Stretch) -> float | None:
    """The mean of a rate over a stretch; None where it was not sampled."""
    amount = amount_of(series, stretch.begin_ns, stretch.end_ns)
    return None if amount is None else amount.total / amount.seconds


def reading_in(
    series: Series, stretch: Stretch, pick: Callable[[Floats], float] = np.mean
) -> float | None:
    """The mean (or whatever is picked) of a gauge's readings in a stretch; None without any."""
    inside = series.between(stretch.begin_ns, stretch.end_ns)
    return float(pick(inside.value)) if len(inside) else None
