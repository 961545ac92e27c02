"""Collect the machine, the software and the settings of a run for `run.json`.

Everything is best effort: an unavailable value is None, and a section that fails keeps its default
and is listed under `unreadable`. No package is imported to find its version.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import Distribution, DistributionFinder, MetadataPathFinder
from pathlib import Path
from typing import Any

from stepscope.inject.masking import mask_environment, mask_text
from stepscope.records import Gpu
from stepscope.records.facts import CpuFacts, Environment, MemoryFacts, ResourceLimit
from stepscope.sensors import procfs
from stepscope.sensors.cgroup import Cgroup, allowed_cpus, find_cgroup

GIT_SECONDS = 1.0
"""Time limit of all git commands together: a large work tree must not delay the start."""

# fmt: off
PACKAGES = (
    "stepscope", "numpy", "pyarrow", "torch", "torchvision", "torchaudio", "triton", "tensorflow",
    "tensorflow-cpu", "keras", "jax", "jaxlib", "flax", "optax", "lightning", "pytorch-lightning",
    "transformers", "accelerate", "datasets", "deepspeed", "timm", "ray", "pillow",
    "opencv-python", "nvidia-dali-cuda120", "webdataset",
)
# fmt: on
"""Packages whose version can affect the speed of training."""

_VARIABLES = re.compile(
    r"(?:OMP_|MKL_|KMP_|OPENBLAS_|CUDA_|NVIDIA_|NCCL_|GLOO_|TORCH|PYTORCH_|TF_|XLA_|JAX_|KERAS_"
    r"|MASTER_|SLURM_JOB|SLURM_\w*TASK|RAY_|PYTHON)\w*|(?:LOCAL_|GROUP_|NODE_)?RANK"
    r"|(?:LOCAL_)?WORLD_SIZE"
)
"""Environment variables that affect training. Other variables are private and not stored."""


def environment_record(
    command: list[str], cwd: Path, pid: int | None, *, root: Path = Path("/")
) -> Environment:
    """Return the environment of a run.

    `pid` is the monitored process, or None for this process. `root` is the parent of `proc`, `sys`,
    `etc` and `dev`.
    """
    monitored = pid or os.getpid()
    proc = str(root / "proc")
    cgroup, memory = find_cgroup(monitored, proc), procfs.meminfo(proc)
    site = _site_packages(command)
    sections: dict[str, Callable[[], Any]] = {
        "hostname": socket.gethostname,
        "os": lambda: _os(root),
        "cpu": lambda: _cpu(root, monitored, cgroup),
        "memory": lambda: MemoryFacts(memory.total, memory.swap_total),
        "storage": lambda: _storage(root, cwd),
        "shm": lambda: {"size_bytes": _space(root / "dev/shm")["total_bytes"]},
        "cgroup": cgroup.describe,
        "limits": lambda: _limits(monitored),
        "python": lambda: {  # of the monitor; the command may use another interpreter
            "version": platform.python_version(),
            "implementation": platform.python_implementation(),
            "executable": Path(sys.executable).name,
        },
        "versions": lambda: _versions(site or sys.path),
        "versions_of": lambda: "command" if site else "monitor",
        "git": lambda: _git(cwd),
        "gpus": lambda: tuple(
            Gpu(uuid=gpu.uuid or "", model=gpu.model or "", bus=gpu.bus)
            for gpu in procfs.nvidia_gpus(proc)
        ),
        "driver": lambda: procfs.nvidia_driver(proc),
        "variables": lambda: _variables(procfs.environ(pid, proc) if pid else os.environ),
    }
    readable: dict[str, Any] = {}
    unreadable: dict[str, str] = {}
    for name, section in sections.items():
        try:
            readable[name] = section()
        except Exception as error:  # a missing section must not end the run
            unreadable[name] = f"{type(error).__name__}: {mask_text(str(error))}"
    return Environment(**readable, unreadable=unreadable)


def _line(path: Path) -> str | None:
    try:
        return path.read_text(errors="replace").strip() or None
    except OSError:
        return None


def _os(root: Path) -> dict[str, Any]:
    machine = platform.uname()
    containers = {
        "kubernetes": "KUBERNETES_SERVICE_HOST" in os.environ,
        "podman": (root / "run/.containerenv").exists(),
        "docker": (root / ".dockerenv").exists(),
        "apptainer": bool({"SINGULARITY_CONTAINER", "APPTAINER_CONTAINER"} & os.environ.keys()),
    }
    release = re.search(r'^PRETTY_NAME="?([^"\n]+)', _line(root / "etc/os-release") or "", re.M)
    return {
        "system": machine.system,
        "kernel": machine.release,
        "machine": machine.machine,
        "distribution": release[1].strip() if release else None,
        "container": next((kind for kind, matches in containers.items() if matches), None),
        "virtual_machine": procfs.cpuinfo(str(root / "proc")).is_virtual,
        "product": _line(root / "sys/class/dmi/id/product_name"),
    }


def _cpu(root: Path, pid: int, cgroup: Cgroup) -> CpuFacts:
    cpus = root / "sys/devices/system/cpu"
    cores, sockets = set(), set()
    for topology in cpus.glob("cpu[0-9]*/topology"):
        # Logical CPUs of the same core have the same list of siblings.
        cores.add(_line(topology / "thread_siblings_list"))
        sockets.add(_line(topology / "physical_package_id"))
    try:
        affinity = len(os.sched_getaffinity(pid))
    except OSError:
        affinity = None
    return CpuFacts(
        model=procfs.cpuinfo(str(root / "proc")).model,
        logical=os.cpu_count(),
        physical=len(cores - {None}) or None,
        sockets=len(sockets - {None}) or None,
        numa_nodes=len(list((root / "sys/devices/system/node").glob("node[0-9]*"))) or None,
        affinity=affinity,
        quota=cgroup.cpu_quota(),
        allowed=allowed_cpus(pid, cgroup),
        governor=_line(cpus / "cpu0/cpufreq/scaling_governor"),
    )


def _space(path: Path) -> dict[str, Any]:
    try:
        stats = os.statvfs(path)
    except OSError:
        return {"total_bytes": None, "free_bytes": None}
    return {
        "total_bytes": stats.f_blocks * stats.f_frsize,
        "free_bytes": stats.f_bavail * stats.f_frsize,
    }


def _storage(root: Path, cwd: Path) -> dict[str, Any]:
    """Return the file system of the working directory and its type of disk."""
    mount = procfs.mount_of(cwd.resolve(), procfs.mounts(str(root / "proc")))
    rotational = None
    if mount:  # a partition has no `queue`: its disk, the parent folder, has
        device = (root / "sys/dev/block" / mount.device_number).resolve()
        rotational = _line(device / "queue/rotational") or _line(device.parent / "queue/rotational")
    return {
        "mount": mount and mount.point,
        "filesystem": mount and mount.filesystem,
        "device": mount and mask_text(mount.device),
        "rotational": rotational == "1" if rotational else None,
    } | _space(cwd)


def _limits(pid: int) -> dict[str, ResourceLimit]:
    wanted = {
        "nofile": resource.RLIMIT_NOFILE,
        "memlock": resource.RLIMIT_MEMLOCK,
        "core": resource.RLIMIT_CORE,
        "nproc": resource.RLIMIT_NPROC,
    }
    limits = {}
    for name, which in wanted.items():
        with contextlib.suppress(OSError):  # no permission to read this process
            pair = resource.prlimit(pid, which)
            soft, hard = ("unlimited" if each == resource.RLIM_INFINITY else each for each in pair)
            limits[name] = ResourceLimit(soft, hard)
    return limits


def _site_packages(command: list[str]) -> list[str]:
    """Return the site-packages of the virtual environment that contains the command, if any."""
    program = shutil.which(command[0]) if command else None
    if program is None:
        return []
    # Not resolved: the interpreter of a virtual environment is a link to the system interpreter.
    prefix = Path(program).absolute().parent.parent
    return [str(path) for path in prefix.glob("lib/python3*/site-packages")]


def _versions(path: list[str]) -> dict[str, str]:
    versions = {}
    for name in PACKAGES:
        context = DistributionFinder.Context(name=name, path=path)
        matches: Iterable[Distribution] = MetadataPathFinder.find_distributions(context)
        if distribution := next(iter(matches), None):
            versions[name] = distribution.version
    return versions


def _git(cwd: Path) -> dict[str, Any] | None:
    """Return the state of the work tree, or None without git or without a repository."""
    deadline = time.monotonic() + GIT_SECONDS
    head = _run_git(cwd, deadline, "rev-parse", "HEAD", "--abbrev-ref", "HEAD")
    if not head:
        return None
    commit, _, branch = head.partition("\n")
    changes = _run_git(cwd, deadline, "status", "--porcelain", "--untracked-files=no")
    remote = _run_git(cwd, deadline, "config", "--get", "remote.origin.url")
    return {
        "commit": commit,
        "branch": None if branch == "HEAD" else branch,
        "dirty": None if changes is None else bool(changes),
        "remote": mask_text(remote) if remote else None,
    }


def _run_git(cwd: Path, deadline: float, *arguments: str) -> str | None:
    """Return the output of a git command, or None if it fails or takes too long.

    It must not write to the user's repository.
    """
    try:
        result = subprocess.run(
            ["git", "-c", "core.fsmonitor=false", *arguments],
            cwd=cwd,
            env=os.environ | {"GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=max(deadline - time.monotonic(), 0.01),
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.decode(errors="replace").strip()


def _variables(environment: Mapping[str, str]) -> dict[str, str]:
    kept = {name: environment[name] for name in sorted(environment) if _VARIABLES.fullmatch(name)}
    return mask_environment(kept)
