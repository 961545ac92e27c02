"""From what is stored to what the analysis takes: timelines and allocators as plain arrays."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from stepscope.analysis.passes import MarkEvent, Source, Timeline
from stepscope.analysis.series import Series, sum_of_held
from stepscope.inject import events as written
from stepscope.metrics import BY_KEY
from stepscope.records import Gpu
from stepscope.runs.events import in_time

if TYPE_CHECKING:
    from stepscope.runs.events import ProcessEvents


def timeline_of(process: ProcessEvents) -> Timeline:
    """The analysis' view of one process. Where Keras tells the steps, torch's are left out."""
    steps = process.of(written.STEP)
    from_fit = (steps["flags"] & written.FROM_FIT) > 0
    return Timeline(
        process.pid,
        process.rank,
        process.of(written.LOADER_BEGIN),
        process.of(written.BATCH),
        process.of(written.LOADER_END),
        steps[from_fit] if from_fit.any() else steps,
        _marks(process),
    )


def _marks(process: ProcessEvents) -> list[MarkEvent]:
    edges = {written.MARK: None, written.PHASE_BEGIN: "begin", written.PHASE_END: "end"}
    return [
        MarkEvent(
            int(record["t"]),
            process.name(record["a"]),
            process.value(record),
            edges[int(record["kind"])],  # type: ignore[arg-type]
            _source(int(record["flags"])),
        )
        for record in process.of(*edges)
    ]


def _source(flags: int) -> Source:
    if flags & written.FROM_FIT:
        return "fit"
    return "pattern" if flags & written.FROM_PATTERN else "marks"


def steps_table(processes: list[ProcessEvents]) -> pa.Table:
    """Batches and steps of all processes, in time."""
    tables = []
    for process in processes:
        records = process.of(written.BATCH, written.STEP)
        is_step = records["kind"] == written.STEP
        tables.append(
            pa.table(
                {
                    "t_ns": pa.array(records["t"]),
                    "pid": pa.array(np.full(len(records), process.pid, np.int32)),
                    "rank": pa.array([process.rank] * len(records), pa.int32()),
                    "kind": pa.array(np.where(is_step, "step", "batch"), pa.string()),
                    "wait_s": pa.array(records["a"] / 1e9, mask=is_step),
                    "samples": pa.array(records["b"], mask=is_step | (records["b"] < 0)),
                    "steps": pa.array(records["a"], mask=~is_step),
                }
            )
        )
    if not tables:
        return pa.table(
            {
                "t_ns": pa.array([], pa.int64()),
                "pid": pa.array([], pa.int32()),
                "rank": pa.array([], pa.int32()),
                "kind": pa.array([], pa.string()),
                "wait_s": pa.array([], pa.float64()),
                "samples": pa.array([], pa.int64()),
                "steps": pa.array([], pa.int64()),
            }
        )
    return pa.concat_tables(tables).sort_by("t_ns")


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
        for (metric, uuid), series in _allocator_of(process).items():
            told.setdefault((metric, _same_gpu(uuid, uuids)), []).append((process, series))
    return {
        (metric, uuid): _counted(parts) if BY_KEY[metric].unit == "count" else _at_once(parts)
        for (metric, uuid), parts in told.items()
    }


def _same_gpu(told: str, known: list[str]) -> str:
    """The UUID by which a GPU is known that PyTorch told of.

    CUDA names a MIG slice as if it were a GPU, so numbers are compared. Old versions of PyTorch
    tell "cuda:0" and no UUID: that is clear where there is one GPU.
    """
    if not told.startswith("GPU-") and len(known) == 1:
        return known[0]
    return next((uuid for uuid in known if _number(uuid) == _number(told)), told)


def _allocator_of(process: ProcessEvents) -> dict[tuple[str, str], Series]:
    found: dict[tuple[str, str], Series] = {}
    uuids = {int(r["number"]): process.name(r["a"]) for r in process.of(written.GPU)}
    for kind, metrics in _ALLOCATOR.items():
        records = process.of(kind)
        for number, uuid in uuids.items():
            own = in_time(records.take(np.flatnonzero(records["number"] == number)))
            for metric, field in zip(metrics, "ab", strict=True):
                if len(own):
                    found[metric, uuid] = Series(
                        np.ascontiguousarray(own["t"]),
                        np.zeros(len(own)),
                        own[field].astype(np.float64),
                    )
    return found


def _counted(parts: list[tuple[ProcessEvents, Series]]) -> Series:
    """What happened so far, in processes that have ended too."""
    return sum_of_held([series for _, series in parts])


def _at_once(parts: list[tuple[ProcessEvents, Series]]) -> Series:
    """What is held at one time: a process that begins when another has ended takes its place."""
    groups: list[list[Series]] = []
    end = -1
    for process, series in sorted(parts, key=lambda part: int(part[1].t[0])):
        if series.t[0] > end:
            groups.append([])
        groups[-1].append(series)
        end = max(end, int(process.records["t"].max()))
    sums = [sum_of_held(group) for group in groups]
    return Series(*(np.concatenate([getattr(s, name) for s in sums])
                    for name in ("t", "window", "value")))  # fmt: skip


def gpus_of(facts: Mapping[str, Any], seen: Iterable[str]) -> tuple[Gpu, ...]:
    """The GPUs that run.json tells of, then those that were only `seen`, by their UUIDs."""
    listed = (facts.get("environment") or {}).get("gpus") or []
    told = [_gpu(place, fact) for place, fact in enumerate(listed) if isinstance(fact, Mapping)]
    known = {gpu.uuid for gpu in told}
    return (*told, *(Gpu(uuid, _short(uuid)) for uuid in sorted(set(seen) - known)))


def _gpu(place: int, fact: Mapping[str, Any]) -> Gpu:
    """A GPU as run.json has it; runs of the first version tell its model and its UUID alone."""
    label = str(fact.get("label") or f"GPU {fact.get('index', place)}")
    return Gpu(
        uuid=str(fact.get("uuid") or label),
        label=label,
        name=str(fact.get("model") or ""),
        memory_bytes=fact.get("memory_bytes"),
        power_limit_watts=fact.get("power_limit_watts"),
        mig_of=fact.get("mig_of"),
    )


def _short(uuid: str) -> str:
    """Enough of a UUID to tell GPUs apart: GPU-74f7346c."""
    return "-".join(uuid.split("-")[:2])


def _number(uuid: str) -> str:
    """A UUID without the word in front of it."""
    return uuid.partition("-")[2] or uuid
