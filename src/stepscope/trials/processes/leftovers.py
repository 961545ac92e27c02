"""Leftovers of a trial: processes, files in /dev/shm and GPU memory.

Leftovers would affect the next trial and its measurements, so they are removed if possible. A file
in /dev/shm belongs to the trial if it is new, owned by this user, named like the files of a
training framework, and not in use. Other new files may be user data: they are reported and kept.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from stepscope.errors import TrialError
from stepscope.sensors import procfs
from stepscope.sensors.gpu.nvml import NvmlUnavailable, Unreadable, open_nvml
from stepscope.sensors.gpu.sensors import in_initial_pid_namespace
from stepscope.trials.limits.cgroups import remove_stale
from stepscope.trials.limits.spec import size_text
from stepscope.trials.processes import trial_processes
from stepscope.trials.processes.trial_processes import TrialProcess

SHM = Path("/dev/shm")

_DRIVER_S = 3.0
"""Time for the driver to release the memory of an exited process."""
_FRAMEWORK_FILES = re.compile(
    r"torch_(?P<torch>\d+)_\w+"  # PyTorch, file_system sharing strategy
    r"|__KMP_REGISTERED_LIB_(?P<openmp>\d+)_\d+"
    r"|(psm|wnsm)_[0-9a-f]+|sem\.mp-\w+|pym-\d+-\w+"  # Python's multiprocessing
    r"|sem\.loky-\S+|nccl-\w+|cuda\.shm\.\w+(\.\w+)*"
)


@dataclass(frozen=True)
class Snapshot:
    shm: dict[str, int]  # file name to inode
    gpu: frozenset[tuple[str, int]] = frozenset()
    """GPUs and pids; only recorded in a container, where the driver reports the host's pids."""

    @classmethod
    def take(cls, shm: Path = SHM) -> Snapshot:
        files = {name: status.st_ino for name, status in _files(shm).items()}
        if in_initial_pid_namespace():
            return cls(files)
        return cls(files, frozenset((gpu, pid) for gpu, pid, _ in _gpu_processes()))


@dataclass(frozen=True)
class Leftovers:
    """Leftovers of a trial, removed or not."""

    processes: tuple[TrialProcess, ...] = ()
    shm: tuple[str, ...] = ()  # files of the trial that could not be removed
    gpu: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()  # files of the trial that were removed
    unclaimed: tuple[str, ...] = ()  # new, but may belong to another process

    def describe(self) -> list[str]:
        """Return the leftovers that prevent another trial, one line each."""
        return [*map(str, self.processes), *self.shm, *self.gpu]


def leftovers(
    before: Snapshot, token: str, known: Iterable[TrialProcess] = (), shm: Path = SHM
) -> Leftovers:
    """Find the leftovers of a trial and remove what can be removed. `known` are its processes."""
    known = list(known)
    processes = trial_processes.processes_of(token, known)
    running = {each.pid for each in processes}
    pids = {each.pid for each in known} | running
    removed, remaining, unclaimed = [], [], []
    new = {
        name: status
        for name, status in _files(shm).items()
        if before.shm.get(name) != status.st_ino and status.st_uid == os.geteuid()
    }
    used_by: dict[tuple[int, int], set[int]] = {(s.st_dev, s.st_ino): set() for s in new.values()}
    if new:
        for pid in procfs.pids():
            for file in used_by.keys() & set(procfs.files_in_use(pid)):
                used_by[file].add(pid)
    for name, status in sorted(new.items()):
        users = used_by[status.st_dev, status.st_ino]
        text = f"{shm / name} ({size_text(status.st_size)})"
        if users - running:
            continue  # in use by another process
        if users:
            remaining.append(text)
        elif not is_of_trial(name, pids):
            unclaimed.append(text)
        else:
            try:
                with contextlib.suppress(FileNotFoundError):
                    if os.lstat(shm / name).st_ino == status.st_ino:
                        os.unlink(shm / name)
                removed.append(text)
            except OSError:
                remaining.append(text)
    # A process that does not end is often stuck in the driver, which then does not respond either.
    gpu, unclaimed_gpu = ([], []) if processes else _wait_for_gpus(before, pids)
    return Leftovers(
        tuple(processes), tuple(remaining), tuple(gpu), tuple(removed), (*unclaimed, *unclaimed_gpu)
    )


def check_clean() -> list[str]:
    """End processes left by exited runners and return messages; raises TrialError if any remain."""
    stale, remaining = trial_processes.end_stale_processes()
    if remaining:
        hint = "Wait, or reboot the machine: a process in state D is stuck in the kernel"
        names = ", ".join(map(str, remaining))
        raise TrialError(f"Cannot stop the processes of an earlier trial: {names}", hint)
    if groups := remove_stale():
        raise TrialError(
            f"Cannot remove the cgroups of an earlier trial: {', '.join(groups)}",
            f"List their processes with: cat {groups[0]}/cgroup.procs",
        )
    return [
        f"stopped {each}, a leftover process of a trial whose runner was killed" for each in stale
    ]


def is_of_trial(name: str, pids: Collection[int]) -> bool:
    """Whether a file in /dev/shm belongs to a trial, by its name and the pid in it."""
    match = _FRAMEWORK_FILES.fullmatch(name)
    if match is None:
        return False
    pid = match["torch"] or match["openmp"]
    return pid is None or int(pid) in pids or trial_processes.identify(int(pid)) is None


def _files(folder: Path) -> dict[str, os.stat_result]:
    files = {}
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            with contextlib.suppress(OSError):
                files[name] = os.lstat(folder / name)
    return files


def _wait_for_gpus(before: Snapshot, pids: Collection[int]) -> tuple[list[str], list[str]]:
    """Wait for the release of GPU memory. Return the memory that the trial still uses, and the
    memory of new processes that may not belong to it."""
    pids_match = in_initial_pid_namespace()
    deadline = time.monotonic() + _DRIVER_S
    while True:
        held = [
            f"{gpu}: {'some memory' if size is None else size_text(int(size))} of pid {pid}"
            for gpu, pid, size in _gpu_processes()
            if (pid in pids if pids_match else (gpu, pid) not in before.gpu)
        ]
        if not held or time.monotonic() >= deadline:
            return (held, []) if pids_match else ([], held)
        time.sleep(0.1)


def _gpu_processes() -> list[tuple[str, int, float | None]]:
    """Return (GPU, pid, bytes) of all processes on GPUs."""
    processes = []
    with contextlib.suppress(NvmlUnavailable), open_nvml() as nvml:
        for gpu in nvml.gpus:
            with contextlib.suppress(Unreadable):
                processes += [(gpu.facts.label, pid, size) for pid, size in gpu.processes()]
    return processes
