"""Some more steps, under the PyTorch profiler: after those that are measured, as it slows them."""

from __future__ import annotations

import gzip
import shutil
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from stepscope.analysis.profiletrace import TraceFigures, events_of, trace_figures

DEFAULT_STEPS = 5
MOST_STEPS = 50
"""A step of a large model leaves ten megabytes and more in the trace."""

_WARM_UP = 1
"""Steps in which the profiler starts; they are in no figure."""
_MOST_KERNELS = 100
_CHUNK = 1 << 20
_ZIP_LEVEL = 4
"""Traces are long and repeat themselves: more effort takes seconds and gains little."""

_NO_CUPTI = (
    "The profiler saw nothing of the GPU, as if CUPTI could not be used here. End other profilers "
    "(nsys, ncu, DCGM); in a container, allow it SYS_ADMIN, or ask the administrator to set "
    "NVreg_RestrictProfilingToAdminUsers=0"
)


def profile_steps(
    one_step: Callable[[], None],
    steps: int,
    trace: Path,
    device: str,
    steps_per_epoch: int | None,
) -> dict[str, Any]:
    """Take steps under the profiler, keep their trace, and tell what they took in all.

    A profiler that fails is told as `error`, and fails nothing. A step that fails does.
    """
    todo = _Steps(one_step, _WARM_UP + max(1, min(steps, MOST_STEPS)))
    try:
        return _profiled(todo, trace, device, steps_per_epoch)
    except Exception as error:
        trace.unlink(missing_ok=True)
        if todo.failure is not None:
            raise todo.failure from None
        todo.take_rest()
        return {"error": _explained(error)}


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

    def take_rest(self) -> None:
        while self.left:
            self.take()


def _profiled(
    todo: _Steps, trace: Path, device: str, steps_per_epoch: int | None
) -> dict[str, Any]:
    steps = todo.left - _WARM_UP
    with TemporaryDirectory(dir=trace.parent, prefix=".profile") as folder:
        unzipped = Path(folder) / "trace.json"
        _record(todo, unzipped, device)
        seen = read_trace(unzipped)
        if len(seen.step_us) != steps:
            raise RuntimeError(f"it recorded {len(seen.step_us)} of {steps} steps")
        _zip(unzipped, trace)
        sizes = {"bytes": trace.stat().st_size, "unzipped_bytes": unzipped.stat().st_size}
    return {
        "device": device,
        "steps": steps,
        "steps_per_epoch": steps_per_epoch,
        **_totals(seen),
        "missing": _NO_CUPTI if _is_gpu(device) and not seen.has_device else "",
        "trace": {"file": trace.name, **sizes, "events": seen.events},
    }


def _record(todo: _Steps, unzipped: Path, device: str) -> None:
    """Take the steps and write their trace.

    The device is waited for at both ends, so that its work falls into the steps that asked for it.
    """
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if _is_gpu(device) else [])
    with profile(
        activities=activities,
        schedule=schedule(wait=0, warmup=_WARM_UP, active=todo.left - _WARM_UP, repeat=1),
        profile_memory=True,
    ) as profiler:
        todo.take()
        _wait_for(device)
        while todo.left:
            profiler.step()
            todo.take()
        _wait_for(device)
    profiler.export_chrome_trace(str(unzipped))


def read_trace(unzipped: Path) -> TraceFigures:
    """What a trace comes to; ValueError where it is damaged."""
    with open(unzipped, encoding="utf-8", errors="replace") as file:
        return trace_figures(events_of(iter(partial(file.read, _CHUNK), "")))


def _zip(unzipped: Path, trace: Path) -> None:
    with open(unzipped, "rb") as plain, gzip.open(trace, "wb", _ZIP_LEVEL) as zipped:
        shutil.copyfileobj(plain, zipped, _CHUNK)


def _totals(seen: TraceFigures) -> dict[str, Any]:
    """What the trace tells, as plain values; None for all of a device that was not seen."""
    unknown = {} if seen.has_device else {"self_cuda_us": None, "cuda_us": None}
    copies = {direction: asdict(copied) for direction, copied in seen.copies.items()}
    return {
        "step_us": list(seen.step_us),
        "operators": [{**asdict(each), **unknown} for each in seen.operators],
        "kernels": [asdict(kernel) for kernel in seen.kernels[:_MOST_KERNELS]],
        "sums": _sums(seen),
        "copies": copies if seen.has_device else None,
        "memory": {device: asdict(peak) for device, peak in seen.memory.items()},
    }


def _sums(seen: TraceFigures) -> dict[str, float | None]:
    operators = [each for each in seen.operators if each.kind == "operator"]
    calls = [each for each in seen.operators if each.kind == "runtime"]
    waits = [each for each in calls if each.name.endswith("Synchronize")]
    in_calls, in_waits = (sum(each.self_cpu_us for each in some) for some in (calls, waits))
    of_device = {
        "runtime_cpu_us": in_calls - in_waits,
        "synchronize_cpu_us": in_waits,
        "kernels": sum(kernel.calls for kernel in seen.kernels),
        "kernel_us": sum(kernel.us for kernel in seen.kernels),
        "launches": seen.launches,
        "memcpy_us": sum(copied.us for copied in seen.copies.values()),
        "memset_us": seen.memset_us,
    }
    return {
        "operator_cpu_us": sum(each.self_cpu_us for each in operators),
        **{name: total if seen.has_device else None for name, total in of_device.items()},
    }


def _explained(error: Exception) -> str:
    """What went wrong and what to do."""
    if isinstance(error, OSError):
        return (
            f"The trace could not be kept: {error.strerror or error}. See that the folder of the "
            "run can be written and has space"
        )
    what = str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__
    return (
        f"The PyTorch profiler failed: {what}. The trial is not affected; end other profilers, or "
        "try another version of PyTorch"
    )


def _is_gpu(device: str) -> bool:
    return device.startswith("cuda")


def _wait_for(device: str) -> None:
    if _is_gpu(device):
        torch.cuda.synchronize(device)
