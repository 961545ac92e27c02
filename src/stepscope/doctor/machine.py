"""Checks of the machine: limits, settings and other processes that slow down or break training."""

from __future__ import annotations

import os
import pwd
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from stepscope.records.facts import Environment
from stepscope.report.kit.format import allowed_text, bytes_text, plural, share_text
from stepscope.sensors import procfs
from stepscope.sensors.gpu.nvml import NvmlUnavailable, Unreadable, open_nvml
from stepscope.trials.limits.spec import THREAD_VARIABLES

Level = Literal["ok", "note", "problem"]

_MIB, _GIB = 1 << 20, 1 << 30
_DOCKER_SHM = 64 * _MIB
_FEW_FILES = _FEW_PROCESSES = 4096
_LOW_DISK = 2 * _GIB
_ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_SLOW_SWITCHES = {
    "CUDA_LAUNCH_BLOCKING": "every kernel launch blocks; for debugging only",
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "every allocation calls the driver; very slow",
}
_WINDOW_S = 0.5
_MAX_NAMED = 3
_MIN_NAMED_CORES = 0.05


@dataclass(frozen=True)
class MachineRemark:
    """A property of the machine, its severity, and what to do about it."""

    topic: str  # what was checked, such as `Memory`
    text: str  # what was found
    level: Level = "ok"  # `ok`, `note` or `problem`
    hint: str = ""  # what to do; empty if nothing


def check_machine(
    environment: Environment, runs: Path, root: Path = Path("/")
) -> list[MachineRemark]:
    """Return all remarks. `runs` is the folder for runs; `root` contains `proc` and `dev`."""
    return [
        *cpus(environment),
        *cpu_load(environment),
        *threads(environment),
        *memory(environment, root),
        shared_memory(root),
        limits(environment),
        disk(runs),
        *cuda_settings(environment),
        *other_gpu_processes(),
    ]


def cpus(environment: Environment) -> Iterator[MachineRemark]:
    """Compare the allowed CPUs with `os.cpu_count()`, which ignores affinity and quota."""
    cpu = environment.cpu
    logical, allowed, affinity, quota = cpu.logical, cpu.allowed, cpu.affinity, cpu.quota
    if not logical or not allowed:
        return
    if allowed >= logical:
        yield MachineRemark("CPUs", f"{logical} of {logical} allowed")
        return
    reasons = []
    if affinity is not None and affinity < logical:
        reasons.append(f"affinity {affinity}")
    if quota is not None and quota < logical:
        reasons.append(f"cgroup quota {allowed_text(quota)}")
    text = (
        f"{allowed_text(allowed)} of {logical} allowed ({', '.join(reasons) or 'limits'}); "
        f"os.cpu_count() returns {logical}, which is too high for num_workers"
    )
    hint = f"Set num_workers={max(1, int(allowed))}"
    if quota and quota < (affinity or logical):
        hint += "; len(os.sched_getaffinity(0)) ignores the quota"
    else:
        hint += ", or use len(os.sched_getaffinity(0))"
    yield MachineRemark("CPUs", text, "problem", hint)


class ProcessLoad(NamedTuple):
    name: str
    pid: int
    user: str
    cores: float

    def __str__(self) -> str:
        return f"{self.name} (PID {self.pid}, user {self.user}, {self.cores:.1f} cores)"


def cpu_load(environment: Environment) -> Iterator[MachineRemark]:
    """Report how many of the allowed CPUs other processes use."""
    cpu = environment.cpu
    if not cpu.logical or not cpu.allowed:
        return
    affinity = os.sched_getaffinity(0)
    used, processes = measure_cpu_load(affinity)
    load_average = procfs.load_average()
    yield cpu_load_remark(load_average, cpu.logical, len(affinity), cpu.allowed, used, processes)


def measure_cpu_load(
    cpus: Collection[int], window_s: float = _WINDOW_S
) -> tuple[float, list[ProcessLoad]]:
    """Return the cores that other processes use on some CPUs, and these processes, busiest first.

    The sum is from /proc/stat, because processes outside a container are not listed.
    """

    def snapshot() -> tuple[float, float, dict[int, procfs.ProcessStat]]:
        processes = {pid: stat for pid in procfs.pids() if (stat := procfs.stat(pid)) is not None}
        own = time.process_time()
        return time.monotonic(), procfs.busy_seconds(cpus) - own, processes

    began, busy_before, before = snapshot()
    time.sleep(window_s)
    ended, busy_after, after = snapshot()
    loads = []
    for pid, stat in after.items():
        earlier = before.get(pid)
        is_same = earlier is not None and earlier.started_ticks == stat.started_ticks
        used_s = stat.cpu_s - (earlier.cpu_s if earlier is not None and is_same else 0.0)
        if used_s > 0 and stat.last_cpu in cpus and pid != os.getpid():
            loads.append(ProcessLoad(stat.name, pid, _user(pid), used_s / (ended - began)))
    loads.sort(key=lambda load: load.cores, reverse=True)
    return max(0.0, busy_after - busy_before) / (ended - began), loads


def cpu_load_remark(
    load_average: float | None,
    logical: int,
    cpus: int,
    allowed: float,
    used: float,
    processes: Sequence[ProcessLoad],
) -> MachineRemark:
    """Describe the load. Other processes use `used` cores of `cpus` CPUs, of which a quota may
    allow fewer."""
    available = min(allowed, max(0.0, cpus - used))
    taken = 1 - available / allowed
    of_cpus = "" if cpus == logical else f" of the {cpus} allowed"
    text = f"other processes use {used:.1f}{of_cpus} cores"
    if load_average is not None:
        text = f"load average {load_average:.1f} on {logical} cores; {text}"
    if taken <= 0.1:
        return MachineRemark("CPU load", text)
    named = [str(each) for each in processes[:_MAX_NAMED] if each.cores >= _MIN_NAMED_CORES]
    if named:
        text += f": {', '.join(named)}"
    hint = "Timings will vary; wait until the machine is idle"
    return MachineRemark("CPU load", text, "problem" if taken > 0.5 else "note", hint)


def _user(pid: int) -> str:
    uid = procfs.owner(pid)
    try:
        return "unknown" if uid is None else pwd.getpwuid(uid).pw_name
    except KeyError:  # a user of the host, in a container
        return str(uid)


def threads(environment: Environment) -> Iterator[MachineRemark]:
    """Check the thread counts of numerical libraries, which multiply with loader workers."""
    cpu, variables = environment.cpu, environment.variables
    if not cpu.logical or not cpu.allowed:
        return
    fits = max(1, int(cpu.allowed))
    started = cpu.affinity or cpu.logical  # libraries respect the affinity, not the quota
    given = {name: variables[name] for name in THREAD_VARIABLES if variables.get(name)}
    if not given:
        text = (
            f"OMP_NUM_THREADS is not set: NumPy and OpenCV start {started} threads in every "
            f"process, including loader workers; PyTorch starts {started} in the main process and "
            "1 in a worker"
        )
        hint = f"Set OMP_NUM_THREADS={fits}, or 1 if the loader workers do most of the work"
        yield MachineRemark("Threads", text, "problem" if fits < started else "note", hint)
    for name, value in given.items():
        count = int(value) if value.isdigit() else None
        if count is not None and count > fits:
            text = (
                f"{name}={count}, but the number of allowed CPUs is {fits}; each loader worker "
                "starts "
                "that many threads again"
            )
            hint = f"Set {name}={fits}, or less with loader workers"
            yield MachineRemark("Threads", text, "problem", hint)
        else:
            total = (
                f"; up to {count * fits} threads with {fits} {plural(fits, 'worker')}"
                if count
                else ""
            )
            yield MachineRemark("Threads", f"{name}={value}{total}")


def memory(environment: Environment, root: Path = Path("/")) -> Iterator[MachineRemark]:
    """Check the cgroup limit, the available memory and swap."""
    total, limit = environment.memory.total_bytes, environment.cgroup.memory_limit_bytes
    now = procfs.meminfo(str(root / "proc"))
    available, swapped = now.available, now.swap_used or 0
    free = f", {bytes_text(available)} available" if available is not None else ""
    if limit and total and limit < 0.95 * total:
        text = (
            f"the cgroup limit is {bytes_text(limit)} (the machine has {bytes_text(total)}{free}); "
            "the kernel kills processes that exceed it"
        )
        hint = "If memory is short, use fewer loader workers or a smaller prefetch_factor"
        yield MachineRemark("Memory", text, "problem", hint)
    elif total:
        is_low = available is not None and available < 0.1 * total
        text = f"{bytes_text(total)}{free}, no cgroup limit"
        yield MachineRemark("Memory", text, "note" if is_low else "ok")
    if total and swapped > 0.01 * total:
        text = f"{bytes_text(swapped)} in use: memory is or was short, and swapping in is slow"
        hint = "Free some memory, then run as root: swapoff -a; swapon -a"
        yield MachineRemark("Swap", text, "note", hint)


def shared_memory(root: Path = Path("/")) -> MachineRemark:
    """Check /dev/shm, which loader workers use to pass batches."""
    try:
        status = os.statvfs(root / "dev/shm")
    except OSError:
        text = "not available: loader workers cannot pass batches"
        return MachineRemark("/dev/shm", text, "problem", "Mount a tmpfs there")
    return shm_remark(status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize)


def shm_remark(size: int, free: int) -> MachineRemark:
    if not size:
        return MachineRemark("/dev/shm", "mounted without a size limit")
    text = f"{bytes_text(size)}, {bytes_text(free)} free"
    if size <= _DOCKER_SHM:
        text += " (the container default); a few batches of images can fill it"
        hint = "Use docker run --shm-size 8g, or --ipc host"
        return MachineRemark("/dev/shm", text, "problem", hint)
    if free < _GIB:
        hint = "Free some space: loader workers use it to pass batches"
        return MachineRemark("/dev/shm", text, "note", hint)
    return MachineRemark("/dev/shm", text)


def limits(environment: Environment) -> MachineRemark:
    """Check the resource limits (ulimit)."""

    def soft(name: str) -> int | None:
        limit = environment.limits.get(name)
        return limit.soft if limit and isinstance(limit.soft, int) else None

    def count(value: int | None) -> str:
        return "unlimited" if value is None else f"{value:,}"

    files, processes, locked = soft("nofile"), soft("nproc"), soft("memlock")
    hints = []
    if files is not None and files < _FEW_FILES:
        hints.append("For many loader workers, raise the limit on open files: ulimit -n 65536")
    if processes is not None and processes < _FEW_PROCESSES:
        hints.append("For many workers and threads, raise the limit on processes: ulimit -u 65536")
    text = (
        f"open files {count(files)}, processes {count(processes)}, core dumps "
        f"{'off' if soft('core') == 0 else 'on'}, locked memory "
        f"{'unlimited' if locked is None else bytes_text(locked)} (applies to RDMA, not to CUDA "
        "pinned memory)"
    )
    return MachineRemark("Limits", text, "note" if hints else "ok", ". ".join(hints))


def disk(runs: Path) -> MachineRemark:
    """Check the free space for runs."""
    folder = nearest_folder(runs)
    try:
        status = os.statvfs(folder)
    except OSError as error:
        return MachineRemark("Disk", f"{folder}: {error.strerror}", "note")
    if not os.access(folder, os.W_OK):
        hint = "Choose another folder with --out DIR"
        return MachineRemark("Disk", f"{folder} is not writable", "problem", hint)
    free = status.f_bavail * status.f_frsize
    text = f"{bytes_text(free)} free in the folder for runs ({folder})"
    if free < _LOW_DISK:
        hint = "Free some space, or choose another folder with --out DIR"
        return MachineRemark("Disk", text, "problem", hint)
    return MachineRemark("Disk", text)


def nearest_folder(path: Path) -> Path:
    """Return the folder or its nearest existing ancestor."""
    absolute = path.absolute()
    return next(folder for folder in (absolute, *absolute.parents) if folder.is_dir())


def cuda_settings(environment: Environment) -> Iterator[MachineRemark]:
    """Check variables that hide GPUs, slow them down or change the allocator."""
    variables = environment.variables
    visible = variables.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1", "NoDevFiles"):
        text = f"CUDA_VISIBLE_DEVICES={visible or '(empty)'} hides all GPUs"
        yield MachineRemark("CUDA", text, "problem", "Unset CUDA_VISIBLE_DEVICES")
    elif visible is not None:
        yield MachineRemark("CUDA", f"CUDA_VISIBLE_DEVICES={visible}; other GPUs are hidden")
    for name, meaning in _SLOW_SWITCHES.items():
        if variables.get(name, "0") not in ("", "0"):
            text = f"{name}={variables[name]}: {meaning}"
            yield MachineRemark("CUDA", text, "problem", f"Unset {name}")
    for name in _ALLOCATOR_VARIABLES:
        if variables.get(name):
            yield MachineRemark("CUDA", f"{name}={variables[name]}")


def other_gpu_processes() -> Iterator[MachineRemark]:
    try:
        nvml = open_nvml()
    except NvmlUnavailable as error:
        yield MachineRemark("GPUs", f"not available: {error}")
        return
    with nvml:
        for gpu in nvml.gpus:
            facts = gpu.facts
            try:
                others = gpu.processes()
            except Unreadable as error:
                yield MachineRemark(
                    "GPUs", f"{facts.label} ({facts.model}): processes unknown ({error})"
                )
            else:
                yield other_processes_remark(facts.label, facts.model, others, facts.memory_bytes)


def other_processes_remark(
    label: str, name: str, others: Iterable[tuple[int, float | None]], memory_bytes: float | None
) -> MachineRemark:
    """Describe the other processes on a GPU, without pids, which are the host's in a container."""
    sizes = [size for _, size in others]
    if not sizes:
        return MachineRemark("GPUs", f"{label} ({name}): no other processes")
    held = sum(size for size in sizes if size is not None)
    count = "1 other process uses" if len(sizes) == 1 else f"{len(sizes)} other processes use"
    amount = bytes_text(held) if held else "an unknown amount of memory"
    if held and memory_bytes:
        amount += f", {share_text(held / memory_bytes)} of the GPU's memory"
    hint = "Timings will vary; run nvidia-smi to list the processes"
    return MachineRemark("GPUs", f"{label} ({name}): {count} {amount}", "problem", hint)
