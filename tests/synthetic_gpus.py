"""The GPUs of a synthetic run: facts, samples and allocator events."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from stepscope.inject import events
from stepscope.metrics import is_counter
from stepscope.records import Entity
from stepscope.runs.events import Records

if TYPE_CHECKING:
    from synthetic import Plan

Values = dict[str, float | None]
Row = tuple[float, float | None, Entity, Values]
"""Time, window in seconds, GPU and values."""

GPM_SHARES = (
    "gpu_active",
    "gpu_sm",
    "gpu_occupancy",
    "gpu_tensor",
    "gpu_fp32",
    "gpu_fp16",
    "gpu_dram",
)
COUNTER_OVER_READINGS = 1.03
"""Ratio of the energy counter to the power readings."""
ENERGY_EVERY = 10.0
_ALLOCATOR_EVERY = 0.15
"""The allocator reports at the first step after 0.1 s."""


def gpu_uuid(index: int) -> str:
    return f"GPU-{0x74F7346C + index:08x}-7a14-5c0e-9d5b-1f0c5f6f3a{index:02d}"


def gpu_facts(plan: Plan) -> list[dict[str, Any]]:
    """The GPUs in `run.json`."""
    model, memory, watts = ("NVIDIA H200", 150.75e9, 700.0)
    if not plan.gpm:
        model, memory, watts = ("NVIDIA A100-SXM4-80GB", 85.9e9, 400.0)
    return [
        {
            "index": index,
            "uuid": gpu_uuid(index),
            "model": model,
            "bus": f"0000:{index + 1:02x}:00.0",
            "memory_bytes": memory,
            "power_limit_watts": watts,
            "label": f"GPU {index}",
            "mig_of": None,
            "pcie_generation": 5 if plan.gpm else 4,
            "pcie_width": 16,
        }
        for index in range(plan.gpus + plan.idle_gpus)
    ]


def missing_gpu_metrics(plan: Plan) -> dict[str, str]:
    if plan.gpm or not plan.gpus:
        return {}
    reason = "GPU 0: no performance counters (GPM requires Hopper)"
    return dict.fromkeys((*GPM_SHARES, "gpu_nvlink_received", "gpu_nvlink_sent"), reason)


def gpu_rows(plan: Plan) -> Iterator[Row]:
    """Yield the readings of all sensors and GPUs, in order of time."""
    random = np.random.default_rng(plan.seed + 1)
    rows = []
    for position, (period, read) in enumerate(_sensors(plan)):
        # The first reading is at the start of the run, the last at its end.
        ticks = [*np.arange(0.0, plan.seconds - period / 2, period).tolist(), plan.seconds]
        for before, at in zip([None, *ticks], ticks, strict=False):
            over = None if before is None else at - before
            for index in range(plan.gpus + plan.idle_gpus):
                values = read(plan, at, index, float(random.normal()))
                if over is None:
                    values = {k: v for k, v in values.items() if not is_counter(k)}
                rows.append((at, position, over, Entity(gpu_uuid(index)), values))
    rows.sort(key=lambda row: row[:2])
    for at, _, over, entity, values in rows:
        yield at, over, entity, values


def allocations(
    plan: Plan, begin: float, seconds: float, records: Callable[..., Records]
) -> Iterator[Records]:
    """Yield the allocator events at the end of some steps; peaks only when they grow."""
    count = max(20, int(seconds / _ALLOCATOR_EVERY))
    at = np.linspace(begin, begin + seconds, count + 1)[1:]
    reserved = np.array([int(_reserved(plan, moment)) for moment in at.tolist()])
    new = np.flatnonzero(np.diff(reserved, prepend=-1))
    allocated, peak = (0.3 * reserved).astype(np.int64), (0.93 * reserved[new]).astype(np.int64)
    for index in range(plan.gpus if plan.allocator else 0):
        yield records(at, events.GPU_MEMORY, number=index, a=allocated, b=reserved)
        yield records(at[new], events.GPU_PEAK, number=index, a=peak, b=reserved[new])
        yield records(at[new], events.GPU_RETRIES, number=index)


Read = Callable[["Plan", float, int, float], Values]
"""Plan, time, GPU index and noise to values."""


def _sensors(plan: Plan) -> list[tuple[float, Read]]:
    """Return the sensors: seconds between readings, and the function that reads."""
    return [
        (0.2, _activity) if plan.gpm else (0.2, _pcie),
        (0.2, _power),
        (0.2, _memory),
        (0.5, _utilization),
        (1.0, _processes),
        (1.0, _state),
        (ENERGY_EVERY, _energy),
        (30.0, _errors),
        (2.0, _other_processes),
    ]


def _busy(plan: Plan, at: float, index: int) -> float:
    """Return the activity of a GPU: lower in the first epoch, which waits for data."""
    if index >= plan.gpus:
        return 0.0
    busy, epoch = plan.activity(at)
    return busy * (0.55 if epoch == 0 else 0.82) * (1 - 0.06 * index)


def _watts(plan: Plan, at: float, index: int) -> float:
    return 78.0 + 590.0 * _busy(plan, at, index)


def _activity(plan: Plan, at: float, index: int, noise: float) -> Values:
    sm = _busy(plan, at, index) * (1 + 0.04 * noise)
    nvlink = 8e9 * sm if plan.gpus > 1 else 0.0
    return {
        "gpu_active": min(1.0, 1.1 * sm),
        "gpu_sm": sm,
        "gpu_occupancy": 0.4 * sm,
        "gpu_tensor": 0.42 * sm,
        "gpu_fp32": 0.1 * sm,
        "gpu_fp16": 0.02 * sm,
        "gpu_dram": 0.55 * sm,
        **_pcie(plan, at, index, noise),
        "gpu_nvlink_received": nvlink,
        "gpu_nvlink_sent": nvlink,
    }


def _pcie(plan: Plan, at: float, index: int, noise: float) -> Values:
    busy = _busy(plan, at, index) * (1 + 0.08 * noise)
    return {"gpu_pcie_received": 2.3e9 * busy, "gpu_pcie_sent": 0.16e9 * busy}


def _power(plan: Plan, at: float, index: int, noise: float) -> Values:
    return {"gpu_power": _watts(plan, at, index) + 20 * _busy(plan, at, index) * noise}


def _energy(plan: Plan, at: float, index: int, noise: float) -> Values:
    """Mean power since the last reading, from the energy counter."""
    before = max(0.0, (math.ceil(at / ENERGY_EVERY - 1e-9) - 1) * ENERGY_EVERY)
    watts = [_watts(plan, moment, index) for moment in np.linspace(before, at, 101).tolist()]
    return {"gpu_energy": COUNTER_OVER_READINGS * float(np.mean(watts))}


def _memory(plan: Plan, at: float, index: int, noise: float) -> Values:
    return {"gpu_memory": 0.6e9 + _own_memory(plan, at, index)}


def _processes(plan: Plan, at: float, index: int, noise: float) -> Values:
    return {"gpu_memory_run": _own_memory(plan, at, index)}


def _own_memory(plan: Plan, at: float, index: int) -> float:
    """A CUDA context once the model exists, then also the reserved memory."""
    if index >= plan.gpus or at < 0.6 * plan.start_up:
        return 0.0
    return 0.5e9 + _reserved(plan, at)


def _reserved(plan: Plan, at: float) -> float:
    """Reserved memory: grows in the first steps, and slightly with every epoch."""
    since = at - plan.start_up
    if since < 0:
        return 0.4e9
    epoch = int(since / plan.epoch_seconds)
    return 31.5e9 * min(1.0, 0.3 + since / (0.1 * plan.seconds)) + 0.8e9 * epoch


def _utilization(plan: Plan, at: float, index: int, noise: float) -> Values:
    busy = _busy(plan, at, index)
    share = min(1.0, 0.97 + 0.01 * noise) if busy else 0.0
    return {"gpu_utilization": share, "gpu_memory_controller": 0.6 * busy}


def _state(plan: Plan, at: float, index: int, noise: float) -> Values:
    busy = _busy(plan, at, index)
    return {
        "gpu_sm_clock": 1980.0 if busy else 345.0,
        "gpu_memory_clock": 3201.0,
        "gpu_temperature": 33.0 + (30.0 * at / plan.seconds if index < plan.gpus else 0.0),
        "gpu_throttled_power": float(busy > 0.6 and noise > 1),
        "gpu_throttled_thermal": 0.0,
        "gpu_throttled_other": 0.0,
    }


def _other_processes(plan: Plan, at: float, index: int, noise: float) -> Values:
    return {"gpu_other_processes": 0.0}


def _errors(plan: Plan, at: float, index: int, noise: float) -> Values:
    return {"gpu_ecc_corrected": 0.0, "gpu_ecc_uncorrected": 0.0}
