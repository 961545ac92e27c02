"""Enforcement of the limits of a trial, with the strictest method available on this machine.

    whole CPUs      affinity, inherited by all child processes and checked repeatedly
    part of a CPU   quota of a cgroup; otherwise affinity, rounded up to whole CPUs
    host memory     cgroup; otherwise a watchdog (`soft`), which reacts with a delay
    GPU memory      memory limit of the framework
    GPUs            CUDA_VISIBLE_DEVICES

A trial without a limit that needs a cgroup has one without limits, so that no process is lost.
`facts` returns the method that was used.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path

from stepscope.errors import TrialError
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
_MAX_PSS_SHARE = 0.05
"""Maximum share of the time for reading PSS, which takes about 15 ms per GB and process."""
_MAX_NAMED = 5


class Watchdog:
    """The soft limit of host memory: sums the memory of the processes of a trial.

    It reacts with a delay and does not include the page cache or unmapped files in /dev/shm. The
    resident memory (RSS) is read first: it counts shared pages once per process, so that a sum
    within the limit is sufficient. Otherwise the proportional memory (PSS) is read, and read again
    only after the resident memory has grown by the remaining memory.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._within_until = limit  # resident bytes that are certainly within the limit
        self._next_pss = 0.0

    def inspect(self, pids: Collection[int]) -> Stopped | None:
        """Return why the trial must end, if it exceeds the limit."""
        held = {pid: procfs.statm(pid) or procfs.Resident(0, 0) for pid in pids}
        resident = sum(each.total for each in held.values())
        begun = time.monotonic()
        if resident <= max(self._limit, self._within_until) or begun < self._next_pss:
            return None
        shares = {}
        for pid, each in held.items():
            memory = procfs.proportional_memory(pid)
            # None: exited, or not supported by this kernel.
            shares[pid] = each.total - each.shared if memory is None else memory.pss
        used = sum(shares.values())
        now = time.monotonic()
        self._next_pss = now + (now - begun) / _MAX_PSS_SHARE
        self._within_until = resident + self._limit - used
        if used <= self._limit:
            return None
        largest = sorted(shares, key=shares.__getitem__, reverse=True)[:_MAX_NAMED]
        reason = f"used {size_text(used)}, more than the memory limit of {size_text(self._limit)}"
        evidence = {"limit": self._limit, "pss": used, "rss": resident}
        named = {str(pid): shares[pid] for pid in largest}
        return Stopped(Outcome.HOST_OOM, reason, {**evidence, "largest": named})


class EnforcedLimits:
    """The limits of a trial, from before its first process until after its last one."""

    def __init__(self, limits: Limits, token: str, ranks: int = 1, workers: int = 0) -> None:
        """Raises TrialError if a limit is not available."""
        check_limits(limits, MachineResources.here())
        self.limits = limits
        self._token = token
        self._processes = ranks * (1 + workers)
        self.threads = None if limits.cpus is None else max(1, int(limits.cpus) // ranks)
        """Threads of the framework in each rank; None: its default."""
        self._gpus = _gpu_facts(limits)
        self._group: TrialGroup | None = None
        self._counts = GroupCounts()
        self._affinity: Affinity | None = None
        self._watchdog: Watchdog | None = None
        self._cpus: CpuLimit | None = None
        self._memory: MemoryLimit | None = None
        self._replaced: dict[str, str] = {}
        # A quota is only needed for a part of a CPU.
        is_part = limits.cpus is not None and limits.cpus != int(limits.cpus)
        quota = limits.cpus if is_part else None
        reason = ""
        # The last group has no limits: it holds the processes of the trial together.
        parts = ((limits.memory, quota), (limits.memory, None), (None, quota), (None, None))
        for part in dict.fromkeys(parts):
            made = make_group(f"{PREFIX}{token}", *part)
            if isinstance(made, TrialGroup):
                self._group = made
                break
            reason = reason or made.reason
        self._enforce(reason)

    def _enforce(self, reason: str) -> None:
        """Use the cgroup where possible and other methods for the rest; `reason` is why the
        cgroup is not available."""
        limits, group = self.limits, self._group
        controllers = group.controllers if group else frozenset()
        if limits.memory is not None and group and "memory" in controllers:
            self._memory = MemoryLimit(limits.memory, group.version)
        elif limits.memory is not None:
            self._watchdog = Watchdog(limits.memory)
            note = "does not limit the page cache"
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
        note = "" if is_whole else f"rounded up to {count}: cannot set a quota ({reason})"
        self._cpus = CpuLimit(limits.cpus, "affinity", chosen, note)

    def group_paths(self) -> tuple[Path, ...]:
        """Return the folders that the guard must remove if the runner is killed."""
        return self._group.folders if self._group else ()

    def environment(self, base: Mapping[str, str]) -> dict[str, str]:
        """Return the environment of the trial, with its token, thread counts and GPUs."""
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
        """Apply the limits to the first process of the trial; its children inherit them."""
        try:
            if (group := self._group) and group.has_limits:
                try:
                    group.place(pid)
                except ProcessLookupError:
                    raise
                except OSError as error:
                    group.remove()
                    self._group = None
                    self._enforce(f"cannot move the trial into its cgroup: {error.strerror}")
            if self._affinity is not None:
                self._affinity.place(pid)
        except ProcessLookupError:  # the process has already exited
            pass
        except OSError as error:
            problem = f"Cannot set the CPU affinity of the trial: {error.strerror}"
            raise TrialError(problem, "Remove --cpus") from None

    def hold_together(self, pid: int) -> None:
        """Move the first process into a group without limits, after the sensors have started: in
        version 2 they read its current group, which has the counters."""
        if (group := self._group) and not group.has_limits:
            try:
                group.place(pid)
            except OSError:
                group.remove()
                self._group = None

    def members(self) -> list[trial_processes.TrialProcess]:
        """Return the running processes in the group of the trial."""
        return self._group.members() if self._group else []

    def inspect(self, pids: Collection[int]) -> Stopped | None:
        """Check the running processes of the trial; called several times a second."""
        if self._affinity is not None:
            self._affinity.inspect(pids)
        return self._watchdog.inspect(pids) if self._watchdog else None

    def counts(self) -> GroupCounts:
        """Return the counters of the cgroup, even after its removal."""
        if self._group is not None:
            self._counts = self._group.counts()
        return self._counts

    def close(self) -> list[str]:
        """Kill all processes in the groups and remove them; return groups that remain."""
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
            oversubscribed = ""
            if self._processes > max(1, cpus.requested):
                oversubscribed = f"shared by {self._processes} ranks and loader workers"
            cpus = replace(
                cpus,
                threads=self.threads,
                masks_checked=affinity.masks_checked if affinity else None,
                escaped=tuple(affinity.escaped) if affinity else None,
                replaced=self._replaced,
                oversubscribed=oversubscribed,
            )
        requested = limits.gpu_memory
        gpu_memory = None if requested is None else records.GpuMemoryLimit(requested, "framework")
        times = records.TimeLimits(limits.timeout_s, limits.stall_timeout_s)
        return records.LimitFacts(cpus, memory, gpu_memory, self._gpus, times)


def _gpu_facts(limits: Limits) -> GpuLimit | None:
    """Select GPUs by UUID, because CUDA may use a different order than nvidia-smi."""
    if not limits.gpus:
        return None if limits.gpus is None else GpuLimit((), _GPUS, ())
    try:
        with open_nvml() as nvml:
            chosen = select_gpus(nvml.gpus, os.environ, limits.gpus).gpus
            return GpuLimit(limits.gpus, _GPUS, tuple(gpu.facts.uuid for gpu in chosen))
    except NvmlUnavailable as error:
        problem = f"`--gpus {','.join(limits.gpus)}` is not available: {error}"
        raise TrialError(problem, "Remove --gpus") from None
