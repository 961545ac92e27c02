"""Memory and time of a training process: on the CPU, or on a GPU with its allocator."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from stepscope.sensors import procfs
from stepscope.workloads.frameworks.contract import AllocatorStats
from stepscope.workloads.frameworks.torch.adapter import TorchFramework
from stepscope.workloads.frameworks.torch.device import cap_memory
from stepscope.workloads.frameworks.torch.stepper import Stepper
from stepscope.workloads.probing import ProbeRequest

_MAX_EVENTS = 1_000_000
_NO_STATS = AllocatorStats(0, 0, 0, 0)


class HostMeter:
    """Memory and time of a process that computes on the CPU, which has no caching allocator.

    `fit` probes host memory with trials; this class lets forked probes run without a GPU.
    """

    def begin(self, request: ProbeRequest) -> None:
        torch.set_num_threads(len(os.sched_getaffinity(0)))

    def reset_peaks(self) -> None: ...

    def stats(self) -> AllocatorStats:
        """Return peaks and counts since the last reset."""
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return AllocatorStats(peak, peak, 0, 0)

    def allocated(self) -> int:
        resident = procfs.statm("self")
        return resident.total if resident else 0

    def reserved(self) -> int:
        return self.allocated()

    def context_bytes(self) -> int:
        return 0

    def events(self) -> list[int]:
        return []

    @contextmanager
    def timed(self) -> Iterator[Callable[[], float]]:
        began = time.perf_counter()
        ended = began
        yield lambda: ended - began
        ended = time.perf_counter()

    @contextmanager
    def after_forward(self, stepper: Stepper) -> Iterator[Callable[[], int]]:
        """Yield a function that returns the bytes that the forward pass kept in memory."""
        before, after = self.allocated(), 0

        def read(*_: Any) -> None:
            nonlocal after
            after = self.allocated()

        hook = stepper.forward.register_forward_hook(read)
        try:
            yield lambda: max(0, after - before)
        finally:
            hook.remove()


class GpuMeter(HostMeter):
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free_before: int | None = None
        self._before = _NO_STATS

    def begin(self, request: ProbeRequest) -> None:
        super().begin(request)
        self._free_before = request.free_before
        torch.cuda.set_device(self._device)
        cap_memory(self._device, request.cap)
        if request.trace:
            torch.cuda.memory._record_memory_history("all", context=None, max_entries=_MAX_EVENTS)

    def reset_peaks(self) -> None:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)
        self._before = TorchFramework().allocator_stats() or _NO_STATS

    def stats(self) -> AllocatorStats:
        stats = TorchFramework().allocator_stats() or _NO_STATS  # before the device was used
        retries, ooms = stats.retries - self._before.retries, stats.ooms - self._before.ooms
        return replace(stats, retries=retries, ooms=ooms)

    def allocated(self) -> int:
        return torch.cuda.memory_allocated(self._device)

    def reserved(self) -> int:
        return torch.cuda.memory_reserved(self._device)

    def context_bytes(self) -> int:
        """Return the device memory used outside the allocator.

        The result is correct as long as other processes do not change their use.
        """
        if self._free_before is None:
            return 0
        free, _ = torch.cuda.mem_get_info(self._device)
        return max(0, self._free_before - free - self.reserved())

    def events(self) -> list[int]:
        """Return the `AllocationTrace` since `begin`; empty if the history is incomplete."""
        history = torch.cuda.memory._snapshot(self._device)["device_traces"][self._device.index]
        torch.cuda.memory._record_memory_history(None)
        if len(history) >= _MAX_EVENTS:  # the oldest events were dropped
            return []
        events: list[int] = []
        in_use: dict[int, int] = {}
        count = 0
        for entry in history:
            if entry["action"] == "alloc":
                in_use[entry["addr"]] = count
                count += 1
                events.append(int(entry["size"]))
            elif entry["action"] == "free_completed" and entry["addr"] in in_use:
                events.append(~in_use.pop(entry["addr"]))
        return events

    @contextmanager
    def timed(self) -> Iterator[Callable[[], float]]:
        begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        begin.record()
        yield lambda: begin.elapsed_time(end) / 1e3
        end.record()
        end.synchronize()


@dataclass
class HostMemory:
    """Memory of this process that the kernel cannot reclaim: everything except file pages."""

    after_step_bytes: list[int] = field(default_factory=list)
    before_bytes: int = 0
    peak_bytes: int = 0

    def begin(self) -> None:
        """Record the memory before the first step: the framework, the dataset and the model."""
        self.before_bytes = _resident()[0]
        procfs.reset_peak_memory()

    def record_step(self) -> None:
        # The kernel's peak includes file pages; their number hardly changes between steps.
        resident, peak = _resident()
        self.after_step_bytes.append(resident)
        self.peak_bytes = max(self.peak_bytes, peak)


def _resident() -> tuple[int, int]:
    """Return the resident bytes and their peak, without file pages."""
    status = procfs.status("self")
    assert status is not None
    files = status.size("RssFile") or 0
    return (status.size("VmRSS") or 0) - files, (status.size("VmHWM") or 0) - files
