"""What around a training would slow it down or break it: limits, settings, and other processes."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from stepscope.records.facts import Environment
from stepscope.report.kit.format import allowed_text, bytes_text, share_text
from stepscope.sensors import procfs
from stepscope.sensors.gpu.nvml import NvmlUnavailable, Unreadable, open_nvml
from stepscope.trials.limits.spec import THREAD_VARIABLES

Level = Literal["fine", "note", "bites"]

_MIB, _GIB = 1 << 20, 1 << 30
_SHM_OF_CONTAINERS = 64 * _MIB
_FEW_FILES = _FEW_PROCESSES = 4096
_LITTLE_DISK = 2 * _GIB
_ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_SLOW_SWITCHES = {
    "CUDA_LAUNCH_BLOCKING": "every kernel waits for the one before: for debugging only",
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "every tensor asks the driver for memory: very slow",
}


@dataclass(frozen=True)
class Condition:
    """One fact about the surroundings, whether it will bite, and what to do about it."""

    topic: str
    text: str
    level: Level = "fine"
    hint: str = ""


def look_around(environment: Environment, runs: Path, root: Path = Path("/")) -> list[Condition]:
    """All remarks. `runs` is where runs will go; `root` is where `proc` and `dev` are."""
    return [
        *cpus(environment),
        *threads(environment),
        *memory(environment, root),
        shared_memory(root),
        limits(environment),
        disk(runs),
        *cuda_settings(environment),
        *other_gpu_processes(),
    ]


def cpus(environment: Environment) -> Iterator[Condition]:
    """A loader with `num_workers=os.cpu_count()` counts what it may not use."""
    cpu = environment.cpu
    logical, allowed, affinity, quota = cpu.logical, cpu.allowed, cpu.affinity, cpu.quota
    if not logical or not allowed:
        return
    if allowed >= logical:
        yield Condition("CPUs", f"{logical}, all of them allowed")
        return
    reasons = []
    if affinity is not None and affinity < logical:
        reasons.append(f"affinity {affinity}")
    if quota is not None and quota < logical:
        reasons.append(f"cgroup quota {allowed_text(quota)}")
    text = (
        f"{allowed_text(allowed)} of {logical} allowed ({', '.join(reasons) or 'limits'}): "
        f"os.cpu_count() still says {logical}, and whoever starts as many workers starts too many"
    )
    hint = f"num_workers={max(1, int(allowed))}, or len(os.sched_getaffinity(0))"
    if quota and quota < (affinity or logical):
        hint += ", which does not know of the quota"
    yield Condition("CPUs", text, "bites", hint)


def threads(environment: Environment) -> Iterator[Condition]:
    """Threads of numerical libraries, which multiply with loader workers."""
    cpu, variables = environment.cpu, environment.variables
    if not cpu.logical or not cpu.allowed:
        return
    fits = max(1, int(cpu.allowed))
    started = cpu.affinity or cpu.logical  # libraries know the affinity, not the quota
    given = {name: variables[name] for name in THREAD_VARIABLES if variables.get(name)}
    if not given:
        text = (
            f"OMP_NUM_THREADS is not set: NumPy and OpenCV start {started} threads in every "
            "process, so in every loader worker; PyTorch does in the main one, and 1 in a worker"
        )
        hint = f"OMP_NUM_THREADS={fits}, or 1 where the workers do the work"
        yield Condition("Threads", text, "bites" if fits < started else "note", hint)
    for name, value in given.items():
        count = int(value) if value.isdigit() else None
        if count is not None and count > fits:
            text = f"{name}={count}, but {fits} CPUs are allowed; workers multiply it"
            yield Condition("Threads", text, "bites", f"export {name}={fits}, or less with workers")
        else:
            times = f"; with {fits} workers up to {count * fits} threads" if count else ""
            yield Condition("Threads", f"{name}={value}{times}")


def memory(environment: Environment, root: Path = Path("/")) -> Iterator[Condition]:
    """The limit of the cgroup, what is left of the machine, and swap."""
    total, limit = environment.memory.total_bytes, environment.cgroup.memory_limit_bytes
    now = procfs.meminfo(str(root / "proc"))
    available, swapped = now.available, now.swap_used or 0
    left = f", {bytes_text(available)} available" if available is not None else ""
    if limit and total and limit < 0.95 * total:
        text = (
            f"the cgroup allows {bytes_text(limit)} of the machine's {bytes_text(total)}{left}: "
            "the kernel kills at the limit, and page cache counts"
        )
        hint = "fewer workers or a smaller prefetch_factor where it gets tight"
        yield Condition("Memory", text, "bites", hint)
    elif total:
        tight = available is not None and available < 0.1 * total
        text = f"{bytes_text(total)}{left}, no lower limit"
        yield Condition("Memory", text, "note" if tight else "fine")
    if total and swapped > 0.01 * total:
        text = f"{bytes_text(swapped)} in use: memory is or was short, and what comes back stalls"
        yield Condition("Swap", text, "note", "free memory, then: swapoff -a; swapon -a")


def shared_memory(root: Path = Path("/")) -> Condition:
    """/dev/shm, through which loader workers hand over their batches."""
    try:
        found = os.statvfs(root / "dev/shm")
    except OSError:
        text = "is not there: loader workers cannot hand over batches"
        return Condition("/dev/shm", text, "bites", "mount a tmpfs there")
    return shm_remark(found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize)


def shm_remark(size: int, free: int) -> Condition:
    """What the size of /dev/shm means."""
    if not size:
        return Condition("/dev/shm", "mounted without a bound of its own")
    text = f"{bytes_text(size)}, {bytes_text(free)} free"
    if size <= _SHM_OF_CONTAINERS:
        text += ": as containers have it; a few batches of images fill it"
        return Condition("/dev/shm", text, "bites", "docker run --shm-size 8g, or --ipc host")
    if free < _GIB:
        return Condition("/dev/shm", text, "note", "loader workers pass batches through it")
    return Condition("/dev/shm", text)


def limits(environment: Environment) -> Condition:
    """The limits of the shell."""

    def soft(name: str) -> int | None:
        limit = environment.limits.get(name)
        return limit.soft if limit and isinstance(limit.soft, int) else None

    def count(value: int | None) -> str:
        return "unlimited" if value is None else f"{value:,}"

    files, processes, locked = soft("nofile"), soft("nproc"), soft("memlock")
    hints = []
    if files is not None and files < _FEW_FILES:
        hints.append("many workers that share tensors by descriptors need more: ulimit -n 65536")
    if processes is not None and processes < _FEW_PROCESSES:
        hints.append("workers times threads may exceed the processes: ulimit -u 65536")
    text = (
        f"open files {count(files)}, processes {count(processes)}, core dumps "
        f"{'off' if soft('core') == 0 else 'on'}, locked memory "
        f"{'no bound' if locked is None else bytes_text(locked)} (pinned memory of CUDA is not "
        "bound by it, RDMA is)"
    )
    return Condition("Limits", text, "note" if hints else "fine", "; ".join(hints))


def disk(runs: Path) -> Condition:
    """Room where runs go."""
    place = nearest_folder(runs)
    try:
        found = os.statvfs(place)
    except OSError as error:
        return Condition("Disk", f"{place}: {error.strerror}", "note")
    if not os.access(place, os.W_OK):
        return Condition("Disk", f"{place} cannot be written to", "bites", "choose with --out DIR")
    free = found.f_bavail * found.f_frsize
    text = f"{bytes_text(free)} free where runs go ({place})"
    if free < _LITTLE_DISK:
        hint = "make room, or choose another place with --out DIR"
        return Condition("Disk", text, "bites", hint)
    return Condition("Disk", text)


def nearest_folder(path: Path) -> Path:
    """The folder itself, or the innermost one above it that exists."""
    whole = path.absolute()
    return next(folder for folder in (whole, *whole.parents) if folder.is_dir())


def cuda_settings(environment: Environment) -> Iterator[Condition]:
    """Variables that hide GPUs, slow them down or change how memory is handed out."""
    variables = environment.variables
    visible = variables.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1", "NoDevFiles"):
        text = f"CUDA_VISIBLE_DEVICES={visible or '(empty)'} hides every GPU"
        yield Condition("CUDA", text, "bites", "unset CUDA_VISIBLE_DEVICES")
    elif visible is not None:
        yield Condition("CUDA", f"CUDA_VISIBLE_DEVICES={visible}: the others are hidden")
    for name, meaning in _SLOW_SWITCHES.items():
        if variables.get(name, "0") not in ("", "0"):
            text = f"{name}={variables[name]}: {meaning}"
            yield Condition("CUDA", text, "bites", f"unset {name}")
    for name in _ALLOCATOR_VARIABLES:
        if variables.get(name):
            yield Condition("CUDA", f"{name}={variables[name]}")


def other_gpu_processes() -> Iterator[Condition]:
    try:
        nvml = open_nvml()
    except NvmlUnavailable as error:
        yield Condition("GPUs", f"none can be seen: {error}")
        return
    with nvml:
        for gpu in nvml.gpus:
            facts = gpu.facts
            try:
                others = gpu.processes()
            except Unreadable as error:
                yield Condition(
                    "GPUs", f"{facts.label} ({facts.model}): processes unknown, {error}"
                )
            else:
                yield other_processes_remark(facts.label, facts.model, others, facts.memory_bytes)


def other_processes_remark(
    label: str, name: str, others: Iterable[tuple[int, float | None]], memory_bytes: float | None
) -> Condition:
    """Who else is on a GPU; their numbers are the host's in a container, so they are not named."""
    sizes = [size for _, size in others]
    if not sizes:
        return Condition("GPUs", f"{label} ({name}): nobody else is on it")
    held = sum(size for size in sizes if size is not None)
    who = "1 other process holds" if len(sizes) == 1 else f"{len(sizes)} other processes hold"
    amount = bytes_text(held) if held else "an unknown amount of memory"
    if held and memory_bytes:
        amount += f", {share_text(held / memory_bytes)} of its memory"
    hint = "see who: nvidia-smi; timings will vary"
    return Condition("GPUs", f"{label} ({name}): {who} {amount}", "bites", hint)
