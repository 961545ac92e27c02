"""What a probe reads while it trains: memory and time, of the CPU or of a GPU and its allocator."""

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

_MOST_EVENTS = 1_000_000
_NOTHING = AllocatorStats(0, 0, 0, 0)


class HostMeter:
    """Memory and time of a process that computes on the CPU, which has no allocator to ask.

    `fit` probes host memory by trials: this is what lets the probes of forks run without a GPU.
    """

    def begin(self, request: ProbeRequest) -> None:
        torch.set_num_threads(len(os.sched_getaffinity(0)))

    def forget_peaks(self) -> None: ...

    def stats(self) -> AllocatorStats:
        """Peaks and counts since they were forgotten."""
        held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return AllocatorStats(held, held, 0, 0)

    def allocated(self) -> int:
        resident = procfs.statm("self")
        return resident.total if resident else 0

    def reserved(self) -> int:
        return self.allocated()

    def outside(self) -> int:
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
        """What the forward pass left in memory."""
        before, after = self.allocated(), 0

        def note(*_: Any) -> None:
            nonlocal after
            after = self.allocated()

        hook = stepper.forward.register_forward_hook(note)
        try:
            yield lambda: max(0, after - before)
        finally:
            hook.remove()


class GpuMeter(HostMeter):
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free_before: int | None = None
        self._before = _NOTHING

    def begin(self, request: ProbeRequest) -> None:
        super().begin(request)
        self._free_before = request.free_before
        torch.cuda.set_device(self._device)
        cap_memory(self._device, request.cap)
        if request.trace:
            torch.cuda.memory._record_memory_history("all", context=None, max_entries=_MOST_EVENTS)

    def forget_peaks(self) -> None:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)
        self._before = TorchFramework().allocator_stats() or _NOTHING

    def stats(self) -> AllocatorStats:
        stats = TorchFramework().allocator_stats() or _NOTHING  # before the device was used
        retries, ooms = stats.retries - self._before.retries, stats.ooms - self._before.ooms
        return replace(stats, retries=retries, ooms=ooms)

    def allocated(self) -> int:
        return torch.cuda.memory_allocated(self._device)

    def reserved(self) -> int:
        return torch.cuda.memory_reserved(self._device)

    def outside(self) -> int:
        """What is gone of the device beside the allocator's: right while nobody else comes."""
        if self._free_before is None:
            return 0
        free, _ = torch.cuda.mem_get_info(self._device)
        return max(0, self._free_before - free - self.reserved())

    def events(self) -> list[int]:
        """All allocations (their bytes) and releases (`~n`, of the n-th) since the beginning."""
        history = torch.cuda.memory._snapshot(self._device)["device_traces"][self._device.index]
        torch.cuda.memory._record_memory_history(None)
        if len(history) >= _MOST_EVENTS:  # the first of them are lost
            return []
        events: list[int] = []
        live: dict[int, int] = {}
        count = 0
        for entry in history:
            if entry["action"] == "alloc":
                live[entry["addr"]] = count
                count += 1
                events.append(int(entry["size"]))
            elif entry["action"] == "free_completed" and entry["addr"] in live:
                events.append(~live.pop(entry["addr"]))
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
    """What this process holds that the kernel cannot take back: all but the pages of files."""

    kept: list[int] = field(default_factory=list)
    """Bytes after each step."""
    before: int = 0
    peak: int = 0

    def begin(self) -> None:
        """Before the first step: the data set, the model and the framework are there."""
        self.before = _held()[0]
        procfs.reset_peak_memory()  # forget the peak of what was before

    def note(self) -> None:
        """After a step. The kernel keeps the peak of all pages: those of files stay as they are."""
        held, peak = _held()
        self.kept.append(held)
        self.peak = max(self.peak, peak)


def _held() -> tuple[int, int]:
    status = procfs.status("self")
    assert status is not None
    files = status.size("RssFile") or 0
    return (status.size("VmRSS") or 0) - files, (status.size("VmHWM") or 0) - files
