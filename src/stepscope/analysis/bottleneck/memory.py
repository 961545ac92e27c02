"""Memory: at its edge, or growing without end; and steps that get slower and slower."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from stepscope.analysis.bottleneck.account import Window, reading_in
from stepscope.analysis.bottleneck.case import Case, finding, measured
from stepscope.analysis.bottleneck.thresholds import limit
from stepscope.analysis.run.series import Floats, Series
from stepscope.analysis.trial.steady import drift_of, trend
from stepscope.records import Confidence, Evidence, Finding, Recommendation

_BUCKETS = 24
_LEAST_BUCKETS = 8
_SURE = 3.3  # standard deviations of Mann and Kendall's count: chance does it once in a thousand
_FIRST_STEPS = 5  # they allocate, compile and autotune: no step is like them


def _last(values: Floats) -> float:
    return float(values[-1])


@dataclass(frozen=True)
class MemoryGrowth:
    bytes_per_second: float
    at_beginning: float  # bytes


def growth(series: Series, stretch: Window) -> MemoryGrowth | None:
    """Of a gauge of bytes that grows without end; else None.

    The least of each bucket of time is taken: what is freed after every step or epoch is no leak.
    How low that is, is known no better than the gauge moves from one reading to the next: readings
    in step with an epoch come a little later in it each time.
    """
    inside = series.between(stretch.begin_ns, stretch.end_ns)
    if len(inside) < _LEAST_BUCKETS:
        return None
    edges = np.linspace(stretch.begin_ns, stretch.end_ns, _BUCKETS + 1)
    places = np.clip(np.searchsorted(edges, inside.t, side="right") - 1, 0, _BUCKETS - 1)
    least = np.full(_BUCKETS, np.inf)
    np.minimum.at(least, places, inside.value)
    known = np.flatnonzero(np.isfinite(least))
    if len(known) < _LEAST_BUCKETS:
        return None
    values, seconds = least[known], known * stretch.seconds / _BUCKETS
    sureness, _ = trend(values)
    half = len(values) // 2
    first, second = values[half] - values[0], values[-1] - values[half]
    total = float(values[-1] - values[0])
    moves = float(np.median(np.abs(np.diff(inside.value))))
    enough = total >= max(limit("growth_bytes"), limit("growth_share") * float(values[0]), moves)
    if sureness < _SURE or not enough or second < limit("goes_on") * max(first, 0.0) or second <= 0:
        return None
    pairs = np.triu_indices(len(values), 1)
    slopes = (values[pairs[1]] - values[pairs[0]]) / (seconds[pairs[1]] - seconds[pairs[0]])
    return MemoryGrowth(bytes_per_second=float(np.median(slopes)), at_beginning=float(values[0]))


def leak_confidence(seconds_left: float | None) -> Confidence:
    """MemoryGrowth that takes a week to matter is reported, but does not limit a run."""
    soon = seconds_left is None or seconds_left < limit("leak_horizon")
    return "high" if soon else "low"


def seconds_left(left: float | None, rate: float) -> float | None:
    """Until memory that grows is gone."""
    return None if left is None or rate <= 0 else max(0.0, left) / rate


def host_leak(case: Case) -> Finding | None:
    grown = growth(case.data.of("memory"), case.stretch)
    if grown is None or not _is_lost(case, grown.bytes_per_second):
        return None
    rates = {
        role: of_role.bytes_per_second
        for metric, role in case.data.series
        if metric == "memory" and role != "tree"
        if (of_role := growth(case.data.of("memory", role), case.stretch))
    }
    process = max(rates, key=lambda role: rates[role], default=None)
    left = case.reading("host_available", "host", _last)
    top = case.reading("cgroup_memory_limit", "cgroup", _last)
    used = case.reading("cgroup_memory", "cgroup", _last)
    if top is not None and used is not None:
        left = top - used if left is None else min(left, top - used)
    remaining = seconds_left(left, grown.bytes_per_second)
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
            measured("left", left, "bytes", source="/proc"),
        ],
        recommendations=[action],
    )


def _is_lost(case: Case, rate: float) -> bool:
    """Whether the machine loses what the run takes: pages of files that are read through a map
    count as the run's, and are given back when anybody needs them."""
    available = case.data.of("host_available", "host")
    inside = available.between(case.stretch.begin_ns, case.stretch.end_ns)
    if len(inside) < _LEAST_BUCKETS:
        return True
    third = max(1, len(inside) // 3)
    lost = float(np.median(inside.value[:third]) - np.median(inside.value[-third:]))
    return lost >= limit("most_of_it") * rate * case.stretch.seconds * 2 / 3


def gpu_leak(case: Case) -> Finding | None:
    for gpu in case.data.used_gpus:
        grown = growth(gpu.of("gpu_allocated"), case.stretch)
        if grown is None:
            continue
        held, size = reading_in(gpu.memory, case.stretch, _last), gpu.gpu.memory_bytes
        left = size - held if size is not None and held is not None else None
        remaining = seconds_left(left, grown.bytes_per_second)
        return finding(
            "leak.gpu",
            leak_confidence(remaining),
            1.0,
            values={"gpu": gpu.gpu.label, "seconds_left": remaining},
            evidence=[
                *_growth_evidence(case, grown, "allocator"),
                measured("left", left, "bytes", source="NVML"),
            ],
            recommendations=["detach_loss", "find_kept_outputs"],
        )
    return None


def _growth_evidence(case: Case, grown: MemoryGrowth, source: str) -> Iterator[Evidence | None]:
    yield measured("growth", grown.bytes_per_second, "bytes/s", source=source)
    total = grown.bytes_per_second * case.stretch.seconds
    yield measured("grown", total, "bytes", "growth_bytes", source)
    yield measured("at_beginning", grown.at_beginning, "bytes", source=source)


def step_drift(case: Case) -> Finding | None:
    account = case.account
    if account.seconds < limit("drift_seconds"):
        return None
    lengths = np.concatenate([account.before, account.own])[_FIRST_STEPS:]
    drift = drift_of(lengths)
    if drift is None or drift < limit("drift"):
        return None
    tenth = max(1, len(lengths) // 10)
    first, last = float(np.median(lengths[:tenth])), float(np.median(lengths[-tenth:]))
    if last < (1 + limit("drift")) * first or not first:
        return None
    rate = (last / first - 1) / max(account.seconds, 1e-9)
    most = max(account.spent.values(), key=lambda spent: spent.seconds, default=None)
    return finding(
        "drift.steps",
        "high",
        float(account.lengths.mean()) / (first + float((account.lengths - account.own).mean())),
        values={"doubling": 1.0 / rate if rate > 0 else math.inf},
        evidence=[
            measured("step_change", drift, "share", "drift", "steps"),
            measured("first_step", first, "s", source="steps"),
            measured("last_step", last, "s", source="steps"),
        ],
        recommendations=[
            Recommendation("find_what_is_kept", location=most.location)
            if most
            else "find_what_is_kept_somewhere"
        ],
    )


def allocator_retries(case: Case) -> Finding | None:
    account = case.account
    for gpu in case.data.used_gpus:
        inside = gpu.of("gpu_alloc_retries").between(case.stretch.begin_ns, case.stretch.end_ns)
        count = float(inside.value[-1] - inside.value[0]) if len(inside) > 1 else 0.0
        per_step = count / max(1, account.steps)
        if per_step < limit("retries"):
            continue
        busy, batch = case.device.busy, account.batch_size
        location = account.loader_location
        return finding(
            "memory.gpu",
            "high",
            1.0 / busy if busy else None,
            variant="retries",
            values={"gpu": gpu.gpu.label, "count": count},
            evidence=[
                measured("retries", per_step, "count", "retries", "allocator"),
                measured("kernels_ran", busy, "share", source="GPM"),
            ],
            recommendations=[
                Recommendation("smaller_batch", "batch_size", int(batch * 0.85), location)
                if batch and batch > 1
                else Recommendation("some_smaller_batch", location=location),
                "expandable_segments",
            ],
        )
    return None


def gpu_memory_full(case: Case) -> Finding | None:
    for gpu in case.data.used_gpus:
        most = reading_in(gpu.of("gpu_memory"), case.stretch, np.max)
        size = gpu.gpu.memory_bytes
        if most is None or not size or most / size < limit("memory_full"):
            continue
        return finding(
            "memory.gpu",
            "medium",
            1.0,
            variant="full",
            values={"gpu": gpu.gpu.label, "left": size - most, "size": size},
            evidence=[measured("in_use", most / size, "share", "memory_full", "NVML")],
            recommendations=["less_gpu_memory"],
        )
    return None


def host_memory_full(case: Case) -> Finding | None:
    total = case.machine.memory.total_bytes
    left = case.reading("host_available", "host", np.min)
    stalled = case.mean("pressure_memory", "host") or 0.0
    share = 1 - left / total if left is not None and total else 0.0
    if share < limit("memory_full") and stalled < limit("outside_share"):
        return None
    return finding(
        "memory.host",
        "high" if stalled >= limit("outside_share") else "medium",
        1.0 / max(1.0 - stalled, 0.1),
        evidence=[
            measured("in_use", share, "share", "memory_full", "/proc"),
            measured("memory_pressure", stalled, "share", "outside_share", "PSI"),
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
        recommendations=["larger_shm", "share_through_files"],
    )
