"""What this machine has, and what of a trial cannot be had on it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

from stepscope.capture.environment import cpu_model
from stepscope.sensors.gpus import visible_gpus
from stepscope.sensors.nvml import GpuFacts, NvmlUnavailable, open_nvml
from stepscope.studies.spec import Spec, level_text
from stepscope.trials.limits import Limits, Room, size_text


@dataclass(frozen=True)
class Here:
    """What trials can have on this machine."""

    room: Room
    gpus: tuple[str, ...] = ()
    """UUIDs of those that this process may use."""
    gpu_memory: int | None = None
    """Of the GPU that has most."""
    machine: str = ""
    """The hardware in words: what must not differ within a study."""

    @classmethod
    def look(cls) -> Here:
        gpus = _gpus()
        sizes = [int(gpu.memory_bytes or 0) for gpu in gpus]
        return cls(
            Room.here(),
            tuple(gpu.uuid for gpu in gpus),
            max(sizes, default=None),
            _machine([gpu.name for gpu in gpus]),
        )

    def limits(self, spec: Spec) -> Limits:
        """With so many GPUs as asked for, by their names here."""
        asked = spec.get("gpus")
        if not isinstance(asked, int):
            return spec.limits
        return replace(spec.limits, gpus=self.gpus[:asked])

    def lacks(self, spec: Spec) -> str:
        """Why a trial cannot be had here, in words; nothing if it can."""
        limits, room = spec.limits, self.room
        if limits.cpus is not None and limits.cpus > room.cpus:
            return f"{limits.cpus:g} CPUs cannot be had here: there are {room.cpus:g}"
        if limits.memory is not None and limits.memory > room.memory:
            return (
                f"{size_text(limits.memory)} of memory cannot be had here: there are "
                f"{size_text(room.memory)}"
            )
        return self._lacks_gpus(spec)

    def _lacks_gpus(self, spec: Spec) -> str:
        count = len(self.gpus)
        there = {0: "there is none", 1: "there is one"}.get(count, f"there are {count}")
        asked = spec.get("gpus")
        if isinstance(asked, int) and asked > count:
            return f"{asked} GPU{'s' if asked > 1 else ''} cannot be had here: {there}"
        if isinstance(asked, str) and asked and len(asked.split(",")) > count:
            return f"GPUs {asked} cannot be had here: {there}"
        if not self.gpus and spec.workload.device == "cuda":
            return f"device cuda cannot be had here: {there}"
        memory = spec.limits.gpu_memory
        if memory is not None and memory > (self.gpu_memory or 0):
            has = (
                f"the GPU has {size_text(self.gpu_memory)}" if self.gpu_memory else "there is none"
            )
            return f"{level_text('gpu_memory', memory)} of GPU memory cannot be had here: {has}"
        return ""


def _gpus() -> list[GpuFacts]:
    """The GPUs that this process may use."""
    try:
        nvml = open_nvml()
    except NvmlUnavailable:
        return []
    try:
        return [gpu.facts for gpu in visible_gpus(nvml.gpus, os.environ)]
    finally:
        nvml.close()


def _machine(gpus: Sequence[str]) -> str:
    cores = f"{os.cpu_count()} × {cpu_model() or 'unknown CPU'}"
    counts = [f"{gpus.count(name)} × {name}" for name in dict.fromkeys(gpus)]
    return ", ".join([cores, *counts])
