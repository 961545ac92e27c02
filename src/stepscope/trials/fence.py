"""The fence around a trial: its limits, by the strictest means that this machine allows.

    CPUs, whole     affinity, inherited by all that the trial starts, and read again all the while
    CPUs, a part    a quota of its control group; without one, affinity to the next whole number
    host memory     its control group; without one a watchdog (`soft`), which is late by nature
    GPU memory      the framework's own cap
    GPUs            CUDA_VISIBLE_DEVICES

`facts` says which means it was.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stepscope.errors import CannotTry
from stepscope.sensors.gpus import visible_gpus
from stepscope.sensors.nvml import GpuFacts, NvmlUnavailable, open_nvml
from stepscope.trials import kin
from stepscope.trials.affinity import Affinity, choose_cpus, read_cores
from stepscope.trials.cgroups import PREFIX, TrialGroup, make_group
from stepscope.trials.limits import Limits, Room, check_limits
from stepscope.trials.watchdog import Breach, Watchdog

__all__ = ["THREAD_VARIABLES", "Breach", "Fence"]

THREAD_VARIABLES = (
    "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "BLIS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
)  # fmt: skip

_GPUS = "CUDA_VISIBLE_DEVICES"
_SOFT_NOTE = "does not bound the page cache"


@dataclass(frozen=True)
class _Counted:
    """What a control group told of the trial."""

    kills: int | None = None
    peak: int | None = None
    counters: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, group: TrialGroup) -> _Counted:
        return cls(group.oom_kills(), group.peak(), group.counters())


class Fence:
    """The limits of one trial, from before its first process until after its last."""

    def __init__(
        self,
        limits: Limits,
        token: str,
        ranks: int = 1,
        workers: int = 0,
        gpus: tuple[str, ...] | None = None,
    ) -> None:
        """`build` is how to make one: this alone limits nothing."""
        self.limits = limits
        self._token = token
        self._ranks = ranks
        self._workers = workers
        self._gpus = gpus
        self._group: TrialGroup | None = None
        self._affinity: Affinity | None = None
        self._watchdog: Watchdog | None = None
        self._cpus: dict[str, Any] = {}
        self._memory: dict[str, Any] = {}
        self._replaced: dict[str, str] = {}
        self._counted = _Counted()

    @classmethod
    def build(cls, limits: Limits, token: str, ranks: int = 1, workers: int = 0) -> Fence:
        """Prepare all limits; CannotTry names one that cannot be had at all."""
        check_limits(limits, Room.here())
        gpus = None if limits.gpus is None else _uuids(limits.gpus)
        fence = cls(limits, token, ranks, workers, gpus)
        fence._settle(*_make_group(f"{PREFIX}{token}", limits.memory, fence._quota))
        return fence

    @property
    def threads(self) -> int | None:
        """Threads that a framework is told to use, per rank; None: as it likes."""
        cpus = self.limits.cpus
        return None if cpus is None else max(1, int(cpus) // self._ranks)

    def group_paths(self) -> tuple[Path, ...]:
        """For the guard: what must not outlive the runner."""
        return self._group.folders if self._group else ()

    def environment(self, base: Mapping[str, str]) -> dict[str, str]:
        """The environment of the trial: marked as its own, with threads and GPUs as limited."""
        environment = {**base, kin.VARIABLE: self._token}
        if self.threads is not None:
            wanted = dict.fromkeys(THREAD_VARIABLES, str(self.threads))
            self._replaced = {
                name: base[name] for name in wanted if base.get(name, wanted[name]) != wanted[name]
            }
            environment |= wanted
        if self._gpus is not None:
            environment[_GPUS] = ",".join(self._gpus)
        return environment

    def place(self, pid: int) -> None:
        """Put the first process of the trial inside, at once: what it starts is inside too."""
        try:
            self._place_in_group(pid)
            if self._affinity is not None:
                self._affinity.place(pid)
        except ProcessLookupError:  # it has ended already
            pass
        except OSError as error:
            raise CannotTry(
                f"The trial cannot be bound to CPUs: {error.strerror}", "Leave --cpus out"
            ) from None

    def inspect(self, pids: Collection[int]) -> Breach | None:
        """Look at the living processes of the trial, some times a second."""
        if self._affinity is not None:
            self._affinity.inspect(pids)
        return self._watchdog.inspect(pids) if self._watchdog else None

    def cgroup_kills(self) -> int | None:
        """Processes that the kernel killed for the limit of memory; None without a group."""
        return self._count().kills

    def peak_memory(self) -> int | None:
        """The most that the control group held at once; None where there is none to tell."""
        return self._count().peak

    def counters(self) -> dict[str, Any]:
        """What the control group counted, as evidence."""
        return self._count().counters

    def close(self) -> list[str]:
        """Remove the groups, with whoever is still in them; returns those that stay."""
        if self._group is None:
            return []
        self._count()
        group, self._group = self._group, None
        group.kill_all()
        return group.remove()

    def facts(self) -> dict[str, Any]:
        """What was limited and how, for run.json."""
        asked = self.limits
        facts: dict[str, Any] = {}
        if asked.cpus is not None:
            facts["cpus"] = {"asked": asked.cpus, **self._cpu_facts()}
        if asked.memory is not None:
            facts["memory"] = {"asked": asked.memory, **self._memory}
        if asked.gpu_memory is not None:
            facts["gpu_memory"] = {"asked": asked.gpu_memory, "by": "framework"}
        if self._gpus is not None:
            facts["gpus"] = {"asked": asked.gpus, "by": _GPUS, "uuids": self._gpus}
        return facts

    @property
    def _quota(self) -> float | None:
        """CPUs where they are no whole number, which affinity cannot express."""
        cpus = self.limits.cpus
        return cpus if cpus is not None and cpus != int(cpus) else None

    def _settle(self, group: TrialGroup | None, why_not: str) -> None:
        """Take what the control group gives, and find other means for the rest."""
        self._group = group
        given = group.controllers if group else frozenset()
        if self.limits.memory is not None:
            if group and "memory" in given:
                self._memory = {"by": group.version}
            else:
                self._watchdog = Watchdog(self.limits.memory)
                self._memory = {"by": "soft", "why": why_not, "note": _SOFT_NOTE}
        if self.limits.cpus is not None:
            if self._quota is not None and "cpu" in given:
                self._cpus = {"by": "quota"}
            else:
                self._bind(self.limits.cpus, why_not)

    def _bind(self, cpus: float, why_no_quota: str) -> None:
        count = math.ceil(cpus)
        chosen = choose_cpus(count, os.sched_getaffinity(0), read_cores())
        self._affinity = Affinity(chosen)
        self._cpus = {"by": "affinity", "cpus": list(chosen)}
        if self._quota is not None:
            self._cpus["note"] = f"rounded up to {count}: no quota can be set ({why_no_quota})"

    def _place_in_group(self, pid: int) -> None:
        if self._group is None:
            return
        try:
            self._group.place(pid)
        except ProcessLookupError:
            raise
        except OSError as error:
            self._group.remove()
            self._settle(None, f"the trial cannot enter its control group: {error.strerror}")

    def _cpu_facts(self) -> dict[str, Any]:
        facts: dict[str, Any] = {**self._cpus, "threads": self.threads}
        if self._affinity is not None:
            facts["masks_checked"] = self._affinity.masks_checked
            facts["escaped"] = self._affinity.escaped
        if self._replaced:
            facts["replaced"] = self._replaced
        processes = self._ranks * (1 + self._workers)
        if self.limits.cpus is not None and processes > max(1, self.limits.cpus):
            facts["crowded"] = f"{processes} ranks and loader workers share them"
        return facts

    def _count(self) -> _Counted:
        if self._group is not None:
            self._counted = _Counted.of(self._group)
        return self._counted


def _make_group(
    name: str, memory: int | None, quota: float | None
) -> tuple[TrialGroup | None, str]:
    """A group for as much as can be limited by one, and why it is not all."""
    reason = ""
    for part in dict.fromkeys(((memory, quota), (memory, None), (None, quota))):
        if part == (None, None):
            continue
        made = make_group(name, *part)
        if isinstance(made, TrialGroup):
            return made, reason
        reason = reason or made.reason
    return None, reason


def _uuids(names: Sequence[str]) -> tuple[str, ...]:
    """GPUs by what cannot be mistaken: CUDA may count them in another order than nvidia-smi."""
    if not names:
        return ()
    try:
        nvml = open_nvml()
    except NvmlUnavailable as error:
        raise CannotTry(
            f"--gpus {','.join(names)} cannot be had: {error}", "Leave --gpus out"
        ) from None
    try:
        there = [gpu.facts for gpu in visible_gpus(nvml.gpus, os.environ)]
    finally:
        nvml.close()
    return tuple(_uuid(name, there) for name in names)


def _uuid(name: str, there: Sequence[GpuFacts]) -> str:
    for gpu in there:
        by_number = name.isdigit() and gpu.index == int(name) and gpu.mig_of is None
        if by_number or gpu.uuid.startswith(name):
            return gpu.uuid
    listed = ", ".join(gpu.label for gpu in there) or "none"
    raise CannotTry(f"There is no GPU {name} for this process", f"There is: {listed}")
