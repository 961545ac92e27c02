"""Leftovers of a trial: processes, files in /dev/shm and GPU memory.

Leftovers would affect the next trial and its measurements, so they are removed if possible. A file
in /dev/shm belongs to the trial if it is new, owned by this user, named like the files of a
training framework, and not in use. Other new files may be user data: they are reported and kept.

If the runner is killed, the next trial removes what is left. A file in the state folder per running
trial, the `RunningTrial`, tells it what was there before.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import re
import stat
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from stepscope.errors import TrialError
from stepscope.records.codec import from_json
from stepscope.runs.files import UnsafeFile, read_json, write_json
from stepscope.runs.paths import RunPaths
from stepscope.sensors import procfs
from stepscope.sensors.gpu.nvml import NvmlUnavailable, Unreadable, open_nvml
from stepscope.sensors.gpu.sensors import in_initial_pid_namespace
from stepscope.state import state_folder
from stepscope.trials.limits.cgroups import PREFIX, remove_groups, stale_groups
from stepscope.trials.limits.spec import size_text
from stepscope.trials.processes import trial_processes
from stepscope.trials.processes.trial_processes import TrialProcess

SHM = Path("/dev/shm")

_DRIVER_S = 3.0
"""Time for the driver to release the memory of an exited process."""
_ACTIVITY_S = 5.0
"""Files of a trial may be this much newer than the newest file in its run folder."""
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
    before: Snapshot,
    token: str,
    known: Iterable[TrialProcess] = (),
    shm: Path = SHM,
    more: trial_processes.Find = tuple,
) -> Leftovers:
    """Find the leftovers of a trial and remove what can be removed. `known` are its processes;
    `more` finds those that can no longer be linked to it."""
    known = list(known)
    processes = trial_processes.processes_of(token, known, more)
    running = {each.pid for each in processes}
    pids = {each.pid for each in known} | running
    removed, remaining, unclaimed = _remove_new_files(before.shm, shm, pids, running)
    # A process that does not end is often stuck in the driver, which then does not respond either.
    gpu, unclaimed_gpu = ([], []) if processes else _wait_for_gpus(before, pids)
    return Leftovers(
        tuple(processes), tuple(remaining), tuple(gpu), tuple(removed), (*unclaimed, *unclaimed_gpu)
    )


def _remove_new_files(
    before: Mapping[str, int],
    shm: Path,
    pids: Collection[int] = (),
    running: Collection[int] = (),
    until: float = math.inf,
) -> tuple[list[str], list[str], list[str]]:
    """Remove the files of a trial in /dev/shm: those that are not in `before` and have not changed
    later than `until`. `pids` are its processes, some of them still `running`.

    Returns the files that were removed, those that were not, and those that may be user data.
    """
    removed, remaining, unclaimed = [], [], []
    new = {
        name: status
        for name, status in _files(shm).items()
        if before.get(name) != status.st_ino
        and status.st_uid == os.geteuid()
        and max(status.st_ctime, status.st_mtime) <= until
    }
    used_by: dict[tuple[int, int], set[int]] = {(s.st_dev, s.st_ino): set() for s in new.values()}
    if new:
        for pid in procfs.pids():
            for file in used_by.keys() & set(procfs.files_in_use(pid)):
                used_by[file].add(pid)
    for name, status in sorted(new.items()):
        users = used_by[status.st_dev, status.st_ino]
        text = f"{shm / name} ({size_text(status.st_size)})"
        if users.difference(running):
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
    return removed, remaining, unclaimed


@dataclass(frozen=True)
class RunningTrial:
    """What the next trial must know about a running one, in case its runner is killed."""

    folder: str  # the run folder
    groups: tuple[str, ...] = ()
    shm: dict[str, int] = field(default_factory=dict)
    """Files of frameworks before the trial: name to inode."""
    processes: tuple[tuple[int, int], ...] = ()
    """Processes of the trial without its token: pid and start ticks."""

    @classmethod
    def of(cls, folder: Path, groups: Iterable[Path], before: Snapshot) -> RunningTrial:
        shm = {name: ino for name, ino in before.shm.items() if _FRAMEWORK_FILES.fullmatch(name)}
        return cls(str(folder.absolute()), tuple(map(str, groups)), shm)

    def write(self, token: str) -> None:
        """Write the record of the trial with this token, if the state folder is writable."""
        with contextlib.suppress(OSError):
            _records().mkdir(parents=True, exist_ok=True)
            write_json(_records() / f"{token}.json", self, indent=None)

    @staticmethod
    def remove(token: str) -> None:
        with contextlib.suppress(OSError):
            (_records() / f"{token}.json").unlink()

    @staticmethod
    def read_all() -> dict[str, RunningTrial]:
        """Return the records of this user by token. Files that are not records are ignored."""
        records = {}
        for path in _records().glob("*.json"):
            with contextlib.suppress(OSError, ValueError, UnsafeFile):
                if path.lstat().st_uid == os.geteuid():
                    records[path.stem] = from_json(RunningTrial, read_json(path))
        return records

    def last_activity(self, token: str) -> float:
        """Return the time of the newest file in the run folder; without it, the trial's start."""
        paths, own = RunPaths(Path(self.folder)), _status(_records() / f"{token}.json")
        # Not `derived`: reports are written later.
        written = (_files(folder).values() for folder in (paths.folder, paths.events, paths.trial))
        statuses = [*itertools.chain(*written), *([own] if own else [])]
        return max((s.st_mtime for s in statuses if stat.S_ISREG(s.st_mode)), default=0.0)


def _records() -> Path:
    return state_folder() / "running"


def check_clean(shm: Path = SHM) -> list[str]:
    """Remove what exited runners have left and return messages; raises TrialError if processes or
    cgroups remain."""
    records = RunningTrial.read_all()
    is_running = {token: trial_processes.runner_is_running(token) for token in records}
    stale = {token: records[token] for token in records if is_running[token] is False}
    groups = set(stale_groups())
    for token, record in stale.items():  # a terminal may have its own group, far from ours
        groups |= {Path(path) for path in record.groups if Path(path).name == f"{PREFIX}{token}"}

    def registered() -> list[TrialProcess]:
        inside = [member for group in groups for member in trial_processes.members(group)]
        orphans = (
            trial_processes.identify_same(pid, started)
            for record in stale.values()
            for pid, started in record.processes
        )
        return [*inside, *filter(None, orphans)]

    ended, remaining = trial_processes.end_stale_processes(more=registered)
    if remaining:
        hint = "Wait, or reboot the machine: a process in state D is stuck in the kernel"
        names = ", ".join(map(str, remaining))
        raise TrialError(f"Cannot stop the processes of an earlier trial: {names}", hint)
    if left := remove_groups(groups):
        raise TrialError(
            f"Cannot remove the cgroups of an earlier trial: {', '.join(left)}",
            f"List their processes with: cat {left[0]}/cgroup.procs",
        )
    messages = [
        f"stopped {each}, a leftover process of a trial whose runner was killed" for each in ended
    ]
    # A file may belong to a trial that is running, even if it is not in use now.
    if not any(is_running.values()):
        for token, record in stale.items():
            until = record.last_activity(token) + _ACTIVITY_S
            removed, *_ = _remove_new_files(record.shm, shm, until=until)
            messages += [
                f"removed {file}, a leftover file of a trial whose runner was killed"
                for file in removed
            ]
            RunningTrial.remove(token)
    return messages


def is_of_trial(name: str, pids: Collection[int]) -> bool:
    """Whether a file in /dev/shm belongs to a trial, by its name and the pid in it."""
    match = _FRAMEWORK_FILES.fullmatch(name)
    if match is None:
        return False
    pid = match["torch"] or match["openmp"]
    return pid is None or int(pid) in pids or trial_processes.identify(int(pid)) is None


def _files(folder: Path) -> dict[str, os.stat_result]:
    names: list[str] = []
    with contextlib.suppress(OSError):
        names = os.listdir(folder)
    return {name: status for name in names if (status := _status(folder / name))}


def _status(path: Path) -> os.stat_result | None:
    try:
        return os.lstat(path)
    except OSError:
        return None


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
