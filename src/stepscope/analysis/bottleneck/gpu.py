"""GPU causes: what the GPUs are busy with or, if they are idle, what they wait for."""

from __future__ import annotations

import math

from stepscope.analysis.bottleneck.breakdown import StepBreakdown
from stepscope.analysis.bottleneck.case import Case, Device, finding, measured
from stepscope.analysis.bottleneck.thresholds import limit
from stepscope.analysis.trial.interference import has_gpu_interference
from stepscope.records import Confidence, Evidence, Finding, Recommendation

_LAUNCHING = ("forward", "backward", "optimizer", "other")


def gpu_work(case: Case) -> Finding | None:
    """Find what the GPUs are busy with, or what they wait for other than data."""
    breakdown, busy = case.breakdown, case.device.busy
    if busy is None:
        return None
    return _gpu_bound(case, breakdown) if _is_gpu_bound(case) else _idle(case, breakdown, busy)


def _is_gpu_bound(case: Case) -> bool:
    """Whether the GPU determines the step time."""
    busy, queued_ahead = case.device.busy or 0.0, case.device.queued_ahead or 0.0
    return busy >= limit("gpu_busy") or queued_ahead >= limit("host_ahead")


def _kernel_time(case: Case) -> Evidence | None:
    source = "GPM" if case.device.active is not None else "NVML"
    return measured("kernel_time", case.device.busy, "share", "gpu_busy", source)


def _queued_ahead(case: Case) -> Evidence | None:
    return measured("queued_ahead", case.device.queued_ahead, "share", "host_ahead", "CUDA events")


def gpu_interference(case: Case) -> Finding | None:
    other = case.device.other_processes
    if case.device.busy is None or other is None or not has_gpu_interference(other):
        return None
    is_time_sliced = other >= limit("other_gpu_busy")
    return finding(
        "interference.gpu",
        "high" if other >= 2 * limit("other_gpu_use") else "medium",
        limit("gpu_time_slicing") if is_time_sliced else 1.0 / (1.0 - other),
        evidence=[
            measured("other_process_kernels", other, "share", "other_gpu_use", "NVML"),
            _kernel_time(case),
        ],
        recommendations=["find_gpu_processes", "exclusive_gpu"],
    )


def _gpu_bound(case: Case, breakdown: StepBreakdown) -> Finding:
    """Find what a GPU that determines the step time is busy with."""
    device = case.device
    bandwidth = measured("memory_bandwidth", device.dram, "share", "bandwidth_bound", "GPM")
    tensor = measured("tensor_cores", device.tensor, "share", source="GPM")
    if device.sm is None:
        return finding(
            "gpu.compute",
            "low" if device.queued_ahead is None else "medium",
            None,
            variant="no_counters",
            evidence=[_kernel_time(case), _queued_ahead(case)],
            recommendations=[Recommendation("compile_for_larger_kernels", "compile", True)],
        )
    if device.dram is not None and device.dram >= limit("bandwidth_bound"):
        return finding(
            "gpu.bandwidth",
            "high",
            None,
            evidence=[_kernel_time(case), _queued_ahead(case), bandwidth, tensor],
            recommendations=[
                Recommendation("compile_for_bandwidth", "compile", True),
                Recommendation("bf16_for_bandwidth", "precision", "bf16"),
            ],
        )
    if (device.fp32 or 0.0) >= limit("fp32_busy") and (device.tensor or 0.0) < limit(
        "tensor_cores_idle"
    ):
        matmul_share = min(1.0, (device.fp32 or 0.0) / limit("fp32_matmul"))
        precision = breakdown.trainer.settings.matmul_precision
        return finding(
            "gpu.precision",
            "high",
            1.0 / (1.0 - matmul_share + matmul_share / limit("tf32_speedup")),
            values={"precision": precision or None},
            evidence=[
                measured("fp32_units", device.fp32, "share", "fp32_busy", "GPM"),
                measured("tensor_cores", device.tensor, "share", "tensor_cores_idle", "GPM"),
                _kernel_time(case),
            ],
            recommendations=[
                Recommendation("tf32", "precision", "tf32"),
                Recommendation("bf16", "precision", "bf16"),
            ],
        )
    filled = device.sm / max(device.busy or 1.0, 1e-3)
    if filled < limit("gpu_filled"):
        bound = 1.0 / max(filled, 0.01)
        times = _power_of_two_below(bound)
        return finding(
            "gpu.underutilized",
            "medium",
            bound,
            values={"times": times},
            evidence=[
                measured("sm_filled", filled, "share", "gpu_filled", "GPM"),
                _kernel_time(case),
            ],
            recommendations=[_larger_batch(breakdown, times)],
        )
    return finding(
        "gpu.compute",
        "high",
        None,
        evidence=[
            _kernel_time(case),
            _queued_ahead(case),
            measured("sm_active", device.sm, "share", "gpu_filled", "GPM"),
            tensor,
            bandwidth,
        ],
        recommendations=[Recommendation("compile", "compile", True)],
    )


def _idle(case: Case, breakdown: StepBreakdown, busy: float) -> Finding | None:
    """Find what a GPU that is idle part of the time waits for, other than data."""
    copies, syncs = breakdown.share("copy"), breakdown.share("sync")
    received = case.device.received or 0.0
    enough = limit("idle_explained") * (1.0 - busy)
    if copies >= max(limit("copy_share"), enough) and received >= limit("copy_rate"):
        pinned = bool(breakdown.loader and breakdown.loader.pins)
        return finding(
            "gpu.transfer",
            "high",
            1.0 / max(busy, 1.0 - copies, 0.01),
            variant="pinned" if pinned else "unpinned",
            values={"copied": received * breakdown.step_seconds},
            evidence=[
                measured("copying", copies, "share", "copy_share", "stack samples"),
                measured("pcie_received", received, "bytes/s", "copy_rate", "GPM"),
                _kernel_time(case),
            ],
            recommendations=[
                None
                if pinned
                else Recommendation("pin_memory", "pin", True, breakdown.loader_location),
                Recommendation("copy_ahead", location=breakdown.location("copy")),
                "copy_fewer_bytes",
            ],
        )
    if syncs >= max(limit("sync_share"), enough):
        return finding(
            "gpu.sync",
            "high",
            1.0 / max(busy, 1.0 - syncs, 0.01),
            evidence=[
                measured("device_to_host_reads", syncs, "share", "sync_share", "stack samples"),
                _queued_ahead(case),
                _kernel_time(case),
            ],
            recommendations=[
                Recommendation("read_back_less_often", location=breakdown.location("sync"))
            ],
        )
    return _launch(case, breakdown)


def _launch(case: Case, breakdown: StepBreakdown) -> Finding | None:
    """Find a GPU that is idle within its span of the step: the host launches too slowly."""
    device = case.device
    if device.step_span is None or not breakdown.step_seconds:
        share, inside = 1.0, device.busy or 0.0
    else:
        share = min(1.0, device.step_span / breakdown.step_seconds)
        inside = min(1.0, (device.busy or 0.0) / max(share, 1e-3))
    starved = (case.cores.training_waiting or 0.0) >= limit("idle_cores") / 2
    if inside >= limit("gpu_busy") or starved:
        return None
    batch = breakdown.batch_size
    has_idle_sms = (device.sm or 0.0) < limit("gpu_filled")
    if batch is not None and batch <= limit("small_batch") and has_idle_sms:
        times = _power_of_two_below(1.0 / max(device.sm or 0.01, 0.002))
        times = min(times, int(limit("batch_growth")))
        return finding(
            "batch.small",
            "high",
            float(times),
            variant="gpu",
            values={"step_seconds": breakdown.step_seconds, "times": times},
            evidence=[
                measured("batch_size", batch, "count", "small_batch", "loader"),
                measured("sm_active", device.sm, "share", "gpu_filled", "GPM"),
                _kernel_time(case),
                _queued_ahead(case),
            ],
            recommendations=[_larger_batch(breakdown, times)],
        )
    needed = max(inside - limit("launch_overhead") / max(share, 1e-3), 0.02)
    remaining = 1.0 - share * (1.0 - needed)
    launching = breakdown.share(*_LAUNCHING)
    confidence: Confidence = "high" if inside < limit("gpu_filled") else "medium"
    if launching < limit("majority"):
        confidence = "low"
    return finding(
        "gpu.launch",
        confidence,
        1.0 / remaining,
        values={
            "queueing": device.queueing or breakdown.step_without_wait,
            "device_step": inside * (device.step_span or breakdown.step_without_wait),
        },
        evidence=[
            measured("step_kernel_time", inside, "share", "gpu_busy", "GPM"),
            _queued_ahead(case),
            measured("queueing", device.queueing, "s", source="CUDA events"),
            measured("launching", launching, "share", "majority", "stack samples"),
        ],
        recommendations=[
            Recommendation("compile_to_graphs", "compile", True),
            "graph_callables",
            None if breakdown.trainer.settings.fused else "fused_optimizer",
        ],
    )


def _power_of_two_below(times: float) -> int:
    return int(2 ** max(1, math.floor(math.log2(max(times, 2.0) * 1.05))))


def _larger_batch(breakdown: StepBreakdown, times: int) -> Recommendation:
    batch, location = breakdown.batch_size, breakdown.loader_location
    if batch:
        return Recommendation("larger_batch", "batch_size", batch * times, location)
    return Recommendation("batch_times_larger", location=location)


def power_throttling(case: Case) -> Finding | None:
    device = case.device
    if not _is_gpu_bound(case) or not _is_throttled(device, device.throttled_power):
        return None
    return finding(
        "throttle.power",
        "medium",
        _clock_ratio(device),
        evidence=[
            measured("clock_throttled", device.throttled_power, "share", "clock_throttled", "NVML"),
            measured("power", device.power, "W", source="NVML"),
            measured("clock", device.clock, "MHz", source="NVML"),
        ],
        recommendations=["show_power_limit"],
    )


def thermal_throttling(case: Case) -> Finding | None:
    device = case.device
    if not _is_throttled(device, device.throttled_thermal):
        return None
    return finding(
        "throttle.thermal",
        "high",
        _clock_ratio(device),
        evidence=[
            measured(
                "clock_throttled", device.throttled_thermal, "share", "clock_throttled", "NVML"
            ),
            measured("clock", device.clock, "MHz", source="NVML"),
        ],
        recommendations=["better_cooling"],
    )


def _is_throttled(device: Device, share: float | None) -> bool:
    return device.busy is not None and (share or 0.0) >= limit("clock_throttled")


def _clock_ratio(device: Device) -> float | None:
    """Return the highest clock over the mean clock: the cost of throttling."""
    return device.clock_max / device.clock if device.clock and device.clock_max else None
