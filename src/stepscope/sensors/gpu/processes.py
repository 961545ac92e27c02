"""The processes on a GPU: memory of the run, and time used by other processes.

In a container the driver reports the host's pids, which cannot be matched. Then processes that
appear after the start are attributed to the run, and the values are marked as estimates.
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
    MonitoredGpu,
    MonitoredProcesses,
    Values,
    in_initial_pid_namespace,
)

_UNMATCHED = "PIDs cannot be matched in a container"
_MEMORY_BY_START_TIME = (
    f"{_UNMATCHED}, so all processes that appeared on the GPU after the run started are counted"
)
_MEMORY_BY_INCREASE = (
    "the driver does not list processes, so the increase since the start of the run is used"
)
_OTHERS_BY_START_TIME = (
    f"{_UNMATCHED}, so only processes that used the GPU before the run are counted"
)
_AMBIGUOUS = f"{_UNMATCHED}, and processes already on the GPU may belong to the run"
_NONE_LISTED = f"{_UNMATCHED}, and the driver does not list the processes on the GPU"


class ProcessOwnership:
    """Distinguishes processes of the run from other processes on the same GPUs."""

    def __init__(
        self,
        gpus: Sequence[MonitoredGpu],
        processes: MonitoredProcesses,
        pids_match: bool | None = None,
    ) -> None:
        self._processes = processes
        self._numbers_match = in_initial_pid_namespace() if pids_match is None else pids_match
        self._before = {monitored.facts.uuid: _Before(monitored.gpu) for monitored in gpus}

    def listed(self, monitored: MonitoredGpu) -> list[tuple[int, float | None]]:
        """Return the processes on a GPU with their memory, as the driver lists them."""
        processes = monitored.gpu.processes()
        self._before[monitored.facts.uuid].listed |= bool(processes)
        return processes

    def can_see(self, monitored: MonitoredGpu) -> bool:
        """Whether pids match, or the driver has ever listed a process on this GPU."""
        return self._numbers_match or self._before[monitored.facts.uuid].listed

    def of_run(self, monitored: MonitoredGpu, pids: Iterable[int]) -> set[int]:
        """Return the pids of the run; raises Unreadable if they cannot be determined."""
        if self._numbers_match:
            return set(pids) & set(self._processes.pids())
        if self._processes.ran_before:
            raise Unreadable(_AMBIGUOUS, permanent=True)
        return set(pids) - self._before[monitored.facts.uuid].pids

    def is_guess(self, run_pids: set[int]) -> bool:
        """Whether any pid was attributed to the run by its start time only."""
        return not run_pids <= set(self._processes.pids())

    def memory_increase(self, monitored: MonitoredGpu) -> float:
        """Return the increase of the memory in use by all processes since before the run."""
        return max(0.0, monitored.gpu.memory_used() - self._before[monitored.facts.uuid].memory)


class _Before:
    """Processes and memory in use on a GPU before the run."""

    def __init__(self, gpu: NvmlGpu) -> None:
        self.pids: frozenset[int] = frozenset()
        self.memory = 0.0
        with contextlib.suppress(Unreadable):
            self.pids = frozenset(pid for pid, _ in gpu.processes())
        with contextlib.suppress(Unreadable):
            self.memory = gpu.memory_used()
        self.listed = bool(self.pids)
        """Whether the driver has ever listed a process on this GPU."""


class _OwnershipSensor(GpuSensor):
    """A sensor of one metric that depends on which processes belong to the run."""

    by_start_time: ClassVar[str]
    """The estimation method if pids cannot be matched."""

    def __init__(self, gpus: Sequence[MonitoredGpu], ownership: ProcessOwnership) -> None:
        super().__init__(gpus)
        self.ownership = ownership

    def of_run(self, monitored: MonitoredGpu, pids: Iterable[int]) -> set[int]:
        """Return the pids of the run; marks the metric as estimated if that is a guess."""
        try:
            run_pids = self.ownership.of_run(monitored, pids)
        except Unreadable:
            self.estimated.clear()
            raise
        if self.ownership.is_guess(run_pids):
            self.estimated[self.metrics[0]] = self.by_start_time
        return run_pids


class ProcessesSensor(_OwnershipSensor):
    """Device memory of the monitored processes."""

    name = "gpu processes"
    metrics = ("gpu_memory_run",)
    period = 1.0
    share = 0.0004
    by_start_time = _MEMORY_BY_START_TIME

    def values_of(self, monitored: MonitoredGpu) -> Values:
        return self.query(monitored, "gpu_memory_run", by=lambda: (self._memory(monitored),))

    def _memory(self, monitored: MonitoredGpu) -> float:
        processes = self.ownership.listed(monitored)
        run_pids = self.of_run(monitored, (pid for pid, _ in processes))
        if not self.ownership.can_see(monitored):
            self.estimated["gpu_memory_run"] = _MEMORY_BY_INCREASE
            return self.ownership.memory_increase(monitored)
        total = 0.0
        for pid, size in processes:
            if pid in run_pids and size is None:
                reason = "the driver does not report memory per process"
                raise Unreadable(reason, permanent=True)
            total += (size or 0.0) if pid in run_pids else 0.0
        return total


class OtherProcessesSensor(_OwnershipSensor):
    """GPU time of processes outside the run, from the samples of the driver."""

    name = "gpu other processes"
    metrics = ("gpu_other_processes",)
    period = 2.0
    share = 0.0007
    by_start_time = _OTHERS_BY_START_TIME

    SAMPLED_WITHIN_S = 1.0
    """The driver samples every 1/6 to 1 s: an empty result means idle only over this time."""

    def __init__(self, gpus: Sequence[MonitoredGpu], ownership: ProcessOwnership) -> None:
        super().__init__(gpus, ownership)
        lately_us = time.time_ns() // 1000 - int(self.SAMPLED_WITHIN_S * 1e6)
        self._seen_us = {monitored.facts.uuid: lately_us for monitored in gpus}
        self._next_at: dict[str, float] = {}

    def values_of(self, monitored: MonitoredGpu) -> Values:
        now = time.monotonic()
        if now < self._next_at.get(monitored.facts.uuid, 0.0):
            return {}
        self._next_at[monitored.facts.uuid] = now + self.SAMPLED_WITHIN_S
        return self.query(monitored, "gpu_other_processes", by=lambda: (self._share(monitored),))

    def _share(self, monitored: MonitoredGpu) -> float:
        seen_us = self._seen_us[monitored.facts.uuid]
        samples = monitored.gpu.process_samples(seen_us)
        if (
            samples
            and not self.ownership.can_see(monitored)
            and not self.ownership.listed(monitored)
        ):
            raise Unreadable(_NONE_LISTED)
        self._seen_us[monitored.facts.uuid] = max((s.at_us for s in samples), default=seen_us)
        shares: dict[int, list[float]] = defaultdict(list)
        for sample in samples:
            shares[sample.pid].append(sample.share)
        run_pids = self.of_run(monitored, shares)
        return min(1.0, sum(fmean(each) for pid, each in shares.items() if pid not in run_pids))
