"""Trainings that never were, as an explanation takes them: exact, so that results can be told by
hand."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from stepscope.analysis.run.data import (
    NO_BATCH_TIMING,
    NO_RECORDS,
    NO_STACK_SAMPLES,
    BatchTiming,
    Loader,
    RunData,
    StackLocation,
    StackSamples,
    Trainer,
    TrainerSettings,
)
from stepscope.analysis.run.passes import MarkEvent, Records, Timeline
from stepscope.analysis.run.series import Floats, Series
from stepscope.inject import events
from stepscope.metrics import is_counter
from stepscope.records import CodeLocation, Gpu
from stepscope.records.facts import CpuFacts, Environment, HookFacts, MemoryFacts, RunFacts

BEGIN_NS = 5_000_000_000_000
A_GPU = Gpu("GPU-1", "GPU 0", "NVIDIA H200", memory_bytes=150e9)
TRAINS, EVALUATES = 1, 2
"""The numbers of the two loaders."""

FORWARD = StackLocation("train.py:20", "model(x)", part="forward")
BACKWARD = StackLocation("train.py:21", "loss.backward()", part="backward")
COPY = StackLocation("train.py:19", "x.to(device)")
SYNC = StackLocation("train.py:23", "loss.item()")
LOGGING = StackLocation("train.py:24", "json.dump(row, log)", "json/__init__.py:dump")
SAVE = StackLocation("train.py:30", "torch.save(model.state_dict(), path)", part="save")
SLEEP = StackLocation("train.py:31", "time.sleep(0.1)")
LOADING = StackLocation("train.py:18", "for x, y in loader", part="loader")
OTHER = StackLocation("train.py:25", "x = x + 1")

Value = float | Callable[[Floats], Floats]
"""What is read all of the time, or a function of the seconds since the beginning."""
Table = Mapping[tuple[str, str], Value]
Parts = tuple[float, float, float]
"""Seconds for one batch: by the clock, of CPU, ready but without a CPU."""


@dataclass(frozen=True)
class Training:
    """One process that trains. Seconds everywhere; of `steps` + 1 steps the first begins it all."""

    steps: int = 200
    step: float = 0.1
    """How long each takes, the wait included."""
    wait: float = 0.0
    lengths: Sequence[float] = ()
    """Of each step, where they differ."""
    waits: Sequence[float] = ()
    epoch: int | None = None
    """Steps in each pass over the loader; all of them where it is None."""
    startup: float = 0.0
    """Beyond the usual, until the first batch of each pass."""
    evaluates: tuple[int, float] | None = None
    """Every so many steps, for so long."""
    batch: int = 64
    workers: int = 4
    samples: Parts | None = (0.02, 0.018, 0.0)
    collation: Parts = (0.001, 0.001, 0.0)
    looks: Mapping[StackLocation, float] = field(default_factory=dict)
    """Shares of the time."""
    device: Parts | None = None
    """From batch to end on the device, to queue it, and in which share of steps all was queued."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    rank: int | None = None
    by: str = "optimizer"
    """Who tells of steps: the "optimizer", "marks", or the "loader" alone."""


def observed(
    *trainings: Training,
    series: Table | None = None,
    gpu: Mapping[str, Value] | None = None,
    allowed: float | None = 4.0,
    cpus: int | None = 4,
    memory_bytes: float | None = 64e9,
    seconds: float = 20.0,
    hook: str = "",
) -> RunData:
    """What is known of a run of these processes; of `seconds` where there are none."""
    ran = [_Ran(training) for training in trainings]
    end = max((each.end for each in ran), default=seconds)
    of_gpu = {(metric, A_GPU.uuid): value for metric, value in (gpu or {}).items()}
    table = {**(series or {}), **of_gpu}
    return RunData(
        series={key: _series(key[0], value, end) for key, value in table.items()},
        timelines=[each.timeline for each in ran],
        begin_ns=BEGIN_NS,
        end_ns=ns(end),
        facts=RunFacts(
            environment=Environment(
                cpu=CpuFacts(logical=cpus, allowed=allowed), memory=MemoryFacts(memory_bytes)
            ),
            hook=HookFacts(hook),
        ),
        gpus=(A_GPU,) if gpu else (),
        trainers=tuple(each.trainer for each in ran),
        preparation=_together(each.work(each.training.samples) for each in ran),
        collation=_together(
            each.work(each.training.collation if each.training.samples else None) for each in ran
        ),
    )


def cores(
    used: float, main: float | None = None, wait: float = 0.0, host: float | None = None
) -> dict[tuple[str, str], Value]:
    """The cores that a run uses: all its processes, the training one, and those without a core."""
    return {
        ("cpu", "tree"): used,
        ("cpu", "main"): used if main is None else main,
        ("cpu_wait", "tree"): wait,
        ("host_cpu", "host"): used if host is None else host,
    }


def on_gpu(**different: Value) -> dict[str, Value]:
    """A GPU that is busy with large matrices in bf16, but for what is `different`."""
    return {
        "gpu_memory_tree": 10e9,
        "gpu_memory": 11e9,
        "gpu_utilization": 0.99,
        "gpu_active": 0.95,
        "gpu_sm": 0.9,
        "gpu_tensor": 0.5,
        "gpu_fp32": 0.1,
        "gpu_dram": 0.4,
        "gpu_others": 0.0,
        "gpu_pcie_received": 1e8,
        "gpu_slowed_power": 0.0,
        "gpu_slowed_heat": 0.0,
        "gpu_sm_clock": 1500.0,
        **different,
    }


BUSY = cores(3.8)
"""All four cores compute the model."""
IDLE = cores(1.0)
COMPUTES = {FORWARD: 0.6, BACKWARD: 0.4}
HALF_IDLE: dict[str, Any] = {"gpu_active": 0.5, "gpu_sm": 0.4}


def on_cpu(training: Training | None = None, more: Table | None = None, **of_run: Any) -> RunData:
    return observed(training or Training(), series={**BUSY, **(more or {})}, **of_run)


def waits_for(wait: float, series: Table | None = None, **loader: Any) -> RunData:
    return observed(Training(wait=wait, **loader), series=series or cores(2.0, main=0.8))


def on_device(
    looks: Mapping[StackLocation, float] = COMPUTES,
    ahead: float = 0.0,
    training: Any = None,
    **gpu: Any,
) -> RunData:
    """The device takes 90 of the 100 ms of a step, from batch to end."""
    one = Training(looks=looks, device=(0.09, 0.05, ahead), **(training or {}))
    return observed(one, series=IDLE, gpu=on_gpu(**gpu))


def two_ranks(one: Mapping[StackLocation, float], other: Mapping[StackLocation, float]) -> RunData:
    """Two processes that step together."""
    trainings = (Training(rank=0, looks=one), Training(rank=1, looks=other))
    return observed(*trainings, series={**BUSY, ("loopback", "net:1"): 1e8})


def without_steps(gpu: Any = None, more: Table | None = None, **of_run: Any) -> RunData:
    return observed(series={**IDLE, **(more or {})}, gpu=gpu, **of_run)


def growing(rate: float, begin: float = 2e9) -> Any:
    return lambda seconds: begin + rate * seconds


def slowing(last: float) -> RunData:
    return on_cpu(Training(lengths=np.linspace(0.1, last, 201).tolist()))


def ns(seconds: float) -> int:
    """On the clock of the run."""
    return BEGIN_NS + _ns(seconds)


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


class _Ran:
    """A training as it ran: when its batches came and its steps ended, to the nanosecond."""

    def __init__(self, training: Training) -> None:
        self.training = training
        self._records: list[tuple[int, int, int, int, int, int]] = []
        self._batches: list[int] = []
        self._steps: list[int] = []
        self._run()
        self.end = (self._steps[-1] - BEGIN_NS) / 1e9

    def _run(self) -> None:
        count = self.training.steps + 1
        epoch = self.training.epoch or count
        now = BEGIN_NS
        for step in range(count):
            first = step % epoch == 0
            if first:
                self._tell(events.LOADER_BEGIN, now, TRAINS, 0, epoch)
            now = self._step(step, now, _ns(self.training.startup) if first else 0)
            if (step + 1) % epoch == 0:
                self._tell(events.LOADER_END, now, TRAINS)

    def _step(self, step: int, now: int, startup: int) -> int:
        training = self.training
        length = _ns(training.lengths[step] if training.lengths else training.step)
        wait = startup + _ns(training.waits[step] if training.waits else training.wait)
        if training.evaluates and step and step % training.evaluates[0] == 0:
            now = self._evaluate(now, _ns(training.evaluates[1]))
        self._tell(events.BATCH, now + wait, TRAINS, wait, training.batch)
        self._batches.append(now + wait)
        now += startup + length
        if training.by == "optimizer":
            self._tell(events.STEP, now, 9, 1)
        self._steps.append(now)
        self._tell_device(now, step)
        return now

    def _evaluate(self, begin: int, length: int) -> int:
        self._tell(events.LOADER_BEGIN, begin, EVALUATES, 0, 2)
        for batch in (1, 2):
            self._tell(events.BATCH, begin + length * batch // 3, EVALUATES, 0, 64)
        self._tell(events.LOADER_END, begin + length, EVALUATES)
        return begin + length

    def _tell_device(self, now: int, step: int) -> None:
        if self.training.device:
            span, queueing, ahead = self.training.device
            count = self.training.steps + 1
            flags = events.HOST_AHEAD if step < round(ahead * count) else 0
            self._records.append((now, events.DEVICE_STEP, flags, 0, _ns(span), _ns(queueing)))

    def _tell(self, kind: int, at: int, number: int, a: int = 0, b: int = 0) -> None:
        self._records.append((at, kind, 0, number, a, b))

    def _of(self, kind: int) -> Records:
        return np.array(sorted(r for r in self._records if r[1] == kind), NO_RECORDS.dtype)

    @property
    def timeline(self) -> Timeline:
        marks = [MarkEvent(t, "step", None, None, "marks") for t in self._steps]
        return Timeline(
            4100 + (self.training.rank or 0),
            self.training.rank,
            self._of(events.LOADER_BEGIN),
            self._of(events.BATCH),
            self._of(events.LOADER_END),
            self._of(events.STEP),
            marks if self.training.by == "marks" else (),
        )

    @property
    def trainer(self) -> Trainer:
        training = self.training
        loader = Loader(
            TRAINS,
            training.workers,
            2,
            training.batch,
            False,
            False,
            CodeLocation("train.py:41", "loader = DataLoader(data, 64)"),
        )
        return Trainer(
            self.timeline,
            {TRAINS: loader},
            self._of(events.DEVICE_STEP),
            self._looks(),
            TrainerSettings(**training.settings),
        )

    def _looks(self) -> StackSamples:
        """Told every half of a second, as shares of it."""
        places = list(self.training.looks)
        if not places:
            return NO_STACK_SAMPLES
        told = np.arange(0.5, self.end, 0.5)
        index = np.tile(np.arange(len(places)), len(told))
        shares = np.array([self.training.looks[place] for place in places])
        times = np.repeat([ns(t) for t in told], len(places)).astype(np.int64)
        return StackSamples(times, index, np.tile(0.5 * shares, len(told)), places)

    def work(self, parts: Parts | None) -> BatchTiming:
        if parts is None:
            return NO_BATCH_TIMING
        t = np.array(self._batches, np.int64)
        return BatchTiming(t, *(np.full(len(t), each) for each in parts))


def _together(works: Iterable[BatchTiming]) -> BatchTiming:
    found = [work for work in works if len(work)]
    if not found:
        return NO_BATCH_TIMING
    order = np.argsort(np.concatenate([work.t for work in found]), kind="stable")
    return BatchTiming(
        *(
            np.concatenate([getattr(work, name) for work in found])[order]
            for name in ("t", "wall", "cpu", "without_cpu")
        )
    )


def _series(metric: str, value: Value, end: float) -> Series:
    """Read ten times a second."""
    seconds = np.arange(0.1, end + 0.1, 0.1)
    values = value(seconds) if callable(value) else np.full(len(seconds), value)
    window = 0.1 if is_counter(metric) else 0.0
    times = np.array([ns(at) for at in seconds], np.int64)
    return Series(times, np.full(len(seconds), window), np.asarray(values, np.float64))
