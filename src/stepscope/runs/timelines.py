"""From what is stored to what the analysis takes: timelines and allocators as plain arrays."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from stepscope.analysis.run.data import (
    NO_BATCH_TIMING,
    BatchTiming,
    Loader,
    StackLocation,
    StackSamples,
    Trainer,
    TrainerSettings,
)
from stepscope.analysis.run.passes import MarkEvent, Source, Timeline
from stepscope.analysis.run.series import Series, concatenated, sum_of_held
from stepscope.inject import events as written
from stepscope.metrics import BY_KEY
from stepscope.records import CodeLocation
from stepscope.records.codec import salvage
from stepscope.runs.events import ProcessEvents, in_time, read_records

_EDGES: dict[int, Literal["begin", "end"] | None] = {
    written.MARK: None,
    written.PHASE_BEGIN: "begin",
    written.PHASE_END: "end",
}


def timeline_of(process: ProcessEvents) -> Timeline:
    """The analysis' view of one process. Where Keras tells the steps, torch's are left out."""
    steps = process.of(written.STEP)
    from_fit = (steps["flags"] & written.FROM_FIT) > 0
    marks = []
    for record in process.of(*_EDGES):
        flags = int(record["flags"])
        source: Source = "pattern" if flags & written.FROM_PATTERN else "marks"
        marks.append(
            MarkEvent(
                int(record["t"]),
                process.name(record["a"]),
                process.value(record),
                _EDGES[int(record["kind"])],
                "fit" if flags & written.FROM_FIT else source,
            )
        )
    return Timeline(
        process.pid,
        process.rank,
        process.of(written.LOADER_BEGIN),
        process.of(written.BATCH),
        process.of(written.LOADER_END),
        steps[from_fit] if from_fit.any() else steps,
        marks,
    )


def trainer_of(process: ProcessEvents, timeline: Timeline) -> Trainer:
    """The settings, GPU timings and stack samples of one process beside its timeline."""
    lines = {
        int(record["number"]): process.name(record["a"]).partition("\t")
        for record in process.of(written.LOADER_MADE)
    }
    loaders = {}
    for record in process.of(written.LOADER):
        number, flags = int(record["number"]), int(record["flags"])
        where, _, code = lines.get(number, ("", "", ""))
        loaders[number] = Loader(
            number=number,
            workers=int(record["a"]) & 0xFFFF,
            prefetch=int(record["a"]) >> 16,
            batch_size=int(record["b"]) if record["b"] > 0 else None,
            pins=bool(flags & written.LOADER_PINS),
            persists=bool(flags & written.LOADER_PERSISTS),
            location=CodeLocation(where, code) if where or code else None,
        )
    samples = process.of(written.WHERE)
    ids, index = np.unique(samples["a"], return_inverse=True)
    places = [StackLocation(*(process.name(i).split("\t") + [""] * 5)[:5]) for i in ids]
    settings = TrainerSettings()
    for record in process.of(written.SETTINGS)[::-1]:  # the first that can be read counts
        with contextlib.suppress(ValueError):
            told = json.loads(process.name(record["a"]))
            settings = salvage(TrainerSettings, told) if isinstance(told, dict) else settings
    return Trainer(
        timeline=timeline,
        loaders=loaders,
        device_steps=process.of(written.DEVICE_STEP),
        stack_samples=StackSamples(
            samples["t"].astype(np.int64), index, samples["b"] / 1e6, places
        ),
        settings=settings,
    )


def batch_timing(
    folder: Path, processes: Sequence[ProcessEvents]
) -> tuple[BatchTiming, BatchTiming]:
    """What preparing samples and collating them took, in processes and in their loader workers."""
    told = list(processes)
    for path in sorted(folder.glob("workers-*.bin")):  # each as if it were of one process
        with contextlib.suppress(OSError):
            told.append(ProcessEvents(0, None, read_records(path), {}))
    return _timing(written.PREPARED, told), _timing(written.COLLATED, told)


def _timing(kind: int, told: Iterable[ProcessEvents]) -> BatchTiming:
    pieces = [piece for piece in (process.of(kind) for process in told) if len(piece)]
    if not pieces:
        return NO_BATCH_TIMING
    records = in_time(pieces[0] if len(pieces) == 1 else np.concatenate(pieces))
    return BatchTiming(
        records["t"].astype(np.int64),
        records["a"] / 1e9,
        records["b"] / 1e9,
        records["number"] / 1e6,
    )


_ALLOCATOR = {
    written.GPU_MEMORY: ("gpu_allocated", "gpu_reserved"),
    written.GPU_PEAK: ("gpu_allocated_peak", "gpu_reserved_peak"),
    written.GPU_RETRIES: ("gpu_alloc_retries", "gpu_alloc_ooms"),
}
"""What `a` and `b` of a record are."""


def allocator_series(
    processes: Iterable[ProcessEvents], known: Iterable[str] = ()
) -> dict[tuple[str, str], Series]:
    """What the allocators of all processes hold together, by metric and GPU."""
    uuids = list(known)
    told: dict[tuple[str, str], list[tuple[ProcessEvents, Series]]] = {}
    for process in processes:
        names = {int(r["number"]): process.name(r["a"]) for r in process.of(written.GPU)}
        for kind, metrics in _ALLOCATOR.items():
            records = process.of(kind)
            for number, name in names.items():
                own = in_time(records.take(np.flatnonzero(records["number"] == number)))
                if not len(own):
                    continue
                for metric, field in zip(metrics, "ab", strict=True):
                    series = Series(
                        np.ascontiguousarray(own["t"]),
                        np.zeros(len(own)),
                        own[field].astype(np.float64),
                    )
                    told.setdefault((metric, _same_gpu(name, uuids)), []).append((process, series))
    return {
        # Counts go on in processes that have ended; memory is given back.
        (metric, uuid): sum_of_held([series for _, series in parts])
        if BY_KEY[metric].unit == "count"
        else _held_at_once(parts)
        for (metric, uuid), parts in told.items()
    }


def _same_gpu(told: str, known: list[str]) -> str:
    """The UUID by which a GPU is known that PyTorch told of.

    CUDA names a MIG slice as if it were a GPU, so numbers are compared. Old versions of PyTorch
    tell "cuda:0" and no UUID: that is clear where there is one GPU.
    """

    def number(uuid: str) -> str:
        return uuid.partition("-")[2] or uuid

    if not told.startswith("GPU-") and len(known) == 1:
        return known[0]
    return next((uuid for uuid in known if number(uuid) == number(told)), told)


def _held_at_once(parts: list[tuple[ProcessEvents, Series]]) -> Series:
    """A process that begins when another has ended takes its place."""
    groups: list[list[Series]] = []
    end = -1
    for process, series in sorted(parts, key=lambda part: int(part[1].t[0])):
        if series.t[0] > end:
            groups.append([])
        groups[-1].append(series)
        end = max(end, int(process.records["t"].max()))
    return concatenated([sum_of_held(group) for group in groups])
