"""Writes folders of synthetic runs with the writers of real runs."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from stepscope.inject import events
from stepscope.metrics import SCOPES
from stepscope.records import Entity
from stepscope.records.facts import CpuFacts, Environment, RunFacts
from stepscope.runs.events import RECORD, Records
from stepscope.runs.files import write_json
from stepscope.runs.paths import FORMAT, RunPaths
from stepscope.runs.streams import StreamWriter, pack
from synthetic_gpus import (
    allocations,
    gpu_facts,
    gpu_rows,
    gpu_uuid,
    missing_gpu_metrics,
)

BEGIN_NS = 5_000_000_000_000
WALL_NS = 1_767_348_185_000_000_000
MAIN_PID = 4100

OK: dict[str, Any] = {
    "outcome": "ok",
    "reason": "exit code 0",
    "exit_code": 0,
    "signal": None,
    "evidence": {},
}
RUNNING: dict[str, Any] = {"outcome": "running", "reason": ""}


@dataclass(frozen=True)
class Plan:
    """The properties of a synthetic run."""

    name: str = "resnet18-cifar"
    command: tuple[str, ...] = ("python", "train.py", "--batch-size", "128", "--workers", "2")
    seconds: float = 60.0
    hertz: float = 10.0
    epochs: int = 4
    batches: int = 50
    """Batches per epoch."""
    workers: int = 2
    allowed: float | None = 4.0
    memory_limit: float | None = 4e9
    gpus: int = 0
    """GPUs that the run trains on."""
    idle_gpus: int = 0
    """Additional, idle GPUs."""
    gpm: bool = True
    """Whether the GPUs have performance counters (Hopper and later)."""
    allocator: bool = True
    """Whether PyTorch's allocator reports its memory."""
    exit_status: dict[str, Any] = field(default_factory=lambda: OK)
    facts: dict[str, Any] = field(default_factory=dict)
    """Replaces entries of the default facts."""
    seed: int = 1

    @property
    def start_up(self) -> float:
        return self.seconds * 0.08

    @property
    def epoch_seconds(self) -> float:
        return self.seconds * 0.88 / max(1, self.epochs)

    @property
    def evaluation_seconds(self) -> float:
        """Duration of the evaluation at the end of each epoch."""
        return self.epoch_seconds * 0.12

    def activity(self, at: float) -> tuple[float, int]:
        """Return the load (0 outside epochs, lower in evaluations) and the epoch, or -1."""
        since = at - self.start_up
        if since < 0 or since >= self.epochs * self.epoch_seconds:
            return 0.0, -1
        epoch, within = divmod(since, self.epoch_seconds)
        training = self.epoch_seconds - self.evaluation_seconds
        if within < training:
            return 1.0, int(epoch)
        return (0.0 if within - training < self.evaluation_seconds * 0.3 else 0.6), int(epoch)


def write_run(folder: Path, plan: Plan | None = None) -> RunPaths:
    """Write a run that was monitored to its end, with samples, batches, steps and evaluations."""
    plan = plan or Plan()
    paths = RunPaths(folder)
    paths.events.mkdir(parents=True)
    write_json(paths.run_json, facts_of(plan))
    _write_samples(paths, plan)
    if plan.epochs:
        _write_events(paths, plan)
    return paths


def write_empty_run(folder: Path) -> RunPaths:
    """Write a run whose command ended before the first sample."""
    paths = RunPaths(folder)
    paths.events.mkdir(parents=True)
    write_json(paths.run_json, facts_of(Plan(seconds=0.02, epochs=0)))
    return paths


def write_cut_off_run(folder: Path, plan: Plan | None = None) -> RunPaths:
    """Write a run whose machine went down: no exit status, and every file truncated."""
    paths = write_run(folder, replace(plan or Plan(), exit_status=RUNNING))
    streams = [paths.live_stream(scope) for scope in SCOPES]
    for path in (*streams, *paths.events.glob("*.bin")):
        data = path.read_bytes()
        path.write_bytes(data[: int(len(data) * 0.6) | 1])
        os.utime(path, (0, 0))  # long ago
    return paths


def cpus_allowed(cpus: float | None) -> RunFacts:
    """Return facts that contain only the number of allowed CPUs."""
    return RunFacts(environment=Environment(cpu=CpuFacts(allowed=cpus)))


def facts_of(plan: Plan) -> dict[str, Any]:
    """Return the content of `run.json`."""
    exit_status = dict(plan.exit_status)
    if exit_status["outcome"] != "running":
        exit_status["monotonic_ns"] = BEGIN_NS + int(plan.seconds * 1e9)
    facts: dict[str, Any] = {
        "format": FORMAT,
        "name": plan.name,
        "command": list(plan.command),
        "clock": {"monotonic_ns": BEGIN_NS, "wall_ns": WALL_NS},
        "monitor": {"pid": 4000, "started_ticks": 1, "boot_id": "gone", "host": "node-7"},
        "exit_status": exit_status,
        "environment": {
            "cpu": {"allowed": plan.allowed, "model": "Intel Xeon Platinum 8480+"},
            "memory": {"total": 16_000_000_000},
            "python": "3.11.7",
            "packages": {"torch": "2.14.1", "numpy": "2.1.0"},
            "git": {"commit": "4f2a9c1", "dirty": False},
        },
        "sensors": {
            "missing": {
                "pressure_io": "/proc/pressure/io: No such file or directory",
                "pressure_io_full": "/proc/pressure/io: No such file or directory",
            }
        },
        "hook": {
            "attached": ["DataLoader", "optimizer"],
            "frameworks": {"torch": "2.14.1"},
        },
        "interval_s": 1 / plan.hertz,
    }
    if plan.gpus or plan.idle_gpus:
        facts["environment"]["gpus"] = gpu_facts(plan)
        facts["sensors"]["missing"] |= missing_gpu_metrics(plan)
    return {**facts, **plan.facts}


def _write_samples(paths: RunPaths, plan: Plan) -> None:
    """Write all streams; rolled segments are packed, as in a real run."""
    writers = process, host, gpu = tuple(StreamWriter(paths, scope) for scope in SCOPES)
    pending = list(gpu_rows(plan))[::-1]
    random = np.random.default_rng(plan.seed)
    window, every = 1 / plan.hertz, max(1, round(plan.hertz))
    for number in range(1, int(plan.seconds * plan.hertz) + 1):
        at = number * window
        t_ns = BEGIN_NS + int(at * 1e9)
        for entity, values in _process_rows(plan, at, random, with_pss=number % (2 * every) == 0):
            process.append(t_ns, window, entity, values)
        if number % (2 * every) == 0:
            for entity, values in _cpu_waits(plan, at):
                process.append(t_ns, 2 * window * every, entity, values)
        while pending and pending[-1][0] <= at:
            when, over, entity, values = pending.pop()
            gpu.append(BEGIN_NS + int(when * 1e9), over, entity, values)
        if number % every == 0:
            for entity, values in _host_rows(plan, at, random):
                host.append(t_ns, window * every, entity, values)
            for writer in writers:
                writer.flush()
                closed = writer.roll()
                if closed:
                    pack(closed)
    for writer in writers:
        writer.flush()
        writer.close()


def _process_rows(
    plan: Plan, at: float, random: np.random.Generator, with_pss: bool
) -> Iterator[tuple[Entity, dict[str, float | None]]]:
    busy, epoch = plan.activity(at)
    noise = random.normal(size=6)
    cold = 1.0 if epoch == 0 else 0.15
    main = {
        "cpu": max(0.02, (0.35 + 0.6 * busy) * (1 + 0.05 * noise[0])),
        "rss": 0.35e9 + 1.05e9 * min(1.0, at / plan.start_up) + 0.04e9 * max(0, epoch),
        "read": max(0.0, 4e6 * (1 - busy) * (1 + 0.5 * noise[1])),
        "write": 55e6 if busy == 0 and epoch >= 0 else max(0.0, 2e5 * noise[2]),
    }
    parts = {"main": (1, main)}
    if busy:
        worker = {
            "cpu": max(0.05, 0.8 * plan.workers * busy * (1 + 0.12 * noise[3])),
            "rss": plan.workers * (0.62e9 + 0.02e9 * math.sin(at)),
            "read": max(0.0, 140e6 * cold * busy * (1 + 0.25 * noise[4])),
            "write": 0.0,
        }
        parts["worker"] = (plan.workers, worker)
    for role, (count, values) in parts.items():
        yield Entity(role), _complete_row(values, count, with_pss)
    total = {key: sum(values[key] for _, values in parts.values()) for key in main}
    yield Entity("tree"), _complete_row(total, sum(count for count, _ in parts.values()), with_pss)
    yield Entity("main", MAIN_PID), {"cpu": main["cpu"], "rss": main["rss"]}


def _complete_row(values: dict[str, float], count: int, with_pss: bool) -> dict[str, float | None]:
    shared = 0.45e9 * (count - 1)
    return {
        **values,
        "pss": max(0.1e9, values["rss"] - shared) if with_pss else None,
        "processes": count,
        "threads": 6 * count,
        "read_calls": values["read"] * 1.4 + 1e6,
    }


def _cpu_waits(plan: Plan, at: float) -> Iterator[tuple[Entity, dict[str, float | None]]]:
    busy, _ = plan.activity(at)
    waits = {"main": 0.01 + 0.03 * busy, "worker": 0.05 * plan.workers * busy}
    if not busy:
        del waits["worker"]
    for role, wait in (*waits.items(), ("tree", sum(waits.values()))):
        yield Entity(role), {"cpu_wait": wait}


def _host_rows(
    plan: Plan, at: float, random: np.random.Generator
) -> Iterator[tuple[Entity, dict[str, float | None]]]:
    busy, _ = plan.activity(at)
    noise = random.normal(size=4)
    cpu = 0.5 + (0.95 + 0.8 * plan.workers) * busy + 0.2 * abs(noise[0])
    yield Entity("host"), {"host_cpu": cpu, "host_memory": 6.1e9, "page_cache": 3e9}
    yield (
        Entity("cgroup"),
        {
            "cgroup_cpu": cpu * 0.95,
            "cgroup_memory": 2.4e9 + 0.2e9 * at / plan.seconds,
            "cgroup_memory_limit": plan.memory_limit,
        },
    )
    yield (
        Entity("net:4026531840"),
        {
            "net_received": max(0.0, 12e6 * busy * (1 + 0.3 * noise[1])),
            "net_sent": max(0.0, 1.5e6 * busy * (1 + 0.3 * noise[2])),
        },
    )
    yield Entity("net:4026532001"), {"net_received": 1e5, "net_sent": 1e5}
    yield Entity("shm"), {"shm_used": 0.2e9 * busy, "shm_size": 8e9}
    yield Entity("monitor"), {"monitor_cpu": 0.006, "monitor_rss": 48e6, "monitor_late": 0.002}


_ATTACHED = ("DataLoader", "optimizer")
_CREATED_AT = {
    1: "train.py:41\ttrain_loader = DataLoader(train_set, batch_size=128, num_workers=workers)",
    2: "train.py:42\ttest_loader = DataLoader(test_set, batch_size=128, num_workers=workers)",
}
_PLACES = {
    "train.py:50\tfor x, y in train_loader\tthreading.py:wait\twaiter.acquire()\tloader": 0.12,
    "train.py:51\tx.to(device)\ttrain.py:epoch\t\t": 0.06,
    "train.py:52\tmodel(x)\ttorch/nn/modules/conv.py:forward\tF.conv2d(\tforward": 0.27,
    "train.py:54\tloss.backward()\ttorch/autograd/graph.py:run\tengine(\tbackward": 0.45,
    "train.py:55\toptimizer.step()\ttorch/optim/sgd.py:step\tsgd(\toptimizer": 0.10,
}
"""Locations of the training thread, with their share of the stack samples."""
_STACKS_EVERY = 2.0
_DEVICE_TIMED_EVERY = 0.25
_SETTINGS = json.dumps({"threads": 4, "optimizer": "SGD", "dtype": "float32", "device": "cpu"})


@dataclass(frozen=True)
class _Pass:
    """One pass over a loader; `wait` is the data wait as a share of the time."""

    begin: float
    seconds: float
    batches: int
    wait: float
    loader: int
    trains: bool

    @property
    def each(self) -> float:
        """Seconds between batches."""
        return self.seconds / (self.batches + 1)

    @property
    def arrivals(self) -> npt.NDArray[np.float64]:
        return self.begin + self.each * (np.arange(self.batches) + 0.5)


def _passes(plan: Plan) -> Iterator[_Pass]:
    training = plan.epoch_seconds - plan.evaluation_seconds
    quiet, evaluation = plan.evaluation_seconds * 0.3, plan.evaluation_seconds * 0.6
    for epoch in range(plan.epochs):
        begin = plan.start_up + epoch * plan.epoch_seconds
        wait = 0.4 if epoch == 0 else 0.12
        yield _Pass(begin, training, plan.batches, wait, loader=1, trains=True)
        evaluated = begin + training + quiet
        yield _Pass(evaluated, evaluation, plan.batches // 4, 0.5, loader=2, trains=False)


def _write_events(paths: RunPaths, plan: Plan) -> None:
    """Write the events of the training process."""
    uuids = [gpu_uuid(index) for index in range(plan.gpus if plan.allocator else 0)]
    found = [*_setup_events(plan, uuids), *_stack_samples(plan)]
    for each in _passes(plan):
        found += _pass_events(plan, each)
        if not plan.workers:
            found += _prepared(plan, each)
    texts = (*_ATTACHED, *_CREATED_AT.values(), *_PLACES, _SETTINGS, *uuids)
    _write_file(paths.events / f"{MAIN_PID}.bin", texts, found)


def write_workers(paths: RunPaths, plan: Plan) -> None:
    """Write the events of the loader workers, in their common file."""
    found = []
    for each in _passes(plan):
        begins = np.full(plan.workers, each.begin)
        found += [_records(begins, events.START, number=MAIN_PID, a=-1, b=0x030B07F0)]
        found += _prepared(plan, each)
    _write_file(paths.events / f"workers-{MAIN_PID}.bin", (), found)


def _write_file(path: Path, texts: Iterable[str], records: Iterable[Records]) -> None:
    """Write the start of a process, its texts, and its records in order of time."""
    start = _records(0, events.START, number=1, a=-1, b=0x030B07F0)
    names = b"".join(events.name_records(text) for text in texts)
    found = np.concatenate(list(records))
    found = found.take(np.argsort(found["t"], kind="stable"))
    path.write_bytes(start.tobytes() + names + found.tobytes())


def _setup_events(plan: Plan, uuids: Iterable[str]) -> Iterator[Records]:
    for what in _ATTACHED:
        yield _records(0.1, events.ATTACHED, a=events.name_id(what))
    for index, uuid in enumerate(uuids):
        yield _records(0.6 * plan.start_up, events.GPU, number=index, a=events.name_id(uuid))
    settings = plan.workers | 2 << 16 if plan.workers else 0
    for loader, line in _CREATED_AT.items():
        at = 0.9 * plan.start_up
        yield _records(at, events.LOADER, number=loader, a=settings, b=128)
        yield _records(at, events.LOADER_MADE, number=loader, a=events.name_id(line))
    yield _records(plan.start_up, events.SETTINGS, a=events.name_id(_SETTINGS))


def _stack_samples(plan: Plan) -> Iterator[Records]:
    end = plan.start_up + plan.epochs * plan.epoch_seconds
    at = np.arange(plan.start_up, end - _STACKS_EVERY, _STACKS_EVERY) + _STACKS_EVERY
    for text, share in _PLACES.items():
        microseconds = int(share * _STACKS_EVERY * 1e6)
        yield _records(at, events.WHERE, a=events.name_id(text), b=microseconds)


def _pass_events(plan: Plan, each: _Pass) -> Iterator[Records]:
    """Yield the batches and steps of a pass, and the GPU time of some steps."""
    waited, loader = int(each.each * each.wait * 1e9), each.loader
    yield _records(each.begin, events.LOADER_BEGIN, number=loader, a=waited, b=each.batches)
    yield _records(each.arrivals, events.BATCH, number=loader, a=waited, b=128)
    yield _records(each.begin + each.seconds, events.LOADER_END, number=loader, a=waited)
    if not each.trains:
        return
    steps = each.arrivals + each.each * 0.4
    yield _records(steps, events.STEP, number=1, a=1)
    yield from allocations(plan, each.begin, each.seconds, _records)
    if plan.gpus:
        timed = steps[:: math.ceil(_DEVICE_TIMED_EVERY / each.each)]
        duration, queued = int(0.55e9 * each.each), int(0.3e9 * each.each)
        ahead = np.arange(len(timed)) % 3 == 0
        yield _records(timed, events.DEVICE_STEP, flags=ahead, a=duration, b=queued)


def _prepared(plan: Plan, each: _Pass) -> Iterator[Records]:
    """Yield the preparation time of each batch of a pass."""
    random = np.random.default_rng(int(each.begin * 1000) + plan.seed)
    own = each.each * max(1, plan.workers) * 1e9 * (1 + 0.1 * random.uniform(size=each.batches))
    at = each.arrivals - 0.3 * each.each
    for kind, share in ((events.PREPARED, 0.8), (events.COLLATED, 0.05)):
        wall = share * own
        starved = (0.02 * wall / 1e3).astype(np.uint32)
        yield _records(at, kind, number=starved, a=wall, b=0.9 * wall)


def _records(at: npt.ArrayLike, kind: int, **fields: npt.ArrayLike) -> Records:
    """Return records at these times, in seconds since the start of the run."""
    seconds = np.atleast_1d(np.asarray(at, np.float64))
    found = np.zeros(len(seconds), RECORD)
    found["t"] = BEGIN_NS + (seconds * 1e9).astype(np.int64)
    found["kind"] = kind
    for name, value in fields.items():
        found[name] = value
    return found
