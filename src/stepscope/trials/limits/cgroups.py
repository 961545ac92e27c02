"""Control groups of a trial: they limit its memory and CPU time, and hold its processes together.

A group is created below our own group, so that our limits apply to it too. If that is not possible,
it is created below the nearest possible ancestor, with our limits copied. Version 1 has one
hierarchy per controller. In version 2 a group with processes cannot have child groups with limits
(except the root), so that an ancestor is used nearly always: for a shell under systemd, its slice,
which belongs to the user.

A trial without such limits gets a group without controllers, which changes no measurement. It is
created below our own group or not at all.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from stepscope.sensors.cgroup import CONTROLLERS, Cgroup, Group, find_cgroup
from stepscope.trials.processes import trial_processes

PREFIX = "stepscope-"

_PERIOD_US = 100_000
_MIN_QUOTA_US = 1000
_KILL_S = 2.0
_WITHOUT_LIMITS = ("unified", "freezer", "pids", "devices")
"""Hierarchies for a group without limits, the cheapest first. `unified` is version 2: not the name
of a controller. A group of `cpu` would be scheduled as a whole, a group of `memory` accounted."""
_OPTIONAL = ("memory.swap.max", "memory.memsw.limit_in_bytes")
"""Missing in kernels without swap accounting."""
_EVIDENCE = {
    (2, "memory"): "memory.events memory.max memory.peak",
    (1, "memory"): "memory.oom_control memory.failcnt memory.limit_in_bytes "
    "memory.max_usage_in_bytes",
    (2, "cpu"): "cpu.max cpu.stat",
    (1, "cpu"): "cpu.cfs_quota_us cpu.stat",
}

_REASONS = {
    errno.EACCES: "no permission to create a cgroup",
    errno.EPERM: "no permission to create a cgroup",
    errno.EROFS: "the cgroup file system is read-only",
    errno.EBUSY: (
        "cgroup v2 does not allow limits in the children of a cgroup that contains processes, such "
        "as the one stepscope runs in"
    ),
    errno.ENOENT: "the controller is not available",
}

ControlValue = int | str | dict[str, int]
"""Contents of a control file: one number, a text, or `key number` lines."""


@dataclass(frozen=True)
class Refused:
    reason: str


@dataclass(frozen=True)
class GroupCounts:
    """Kernel counters of the group of a trial; empty without a group."""

    kills: int | None = None  # OOM kills at the memory limit
    peak: int | None = None  # peak memory, including the page cache
    counters: dict[str, ControlValue] = field(default_factory=dict)
    """Control files such as `memory.events`, as evidence."""


@dataclass(frozen=True)
class TrialGroup:
    """The groups of a trial by controller; one folder in version 2."""

    cgroup: Cgroup

    @property
    def controllers(self) -> frozenset[str]:
        return frozenset(self.cgroup.groups)

    @property
    def has_limits(self) -> bool:
        return not self.controllers.isdisjoint(CONTROLLERS)

    @property
    def version(self) -> str:
        """`cgroup v1` or `cgroup v2`; of the memory controller, if it is used."""
        groups = self.cgroup.groups
        group = groups.get("memory") or next(iter(groups.values()))
        return f"cgroup v{group.version}"

    @property
    def folders(self) -> tuple[Path, ...]:
        return tuple(dict.fromkeys(group.path for group in self.cgroup.groups.values()))

    def place(self, pid: int) -> None:
        """Move a process into the groups; its children inherit them. On OSError the process is back
        in our own groups, in all hierarchies of version 1, and the groups can be removed."""
        entered: list[Path] = []
        try:
            for folder in self.folders:
                (folder / "cgroup.procs").write_text(str(pid))
                entered.append(folder)
        except OSError:
            own = find_cgroup(os.getpid()).groups
            for controller, group in self.cgroup.groups.items():
                if group.path in entered and controller in own:
                    with contextlib.suppress(OSError):
                        (own[controller].path / "cgroup.procs").write_text(str(pid))
            raise

    def counts(self) -> GroupCounts:
        evidence: dict[str, ControlValue] = {}
        for controller, group in self.cgroup.groups.items():
            for file in _EVIDENCE.get((group.version, controller), "").split():
                if text := _text(group.path / file):
                    evidence[file] = _numbers(text)
        peaks = (evidence.get(file) for file in ("memory.peak", "memory.max_usage_in_bytes"))
        peak = next((value for value in peaks if isinstance(value, int)), None)
        return GroupCounts(self.cgroup.oom_kills(), peak, evidence)

    def kill_all(self) -> None:
        for folder in self.folders:
            _kill_all(folder)

    def members(self) -> list[trial_processes.TrialProcess]:
        return [each for folder in self.folders for each in trial_processes.members(folder)]

    def remove(self) -> list[str]:
        """Remove the groups after their processes have exited; return those that remain."""
        folders = map(str, self.folders)
        return [folder for folder in folders if not trial_processes.remove_group(folder)]


def make_group(
    name: str, memory: int | None, cpus: float | None, own: Cgroup | None = None
) -> TrialGroup | Refused:
    """Create a group with a memory limit in bytes, a CPU quota in cores, both or none.

    `own` is the current group of this process.
    """
    if memory is None and cpus is None:
        own = own or find_cgroup(os.getpid(), controllers=_WITHOUT_LIMITS)
        refused = Refused(own.reason)
        for hierarchy, parent in own.groups.items():
            # Below an ancestor, our own limits would not apply.
            made = _make_near(name, replace(parent, top=parent.path), {})
            if isinstance(made, Group):
                return TrialGroup(Cgroup({hierarchy: made}))
            refused = made
        return refused
    own = own or find_cgroup(os.getpid())
    parents: dict[Group, dict[str, float]] = {}
    for controller, requested, current in (
        ("memory", memory, own.memory_limit()),
        ("cpu", cpus, own.cpu_quota()),
    ):
        group = own.groups.get(controller)
        if group is None:
            if requested is not None:
                missing = f"the cgroup does not have the {controller} controller"
                return Refused(own.reason or missing)
            continue
        limits = [limit for limit in (requested, current) if limit is not None]
        # A process leaves a version 2 group with all its controllers: keep its current limits.
        if requested is not None or (group.version == 2 and limits):
            parents.setdefault(group, {})[controller] = min(limits)
    created: dict[str, Group] = {}
    for parent, amounts in parents.items():
        made = _make_near(name, parent, amounts)
        if isinstance(made, Refused):
            TrialGroup(Cgroup(created)).remove()
            return made
        created |= dict.fromkeys(amounts, made)
    return TrialGroup(Cgroup(created))


def stale_groups(own: Cgroup | None = None) -> list[Path]:
    """Return the groups of exited runners near our own group."""
    own = own or find_cgroup(os.getpid(), controllers=(*CONTROLLERS, *_WITHOUT_LIMITS))
    return [
        folder
        for parent in {parent for group in own.groups.values() for parent in group.lineage()}
        for folder in parent.glob(f"{PREFIX}*")
        if trial_processes.runner_is_running(folder.name[len(PREFIX) :]) is False
    ]


def remove_groups(folders: Iterable[Path]) -> list[str]:
    """Remove groups with their processes; return those that remain."""
    remaining = []
    for folder in folders:
        _kill_all(folder)
        if not trial_processes.remove_group(str(folder)):
            remaining.append(str(folder))
    return remaining


def _kill_all(folder: Path) -> None:
    deadline = time.monotonic() + _KILL_S
    while (members := trial_processes.members(str(folder))) and time.monotonic() < deadline:
        switch = folder / "cgroup.kill"  # kills all processes, including new forks: v2, Linux 5.14
        if switch.exists():
            switch.write_text("1")
        else:
            for member in members:
                trial_processes.send(member, signal.SIGKILL)
        time.sleep(0.01)


def _make_near(name: str, home: Group, amounts: dict[str, float]) -> Group | Refused:
    """Create the group below our own or below the nearest possible ancestor."""
    reasons = []
    for parent in home.lineage():
        try:
            if home.version == 2:
                _enable(parent, home.top, amounts)
            _make(parent / name, home.version, amounts)
            return Group(home.version, parent / name, home.top)
        except OSError as error:
            reasons.append(_REASONS.get(error.errno or 0) or error.strerror or str(error))
    return Refused("; ".join(dict.fromkeys(reasons)))


def _enable(folder: Path, top: Path, controllers: Iterable[str]) -> None:
    """Enable controllers for the children of a folder and, if necessary, of its ancestors."""
    missing = [c for c in controllers if c not in _text(folder / "cgroup.subtree_control").split()]
    if not missing:
        return
    absent = [c for c in missing if c not in _text(folder / "cgroup.controllers").split()]
    if absent and folder != top:
        _enable(folder.parent, top, absent)
    (folder / "cgroup.subtree_control").write_text(" ".join(f"+{c}" for c in missing))


def _make(folder: Path, version: int, amounts: dict[str, float]) -> None:
    """Create the group and set its limits; remove it again on errors."""
    folder.mkdir()
    try:
        if not os.access(folder.parent / "cgroup.procs", os.W_OK):
            # Moving a process requires write access to the common ancestor of both groups.
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        for controller, amount in amounts.items():
            size = str(int(amount))
            quota = str(max(_MIN_QUOTA_US, round(amount * _PERIOD_US)))
            settings = {
                (2, "memory"): {"memory.max": size, "memory.swap.max": "0"},
                (1, "memory"): {"memory.limit_in_bytes": size, "memory.memsw.limit_in_bytes": size},
                (2, "cpu"): {"cpu.max": f"{quota} {_PERIOD_US}"},
                (1, "cpu"): {"cpu.cfs_period_us": str(_PERIOD_US), "cpu.cfs_quota_us": quota},
            }
            for file, value in settings[version, controller].items():
                try:
                    (folder / file).write_text(value)
                except OSError:
                    if file not in _OPTIONAL:
                        raise
    except OSError:
        trial_processes.remove_group(str(folder), patience_s=0)
        raise


def _numbers(text: str) -> ControlValue:
    lines = [line.split() for line in text.splitlines()]
    if all(len(words) == 2 and words[1].isdigit() for words in lines) and not lines[0][0].isdigit():
        return {key: int(value) for key, value in lines}
    return int(text) if text.strip().isdigit() else text.strip()


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
