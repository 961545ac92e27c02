"""Synthetic trainings as input for `explain`: exact, so that results can be computed by hand."""

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
"""Numbers of the two loaders."""

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
"""A constant reading, or a function of the seconds since the start."""
Table = Mapping[tuple[str, str], Value]
Parts = tuple[float, float, float]
"""Seconds per batch: wall time, CPU time, and time ready to run but without a CPU."""


@dataclass(frozen=True)
class Training:
    """One training process; times in seconds. It takes `steps` + 1 steps, the first as start."""

    steps: int = 200
    step: float = 0.1  # duration, including the wait
    wait: float = 0.0
    lengths: Sequence[float] = ()  # durations of the steps, if they differ
    waits: Sequence[float] = ()
    epoch: int | None = None
    """Steps per pass over the loader; None for a single pass."""
    startup: float = 0.0
    """Additional wait for the first batch of each pass."""
    evaluates: tuple[int, float] | None = None
    """Interval in steps, and duration."""
    batch: int = 64
    workers: int = 4
    samples: Parts | None = (0.02, 0.018, 0.0)
    collation: Parts = (0.001, 0.001, 0.0)
    stacks: Mapping[StackLocation, float] = field(default_factory=dict)
    """Locations of the training thread, with their shares of the time."""
    device: Parts | None = None
    """Seconds on the device per step, seconds to queue a step, share of steps queued ahead."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    rank: int | None = None
    step_source: str = "optimizer"  # or "marks" or "loader"


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
    """Return the data of a run of these processes; without processes it lasts `seconds`."""
    simulated = [_Simulated(training) for training in trainings]
    end = max((each.end for each in simulated), default=seconds)
    gpu_table = {(metric, A_GPU.uuid): value for metric, value in (gpu or {}).items()}
    table = {**(series or {}), **gpu_table}
    return RunData(
        series={key: _series(key[0], value, end) for key, value in table.items()},
        timelines=[each.timeline for each in simulated],
        begin_ns=BEGIN_NS,
        end_ns=ns(end),
        facts=RunFacts(
            environment=Environment(
                cpu=CpuFacts(logical=cpus, allowed=allowed), memory=MemoryFacts(memory_bytes)
            ),
            hook=HookFacts(reason=hook),
        ),
        gpus=(A_GPU,) if gpu else (),
        trainers=tuple(each.trainer for each in simulated),
        preparation=_merged(each.timing(each.training.samples) for each in simulated),
        collation=_merged(
            each.timing(each.training.collation if each.training.samples else None)
            for each in simulated
        ),
    )


def cores(
    used: float, main: float | None = None, wait: float = 0.0, host: float | None = None
) -> dict[tuple[str, str], Value]:
    """Return the cores used by the run and by its training process, threads waiting for a core,
    and the cores used on the host."""
    return {
        ("cpu", "tree"): used,
        ("cpu", "main"): used if main is None else main,
        ("cpu_wait", "tree"): wait,
        ("host_cpu", "host"): used if host is None else host,
    }


def on_gpu(**changes: Value) -> dict[str, Value]:
    """Return the metrics of a GPU that is busy with large matrices in bf16, with `changes`."""
    return {
        "gpu_memory_run": 10e9,
        "gpu_memory": 11e9,
        "gpu_utilization": 0.99,
        "gpu_active": 0.95,
        "gpu_sm": 0.9,
        "gpu_tensor": 0.5,
        "gpu_fp32": 0.1,
        "gpu_dram": 0.4,
        "gpu_other_processes": 0.0,
        "gpu_pcie_received": 1e8,
        "gpu_throttled_power": 0.0,
        "gpu_throttled_thermal": 0.0,
        "gpu_sm_clock": 1500.0,
        **changes,
    }


BUSY = cores(3.8)
"""All four cores compute the model."""
IDLE = cores(1.0)
COMPUTES = {FORWARD: 0.6, BACKWARD: 0.4}
HALF_IDLE: dict[str, Any] = {"gpu_active": 0.5, "gpu_sm": 0.4}


def on_cpu(training: Training | None = None, more: Table | None = None, **run: Any) -> RunData:
    return observed(training or Training(), series={**BUSY, **(more or {})}, **run)


def waits_for(wait: float, series: Table | None = None, **loader: Any) -> RunData:
    return observed(Training(wait=wait, **loader), series=series or cores(2.0, main=0.8))


def on_device(
    stacks: Mapping[StackLocation, float] = COMPUTES,
    ahead: float = 0.0,
    training: Any = None,
    **gpu: Any,
) -> RunData:
    """Return a run in which a step takes 100 ms, 90 of them on the device."""
    one = Training(stacks=stacks, device=(0.09, 0.05, ahead), **(training or {}))
    return observed(one, series=IDLE, gpu=on_gpu(**gpu))


def two_ranks(one: Mapping[StackLocation, float], other: Mapping[StackLocation, float]) -> RunData:
    """Return a run of two ranks with different stack samples."""
    trainings = (Training(rank=0, stacks=one), Training(rank=1, stacks=other))
    return observed(*trainings, series={**BUSY, ("loopback", "net:1"): 1e8})


def without_steps(gpu: Any = None, more: Table | None = None, **run: Any) -> RunData:
    return observed(series={**IDLE, **(more or {})}, gpu=gpu, **run)


def growing(rate: float, begin: float = 2e9) -> Any:
    return lambda seconds: begin + rate * seconds


def slowing(last: float) -> RunData:
    return on_cpu(Training(lengths=np.linspace(0.1, last, 201).tolist()))


def ns(seconds: float) -> int:
    """Return a time on the clock of the run."""
    return BEGIN_NS + _ns(seconds)


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


class _Simulated:
    """The events of a training: when batches arrive and steps end, to the nanosecond."""

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
                self._record(events.LOADER_BEGIN, now, TRAINS, 0, epoch)
            now = self._step(step, now, _ns(self.training.startup) if first else 0)
            if (step + 1) % epoch == 0:
                self._record(events.LOADER_END, now, TRAINS)

    def _step(self, step: int, now: int, startup: int) -> int:
        training = self.training
        length = _ns(training.lengths[step] if training.lengths else training.step)
        wait = startup + _ns(training.waits[step] if training.waits else training.wait)
        if training.evaluates and step and step % training.evaluates[0] == 0:
            now = self._evaluate(now, _ns(training.evaluates[1]))
        self._record(events.BATCH, now + wait, TRAINS, wait, training.batch)
        self._batches.append(now + wait)
        now += startup + length
        if training.step_source == "optimizer":
            self._record(events.STEP, now, 9, 1)
        self._steps.append(now)
        self._record_device_step(now, step)
        return now

    def _evaluate(self, begin: int, length: int) -> int:
        self._record(events.LOADER_BEGIN, begin, EVALUATES, 0, 2)
        for batch in (1, 2):
            self._record(events.BATCH, begin + length * batch // 3, EVALUATES, 0, 64)
        self._record(events.LOADER_END, begin + length, EVALUATES)
        return begin + length

    def _record_device_step(self, now: int, step: int) -> None:
        if self.training.device:
            span, queueing, ahead = self.training.device
            count = self.training.steps + 1
            flags = events.HOST_AHEAD if step < round(ahead * count) else 0
            self._records.append((now, events.DEVICE_STEP, flags, 0, _ns(span), _ns(queueing)))

    def _record(self, kind: int, t: int, number: int, a: int = 0, b: int = 0) -> None:
        self._records.append((t, kind, 0, number, a, b))

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
            marks if self.training.step_source == "marks" else (),
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
            self._stack_samples(),
            TrainerSettings(**training.settings),
        )

    def _stack_samples(self) -> StackSamples:
        """Return stack samples that are reported every half second."""
        locations = list(self.training.stacks)
        if not locations:
            return NO_STACK_SAMPLES
        reports = np.arange(0.5, self.end, 0.5)
        index = np.tile(np.arange(len(locations)), len(reports))
        shares = np.array([self.training.stacks[location] for location in locations])
        times = np.repeat([ns(t) for t in reports], len(locations)).astype(np.int64)
        return StackSamples(times, index, np.tile(0.5 * shares, len(reports)), locations)

    def timing(self, parts: Parts | None) -> BatchTiming:
        if parts is None:
            return NO_BATCH_TIMING
        t = np.array(self._batches, np.int64)
        return BatchTiming(t, *(np.full(len(t), each) for each in parts))


def _merged(timings: Iterable[BatchTiming]) -> BatchTiming:
    known = [timing for timing in timings if len(timing)]
    if not known:
        return NO_BATCH_TIMING
    order = np.argsort(np.concatenate([timing.t for timing in known]), kind="stable")
    return BatchTiming(
        *(
            np.concatenate([getattr(timing, name) for timing in known])[order]
            for name in ("t", "wall", "cpu", "without_cpu")
        )
    )


def _series(metric: str, value: Value, end: float) -> Series:
    """Return a series that is sampled ten times per second."""
    seconds = np.arange(0.1, end + 0.1, 0.1)
    values = value(seconds) if callable(value) else np.full(len(seconds), value)
    window = 0.1 if is_counter(metric) else 0.0
    times = np.array([ns(t) for t in seconds], np.int64)
    return Series(times, np.full(len(seconds), window), np.asarray(values, np.float64))
