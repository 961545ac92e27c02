"""Control groups of our own: how a trial's memory and CPU time are limited by the kernel.

A group is made below the one we are in, so that the limits that hold for us hold for it; where that
is not possible, below the nearest ancestor where it is, with those limits carried along. Version 1
has a hierarchy for each controller. In version 2 a group that has processes can have no groups with
limits below it (the root may), so that there it is an ancestor nearly always: of a shell under
systemd its slice, which belongs to the user.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from stepscope.sensors.cgroup import Cgroup, Group, find_cgroup
from stepscope.trials.processes import trial_processes

PREFIX = "stepscope-"

_PERIOD_US = 100_000
_SHORTEST_QUOTA_US = 1000
_KILL_S = 2.0
_OPTIONAL = ("memory.swap.max", "memory.memsw.limit_in_bytes")
"""A kernel without swap accounting has no swap that these would bound."""
_EVIDENCE = {
    (2, "memory"): "memory.events memory.max memory.peak",
    (1, "memory"): "memory.oom_control memory.failcnt memory.limit_in_bytes "
    "memory.max_usage_in_bytes",
    (2, "cpu"): "cpu.max cpu.stat",
    (1, "cpu"): "cpu.cfs_quota_us cpu.stat",
}

_REASONS = {
    errno.EACCES: "no permission to make a control group",
    errno.EPERM: "no permission to make a control group",
    errno.EROFS: "the cgroup file system is read-only here",
    errno.EBUSY: "cgroup v2 allows no limits below a group that has processes, and ours has",
    errno.ENOENT: "the controller is not available here",
}

ControlValue = int | str | dict[str, int]
"""What a control file holds: one number, words, or lines `key number`."""


@dataclass(frozen=True)
class Refused:
    reason: str


@dataclass(frozen=True)
class GroupCounts:
    """What the kernel counted in the group of a trial; without a group, nothing."""

    kills: int | None = None  # processes that it killed at the memory limit
    peak: int | None = None  # the most memory that was in use at once, page cache included
    counters: dict[str, ControlValue] = field(default_factory=dict)
    """As evidence: `memory.events` and its likes, by the name of their file."""


@dataclass(frozen=True)
class TrialGroup:
    """The groups of one trial, controller by controller; of version 2 they are one folder."""

    cgroup: Cgroup

    @property
    def controllers(self) -> frozenset[str]:
        return frozenset(self.cgroup.groups)

    @property
    def version(self) -> str:
        """`cgroup v1` or `cgroup v2`, of the controller of memory where there is one."""
        groups = self.cgroup.groups
        group = groups.get("memory") or next(iter(groups.values()))
        return f"cgroup v{group.version}"

    @property
    def folders(self) -> tuple[Path, ...]:
        return tuple(dict.fromkeys(group.path for group in self.cgroup.groups.values()))

    def place(self, pid: int) -> None:
        """Move a process in; what it starts from now on is in it too. OSError if it may not: then
        it is with us again, in all hierarchies of version 1, and the groups can be removed."""
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
            for file in _EVIDENCE[group.version, controller].split():
                if text := _text(group.path / file):
                    evidence[file] = _numbers(text)
        peaks = (evidence.get(file) for file in ("memory.peak", "memory.max_usage_in_bytes"))
        peak = next((value for value in peaks if isinstance(value, int)), None)
        return GroupCounts(self.cgroup.oom_kills(), peak, evidence)

    def kill_all(self) -> None:
        for folder in self.folders:
            _kill_all(folder)

    def remove(self) -> list[str]:
        """Remove the groups once their processes have ended; returns those that stay."""
        folders = map(str, self.folders)
        return [folder for folder in folders if not trial_processes.remove_group(folder)]


def make_group(
    name: str, memory: int | None, cpus: float | None, own: Cgroup | None = None
) -> TrialGroup | Refused:
    """A group with a limit of memory (bytes), of CPU time (cores' worth), or of both.

    `own` is the group that we are in.
    """
    own = own or find_cgroup(os.getpid())
    homes: dict[Group, dict[str, float]] = {}
    for controller, asked, holds in (
        ("memory", memory, own.memory_limit()),
        ("cpu", cpus, own.cpu_quota()),
    ):
        group = own.groups.get(controller)
        if group is None:
            if asked is not None:
                return Refused(own.reason or f"no cgroup with the {controller} controller")
            continue
        limits = [limit for limit in (asked, holds) if limit is not None]
        # Out of a version 2 group one moves with all controllers at once: what limits us already
        # must not be left behind.
        if asked is not None or (group.version == 2 and limits):
            homes.setdefault(group, {})[controller] = min(limits)
    made: dict[str, Group] = {}
    for home, amounts in homes.items():
        found = _make_near(name, home, amounts)
        if isinstance(found, Refused):
            TrialGroup(Cgroup(made)).remove()
            return found
        made |= dict.fromkeys(amounts, found)
    return TrialGroup(Cgroup(made))


def remove_stale(own: Cgroup | None = None) -> list[str]:
    """Remove the groups of runners that are dead, and who is in them; returns those that stay."""
    own = own or find_cgroup(os.getpid())
    stale = [
        folder
        for group in set(own.groups.values())
        for parent in group.lineage()
        for folder in parent.glob(f"{PREFIX}*")
        if trial_processes.runner_lives(folder.name[len(PREFIX) :]) is False
    ]
    for folder in stale:
        _kill_all(folder)
    return [str(folder) for folder in stale if not trial_processes.remove_group(str(folder))]


def _kill_all(folder: Path) -> None:
    deadline = time.monotonic() + _KILL_S
    while (found := trial_processes.members(str(folder))) and time.monotonic() < deadline:
        switch = folder / "cgroup.kill"  # all at once, ongoing forks included: v2, Linux 5.14
        if switch.exists():
            switch.write_text("1")
        else:
            for member in found:
                trial_processes.send(member, signal.SIGKILL)
        time.sleep(0.01)


def _make_near(name: str, home: Group, amounts: dict[str, float]) -> Group | Refused:
    """Below our own group, or below the nearest ancestor where one can be made and entered."""
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
    """Let groups below a folder have limits, which the folders above it must allow too."""
    missing = [c for c in controllers if c not in _text(folder / "cgroup.subtree_control").split()]
    if not missing:
        return
    absent = [c for c in missing if c not in _text(folder / "cgroup.controllers").split()]
    if absent and folder != top:
        _enable(folder.parent, top, absent)
    (folder / "cgroup.subtree_control").write_text(" ".join(f"+{c}" for c in missing))


def _make(folder: Path, version: int, amounts: dict[str, float]) -> None:
    """Make the group and set its limits; nothing is left of it where that is not possible."""
    folder.mkdir()
    try:
        if not os.access(folder.parent / "cgroup.procs", os.W_OK):
            # Whoever moves a process must be allowed to change all between its old and new group.
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        for controller, amount in amounts.items():
            size = str(int(amount))
            quota = str(max(_SHORTEST_QUOTA_US, round(amount * _PERIOD_US)))
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
