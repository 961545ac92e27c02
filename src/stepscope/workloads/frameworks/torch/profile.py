"""Some more steps, under the PyTorch profiler: after those that are measured, as it slows them.

All figures are those of the profiler's own aggregation. The trace is kept for a viewer, not read.
"""

from __future__ import annotations

import gzip
import re
import shutil
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, schedule

MOST_STEPS = 50
"""A step of a large model leaves ten megabytes and more in the trace."""

_WARM_UP = 1
"""Steps in which the profiler starts; they are in no figure."""
_MOST_KERNELS = 100
_ZIP_LEVEL = 4
"""Traces are long and repeat themselves: more effort takes seconds and gains little."""
_RUNTIME_CALL = re.compile(r"cu(da)?[A-Z]")
"""`cudaLaunchKernel`, `cuLaunchKernelEx` and their like: calls of the host into CUDA."""
_COPY_NAME = re.compile(r"Memcpy (\wto\w)")
_DIRECTIONS = {
    "HtoD": "to_device",
    "DtoH": "from_device",
    "DtoD": "within_device",
    "PtoP": "between_devices",
    "HtoH": "host",
}
"""Where a copy goes, by what CUPTI calls it; anything else is `other`."""
_NO_CUPTI = (
    "The profiler saw nothing of the GPU, as if CUPTI could not be used here. End other profilers "
    "(nsys, ncu, DCGM); in a container, allow it SYS_ADMIN, or ask the administrator to set "
    "NVreg_RestrictProfilingToAdminUsers=0"
)


def profile_steps(
    one_step: Callable[[], None], steps: int, trace: Path, device: str
) -> dict[str, Any]:
    """Take steps under the profiler, keep their trace, and return their totals: a
    `records.profile.RankProfile` as plain values.

    A profiler that fails is an `error`, and fails nothing. A step that fails does.
    """
    todo = _Steps(one_step, _WARM_UP + max(1, min(steps, MOST_STEPS)))
    try:
        return _profiled(todo, trace, device)
    except Exception as error:
        trace.unlink(missing_ok=True)
        if todo.failure is not None:
            raise todo.failure from None
        while todo.left:
            todo.take()
        if isinstance(error, OSError):
            what = f"The trace could not be kept: {error.strerror or error}"
            return {"error": f"{what}. See that the folder of the run can be written and has space"}
        what = str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__
        advice = "The trial is not affected; end other profilers, or try another version of PyTorch"
        return {"error": f"The PyTorch profiler failed: {what}. {advice}"}


class _Steps:
    """Steps that must be taken, profiled or not: the other ranks would wait for them."""

    def __init__(self, one_step: Callable[[], None], count: int) -> None:
        self._one_step = one_step
        self.left = count
        self.failure: BaseException | None = None

    def take(self) -> None:
        self.left -= 1
        try:
            self._one_step()
        except BaseException as failure:
            self.failure = failure
            raise


def _profiled(todo: _Steps, trace: Path, device: str) -> dict[str, Any]:
    steps, is_gpu = todo.left - _WARM_UP, device != "cpu"
    with profile(
        activities=[ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if is_gpu else []),
        schedule=schedule(wait=0, warmup=_WARM_UP, active=steps, repeat=1),
        profile_memory=True,
    ) as profiler:
        # The device is waited for at both ends, so that its work falls into the steps that asked
        # for it.
        todo.take()
        if is_gpu:
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
        while todo.left:
            profiler.step()
            todo.take()
        if is_gpu:
            torch.cuda.synchronize(device)
    step_us = [
        event.time_range.elapsed_us()
        for event in profiler.events() or ()
        if event.name.startswith("ProfilerStep") and event.device_type == DeviceType.CPU
    ]
    if len(step_us) != steps:
        raise RuntimeError(f"it recorded {len(step_us)} of {steps} steps")
    figures = _figures(profiler)
    return {
        "device": device,
        "steps": steps,
        "step_us": step_us,
        **figures,
        "memory": _memory(profiler, device),
        "missing": _NO_CUPTI if is_gpu and figures["copies"] is None else "",
        "trace": _keep_trace(profiler, trace),
    }


def _figures(profiler: profile) -> dict[str, Any]:
    """Operators and calls of the host, kernels and copies of the device, the longest first; None
    for all of a device that was not seen."""
    rows = [row for row in profiler.key_averages() if not row.is_user_annotation]
    on_host = [row for row in rows if row.device_type == DeviceType.CPU and row.key[0] != "["]
    on_device = [row for row in rows if row.device_type != DeviceType.CPU]
    calls = [row for row in on_host if _RUNTIME_CALL.match(row.key)]
    operators = [row for row in on_host if not _RUNTIME_CALL.match(row.key)]
    waits = [row for row in calls if row.key.endswith("Synchronize")]
    launches = [row for row in calls if "Launch" in row.key and "HostFunc" not in row.key]
    copied = [row for row in on_device if row.key.startswith("Memcpy")]
    memsets = [row for row in on_device if row.key.startswith("Memset")]
    kernels = [row for row in on_device if not row.key.startswith(("Memcpy", "Memset"))]
    has_device = bool(calls)
    kernels.sort(key=lambda row: -row.self_device_time_total)
    on_host.sort(key=lambda row: -row.self_cpu_time_total)
    if has_device:
        on_host.sort(key=lambda row: -row.self_device_time_total)

    def cpu_us(some: list[Any]) -> float:
        return float(sum(row.self_cpu_time_total for row in some))

    def device_us(some: list[Any]) -> float:
        return float(sum(row.self_device_time_total for row in some))

    of_device = {
        "runtime_cpu_us": cpu_us(calls) - cpu_us(waits),
        "synchronize_cpu_us": cpu_us(waits),
        "kernels": sum(row.count for row in kernels),
        "kernel_us": device_us(kernels),
        "launches": sum(row.count for row in launches),
        "memcpy_us": device_us(copied),
        "memset_us": device_us(memsets),
    }
    return {
        "operators": [
            {
                "name": row.key,
                "kind": "runtime" if _RUNTIME_CALL.match(row.key) else "operator",
                "calls": row.count,
                "self_cpu_us": row.self_cpu_time_total,
                "cpu_us": row.cpu_time_total,
                "self_cuda_us": row.self_device_time_total if has_device else None,
                "cuda_us": row.device_time_total if has_device else None,
            }
            for row in on_host
        ],
        "kernels": [
            {"name": row.key, "calls": row.count, "us": row.self_device_time_total}
            for row in kernels[:_MOST_KERNELS]
        ],
        "sums": {
            "operator_cpu_us": cpu_us(operators),
            **{name: total if has_device else None for name, total in of_device.items()},
        },
        "copies": _copies(copied) if has_device else None,
    }


def _copies(rows: list[Any]) -> dict[str, dict[str, float]]:
    """By direction."""
    copies: dict[str, dict[str, float]] = {}
    for row in rows:
        named = _COPY_NAME.match(row.key)
        ends = named[1].replace("A", "D") if named else ""  # an array is memory of the device too
        direction = _DIRECTIONS.get(ends, "other")
        sums = copies.setdefault(direction, {"calls": 0, "us": 0.0, "pageable_us": 0.0})
        sums["calls"] += row.count
        sums["us"] += row.self_device_time_total
        if "Pageable" in row.key:
            sums["pageable_us"] += row.self_device_time_total
    return copies


def _memory(profiler: profile, device: str) -> dict[str, dict[str, int | None]]:
    """The most that tensors held at once, by device; of the host beyond what was held before."""
    results = profiler.profiler.kineto_results if profiler.profiler else None
    changes = sorted(
        (event.start_ns(), event.nbytes())  # type: ignore[attr-defined]
        for event in (results.events() if results else ())
        if event.name() == "[memory]" and event.device_type() == DeviceType.CPU
    )
    peaks: dict[str, dict[str, int | None]] = {}
    if device != "cpu":
        peaks[device] = {
            "allocated": torch.cuda.max_memory_allocated(device),
            "reserved": torch.cuda.max_memory_reserved(device),
        }
    if changes:
        peak = max(0, *accumulate(size for _, size in changes))
        peaks["cpu"] = {"allocated": peak, "reserved": None}
    return peaks


def _keep_trace(profiler: profile, trace: Path) -> dict[str, Any]:
    with TemporaryDirectory(dir=trace.parent, prefix=".profile") as folder:
        unzipped = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(unzipped))
        with open(unzipped, "rb") as plain, gzip.open(trace, "wb", _ZIP_LEVEL) as zipped:
            shutil.copyfileobj(plain, zipped, 1 << 20)
        sizes = {"bytes": trace.stat().st_size, "unzipped_bytes": unzipped.stat().st_size}
        return {"file": trace.name, **sizes}
