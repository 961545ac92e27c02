"""Convert stored events into the input of the analysis: timelines and allocator series."""

from __future__ import annotations

import contextlib
import re
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
from stepscope.records.codec import parse, salvage
from stepscope.runs.events import ProcessEvents, read_records, sorted_by_time
from stepscope.runs.files import entries_in

_WORKERS_FILE = re.compile(r"workers-[0-9]{1,9}\.bin")
"""The events of all loader workers of a process."""
_MARKS_AT_ONCE = 65536
_EDGES: dict[int, Literal["begin", "end"] | None] = {
    written.MARK: None,
    written.PHASE_BEGIN: "begin",
    written.PHASE_END: "end",
}


def timeline_of(process: ProcessEvents) -> Timeline:
    """Return the timeline of one process. If Keras reports steps, those of PyTorch are dropped."""
    steps = process.of(written.STEP)
    from_fit = (steps["flags"] & written.FROM_FIT) > 0
    records, marks = process.of(*_EDGES), []
    # A script may mark each step. Reading the fields of single records takes five times as long.
    for begin in range(0, len(records), _MARKS_AT_ONCE):
        part = records[begin : begin + _MARKS_AT_ONCE]
        columns = (part[name].tolist() for name in ("t", "kind", "flags", "a", "b"))
        marks += [
            MarkEvent(t, process.name(a), process.value(flags, b), _EDGES[kind], _source(flags))
            for t, kind, flags, a, b in zip(*columns, strict=True)
        ]
    return Timeline(
        process.pid,
        process.rank,
        process.of(written.LOADER_BEGIN),
        process.of(written.BATCH),
        process.of(written.LOADER_END),
        steps[from_fit] if from_fit.any() else steps,
        marks,
        frozenset(process.name(record["a"]) for record in process.of(written.SEEN)),
    )


def _source(flags: int) -> Source:
    if flags & written.FROM_FIT:
        return "fit"
    return "pattern" if flags & written.FROM_PATTERN else "marks"


def trainer_of(process: ProcessEvents, timeline: Timeline) -> Trainer:
    """Return the settings, GPU timings and stack samples of one process, with its timeline."""
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
    locations = [StackLocation(*(process.name(i).split("\t") + [""] * 5)[:5]) for i in ids]
    settings = TrainerSettings()
    for record in process.of(written.SETTINGS)[::-1]:  # the first valid one counts
        with contextlib.suppress(ValueError):
            plain = parse(process.name(record["a"]))
            settings = salvage(TrainerSettings, plain) if isinstance(plain, dict) else settings
    return Trainer(
        timeline=timeline,
        loaders=loaders,
        device_steps=process.of(written.DEVICE_STEP),
        stack_samples=StackSamples(
            samples["t"].astype(np.int64), index, samples["b"] / 1e6, locations
        ),
        settings=settings,
    )


def batch_timing(
    folder: Path, processes: Sequence[ProcessEvents]
) -> tuple[BatchTiming, BatchTiming]:
    """Return the times of preparing and of collating samples, in processes and loader workers."""
    sources = list(processes)
    for entry in entries_in(folder):
        if _WORKERS_FILE.fullmatch(entry.name):
            sources.append(ProcessEvents(0, None, read_records(Path(entry.path)), {}))
    return _timing(written.PREPARED, sources), _timing(written.COLLATED, sources)


def _timing(kind: int, processes: Iterable[ProcessEvents]) -> BatchTiming:
    pieces = [piece for piece in (process.of(kind) for process in processes) if len(piece)]
    if not pieces:
        return NO_BATCH_TIMING
    records = sorted_by_time(pieces[0] if len(pieces) == 1 else np.concatenate(pieces))
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
"""The metrics in `a` and `b` of each kind of record."""


def allocator_series(
    processes: Iterable[ProcessEvents], known: Iterable[str] = ()
) -> dict[tuple[str, str], Series]:
    """Return the sum over the allocators of all processes, by metric and GPU."""
    uuids = list(known)
    all_parts: dict[tuple[str, str], list[tuple[ProcessEvents, Series]]] = {}
    for process in processes:
        names = {int(r["number"]): process.name(r["a"]) for r in process.of(written.GPU)}
        for kind, metrics in _ALLOCATOR.items():
            records = process.of(kind)
            for number, name in names.items():
                own = sorted_by_time(records.take(np.flatnonzero(records["number"] == number)))
                if not len(own):
                    continue
                for metric, field in zip(metrics, "ab", strict=True):
                    series = Series(
                        np.ascontiguousarray(own["t"]),
                        np.zeros(len(own)),
                        own[field].astype(np.float64),
                    )
                    key = metric, _known_uuid(name, uuids)
                    all_parts.setdefault(key, []).append((process, series))
    return {
        # The counts of exited processes stay; their memory is released.
        (metric, uuid): sum_of_held([series for _, series in parts])
        if BY_KEY[metric].unit == "count"
        else _held_at_once(parts)
        for (metric, uuid), parts in all_parts.items()
    }


def _known_uuid(name: str, known: list[str]) -> str:
    """Return the UUID of the GPU that PyTorch reported by `name`.

    CUDA writes the UUID of a MIG slice with the prefix of a GPU, so the prefix is ignored. Old
    versions of PyTorch report "cuda:0" without a UUID, which is unique if there is one GPU.
    """

    def number(uuid: str) -> str:
        return uuid.partition("-")[2] or uuid

    if not name.startswith("GPU-") and len(known) == 1:
        return known[0]
    return next((uuid for uuid in known if number(uuid) == number(name)), name)


def _held_at_once(parts: list[tuple[ProcessEvents, Series]]) -> Series:
    """Sum the memory of processes that run at the same time. A process that starts after another
    has exited replaces it."""
    groups: list[list[Series]] = []
    end = -1
    for process, series in sorted(parts, key=lambda part: int(part[1].t[0])):
        if series.t[0] > end:
            groups.append([])
        groups[-1].append(series)
        end = max(end, int(process.records["t"].max()))
    return concatenated([sum_of_held(group) for group in groups])
