"""The processes on a GPU: memory of those of the run, and time that others take.

In a container the driver tells the host's process numbers, which cannot be matched: then those that
came after the start are taken for ours, and what follows from that is called an estimate.
"""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import ClassVar

from stepscope.sensors.gpu.nvml import NvmlGpu, Unreadable
from stepscope.sensors.gpu.sensors import (
    GpuSensor,
    MonitoredProcesses,
    Values,
    WatchedGpu,
    in_first_namespace,
)

_UNMATCHED = "process numbers cannot be matched in a container"
_MEMORY_BY_ARRIVAL = (
    f"{_UNMATCHED}: memory of the processes that came to the GPU after the run began"
)
_MEMORY_BY_RISE = (
    "the driver does not list processes here: memory in use less what was in use before the run"
)
_OTHERS_BY_ARRIVAL = f"{_UNMATCHED}: only those that were on the GPU before the run began"
_CANNOT_TELL = f"{_UNMATCHED}, and what was on the GPU before may be ours"
_NONE_LISTED = f"{_UNMATCHED}, and the driver does not list those that are on the GPU"


class ProcessOwnership:
    """Tells the processes of the run from others on the same GPUs."""

    def __init__(
        self,
        gpus: Sequence[WatchedGpu],
        processes: MonitoredProcesses,
        numbers_match: bool | None = None,
    ) -> None:
        self._processes = processes
        self._numbers_match = in_first_namespace() if numbers_match is None else numbers_match
        self._before = {watched.facts.uuid: _Before(watched.gpu) for watched in gpus}

    def listed(self, watched: WatchedGpu) -> list[tuple[int, float | None]]:
        """The processes on a GPU with their bytes, as the driver lists them."""
        processes = watched.gpu.processes()
        self._before[watched.facts.uuid].listed |= bool(processes)
        return processes

    def can_see(self, watched: WatchedGpu) -> bool:
        """Whether numbers match, or the driver has ever listed a process on this GPU."""
        return self._numbers_match or self._before[watched.facts.uuid].listed

    def of_run(self, watched: WatchedGpu, pids: Iterable[int]) -> set[int]:
        """Those that are of the run; Unreadable where nobody can tell."""
        if self._numbers_match:
            return set(pids) & set(self._processes.pids())
        if self._processes.ran_before:
            raise Unreadable(_CANNOT_TELL, for_good=True)
        return set(pids) - self._before[watched.facts.uuid].pids

    def guessed(self, ours: set[int]) -> bool:
        """Whether any was taken for ours because of when it came."""
        return not ours <= set(self._processes.pids())

    def risen(self, watched: WatchedGpu) -> float:
        """Bytes in use by everybody, beyond those before the run."""
        return max(0.0, watched.gpu.memory_used() - self._before[watched.facts.uuid].memory)


class _Before:
    """What was on a GPU before the run."""

    def __init__(self, gpu: NvmlGpu) -> None:
        self.pids: frozenset[int] = frozenset()
        self.memory = 0.0
        with contextlib.suppress(Unreadable):
            self.pids = frozenset(pid for pid, _ in gpu.processes())
        with contextlib.suppress(Unreadable):
            self.memory = gpu.memory_used()
        self.listed = bool(self.pids)
        """Whether the driver has ever listed a process here."""


class _OwnershipSensor(GpuSensor):
    """A sensor of one metric that depends on which processes are of the run."""

    by_arrival: ClassVar[str]
    """How it is estimated where numbers cannot be matched."""

    def __init__(self, gpus: Sequence[WatchedGpu], ownership: ProcessOwnership) -> None:
        super().__init__(gpus)
        self.ownership = ownership

    def of_run(self, watched: WatchedGpu, pids: Iterable[int]) -> set[int]:
        """Those that are of the run; notes where that is a guess."""
        try:
            ours = self.ownership.of_run(watched, pids)
        except Unreadable:
            self.estimated.clear()
            raise
        if self.ownership.guessed(ours):
            self.estimated[self.metrics[0]] = self.by_arrival
        return ours


class ProcessesSensor(_OwnershipSensor):
    """Device memory of the watched processes."""

    name = "gpu processes"
    metrics = ("gpu_memory_tree",)
    period = 1.0
    share = 0.0004
    by_arrival = _MEMORY_BY_ARRIVAL

    def values_of(self, watched: WatchedGpu) -> Values:
        return self.ask(watched, "gpu_memory_tree", by=lambda: (self._memory(watched),))

    def _memory(self, watched: WatchedGpu) -> float:
        processes = self.ownership.listed(watched)
        ours = self.of_run(watched, (pid for pid, _ in processes))
        if not self.ownership.can_see(watched):
            self.estimated["gpu_memory_tree"] = _MEMORY_BY_RISE
            return self.ownership.risen(watched)
        total = 0.0
        for pid, size in processes:
            if pid in ours and size is None:
                reason = "the driver does not tell the memory of single processes"
                raise Unreadable(reason, for_good=True)
            total += (size or 0.0) if pid in ours else 0.0
        return total


class OthersSensor(_OwnershipSensor):
    """Time that processes outside of the run took on a GPU, from the driver's own samples."""

    name = "gpu others"
    metrics = ("gpu_others",)
    period = 2.0
    share = 0.0007
    by_arrival = _OTHERS_BY_ARRIVAL

    SAMPLED_WITHIN_S = 1.0
    """The driver samples every 1/6 to 1 s: an empty answer means idle only over as long as this."""

    def __init__(self, gpus: Sequence[WatchedGpu], ownership: ProcessOwnership) -> None:
        super().__init__(gpus, ownership)
        lately_us = time.time_ns() // 1000 - int(self.SAMPLED_WITHIN_S * 1e6)
        self._seen_us = {watched.facts.uuid: lately_us for watched in gpus}
        self._next_at: dict[str, float] = {}

    def values_of(self, watched: WatchedGpu) -> Values:
        now = time.monotonic()
        if now < self._next_at.get(watched.facts.uuid, 0.0):
            return {}
        self._next_at[watched.facts.uuid] = now + self.SAMPLED_WITHIN_S
        return self.ask(watched, "gpu_others", by=lambda: (self._share(watched),))

    def _share(self, watched: WatchedGpu) -> float:
        seen_us = self._seen_us[watched.facts.uuid]
        samples = watched.gpu.process_samples(seen_us)
        if samples and not self.ownership.can_see(watched) and not self.ownership.listed(watched):
            raise Unreadable(_NONE_LISTED)
        self._seen_us[watched.facts.uuid] = max((s.at_us for s in samples), default=seen_us)
        shares: dict[int, list[float]] = defaultdict(list)
        for sample in samples:
            shares[sample.pid].append(sample.share)
        ours = self.of_run(watched, shares)
        return min(1.0, sum(fmean(each) for pid, each in shares.items() if pid not in ours))
