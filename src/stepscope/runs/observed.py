"""From a run folder to what the explanation takes: only the columns that it needs are read."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from stepscope.analysis.observed import (
    NO_WORK,
    Loader,
    Looks,
    Machine,
    Observed,
    Place,
    Trainer,
    Work,
)
from stepscope.analysis.passes import Timeline
from stepscope.inject import events as written
from stepscope.runs.events import ProcessEvents, in_time, read_records

if TYPE_CHECKING:
    from stepscope.runs.reader import Run

METRICS = frozenset((
    "cpu", "cpu_wait", "memory", "processes", "switches_involuntary", "read",
    "host_cpu", "host_steal", "host_available", "pressure_memory", "pressure_io",
    "cgroup_throttled", "cgroup_memory", "cgroup_memory_limit", "net_received", "loopback",
    "shm_used", "shm_size", "watcher_cpu",
    "gpu_utilization", "gpu_active", "gpu_sm", "gpu_occupancy", "gpu_tensor", "gpu_fp32",
    "gpu_dram", "gpu_memory", "gpu_memory_tree", "gpu_others", "gpu_pcie_received",
    "gpu_nvlink_received", "gpu_power", "gpu_sm_clock", "gpu_slowed_power", "gpu_slowed_heat",
))  # fmt: skip
"""All that any finding looks at."""


def observe(run: Run) -> Observed:
    """Read what the explanation of a run needs."""
    processes = run.processes
    timelines = run.timelines()
    trainers = tuple(
        _trainer(process, timeline)
        for process, timeline in zip(processes, timelines, strict=True)
        if len(timeline.batches) or len(timeline.steps) or timeline.marks
    )
    samples, collation = _prepared(run)
    return Observed(
        recorded=run.recorded(METRICS),
        trainers=trainers,
        samples=samples,
        collation=collation,
        machine=_machine(run.facts),
        ending=run.ending,
        hook=str((run.facts.get("hook") or {}).get("message") or ""),
    )


def _trainer(process: ProcessEvents, timeline: Timeline) -> Trainer:
    return Trainer(
        timeline=timeline,
        loaders=_loaders(process),
        device_steps=process.of(written.DEVICE_STEP),
        looks=_looks(process),
        settings=_settings(process),
    )


def _loaders(process: ProcessEvents) -> dict[int, Loader]:
    lines = {
        int(record["number"]): process.name(record["a"]).partition("\t")
        for record in process.of(written.LOADER_MADE)
    }
    found = {}
    for record in process.of(written.LOADER):
        number, flags = int(record["number"]), int(record["flags"])
        where, _, line = lines.get(number, ("", "", ""))
        found[number] = Loader(
            number=number,
            workers=int(record["a"]) & 0xFFFF,
            prefetch=int(record["a"]) >> 16,
            batch_size=int(record["b"]) if record["b"] > 0 else None,
            pins=bool(flags & written.LOADER_PINS),
            persists=bool(flags & written.LOADER_PERSISTS),
            where=where or None,
            line=line or None,
        )
    return found


def _looks(process: ProcessEvents) -> Looks:
    records = process.of(written.WHERE)
    ids, index = np.unique(records["a"], return_inverse=True)
    places = [_place(process.name(ident)) for ident in ids]
    return Looks(records["t"].astype(np.int64), index, records["b"] / 1e6, places)


def _place(text: str) -> Place:
    return Place(*(text.split("\t") + [""] * 5)[:5])


def _settings(process: ProcessEvents) -> Mapping[str, Any]:
    for record in process.of(written.SETTINGS):
        try:
            told = json.loads(process.name(record["a"]))
        except ValueError:
            continue
        if isinstance(told, dict):
            return told
    return {}


def _prepared(run: Run) -> tuple[Work, Work]:
    """What samples and collation took. The workers' records are let go before samples are read."""
    told = [*run.processes, *_of_workers(run.paths.events)]
    return _work(written.PREPARED, told), _work(written.COLLATED, told)


def _of_workers(folder: Path) -> list[ProcessEvents]:
    """What loader workers wrote into the files that they share, as if each file were a process."""
    found = []
    for path in sorted(folder.glob("workers-*.bin")):
        try:
            found.append(ProcessEvents(0, None, None, read_records(path), {}))
        except OSError:
            continue
    return found


def _work(kind: int, told: Iterable[ProcessEvents]) -> Work:
    pieces = [piece for piece in (process.of(kind) for process in told) if len(piece)]
    if not pieces:
        return NO_WORK
    records = in_time(pieces[0] if len(pieces) == 1 else np.concatenate(pieces))
    return Work(
        records["t"].astype(np.int64),
        records["a"] / 1e9,
        records["b"] / 1e9,
        records["number"] / 1e6,
    )


def _machine(facts: Mapping[str, Any]) -> Machine:
    environment = facts.get("environment") or {}
    cpus = (environment.get("cpu") or {}).get("logical")
    memory = (environment.get("memory") or {}).get("total_bytes")
    return Machine(
        cpus=int(cpus) if isinstance(cpus, int) else None,
        memory_bytes=float(memory) if isinstance(memory, int | float) else None,
    )
