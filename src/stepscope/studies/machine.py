"""The resources of this machine, and why a trial is not available on it."""

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
    """The resources that trials can use on this machine."""

    resources: MachineResources
    gpus: tuple[str, ...] = ()
    """UUIDs of the GPUs that this process may use."""
    gpu_memory: int | None = None
    """Bytes of the largest GPU."""
    machine: str = ""
    """The hardware, such as `16 × EPYC 7763, 1 × A100`. It must not change within a study."""

    @classmethod
    def detect(cls) -> MachineInfo:
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
        """Return the limits with the UUIDs of the first `gpu_count` GPUs of this machine."""
        return limits if gpu_count is None else replace(limits, gpus=self.gpus[:gpu_count])

    def unavailable_reason(self, spec: TrialSpec) -> str:
        """Return why a trial cannot run on this machine; empty if it can."""
        limits, resources = spec.limits, self.resources
        if limits.cpus is not None and limits.cpus > resources.cpus:
            return f"{limits.cpus:g} CPUs requested, but {_only(resources.cpus)}"
        if limits.memory is not None and limits.memory > resources.memory:
            return (
                f"{size_text(limits.memory)} of memory requested, but only "
                f"{size_text(resources.memory)} is available"
            )
        count = len(self.gpus)
        requested = spec.get("gpus")
        if isinstance(requested, int) and requested > count:
            return f"{requested} GPU{'s' if requested > 1 else ''} requested, but {_only(count)}"
        if isinstance(requested, str) and len(parse_gpus(requested)) > count:
            return f"GPUs {requested} requested, but {_only(count)}"
        if not self.gpus and spec.workload.needs_gpu:
            return f"device {spec.workload.device} is not available on this machine: it has no GPU"
        memory = spec.limits.gpu_memory
        if memory is not None and memory > (self.gpu_memory or 0):
            size = self.gpu_memory
            has = f"the GPU has {size_text(size)}" if size else "this machine has no GPU"
            return f"{level_text('gpu_memory', memory)} of GPU memory requested, but {has}"
        return ""


def _only(count: float) -> str:
    if not count:
        return "none is available"
    return f"only {count:g} {'is' if count == 1 else 'are'} available"
