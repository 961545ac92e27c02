"""Memory causes: nearly full memory, leaks, and steps that get slower."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from stepscope.analysis.bottleneck.breakdown import Window, reading_in
from stepscope.analysis.bottleneck.case import Case, finding, measured
from stepscope.analysis.bottleneck.thresholds import limit
from stepscope.analysis.run.series import Floats, Series
from stepscope.analysis.trial.steady import drift_of, trend
from stepscope.records import Confidence, Evidence, Finding, Recommendation

_BUCKETS = 24
_MIN_BUCKETS = 8
_MIN_Z = 3.3  # of the Mann-Kendall test: p = 0.001
_FIRST_STEPS = 5  # skipped, because they allocate, compile and autotune


def _last(values: Floats) -> float:
    return float(values[-1])


@dataclass(frozen=True)
class MemoryGrowth:
    bytes_per_second: float
    initial_bytes: float


def growth(series: Series, window: Window) -> MemoryGrowth | None:
    """Return the growth of a memory gauge that grows without end, else None.

    Only the minimum of each time bucket counts, because memory that is freed after every step or
    epoch is not a leak. The minimum is uncertain by the typical change between two readings:
    readings that are nearly in phase with the epochs move slowly through them.
    """
    inside = series.between(window.begin_ns, window.end_ns)
    if len(inside) < _MIN_BUCKETS:
        return None
    edges = np.linspace(window.begin_ns, window.end_ns, _BUCKETS + 1)
    buckets = np.clip(np.searchsorted(edges, inside.t, side="right") - 1, 0, _BUCKETS - 1)
    minima = np.full(_BUCKETS, np.inf)
    np.minimum.at(minima, buckets, inside.value)
    known = np.flatnonzero(np.isfinite(minima))
    if len(known) < _MIN_BUCKETS:
        return None
    values, seconds = minima[known], known * window.seconds / _BUCKETS
    z, _ = trend(values)
    half = len(values) // 2
    first, second = values[half] - values[0], values[-1] - values[half]
    total = float(values[-1] - values[0])
    jitter = float(np.median(np.abs(np.diff(inside.value))))
    least = max(limit("growth_bytes"), limit("growth_share") * float(values[0]), jitter)
    if (
        z < _MIN_Z
        or total < least
        or second < limit("growth_continues") * max(first, 0.0)
        or second <= 0
    ):
        return None
    pairs = np.triu_indices(len(values), 1)
    slopes = (values[pairs[1]] - values[pairs[0]]) / (seconds[pairs[1]] - seconds[pairs[0]])
    return MemoryGrowth(bytes_per_second=float(np.median(slopes)), initial_bytes=float(values[0]))


def leak_confidence(seconds_left: float | None) -> Confidence:
    """Return a low confidence for growth that takes more than a week to exhaust the memory."""
    soon = seconds_left is None or seconds_left < limit("leak_horizon")
    return "high" if soon else "low"


def seconds_left(free: float | None, rate: float) -> float | None:
    """Return the seconds until growing memory is exhausted."""
    return None if free is None or rate <= 0 else max(0.0, free) / rate


def host_leak(case: Case) -> Finding | None:
    grown = growth(case.data.of("memory"), case.window)
    if grown is None or not _is_taken_from_host(case, grown.bytes_per_second):
        return None
    rates = {
        role: of_role.bytes_per_second
        for metric, role in case.data.series
        if metric == "memory" and role != "tree"
        if (of_role := growth(case.data.of("memory", role), case.window))
    }
    process = max(rates, key=lambda role: rates[role], default=None)
    free = case.reading("host_available", "host", _last)
    cgroup_limit = case.reading("cgroup_memory_limit", "cgroup", _last)
    used = case.reading("cgroup_memory", "cgroup", _last)
    if cgroup_limit is not None and used is not None:
        free = cgroup_limit - used if free is None else min(free, cgroup_limit - used)
    remaining = seconds_left(free, grown.bytes_per_second)
    action: Recommendation | str = "find_growth_in_loop"
    if process == "worker":
        action = Recommendation("find_growth_in_dataset", location=case.loader_location)
    return finding(
        "leak.host",
        leak_confidence(remaining),
        1.0,
        values={"process": process, "seconds_left": remaining},
        evidence=[
            *_growth_evidence(case, grown, "/proc"),
            measured("memory_left", free, "bytes", source="/proc"),
        ],
        recommendations=[action],
    )


def _is_taken_from_host(case: Case, rate: float) -> bool:
    """Whether the available memory of the host shrinks with the growth.

    Pages of memory-mapped files count as memory of the run, but the kernel can reclaim them.
    """
    available = case.data.of("host_available", "host")
    inside = available.between(case.window.begin_ns, case.window.end_ns)
    if len(inside) < _MIN_BUCKETS:
        return True
    third = max(1, len(inside) // 3)
    loss = float(np.median(inside.value[:third]) - np.median(inside.value[-third:]))
    return loss >= limit("majority") * rate * case.window.seconds * 2 / 3


def gpu_leak(case: Case) -> Finding | None:
    for gpu in case.data.used_gpus:
        grown = growth(gpu.of("gpu_allocated"), case.window)
        if grown is None:
            continue
        used, size = reading_in(gpu.memory, case.window, _last), gpu.gpu.memory_bytes
        free = size - used if size is not None and used is not None else None
        remaining = seconds_left(free, grown.bytes_per_second)
        return finding(
            "leak.gpu",
            leak_confidence(remaining),
            1.0,
            values={"gpu": gpu.gpu.label, "seconds_left": remaining},
            evidence=[
                *_growth_evidence(case, grown, "allocator"),
                measured("memory_left", free, "bytes", source="NVML"),
            ],
            recommendations=["detach_loss", "find_kept_outputs"],
        )
    return None


def _growth_evidence(case: Case, grown: MemoryGrowth, source: str) -> Iterator[Evidence | None]:
    yield measured("growth", grown.bytes_per_second, "bytes/s", source=source)
    total = grown.bytes_per_second * case.window.seconds
    yield measured("total_growth", total, "bytes", "growth_bytes", source)
    yield measured("initial_memory", grown.initial_bytes, "bytes", source=source)


def step_drift(case: Case) -> Finding | None:
    breakdown = case.breakdown
    if breakdown.seconds < limit("step_drift_seconds"):
        return None
    lengths = np.concatenate([breakdown.warmup_without_wait, breakdown.lengths_without_wait])[
        _FIRST_STEPS:
    ]
    drift = drift_of(lengths)
    if drift is None or drift < limit("step_drift"):
        return None
    tenth = max(1, len(lengths) // 10)
    first, last = float(np.median(lengths[:tenth])), float(np.median(lengths[-tenth:]))
    if last < (1 + limit("step_drift")) * first or not first:
        return None
    rate = (last / first - 1) / max(breakdown.seconds, 1e-9)
    longest = max(breakdown.time_by_kind.values(), key=lambda time: time.seconds, default=None)
    return finding(
        "loop.slowdown",
        "high",
        float(breakdown.lengths.mean())
        / (first + float((breakdown.lengths - breakdown.lengths_without_wait).mean())),
        values={"doubling": 1.0 / rate if rate > 0 else math.inf},
        evidence=[
            measured("step_change", drift, "share", "step_drift", "steps"),
            measured("first_step", first, "s", source="steps"),
            measured("last_step", last, "s", source="steps"),
        ],
        recommendations=[
            Recommendation("find_growing_state", location=longest.location)
            if longest
            else "find_growing_state_anywhere"
        ],
    )


def allocator_retries(case: Case) -> Finding | None:
    breakdown = case.breakdown
    for gpu in case.data.used_gpus:
        inside = gpu.of("gpu_alloc_retries").between(case.window.begin_ns, case.window.end_ns)
        count = float(inside.value[-1] - inside.value[0]) if len(inside) > 1 else 0.0
        per_step = count / max(1, breakdown.steps)
        if per_step < limit("retries"):
            continue
        busy, batch = case.device.busy, breakdown.batch_size
        location = breakdown.loader_location
        return finding(
            "memory.gpu",
            "high",
            1.0 / busy if busy else None,
            variant="retries",
            values={"gpu": gpu.gpu.label, "count": count},
            evidence=[
                measured("retries", per_step, "count", "retries", "allocator"),
                measured("kernel_time", busy, "share", source="GPM"),
            ],
            recommendations=[
                Recommendation("smaller_batch", "batch_size", int(batch * 0.85), location)
                if batch and batch > 1
                else Recommendation("reduce_batch", location=location),
                "expandable_segments",
            ],
        )
    return None


def gpu_memory_full(case: Case) -> Finding | None:
    for gpu in case.data.used_gpus:
        peak = reading_in(gpu.of("gpu_memory"), case.window, np.max)
        size = gpu.gpu.memory_bytes
        if peak is None or not size or peak / size < limit("memory_full"):
            continue
        return finding(
            "memory.gpu",
            "medium",
            1.0,
            variant="full",
            values={"gpu": gpu.gpu.label, "free": size - peak, "size": size},
            evidence=[measured("in_use", peak / size, "share", "memory_full", "NVML")],
            recommendations=["less_gpu_memory"],
        )
    return None


def host_memory_full(case: Case) -> Finding | None:
    total = case.machine.memory.total_bytes
    free = case.reading("host_available", "host", np.min)
    stalled = case.mean("pressure_memory", "host") or 0.0
    share = 1 - free / total if free is not None and total else 0.0
    if share < limit("memory_full") and stalled < limit("loop_share"):
        return None
    return finding(
        "memory.host",
        "high" if stalled >= limit("loop_share") else "medium",
        1.0 / max(1.0 - stalled, 0.1),
        evidence=[
            measured("in_use", share, "share", "memory_full", "/proc"),
            measured("memory_pressure", stalled, "share", "loop_share", "PSI"),
        ],
        recommendations=[
            Recommendation("halve_workers_or_prefetch", location=case.loader_location)
        ],
    )


def shm_full(case: Case) -> Finding | None:
    used = case.reading("shm_used", "shm", np.max)
    size = case.reading("shm_size", "shm")
    if used is None or not size or used / size < limit("memory_full"):
        return None
    return finding(
        "memory.shm",
        "medium",
        1.0,
        evidence=[measured("in_use", used / size, "share", "memory_full", "statvfs")],
        recommendations=["larger_shm", "halve_workers_or_prefetch"],
    )
