"""What a probe reads while it trains: memory and time, of the CPU or of a GPU and its allocator."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from stepscope.workloads.frameworks.torch.device import cap_memory
from stepscope.workloads.frameworks.torch.loop import Stepper
from stepscope.workloads.probing import Ask

_MOST_EVENTS = 1_000_000


class HostMeter:
    """Memory and time where the CPU computes: the process has no allocator to ask."""

    def begin(self, ask: Ask) -> None:
        torch.set_num_threads(len(os.sched_getaffinity(0)))

    def forget_peaks(self) -> None: ...

    def counts(self) -> tuple[int, int]:
        """Retries, and how often there was no memory."""
        return 0, 0

    def peaks(self) -> tuple[int, int]:
        held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return held, held

    def allocated(self) -> int:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * resource.getpagesize()

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
    """The allocator's own figures, and the device's clock."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free_before: int | None = None
        self._counted = 0, 0

    def begin(self, ask: Ask) -> None:
        super().begin(ask)
        self._free_before = ask.free_before
        torch.cuda.set_device(self._device)
        cap_memory(self._device, ask.cap)
        if ask.trace:
            torch.cuda.memory._record_memory_history("all", context=None, max_entries=_MOST_EVENTS)

    def forget_peaks(self) -> None:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)
        self._counted = self._counts()

    def counts(self) -> tuple[int, int]:
        retries, ooms = self._counts()
        return retries - self._counted[0], ooms - self._counted[1]

    def _counts(self) -> tuple[int, int]:
        """Since the process began."""
        if not _has_begun():
            return 0, 0
        stats = torch.cuda.memory_stats(self._device)
        return int(stats.get("num_alloc_retries", 0)), int(stats.get("num_ooms", 0))

    def peaks(self) -> tuple[int, int]:
        if not _has_begun():
            return 0, 0
        allocated = torch.cuda.max_memory_allocated(self._device)
        return allocated, torch.cuda.max_memory_reserved(self._device)

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


def _has_begun() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
