"""Additional steps under the PyTorch profiler, after the measured steps since it slows them down.

All figures come from the profiler's own aggregation. The trace is only kept for a viewer.
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

MAX_STEPS = 50
"""A step of a large model adds 10 MiB or more to the trace."""

_WARM_UP = 1
"""Steps while the profiler starts, which are not included in the figures."""
_MAX_KERNELS = 100
_ZIP_LEVEL = 4
"""Higher levels take seconds longer and gain little on traces."""
_RUNTIME_CALL = re.compile(r"cu(da)?[A-Z]")
"""Host calls into CUDA, such as `cudaLaunchKernel` and `cuLaunchKernelEx`."""
_COPY_NAME = re.compile(r"Memcpy (\wto\w)")
_DIRECTIONS = {
    "HtoD": "to_device",
    "DtoH": "from_device",
    "DtoD": "within_device",
    "PtoP": "between_devices",
    "HtoH": "host",
}
"""Direction of a copy by its CUPTI name; anything else is `other`."""
_NO_CUPTI = (
    "The profiler recorded no GPU activity: CUPTI is probably not available. Stop other profilers "
    "(nsys, ncu, DCGM). In a container, add the SYS_ADMIN capability, or ask the administrator to "
    "set NVreg_RestrictProfilingToAdminUsers=0"
)


def profile_steps(
    one_step: Callable[[], None], steps: int, trace: Path, device: str
) -> dict[str, Any]:
    """Take steps under the profiler, save the trace, and return the totals as the plain values of a
    `records.profile.RankProfile`.

    If the profiler fails, the result is an `error` and the trial continues. If a step fails, its
    exception is raised.
    """
    todo = _Steps(one_step, _WARM_UP + max(1, min(steps, MAX_STEPS)))
    try:
        return _profiled(todo, trace, device)
    except Exception as error:
        trace.unlink(missing_ok=True)
        if todo.failure is not None:
            raise todo.failure from None
        while todo.left:
            todo.take()
        if isinstance(error, OSError):
            reason = f"The trace could not be saved: {error.strerror or error}"
            return {"error": f"{reason}. Check that the run folder is writable and has free space"}
        reason = str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__
        hint = "The trial is not affected. Stop other profilers, or try another version of PyTorch"
        return {"error": f"The PyTorch profiler failed: {reason}. {hint}"}


class _Steps:
    """Steps that must be taken, profiled or not, since the other ranks wait for them."""

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
        # Synchronize at both ends, so that device work is counted in the step that queued it.
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
        raise RuntimeError(f"only {len(step_us)} of {steps} steps were recorded")
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
    """Operators and runtime calls of the host, kernels and copies of the device, longest first.

    Device figures are None if no device activity was recorded.
    """
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
            for row in kernels[:_MAX_KERNELS]
        ],
        "sums": {
            "operator_cpu_us": cpu_us(operators),
            **{name: total if has_device else None for name, total in of_device.items()},
        },
        "copies": _copies(copied) if has_device else None,
    }


def _copies(rows: list[Any]) -> dict[str, dict[str, float]]:
    """Copies by direction."""
    copies: dict[str, dict[str, float]] = {}
    for row in rows:
        named = _COPY_NAME.match(row.key)
        ends = named[1].replace("A", "D") if named else ""  # a CUDA array is device memory
        direction = _DIRECTIONS.get(ends, "other")
        sums = copies.setdefault(direction, {"calls": 0, "us": 0.0, "pageable_us": 0.0})
        sums["calls"] += row.count
        sums["us"] += row.self_device_time_total
        if "Pageable" in row.key:
            sums["pageable_us"] += row.self_device_time_total
    return copies


def _memory(profiler: profile, device: str) -> dict[str, dict[str, int | None]]:
    """Peak memory of tensors by device; on the host, the increase during the steps."""
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
