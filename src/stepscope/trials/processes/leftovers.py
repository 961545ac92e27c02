"""What is left of a trial once it has ended: processes, shared memory, memory of a GPU.

Nothing may be: it would be in the way of the next trial, and in its figures. What can be removed
is. Files in /dev/shm are the trial's if they are new, ours, named as training frameworks name
theirs, and not in use. Anything else that is new may be somebody's data: it is reported and left
alone.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from stepscope.errors import CannotTry
from stepscope.sensors import procfs
from stepscope.sensors.gpu.nvml import NvmlUnavailable, Unreadable, open_nvml
from stepscope.sensors.gpu.sensors import in_first_namespace
from stepscope.trials.limits.cgroups import remove_stale
from stepscope.trials.limits.spec import size_text
from stepscope.trials.processes import trial_processes
from stepscope.trials.processes.trial_processes import TrialProcess

SHM = Path("/dev/shm")

_DRIVER_S = 3.0
"""How long a driver may take to let go of the memory of a process that has ended."""
_FRAMEWORKS = re.compile(
    r"torch_(?P<torch>\d+)_\w+"  # PyTorch, sharing by file name
    r"|__KMP_REGISTERED_LIB_(?P<openmp>\d+)_\d+"
    r"|(psm|wnsm)_[0-9a-f]+|sem\.mp-\w+|pym-\d+-\w+"  # Python's multiprocessing
    r"|sem\.loky-\S+|nccl-\w+|cuda\.shm\.\w+(\.\w+)*"
)


@dataclass(frozen=True)
class Snapshot:
    shm: dict[str, int]  # names of files to their inodes
    gpu: frozenset[tuple[str, int]] = frozenset()
    """GPUs with the processes on them: only where the driver's numbers are not ours."""

    @classmethod
    def take(cls, shm: Path = SHM) -> Snapshot:
        files = {name: status.st_ino for name, status in _files(shm).items()}
        if in_first_namespace():
            return cls(files)
        return cls(files, frozenset((gpu, pid) for gpu, pid, _ in _on_gpus()))


@dataclass(frozen=True)
class Leftovers:
    """What is left of a trial, removed or not."""

    processes: tuple[TrialProcess, ...] = ()
    shm: tuple[str, ...] = ()  # files of the trial that could not be removed
    gpu: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()  # files of the trial that were removed
    unclaimed: tuple[str, ...] = ()  # what is new and may be the trial's or anybody's

    def describe(self) -> list[str]:
        """What is in the way of another trial, a line each."""
        return [*map(str, self.processes), *self.shm, *self.gpu]


def leftovers(
    before: Snapshot, token: str, known: Iterable[TrialProcess] = (), shm: Path = SHM
) -> Leftovers:
    """Look for what a trial left, and remove what can be; `known` are all its processes."""
    known = list(known)
    processes = trial_processes.processes_of(token, known)
    living = {each.pid for each in processes}
    pids = {each.pid for each in known} | living
    removed, stay, unclaimed = [], [], []
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
        if users - living:
            continue  # somebody else's
        if users:
            stay.append(text)
        elif not is_of_trial(name, pids):
            unclaimed.append(text)
        else:
            try:
                with contextlib.suppress(FileNotFoundError):
                    if os.lstat(shm / name).st_ino == status.st_ino:
                        os.unlink(shm / name)
                removed.append(text)
            except OSError:
                stay.append(text)
    # A process that will not end is stuck in the driver, often: then that does not answer either.
    gpu, arrived = ([], []) if processes else _wait_for_gpus(before, pids)
    return Leftovers(
        tuple(processes), tuple(stay), tuple(gpu), tuple(removed), (*unclaimed, *arrived)
    )


def check_clean() -> list[str]:
    """End what dead runners left behind, and tell it; CannotTry if some of it will not go."""
    found, stay = trial_processes.end_strays()
    if stay:
        hint = "Wait until they have, or restart the machine: one in state D is stuck in the kernel"
        names = ", ".join(map(str, stay))
        raise CannotTry(f"Processes of an earlier trial do not end: {names}", hint)
    if groups := remove_stale():
        raise CannotTry(
            f"Control groups of an earlier trial cannot be removed: {', '.join(groups)}",
            f"See what is in them: cat {groups[0]}/cgroup.procs",
        )
    return [f"{each} was left of a trial whose runner died: it was ended" for each in found]


def is_of_trial(name: str, pids: Collection[int]) -> bool:
    """Whether a file in /dev/shm is, by its name: those with a process number tell whose it is."""
    named = _FRAMEWORKS.fullmatch(name)
    if named is None:
        return False
    number = named["torch"] or named["openmp"]
    return number is None or int(number) in pids or trial_processes.identify(int(number)) is None


def _files(folder: Path) -> dict[str, os.stat_result]:
    found = {}
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            with contextlib.suppress(OSError):
                found[name] = os.lstat(folder / name)
    return found


def _wait_for_gpus(before: Snapshot, pids: Collection[int]) -> tuple[list[str], list[str]]:
    """What the trial still holds, and what came since the trial began and cannot be told apart."""
    numbers_match = in_first_namespace()
    deadline = time.monotonic() + _DRIVER_S
    while True:
        held = [
            f"{gpu}: {'some memory' if size is None else size_text(int(size))} of pid {pid}"
            for gpu, pid, size in _on_gpus()
            if (pid in pids if numbers_match else (gpu, pid) not in before.gpu)
        ]
        if not held or time.monotonic() >= deadline:
            return (held, []) if numbers_match else ([], held)
        time.sleep(0.1)


def _on_gpus() -> list[tuple[str, int, float | None]]:
    """GPU, process, bytes; nothing where there is no GPU."""
    found = []
    with contextlib.suppress(NvmlUnavailable), open_nvml() as nvml:
        for gpu in nvml.gpus:
            with contextlib.suppress(Unreadable):
                found += [(gpu.facts.label, pid, size) for pid, size in gpu.processes()]
    return found
