"""GPUs: whether they are kept busy, and if so with what; if not, what keeps them waiting."""

from __future__ import annotations

import math

from stepscope.analysis.bottleneck.account import Account
from stepscope.analysis.bottleneck.case import Case, Device, finding, measured
from stepscope.analysis.bottleneck.thresholds import limit
from stepscope.analysis.trial.interference import takes_gpu
from stepscope.records import Confidence, Evidence, Finding, Recommendation

_LAUNCHING = ("forward", "backward", "optimizer", "other")


def gpu_work(case: Case) -> Finding | None:
    """What the GPUs are busy with, or what they wait for besides data."""
    account, busy = case.account, case.device.busy
    if busy is None:
        return None
    return _bound(case, account) if _is_bound(case) else _waits(case, account, busy)


def _is_bound(case: Case) -> bool:
    """Whether the GPU decides how long a step takes."""
    busy, ahead = case.device.busy or 0.0, case.device.ahead or 0.0
    return busy >= limit("gpu_busy") or ahead >= limit("host_ahead")


def _ran(case: Case) -> Evidence | None:
    source = "GPM" if case.device.active is not None else "NVML"
    return measured("kernels_ran", case.device.busy, "share", "gpu_busy", source)


def _queued(case: Case) -> Evidence | None:
    return measured("steps_ahead", case.device.ahead, "share", "host_ahead", "CUDA events")


def gpu_interference(case: Case) -> Finding | None:
    others = case.device.others
    if case.device.busy is None or others is None or not takes_gpu(others):
        return None
    takes_turns = others >= limit("others_busy")
    return finding(
        "interference.gpu",
        "high" if others >= 2 * limit("others_gpu") else "medium",
        limit("takes_turns") if takes_turns else 1.0 / (1.0 - others),
        evidence=[measured("others_kernels", others, "share", "others_gpu", "NVML"), _ran(case)],
        recommendations=["find_gpu_processes", "exclusive_gpu"],
    )


def _bound(case: Case, account: Account) -> Finding:
    """The GPU decides how long a step takes: what it is busy with."""
    device = case.device
    bandwidth = measured("memory_bandwidth", device.dram, "share", "dram_bound", "GPM")
    tensor = measured("tensor_cores", device.tensor, "share", source="GPM")
    if device.sm is None:
        return finding(
            "gpu.compute",
            "low" if device.ahead is None else "medium",
            None,
            variant="no_counters",
            evidence=[_ran(case), _queued(case)],
            recommendations=[Recommendation("compile_for_larger_kernels", "compile", True)],
        )
    if device.dram is not None and device.dram >= limit("dram_bound"):
        return finding(
            "gpu.bandwidth",
            "high",
            None,
            evidence=[_ran(case), _queued(case), bandwidth, tensor],
            recommendations=[
                Recommendation("compile_for_bandwidth", "compile", True),
                Recommendation("bf16_for_bandwidth", "precision", "bf16"),
            ],
        )
    if (device.fp32 or 0.0) >= limit("fp32_busy") and (device.tensor or 0.0) < limit("tensor_idle"):
        products = min(1.0, (device.fp32 or 0.0) / limit("fp32_in_products"))
        precision = account.trainer.settings.matmul_precision
        return finding(
            "gpu.precision",
            "high",
            1.0 / (1.0 - products + products / limit("tf32_gain")),
            values={"precision": precision or None},
            evidence=[
                measured("fp32_units", device.fp32, "share", "fp32_busy", "GPM"),
                measured("tensor_cores", device.tensor, "share", "tensor_idle", "GPM"),
                _ran(case),
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
            "gpu.underfilled",
            "medium",
            bound,
            values={"times": times},
            evidence=[
                measured("sm_filled", filled, "share", "gpu_filled", "GPM"),
                _ran(case),
            ],
            recommendations=[_larger_batch(account, times)],
        )
    return finding(
        "gpu.compute",
        "high",
        None,
        evidence=[
            _ran(case),
            _queued(case),
            measured("sm_active", device.sm, "share", "gpu_filled", "GPM"),
            tensor,
            bandwidth,
        ],
        recommendations=[Recommendation("compile", "compile", True)],
    )


def _waits(case: Case, account: Account, busy: float) -> Finding | None:
    """The GPU is idle for a part of the time: for what, besides data?"""
    copies, syncs = account.share("copy"), account.share("sync")
    moved = case.device.received or 0.0
    part = limit("explains_idle") * (1.0 - busy)
    if copies >= max(limit("copy_share"), part) and moved >= limit("copy_rate"):
        pinned = bool(account.loader and account.loader.pins)
        return finding(
            "transfer",
            "high",
            1.0 / max(busy, 1.0 - copies, 0.01),
            variant="pinned" if pinned else "unpinned",
            values={"copied": moved * account.step_seconds},
            evidence=[
                measured("copying", copies, "share", "copy_share", "stack samples"),
                measured("pcie_received", moved, "bytes/s", "copy_rate", "GPM"),
                _ran(case),
            ],
            recommendations=[
                None
                if pinned
                else Recommendation("pin_memory", "pin", True, account.loader_location),
                Recommendation("copy_ahead", location=account.location("copy")),
                "copy_fewer_bytes",
            ],
        )
    if syncs >= max(limit("sync_share"), part):
        return finding(
            "sync",
            "high",
            1.0 / max(busy, 1.0 - syncs, 0.01),
            evidence=[
                measured("reading_back", syncs, "share", "sync_share", "stack samples"),
                _queued(case),
                _ran(case),
            ],
            recommendations=[Recommendation("read_back_rarely", location=account.location("sync"))],
        )
    return _launch(case, account)


def _launch(case: Case, account: Account) -> Finding | None:
    """Within its own span of the step the GPU is idle: the host cannot launch fast enough."""
    device = case.device
    if device.span is None or not account.step_seconds:
        share, inside = 1.0, device.busy or 0.0
    else:
        share = min(1.0, device.span / account.step_seconds)
        inside = min(1.0, (device.busy or 0.0) / max(share, 1e-3))
    starved = (case.cores.wait_main or 0.0) >= limit("idle_cores") / 2
    if inside >= limit("gpu_busy") or starved:
        return None
    batch = account.batch_size
    unfilled = (device.sm or 0.0) < limit("gpu_filled")
    if batch is not None and batch <= limit("small_batch") and unfilled:
        times = _power_of_two_below(1.0 / max(device.sm or 0.01, 0.002))
        times = min(times, int(limit("safe_growth")))
        return finding(
            "batch.small",
            "high",
            float(times),
            variant="gpu",
            values={"step_seconds": account.step_seconds, "times": times},
            evidence=[
                measured("batch_size", batch, "count", "small_batch", "loader"),
                measured("sm_active", device.sm, "share", "gpu_filled", "GPM"),
                _ran(case),
                _queued(case),
            ],
            recommendations=[_larger_batch(account, times)],
        )
    left = 1.0 - share * (1.0 - max(inside - limit("launch_overhead") / max(share, 1e-3), 0.02))
    launching = account.share(*_LAUNCHING)
    confidence: Confidence = "high" if inside < limit("gpu_filled") else "medium"
    if launching < limit("most_of_it"):
        confidence = "low"
    return finding(
        "launch",
        confidence,
        1.0 / left,
        values={
            "queueing": device.queueing or account.rest,
            "device_step": inside * (device.span or account.rest),
        },
        evidence=[
            measured("step_kernels_ran", inside, "share", "gpu_busy", "GPM"),
            _queued(case),
            measured("queueing", device.queueing, "s", source="CUDA events"),
            measured("launching", launching, "share", "most_of_it", "stack samples"),
        ],
        recommendations=[
            Recommendation("compile_to_graphs", "compile", True),
            "graph_callables",
            None if account.trainer.settings.fused else "fused_optimizer",
        ],
    )


def _power_of_two_below(times: float) -> int:
    return int(2 ** max(1, math.floor(math.log2(max(times, 2.0) * 1.05))))


def _larger_batch(account: Account, times: int) -> Recommendation:
    batch, location = account.batch_size, account.loader_location
    if batch:
        return Recommendation("larger_batch", "batch_size", batch * times, location)
    return Recommendation("batch_times_larger", location=location)


def gpu_power(case: Case) -> Finding | None:
    device = case.device
    if not _is_bound(case) or not _is_slowed(device, device.slowed_power):
        return None
    return finding(
        "throttle.power",
        "medium",
        _clock_ratio(device),
        evidence=[
            measured("slowed", device.slowed_power, "share", "slowed", "NVML"),
            measured("power", device.power, "W", source="NVML"),
            measured("clock", device.clock, "MHz", source="NVML"),
        ],
        recommendations=["show_power_limit"],
    )


def gpu_heat(case: Case) -> Finding | None:
    device = case.device
    if not _is_slowed(device, device.slowed_heat):
        return None
    return finding(
        "throttle.heat",
        "high",
        _clock_ratio(device),
        evidence=[
            measured("slowed", device.slowed_heat, "share", "slowed", "NVML"),
            measured("clock", device.clock, "MHz", source="NVML"),
        ],
        recommendations=["better_cooling"],
    )


def _is_slowed(device: Device, share: float | None) -> bool:
    return device.busy is not None and (share or 0.0) >= limit("slowed")


def _clock_ratio(device: Device) -> float | None:
    """How many times as fast the clocks were at their highest: what holding them down costs."""
    return device.clock_most / device.clock if device.clock and device.clock_most else None
