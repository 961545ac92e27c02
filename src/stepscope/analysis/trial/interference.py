"""Interference with a measurement: other processes on CPUs or GPUs, the hypervisor, heat.

Trials and `explain` use the same rules.
"""

from __future__ import annotations

from dataclasses import dataclass

from stepscope.analysis.bottleneck.thresholds import limit
from stepscope.analysis.run.data import RunData
from stepscope.analysis.run.series import amount_of
from stepscope.records.trial import InterferenceReason


def has_cpu_interference(other: float | None, busy: float | None, machine: float | None) -> bool:
    """Whether other processes took CPU time that the run may have needed.

    This is only possible on a busy machine: otherwise a CPU is nearly always free.
    """
    if other is None or busy is None or machine is None:
        return False
    return other > limit("other_cores") and busy > limit("machine_busy") * machine


def has_gpu_interference(share: float | None) -> bool:
    """Whether kernels of other processes ran for a significant share of the time."""
    return share is not None and share >= limit("other_gpu_use")


@dataclass(frozen=True)
class Interference:
    """Activity outside the run over a time span; None if unknown."""

    machine_cores: float | None = None
    busy_cores: float | None = None  # mean over the time span
    other_cores: float | None = None  # used by neither the run nor its monitor
    steal_cores: float | None = None  # taken by the hypervisor
    gpu_share: float | None = None  # time with kernels of other processes on a GPU of the run
    thermal_share: float | None = None  # time with thermal throttling of a GPU

    @property
    def on_cpus(self) -> bool:
        return has_cpu_interference(self.other_cores, self.busy_cores, self.machine_cores)

    def reasons(self) -> tuple[InterferenceReason, ...]:
        """Return the detected kinds of interference; empty if there are none or if unknown."""
        reasons = []
        if self.on_cpus:
            reasons.append(InterferenceReason("cpu", self.other_cores, self.machine_cores))
        steal = self.steal_cores
        if steal is not None and steal >= limit("steal") * (self.machine_cores or 1.0):
            reasons.append(InterferenceReason("hypervisor", steal, self.machine_cores))
        if has_gpu_interference(self.gpu_share):
            reasons.append(InterferenceReason("gpu", self.gpu_share))
        if self.thermal_share is not None and self.thermal_share >= limit("clock_throttled"):
            reasons.append(InterferenceReason("heat", self.thermal_share))
        return tuple(reasons)


def interference(data: RunData, begin_ns: int | None, end_ns: int | None) -> Interference:
    machine = data.facts.environment.cpu.logical or data.cpu_allowed
    if begin_ns is None or end_ns is None or end_ns <= begin_ns:
        return Interference(machine)

    def cores(metric: str, entity: str) -> float | None:
        amount = amount_of(data.of(metric, entity), begin_ns, end_ns)
        return amount.total / amount.seconds if amount and amount.seconds > 0 else None

    def worst_gpu(metric: str) -> float | None:
        readings = (gpu.of(metric).between(begin_ns, end_ns) for gpu in data.used_gpus)
        return max((float(each.value.mean()) for each in readings if len(each)), default=None)

    busy, own = cores("host_cpu", "host"), cores("cpu", "tree")
    other = None
    if busy is not None and own is not None:
        other = max(0.0, busy - own - (cores("monitor_cpu", "monitor") or 0.0))
    return Interference(
        machine_cores=machine,
        busy_cores=busy,
        other_cores=other,
        steal_cores=cores("host_steal", "host"),
        gpu_share=worst_gpu("gpu_other_processes"),
        thermal_share=worst_gpu("gpu_throttled_thermal"),
    )
