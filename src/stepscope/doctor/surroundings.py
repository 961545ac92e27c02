"""What around a training would hold it back or break it: limits, settings, and other people."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from stepscope.report.format import allowed_text, bytes_text, share_text
from stepscope.sensors.host import memory_values
from stepscope.sensors.nvml import Nvml, NvmlUnavailable, Unreadable, open_nvml

Level = Literal["fine", "note", "bites"]

_MIB, _GIB = 1 << 20, 1 << 30
_SHM_OF_CONTAINERS = 64 * _MIB
_FEW_FILES = 4096
_FEW_PROCESSES = 4096
_LITTLE_DISK = 2 * _GIB
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_SLOW_SWITCHES = {
    "CUDA_LAUNCH_BLOCKING": "every kernel waits for the one before: for debugging only",
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "every tensor asks the driver for memory: very slow",
}

Environment = Mapping[str, Any]
"""The `environment` of run.json."""


@dataclass(frozen=True)
class Remark:
    """One fact about the surroundings, whether it will bite, and what to do about it."""

    topic: str
    text: str
    level: Level = "fine"
    hint: str = ""


def look_around(environment: Environment, runs: Path, root: Path = Path("/")) -> list[Remark]:
    """All remarks. `runs` is where runs will go; `root` is where `proc` and `dev` are."""
    return [
        *cpus(environment),
        *threads(environment),
        *memory(environment, root),
        *shared_memory(root),
        *limits(environment),
        *disk(runs),
        *cuda_settings(environment),
        *gpu_neighbours(),
    ]


def cpus(environment: Environment) -> Iterator[Remark]:
    """A loader with `num_workers=os.cpu_count()` counts what it may not use."""
    cpu = environment.get("cpu") or {}
    logical, allowed = cpu.get("logical"), cpu.get("allowed")
    if not logical or not allowed:
        return
    affinity, quota = cpu.get("affinity"), cpu.get("quota")
    if allowed >= logical:
        yield Remark("CPUs", f"{logical}, all of them allowed")
        return
    why = _narrowed_by(logical, affinity, quota)
    yield Remark(
        "CPUs",
        f"{allowed_text(allowed)} of {logical} allowed ({why}): os.cpu_count() still says "
        f"{logical}, and whoever starts as many workers starts too many",
        "bites",
        f"num_workers={max(1, int(allowed))}, or len(os.sched_getaffinity(0))"
        + (", which does not know of the quota" if quota and quota < (affinity or logical) else ""),
    )
    if affinity and quota and affinity < quota:
        yield Remark(
            "CPUs",
            f"the affinity ({affinity}) is narrower than the quota ({allowed_text(quota)})",
            "note",
            "widen it (taskset, cpuset, --cpus-per-task) to use what is paid for",
        )


def _narrowed_by(logical: int, affinity: int | None, quota: float | None) -> str:
    reasons = []
    if affinity is not None and affinity < logical:
        reasons.append(f"affinity {affinity}")
    if quota is not None and quota < logical:
        reasons.append(f"cgroup quota {allowed_text(quota)}")
    return ", ".join(reasons) or "limits"


def threads(environment: Environment) -> Iterator[Remark]:
    """Threads of numerical libraries, which multiply with loader workers."""
    cpu, variables = environment.get("cpu") or {}, environment.get("variables") or {}
    logical, allowed = cpu.get("logical"), cpu.get("allowed")
    if not logical or not allowed:
        return
    fits = max(1, int(allowed))
    started = cpu.get("affinity") or logical  # libraries know the affinity, not the quota
    given = {name: variables[name] for name in _THREAD_VARIABLES if variables.get(name)}
    if not given:
        yield Remark(
            "Threads",
            f"OMP_NUM_THREADS is not set: NumPy and OpenCV start {started} threads in every "
            "process, so in every loader worker; PyTorch does in the main one, and 1 in a worker",
            "bites" if fits < started else "note",
            f"OMP_NUM_THREADS={fits}, or 1 where the workers do the work",
        )
    for name, text in given.items():
        count = int(text) if text.isdigit() else None
        if count is not None and count > fits:
            yield Remark(
                "Threads",
                f"{name}={count}, but {fits} CPUs are allowed; workers multiply it",
                "bites",
                f"export {name}={fits}, or less with workers",
            )
        elif count == 1 and fits > 1:
            yield Remark(
                "Threads",
                f"{name}=1 (as torchrun sets it): right beside workers and a GPU, slow on a CPU",
            )
        else:
            times = f"; with {fits} workers up to {count * fits} threads" if count else ""
            yield Remark("Threads", f"{name}={text}{times}")


def memory(environment: Environment, root: Path = Path("/")) -> Iterator[Remark]:
    """The limit of the cgroup, what is left of the machine, and swap."""
    total = (environment.get("memory") or {}).get("total_bytes")
    limit = (environment.get("cgroup") or {}).get("memory_limit_bytes")
    now = _meminfo(root)
    available, swapped = now.get("host_available"), now.get("host_swap") or 0.0
    left = f", {bytes_text(available)} available" if available is not None else ""
    if limit and total and limit < 0.95 * total:
        yield Remark(
            "Memory",
            f"the cgroup allows {bytes_text(limit)} of the machine's {bytes_text(total)}{left}: "
            "the kernel kills at the limit, and page cache counts",
            "bites",
            "fewer workers or a smaller prefetch_factor where it gets tight",
        )
    elif total:
        tight = available is not None and available < 0.1 * total
        hint = "see who has it: ps aux --sort=-rss" if tight else ""
        text = f"{bytes_text(total)}{left}, no lower limit"
        yield Remark("Memory", text, "note" if tight else "fine", hint)
    if total and swapped > 0.01 * total:
        yield Remark(
            "Swap",
            f"{bytes_text(swapped)} in use: memory is or was short, and what comes back stalls",
            "note",
            "free memory, then: swapoff -a; swapon -a",
        )


def _meminfo(root: Path) -> Mapping[str, float]:
    try:
        return memory_values((root / "proc/meminfo").read_bytes())
    except OSError:
        return {}


def shared_memory(root: Path = Path("/")) -> Iterator[Remark]:
    """/dev/shm, through which loader workers hand over their batches."""
    try:
        found = os.statvfs(root / "dev/shm")
    except OSError:
        yield Remark("/dev/shm", "is not there: loader workers cannot hand over batches", "bites",
                     "mount a tmpfs there")  # fmt: skip
        return
    yield shm_remark(found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize)


def shm_remark(size: int, free: int) -> Remark:
    """What the size of /dev/shm means."""
    if not size:
        return Remark("/dev/shm", "mounted without a bound of its own")
    text = f"{bytes_text(size)}, {bytes_text(free)} free"
    if size <= _SHM_OF_CONTAINERS:
        return Remark(
            "/dev/shm",
            f"{text}: as containers have it; a few batches of images fill it",
            "bites",
            "docker run --shm-size 8g, or --ipc host",
        )
    if free < _GIB:
        return Remark("/dev/shm", text, "note", "loader workers pass batches through it")
    return Remark("/dev/shm", text)


def limits(environment: Environment) -> Iterator[Remark]:
    """The limits of the shell."""
    known = environment.get("limits") or {}
    files, processes = _soft(known, "nofile"), _soft(known, "nproc")
    if files is not None and files < _FEW_FILES:
        yield Remark(
            "Open files",
            f"{files} at most: many workers that share tensors by descriptors need more",
            "note",
            "ulimit -n 65536",
        )
    if processes is not None and processes < _FEW_PROCESSES:
        yield Remark(
            "Processes",
            f"{processes} at most, threads counted: workers times threads may exceed it",
            "note",
            "ulimit -u 65536",
        )
    locked = _soft(known, "memlock")
    bound = "no bound" if locked is None else bytes_text(locked)
    core = "off" if _soft(known, "core") == 0 else "on"
    yield Remark(
        "Limits",
        f"open files {_count(files)}, processes {_count(processes)}, core dumps {core}, locked "
        f"memory {bound} (pinned memory of CUDA is not bound by it, RDMA is)",
    )


def _soft(known: Mapping[str, Any], name: str) -> int | None:
    value = (known.get(name) or {}).get("soft")
    return value if isinstance(value, int) else None


def _count(value: int | None) -> str:
    return "unlimited" if value is None else f"{value:,}"


def disk(runs: Path) -> Iterator[Remark]:
    """Room where runs go."""
    place = nearest_folder(runs)
    try:
        found = os.statvfs(place)
    except OSError as error:
        yield Remark("Disk", f"{place}: {error.strerror}", "note")
        return
    free = found.f_bavail * found.f_frsize
    text = f"{bytes_text(free)} free where runs go ({place})"
    if not os.access(place, os.W_OK):
        yield Remark("Disk", f"{place} cannot be written to", "bites", "choose with --out DIR")
    elif free < _LITTLE_DISK:
        yield Remark("Disk", text, "bites", "make room, or choose another place with --out DIR")
    else:
        yield Remark("Disk", text)


def nearest_folder(path: Path) -> Path:
    """The folder itself, or the innermost one above it that exists."""
    whole = path.absolute()
    return next(folder for folder in (whole, *whole.parents) if folder.is_dir())


def cuda_settings(environment: Environment) -> Iterator[Remark]:
    """Variables that hide GPUs, slow them down or change how memory is handed out."""
    variables = environment.get("variables") or {}
    visible = variables.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        hides = visible.strip() in ("", "-1", "NoDevFiles")
        yield Remark(
            "CUDA",
            f"CUDA_VISIBLE_DEVICES={visible or '(empty)'}"
            + (" hides every GPU" if hides else ": the others are hidden"),
            "bites" if hides else "fine",
            "unset CUDA_VISIBLE_DEVICES" if hides else "",
        )
    for name, meaning in _SLOW_SWITCHES.items():
        if variables.get(name, "0") not in ("", "0"):
            yield Remark("CUDA", f"{name}={variables[name]}: {meaning}", "bites", f"unset {name}")
    for name in _ALLOCATOR_VARIABLES:
        if variables.get(name):
            yield Remark("CUDA", f"{name}={variables[name]}")


def gpu_neighbours() -> list[Remark]:
    """Processes of others on the GPUs."""
    try:
        nvml = open_nvml()
    except NvmlUnavailable as error:
        return [Remark("GPUs", f"none can be seen: {error}")]
    try:
        return list(_neighbours(nvml))
    finally:
        nvml.close()


def _neighbours(nvml: Nvml) -> Iterator[Remark]:
    for gpu in nvml.gpus:
        facts = gpu.facts
        try:
            others = gpu.processes()
        except Unreadable as error:
            yield Remark("GPUs", f"{facts.label} ({facts.name}): processes unknown, {error}")
            continue
        yield neighbour_remark(facts.label, facts.name, others, facts.memory_bytes)


def neighbour_remark(
    label: str, name: str, others: Iterable[tuple[int, float | None]], memory_bytes: float | None
) -> Remark:
    """Who else is on a GPU; their numbers are the host's in a container, so they are not named."""
    sizes = [size for _, size in others]
    if not sizes:
        return Remark("GPUs", f"{label} ({name}): nobody else is on it")
    held = sum(size for size in sizes if size is not None)
    many = f"{len(sizes)} other process{'es' * (len(sizes) > 1)}"
    hold = "hold" if len(sizes) > 1 else "holds"
    part = f", {share_text(held / memory_bytes)} of its memory" if memory_bytes and held else ""
    known = f" {hold} {bytes_text(held)}{part}" if held else f" {hold} an unknown amount of memory"
    return Remark("GPUs", f"{label} ({name}): {many}{known}", "bites",
                  "see who: nvidia-smi; timings will vary")  # fmt: skip
