"""What this machine has, and what of a trial cannot be had on it."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from stepscope.records import Gpu
from stepscope.sensors import procfs
from stepscope.sensors.gpu.nvml import NvmlUnavailable, open_nvml
from stepscope.sensors.gpu.selection import select_gpus
from stepscope.studies.trial_spec import TrialSpec, level_text
from stepscope.trials.limits.spec import Limits, MachineResources, parse_gpus, size_text


@dataclass(frozen=True)
class MachineInfo:
    """What trials can have on this machine."""

    resources: MachineResources
    gpus: tuple[str, ...] = ()
    """UUIDs of those that this process may use."""
    gpu_memory: int | None = None
    """Of the GPU that has most."""
    machine: str = ""
    """The hardware in words: what must not differ within a study."""

    @classmethod
    def look(cls) -> MachineInfo:
        gpus: Sequence[Gpu] = ()
        with contextlib.suppress(NvmlUnavailable), open_nvml() as nvml:
            gpus = [gpu.facts for gpu in select_gpus(nvml.gpus, os.environ).gpus]
        hardware = Counter({procfs.cpuinfo().model or "unknown CPU": os.cpu_count() or 1})
        hardware.update(gpu.model for gpu in gpus)
        return cls(
            MachineResources.here(),
            tuple(gpu.uuid for gpu in gpus),
            max((int(gpu.memory_bytes or 0) for gpu in gpus), default=None),
            ", ".join(f"{count} × {name}" for name, count in hardware.items()),
        )

    def limits(self, limits: Limits, gpu_count: int | None) -> Limits:
        """With the first so many GPUs of this machine, by their names here."""
        return limits if gpu_count is None else replace(limits, gpus=self.gpus[:gpu_count])

    def lacks(self, spec: TrialSpec) -> str:
        """Why a trial cannot be had here, in words; nothing if it can."""
        limits, resources = spec.limits, self.resources
        if limits.cpus is not None and limits.cpus > resources.cpus:
            return f"{limits.cpus:g} CPUs cannot be had here: there are {resources.cpus:g}"
        if limits.memory is not None and limits.memory > resources.memory:
            return (
                f"{size_text(limits.memory)} of memory cannot be had here: there are "
                f"{size_text(resources.memory)}"
            )
        count = len(self.gpus)
        there = {0: "there is none", 1: "there is one"}.get(count, f"there are {count}")
        asked = spec.get("gpus")
        if isinstance(asked, int) and asked > count:
            return f"{asked} GPU{'s' if asked > 1 else ''} cannot be had here: {there}"
        if isinstance(asked, str) and len(parse_gpus(asked)) > count:
            return f"GPUs {asked} cannot be had here: {there}"
        if not self.gpus and spec.workload.needs_gpu:
            return f"device {spec.workload.device} cannot be had here: {there}"
        memory = spec.limits.gpu_memory
        if memory is not None and memory > (self.gpu_memory or 0):
            size = self.gpu_memory
            has = f"the GPU has {size_text(size)}" if size else "there is none"
            return f"{level_text('gpu_memory', memory)} of GPU memory cannot be had here: {has}"
        return ""
