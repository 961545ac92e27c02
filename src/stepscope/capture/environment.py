"""The machine, the software and the settings a run was made with: facts for `run.json`.

Everything is best effort: a fact that cannot be had is None, and a whole section that fails is left
out, with a line under `unreadable`. Nothing is imported to learn its version.
"""

from __future__ import annotations

import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from importlib.metadata import Distribution, DistributionFinder, MetadataPathFinder
from pathlib import Path
from typing import Any

from stepscope.runs.masking import mask_environment, mask_text
from stepscope.sensors.cgroup import Cgroup, allowed_cpus, find_cgroup

GIT_SECONDS = 1.0
"""For all questions to git together: a large work tree on a slow disk must not delay the start."""

PACKAGES = (
    "stepscope", "numpy", "pyarrow", "torch", "torchvision", "torchaudio", "triton",
    "tensorflow", "tensorflow-cpu", "keras", "jax", "jaxlib", "flax", "optax",
    "lightning", "pytorch-lightning", "transformers", "accelerate", "datasets", "deepspeed",
    "timm", "ray", "pillow", "opencv-python", "nvidia-dali-cuda120", "webdataset",
)  # fmt: skip
"""Whose versions can change how fast a training runs."""

_VARIABLES = re.compile(
    r"(?:OMP_|MKL_|KMP_|OPENBLAS_|CUDA_|NVIDIA_|NCCL_|GLOO_|TORCH|PYTORCH_|TF_|XLA_|JAX_|KERAS_"
    r"|MASTER_|SLURM_JOB|SLURM_\w*TASK|RAY_|PYTHON)\w*|(?:LOCAL_|GROUP_|NODE_)?RANK"
    r"|(?:LOCAL_)?WORLD_SIZE"
)
"""The variables that matter for training. No others are kept: they are nobody's business."""


def environment_record(
    command: list[str], cwd: Path, pid: int | None, *, root: Path = Path("/")
) -> dict[str, Any]:
    """What a run was made with, ready for JSON.

    `pid` is the watched process, or None for this one; `root` is where `proc`, `sys`, `etc` and
    `dev` are looked for.
    """
    watched = pid or os.getpid()
    cgroup = find_cgroup(watched, str(root / "proc"))
    site = _site_packages(command)
    sections: dict[str, Callable[[], Any]] = {
        "hostname": socket.gethostname,
        "os": lambda: _os(root),
        "cpu": lambda: _cpu(root, watched, cgroup),
        "memory": lambda: _memory(root),
        "storage": lambda: _storage(root, cwd),
        "shm": lambda: {"size_bytes": _space(root / "dev/shm")["total_bytes"]},
        "cgroup": cgroup.describe,
        "limits": lambda: _limits(watched),
        "python": _python,
        "versions": lambda: _versions(site or sys.path),
        "versions_of": lambda: "command" if site else "watcher",
        "git": lambda: _git(cwd),
        "gpus": lambda: _gpus(root),
        "driver": lambda: _driver(root),
        "variables": lambda: _variables(root, pid),
    }
    record: dict[str, Any] = {}
    unreadable: dict[str, str] = {}
    for name, section in sections.items():
        try:
            record[name] = section()
        except Exception as error:  # a run is worth more than any fact about it
            unreadable[name] = f"{type(error).__name__}: {mask_text(str(error))}"
    return record | {"unreadable": unreadable}


def _text(path: Path, size: int = 65536) -> str | None:
    try:
        with path.open("rb") as file:
            return file.read(size).decode(errors="replace")
    except OSError:
        return None


def _line(path: Path) -> str | None:
    text = _text(path)
    return text.strip() or None if text else None


def _field(text: str | None, pattern: str) -> str | None:
    """The first group of a pattern, at the start of a line."""
    found = re.search(rf"^{pattern}", text or "", re.MULTILINE)
    return found[1].strip() if found else None


def _os(root: Path) -> dict[str, Any]:
    machine = platform.uname()
    # A page is enough: reading all of it asks every CPU for its clock.
    cpuinfo = _text(root / "proc/cpuinfo", 4096)
    return {
        "system": machine.system,
        "kernel": machine.release,
        "machine": machine.machine,
        "distribution": _field(_text(root / "etc/os-release"), r'PRETTY_NAME="?([^"\n]+)'),
        "container": _container(root),
        "virtual_machine": " hypervisor" in cpuinfo if cpuinfo else None,
        "product": _line(root / "sys/class/dmi/id/product_name"),
    }


def _container(root: Path) -> str | None:
    """What kind of container this looks like, if any."""
    if "KUBERNETES_SERVICE_HOST" in os.environ:
        return "kubernetes"
    if (root / "run/.containerenv").exists():
        return "podman"
    if (root / ".dockerenv").exists():
        return "docker"
    if "SINGULARITY_CONTAINER" in os.environ or "APPTAINER_CONTAINER" in os.environ:
        return "apptainer"
    return None


def _cpu(root: Path, pid: int, cgroup: Cgroup) -> dict[str, Any]:
    cpus = root / "sys/devices/system/cpu"
    cores, sockets = _topology(cpus)
    try:
        affinity = len(os.sched_getaffinity(pid))
    except OSError:
        affinity = None
    return {
        "model": cpu_model(root),
        "logical": os.cpu_count(),
        "physical": cores,
        "sockets": sockets,
        "numa_nodes": len(list((root / "sys/devices/system/node").glob("node[0-9]*"))) or None,
        "affinity": affinity,
        "quota": cgroup.cpu_quota(),
        "allowed": allowed_cpus(pid, cgroup),
        "governor": _line(cpus / "cpu0/cpufreq/scaling_governor"),
    }


def cpu_model(root: Path = Path("/")) -> str | None:
    """What its maker calls the CPU."""
    return _field(_text(root / "proc/cpuinfo", 4096), r"model name\s*:(.*)")


def _topology(cpus: Path) -> tuple[int | None, int | None]:
    """Physical cores and sockets: logical CPUs of one core name the same siblings."""
    cores, sockets = set(), set()
    for topology in cpus.glob("cpu[0-9]*/topology"):
        cores.add(_line(topology / "thread_siblings_list"))
        sockets.add(_line(topology / "physical_package_id"))
    return len(cores - {None}) or None, len(sockets - {None}) or None


def _memory(root: Path) -> dict[str, Any]:
    meminfo = _text(root / "proc/meminfo")

    def size(name: str) -> int | None:
        kib = _field(meminfo, rf"{name}:\s*(\d+)")
        return int(kib) * 1024 if kib else None

    return {"total_bytes": size("MemTotal"), "swap_total_bytes": size("SwapTotal")}


def _space(path: Path) -> dict[str, Any]:
    try:
        found = os.statvfs(path)
    except OSError:
        return {"total_bytes": None, "free_bytes": None}
    return {
        "total_bytes": found.f_blocks * found.f_frsize,
        "free_bytes": found.f_bavail * found.f_frsize,
    }


def _storage(root: Path, cwd: Path) -> dict[str, Any]:
    """The file system behind the working directory, and the kind of disk behind that."""
    mount = _mount_of(str(cwd.resolve()), _text(root / "proc/self/mountinfo", 1 << 20) or "")
    point, number, filesystem, device = mount or (None, "", None, None)
    rotational = _rotational(root / "sys/dev/block" / number) if number else None
    return {
        "mount": point,
        "filesystem": filesystem,
        "device": mask_text(device) if device else None,
        "rotational": rotational,
    } | _space(cwd)


def _mount_of(path: str, mountinfo: str) -> tuple[str, str, str, str] | None:
    """Mount point, device number, file system and device of the innermost, latest mount."""
    best: tuple[str, str, str, str] | None = None
    for line in mountinfo.splitlines():
        place, _, kind = line.partition(" - ")
        words, kinds = place.split(), kind.split()
        point = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), words[4])
        holds = path == point or path.startswith(point.rstrip("/") + "/")
        if holds and len(kinds) > 1 and (best is None or len(point) >= len(best[0])):
            best = (point, words[2], kinds[0], kinds[1])
    return best


def _rotational(block: Path) -> bool | None:
    """Of the device, or of the disk whose partition it is."""
    device = block.resolve()
    flag = _line(device / "queue/rotational") or _line(device.parent / "queue/rotational")
    return flag == "1" if flag else None


def _limits(pid: int) -> dict[str, Any]:
    """Soft and hard limits of the watched process."""
    wanted = {
        "nofile": resource.RLIMIT_NOFILE,
        "memlock": resource.RLIMIT_MEMLOCK,
        "core": resource.RLIMIT_CORE,
        "nproc": resource.RLIMIT_NPROC,
    }
    limits: dict[str, Any] = {}
    for name, which in wanted.items():
        try:
            soft, hard = resource.prlimit(pid, which)
        except OSError:
            soft, hard = resource.getrlimit(which)
        limits[name] = {"soft": _limit(soft), "hard": _limit(hard)}
    return limits


def _limit(value: int) -> int | str:
    return "unlimited" if value == resource.RLIM_INFINITY else value


def _python() -> dict[str, Any]:
    """The watcher's interpreter; the command may use another."""
    return {
        "version": platform.python_version(),
        "implementation": platform.python_implementation(),
        "executable": Path(sys.executable).name,
    }


def _site_packages(command: list[str]) -> list[str]:
    """The packages beside the command's program, as in any virtual environment; if any."""
    program = shutil.which(command[0]) if command else None
    if program is None:
        return []
    # Not resolved: the interpreter of a virtual environment is a link to the system's.
    prefix = Path(program).absolute().parent.parent
    return [str(path) for path in prefix.glob("lib/python3*/site-packages")]


def _versions(path: list[str]) -> dict[str, str]:
    versions = {}
    for name in PACKAGES:
        context = DistributionFinder.Context(name=name, path=path)
        found: Iterable[Distribution] = MetadataPathFinder.find_distributions(context)
        for distribution in found:
            versions[name] = distribution.version
            break
    return versions


def _git(cwd: Path) -> dict[str, Any] | None:
    """The state of the work tree; None where there is no git or no repository."""
    deadline = time.monotonic() + GIT_SECONDS
    head = _ask_git(cwd, deadline, "rev-parse", "HEAD", "--abbrev-ref", "HEAD")
    if not head:
        return None
    commit, _, branch = head.partition("\n")
    changes = _ask_git(cwd, deadline, "status", "--porcelain", "--untracked-files=no")
    remote = _ask_git(cwd, deadline, "config", "--get", "remote.origin.url")
    return {
        "commit": commit,
        "branch": None if branch == "HEAD" else branch,
        "dirty": None if changes is None else bool(changes),
        "remote": mask_text(remote) if remote else None,
    }


def _ask_git(cwd: Path, deadline: float, *question: str) -> str | None:
    """Git's answer in time; None if there is none. It must not write to the user's repository."""
    try:
        answer = subprocess.run(
            ["git", "-c", "core.fsmonitor=false", *question],
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
    return answer.stdout.decode(errors="replace").strip()


def _gpus(root: Path) -> list[dict[str, Any]]:
    """What NVIDIA's kernel module tells without its library."""
    gpus = []
    for folder in sorted((root / "proc/driver/nvidia/gpus").glob("*")):
        text = _text(folder / "information")
        model, uuid = _field(text, r"Model:\s*(.*)"), _field(text, r"GPU UUID:\s*(.*)")
        gpus.append({"model": model, "uuid": uuid, "bus": folder.name})
    return gpus


def _driver(root: Path) -> str | None:
    text = _text(root / "proc/driver/nvidia/version")
    return _field(text, r"NVRM version:.*?\s(\d{3,}\.[\d.]+)")


def _variables(root: Path, pid: int | None) -> dict[str, str]:
    """Those that matter for training, of the watched process if it can be asked."""
    text = _text(root / f"proc/{pid}/environ", 1 << 20) if pid else None
    pairs = (entry.partition("=") for entry in text.split("\0")) if text else ()
    environment = {name: value for name, _, value in pairs} or dict(os.environ)
    kept = {name: environment[name] for name in sorted(environment) if _VARIABLES.fullmatch(name)}
    return mask_environment(kept)
