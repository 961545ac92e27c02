"""What is left of a trial once it has ended: processes, shared memory, memory of a GPU.

Nothing may be: it would be in the way of the next trial, and in its figures. What can be removed
is. Files in /dev/shm are the trial's if they are new, ours, named as training frameworks name
theirs, and in nobody's use. Anything else that is new may be somebody's data: it is told and left
alone.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from stepscope.errors import CannotTry
from stepscope.sensors.gpu import in_first_namespace
from stepscope.sensors.nvml import NvmlGpu, NvmlUnavailable, Unreadable, open_nvml
from stepscope.trials import kin
from stepscope.trials.cgroups import remove_stale
from stepscope.trials.kin import Kin
from stepscope.trials.limits import size_text

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
    """What there was before a trial."""

    shm: dict[str, int]
    """Names of files to their inodes."""
    gpu: frozenset[tuple[str, int]] = frozenset()
    """GPUs with the processes on them: only where the driver's numbers are not ours."""

    @classmethod
    def take(cls, shm: Path = SHM) -> Snapshot:
        files = {name: found.st_ino for name, found in _files(shm)}
        if in_first_namespace():
            return cls(files)
        return cls(files, frozenset((gpu, pid) for gpu, pid, _ in _on_gpus()))


@dataclass(frozen=True)
class Left:
    """What is left. `clean` tells whether another trial can start."""

    processes: tuple[Kin, ...] = ()
    shm: tuple[str, ...] = ()
    """Files of the trial that could not be removed."""
    gpu: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    """Files that were."""
    unclaimed: tuple[str, ...] = ()
    """What is new and may be the trial's or anybody's."""

    @property
    def clean(self) -> bool:
        return not (self.processes or self.shm or self.gpu)

    def describe(self) -> list[str]:
        """What is in the way of another trial, a line each."""
        return [*map(str, self.processes), *self.shm, *self.gpu]


def leftovers(before: Snapshot, token: str, known: Iterable[Kin] = (), shm: Path = SHM) -> Left:
    """Look for what a trial left, and remove what can be; `known` are all its processes."""
    known = list(known)
    processes = kin.kin_of(token, known)
    pids = {each.pid for each in known} | {each.pid for each in processes}
    files = _sort_files(before, pids, {each.pid for each in processes}, shm)
    # A process that will not end is stuck in the driver, often: then that does not answer either.
    gpu, arrived = ([], []) if processes else _wait_for_gpus(before, pids)
    return Left(
        tuple(processes),
        tuple(files.stay),
        tuple(gpu),
        tuple(files.removed),
        (*files.unclaimed, *arrived),
    )


def check_clean() -> list[str]:
    """End what dead runners left behind, and tell it; CannotTry if some of it will not go."""
    found, stay = kin.end_strays()
    if stay:
        raise CannotTry(
            f"Processes of an earlier trial do not end: {', '.join(map(str, stay))}",
            "Wait until they have, or restart the machine: one in state D is stuck in the kernel",
        )
    if groups := remove_stale():
        raise CannotTry(
            f"Control groups of an earlier trial cannot be removed: {', '.join(groups)}",
            f"See what is in them: cat {groups[0]}/cgroup.procs",
        )
    return [f"{each} was left of a trial whose runner died: it was ended" for each in found]


@dataclass
class _Files:
    removed: list[str] = field(default_factory=list)
    stay: list[str] = field(default_factory=list)
    unclaimed: list[str] = field(default_factory=list)


def _files(folder: Path) -> Iterator[tuple[str, os.stat_result]]:
    try:
        names = os.listdir(folder)
    except OSError:
        return
    for name in names:
        with contextlib.suppress(OSError):
            yield name, os.lstat(folder / name)


def _sort_files(before: Snapshot, pids: Collection[int], living: set[int], shm: Path) -> _Files:
    """New files of ours: removed, staying because they cannot be or are in use, or nobody's."""
    found = _Files()
    new = {
        name: status
        for name, status in _files(shm)
        if before.shm.get(name) != status.st_ino and status.st_uid == os.geteuid()
    }
    if not new:
        return found
    used_by = _users_of({(s.st_dev, s.st_ino) for s in new.values()})
    for name, status in sorted(new.items()):
        users = used_by.get((status.st_dev, status.st_ino), set())
        text = f"{shm / name} ({size_text(status.st_size)})"
        if users - living:
            continue  # somebody else's
        if users:
            found.stay.append(text)
        elif not _is_of_trial(name, pids):
            found.unclaimed.append(text)
        elif _remove(shm / name, status):
            found.removed.append(text)
        else:
            found.stay.append(text)
    return found


def _is_of_trial(name: str, pids: Collection[int]) -> bool:
    """By its name: those with the number of a process tell whose they are."""
    named = _FRAMEWORKS.fullmatch(name)
    if named is None:
        return False
    number = named["torch"] or named["openmp"]
    return number is None or int(number) in pids or kin.identify(int(number)) is None


def _remove(path: Path, status: os.stat_result) -> bool:
    try:
        if os.lstat(path).st_ino == status.st_ino:
            path.unlink()
        return True
    except FileNotFoundError:
        return True
    except OSError:
        return False


def _users_of(files: set[tuple[int, int]]) -> dict[tuple[int, int], set[int]]:
    """Which processes have one of some files (device, inode) open or mapped, as far as we see."""
    users: dict[tuple[int, int], set[int]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        for each in files.intersection((*_open_files(name), *_mapped_files(name))):
            users.setdefault(each, set()).add(int(name))
    return users


def _open_files(pid: str) -> Iterator[tuple[int, int]]:
    with contextlib.suppress(OSError):
        for descriptor in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                status = os.stat(f"/proc/{pid}/fd/{descriptor}")
                yield status.st_dev, status.st_ino


def _mapped_files(pid: str) -> Iterator[tuple[int, int]]:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/maps") as file:
        for line in file:
            _, _, _, device, inode, *_ = line.split(None, 5)
            major, minor = device.split(":")
            yield os.makedev(int(major, 16), int(minor, 16)), int(inode)


def _wait_for_gpus(before: Snapshot, pids: Collection[int]) -> tuple[list[str], list[str]]:
    """What the trial still holds, and what came since the trial began and cannot be told apart."""
    numbers_match = in_first_namespace()

    def held() -> list[str]:
        return [
            f"{gpu}: {'some memory' if size is None else size_text(int(size))} of pid {pid}"
            for gpu, pid, size in _on_gpus()
            if (pid in pids if numbers_match else (gpu, pid) not in before.gpu)
        ]

    left = _until_empty(held, _DRIVER_S)
    return (left, []) if numbers_match else ([], left)


def _until_empty(look: Callable[[], list[str]], seconds: float) -> list[str]:
    deadline = time.monotonic() + seconds
    while (found := look()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return found


def _on_gpus() -> Iterator[tuple[str, int, float | None]]:
    """GPU, process, bytes; nothing where there is no GPU."""
    try:
        nvml = open_nvml()
    except NvmlUnavailable:
        return
    try:
        for gpu in nvml.gpus:
            for pid, size in _processes_on(gpu):
                yield gpu.facts.label, pid, size
    finally:
        nvml.close()


def _processes_on(gpu: NvmlGpu) -> list[tuple[int, float | None]]:
    try:
        return gpu.processes()
    except Unreadable:
        return []
