"""What changed a measurement from outside: other processes on CPUs or GPU, the hypervisor, heat.

One rule for trials and for the bottleneck of any run; its thresholds are in the table.
"""

from __future__ import annotations

from dataclasses import dataclass

from stepscope.analysis.bottleneck.thresholds import limit
from stepscope.analysis.run.data import RunData
from stepscope.analysis.run.series import amount_of
from stepscope.records.trial import InterferenceReason


def takes_cores(others: float | None, busy: float | None, machine: float | None) -> bool:
    """Whether other processes took CPU time that the run may have wanted.

    Others only take something away where little is left: on a machine that is less busy there was
    nearly always a CPU free.
    """
    if others is None or busy is None or machine is None:
        return False
    return others > limit("others_cores") and busy > limit("busy_machine") * machine


def takes_gpu(share: float | None) -> bool:
    """Whether kernels of other processes ran for a part of the time that matters."""
    return share is not None and share >= limit("others_gpu")


@dataclass(frozen=True)
class Interference:
    """What others did over a stretch of time; None where that is not known."""

    machine_cores: float | None = None
    busy_cores: float | None = None  # on average, with whatever it was
    other_cores: float | None = None  # busy with neither the run nor its monitor
    stolen_cores: float | None = None  # given to others by the hypervisor
    gpu_share: float | None = None
    """Of the time, in which kernels of other processes ran on a GPU of the run."""
    heat_share: float | None = None  # of the time, in which heat held the clocks of a GPU down

    @property
    def on_cpus(self) -> bool:
        return takes_cores(self.other_cores, self.busy_cores, self.machine_cores)

    def reasons(self) -> tuple[InterferenceReason, ...]:
        """None where the trial was alone, or nobody can tell."""
        found = []
        if self.on_cpus:
            found.append(InterferenceReason("cpu", self.other_cores, self.machine_cores))
        stolen = self.stolen_cores
        if stolen is not None and stolen >= limit("stolen_cores") * (self.machine_cores or 1.0):
            found.append(InterferenceReason("hypervisor", stolen, self.machine_cores))
        if takes_gpu(self.gpu_share):
            found.append(InterferenceReason("gpu", self.gpu_share))
        if self.heat_share is not None and self.heat_share >= limit("slowed"):
            found.append(InterferenceReason("heat", self.heat_share))
        return tuple(found)


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
    others = None
    if busy is not None and own is not None:
        others = max(0.0, busy - own - (cores("watcher_cpu", "watcher") or 0.0))
    return Interference(
        machine_cores=machine,
        busy_cores=busy,
        other_cores=others,
        stolen_cores=cores("host_steal", "host"),
        gpu_share=worst_gpu("gpu_others"),
        heat_share=worst_gpu("gpu_slowed_heat"),
    )
