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
import time
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path

from stepscope.errors import CannotTry
from stepscope.records import Outcome
from stepscope.records import trial as records
from stepscope.records.trial import CpuLimit, GpuLimit, MemoryLimit
from stepscope.sensors import procfs
from stepscope.sensors.gpu.nvml import NvmlUnavailable, open_nvml
from stepscope.sensors.gpu.selection import select_gpus
from stepscope.trials.limits.affinity import Affinity, choose_cpus, read_cores
from stepscope.trials.limits.cgroups import PREFIX, GroupCounts, TrialGroup, make_group
from stepscope.trials.limits.spec import (
    THREAD_VARIABLES,
    Limits,
    MachineResources,
    check_limits,
    size_text,
)
from stepscope.trials.outcome import Stopped
from stepscope.trials.processes import trial_processes

_GPUS = "CUDA_VISIBLE_DEVICES"
_MOST_SHARE = 0.05
"""PSS costs some 15 ms per gigabyte and process: reading it may take this part of the time."""
_NAMED = 5


class Watchdog:
    """The soft limit of host memory: adds up what the processes of a trial hold.

    It is late by nature, and cannot see the page cache or files in /dev/shm that nobody has mapped.
    Resident memory is read first: it counts shared pages once for each process, so that a sum
    within the limit is proof. Only beyond it proportional memory (PSS) is read, and again only
    once resident memory has grown by what was left.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._within_until = limit  # resident bytes up to which the limit is known to be kept
        self._next_pss = 0.0

    def inspect(self, pids: Collection[int]) -> Stopped | None:
        """Why the trial must end, if it must."""
        held = {pid: procfs.statm(pid) or procfs.Resident(0, 0) for pid in pids}
        resident = sum(each.total for each in held.values())
        begun = time.monotonic()
        if resident <= max(self._limit, self._within_until) or begun < self._next_pss:
            return None
        shares = {}
        for pid, each in held.items():
            memory = procfs.proportional_memory(pid)
            # None: it has ended, or this kernel does not tell.
            shares[pid] = each.total - each.shared if memory is None else memory.pss
        used = sum(shares.values())
        now = time.monotonic()
        self._next_pss = now + (now - begun) / _MOST_SHARE
        self._within_until = resident + self._limit - used
        if used <= self._limit:
            return None
        largest = sorted(shares, key=shares.__getitem__, reverse=True)[:_NAMED]
        reason = f"its processes held {size_text(used)}, and {size_text(self._limit)} are allowed"
        evidence = {"limit": self._limit, "pss": used, "rss": resident}
        named = {str(pid): shares[pid] for pid in largest}
        return Stopped(Outcome.HOST_OOM, reason, {**evidence, "largest": named})


class Fence:
    """The limits of one trial, from before its first process until after its last."""

    def __init__(self, limits: Limits, token: str, ranks: int = 1, workers: int = 0) -> None:
        """CannotTry names a limit that cannot be had at all."""
        check_limits(limits, MachineResources.here())
        self.limits = limits
        self._token = token
        self._processes = ranks * (1 + workers)
        self.threads = None if limits.cpus is None else max(1, int(limits.cpus) // ranks)
        """That the framework is told to use in each rank; None is as many as it likes."""
        self._gpus = _gpu_facts(limits)
        self._group: TrialGroup | None = None
        self._counts = GroupCounts()
        self._affinity: Affinity | None = None
        self._watchdog: Watchdog | None = None
        self._cpus: CpuLimit | None = None
        self._memory: MemoryLimit | None = None
        self._replaced: dict[str, str] = {}
        # A quota only for a part of a CPU, which affinity cannot express.
        is_part = limits.cpus is not None and limits.cpus != int(limits.cpus)
        quota = limits.cpus if is_part else None
        reason = ""
        for part in dict.fromkeys(((limits.memory, quota), (limits.memory, None), (None, quota))):
            if part == (None, None):
                continue
            made = make_group(f"{PREFIX}{token}", *part)
            if isinstance(made, TrialGroup):
                self._group = made
                break
            reason = reason or made.reason
        self._enforce(reason)

    def _enforce(self, reason: str) -> None:
        """Use what the control group gives, and other means for the rest, which it lacks for a
        reason."""
        limits, group = self.limits, self._group
        controllers = group.controllers if group else frozenset()
        if limits.memory is not None and group and "memory" in controllers:
            self._memory = MemoryLimit(limits.memory, group.version)
        elif limits.memory is not None:
            self._watchdog = Watchdog(limits.memory)
            note = "does not bound the page cache"
            self._memory = MemoryLimit(limits.memory, "soft", reason, note)
        if limits.cpus is None:
            return
        is_whole = limits.cpus == int(limits.cpus)
        if not is_whole and "cpu" in controllers:
            self._cpus = CpuLimit(limits.cpus, "quota")
            return
        count = math.ceil(limits.cpus)
        chosen = choose_cpus(count, os.sched_getaffinity(0), read_cores())
        self._affinity = Affinity(chosen)
        note = "" if is_whole else f"rounded up to {count}: no quota can be set ({reason})"
        self._cpus = CpuLimit(limits.cpus, "affinity", chosen, note)

    def group_paths(self) -> tuple[Path, ...]:
        """For the guard: what must not outlive the runner."""
        return self._group.folders if self._group else ()

    def environment(self, base: Mapping[str, str]) -> dict[str, str]:
        """The environment of the trial: marked as its own, with threads and GPUs as limited."""
        environment = {**base, trial_processes.VARIABLE: self._token}
        if self.threads is not None:
            wanted = dict.fromkeys(THREAD_VARIABLES, str(self.threads))
            self._replaced = {
                name: base[name] for name in wanted if base.get(name, wanted[name]) != wanted[name]
            }
            environment |= wanted
        if self._gpus is not None:
            environment[_GPUS] = ",".join(self._gpus.uuids or ())
        return environment

    def place(self, pid: int) -> None:
        """Put the first process of the trial inside, at once: what it starts is inside too."""
        try:
            if group := self._group:
                try:
                    group.place(pid)
                except ProcessLookupError:
                    raise
                except OSError as error:
                    group.remove()
                    self._group = None
                    self._enforce(f"the trial cannot enter its control group: {error.strerror}")
            if self._affinity is not None:
                self._affinity.place(pid)
        except ProcessLookupError:  # it has ended already
            pass
        except OSError as error:
            problem = f"The trial cannot be bound to CPUs: {error.strerror}"
            raise CannotTry(problem, "Leave --cpus out") from None

    def inspect(self, pids: Collection[int]) -> Stopped | None:
        """Look at the living processes of the trial, some times a second."""
        if self._affinity is not None:
            self._affinity.inspect(pids)
        return self._watchdog.inspect(pids) if self._watchdog else None

    def counts(self) -> GroupCounts:
        """What the control group counted, also once it is removed."""
        if self._group is not None:
            self._counts = self._group.counts()
        return self._counts

    def close(self) -> list[str]:
        """Remove the groups, with all processes that are still in them; returns those that stay."""
        if self._group is None:
            return []
        self.counts()
        group, self._group = self._group, None
        group.kill_all()
        return group.remove()

    def facts(self) -> records.LimitFacts:
        limits, memory, cpus, affinity = self.limits, self._memory, self._cpus, self._affinity
        if memory is not None and not memory.is_soft:
            memory = replace(memory, peak=self.counts().peak)
        if cpus is not None:
            crowded = ""
            if self._processes > max(1, cpus.asked):
                crowded = f"{self._processes} ranks and loader workers share them"
            cpus = replace(
                cpus,
                threads=self.threads,
                masks_checked=affinity.masks_checked if affinity else None,
                escaped=tuple(affinity.escaped) if affinity else None,
                replaced=self._replaced,
                crowded=crowded,
            )
        asked = limits.gpu_memory
        gpu_memory = None if asked is None else records.GpuMemoryLimit(asked, "framework")
        times = records.TimeLimits(limits.timeout_s, limits.stall_timeout_s)
        return records.LimitFacts(cpus, memory, gpu_memory, self._gpus, times)


def _gpu_facts(limits: Limits) -> GpuLimit | None:
    """GPUs by what cannot be mistaken: CUDA may count them in another order than nvidia-smi."""
    if not limits.gpus:
        return None if limits.gpus is None else GpuLimit((), _GPUS, ())
    try:
        with open_nvml() as nvml:
            chosen = select_gpus(nvml.gpus, os.environ, limits.gpus).gpus
            return GpuLimit(limits.gpus, _GPUS, tuple(gpu.facts.uuid for gpu in chosen))
    except NvmlUnavailable as error:
        problem = f"--gpus {','.join(limits.gpus)} cannot be had: {error}"
        raise CannotTry(problem, "Leave --gpus out") from None
