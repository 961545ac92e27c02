"""Control groups of our own: how a trial's memory and CPU time are limited by the kernel.

A group is made below the one we are in, so that the limits that hold for us hold for it; where that
is not possible, below the nearest ancestor where it is, with those limits carried along. Version 1
has a hierarchy for each controller. In version 2 a group that has processes can have no groups with
limits below it (the root may), so that there it is an ancestor nearly always: of a shell under
systemd its slice, which belongs to the user.
"""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from stepscope.sensors.cgroup import Cgroup, Group, find_cgroup
from stepscope.trials import kin

PREFIX = "stepscope-"

_PERIOD_US = 100_000
_SHORTEST_QUOTA_US = 1000
_KILL_S = 2.0

_REASONS = {
    errno.EACCES: "no permission to make a control group",
    errno.EPERM: "no permission to make a control group",
    errno.EROFS: "the cgroup file system is read-only here",
    errno.EBUSY: "cgroup v2 allows no limits below a group that has processes, and ours has",
    errno.ENOENT: "the controller is not available here",
}


@dataclass(frozen=True)
class Refused:
    """No group could be made, and why."""

    reason: str


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
        """Move a process in; what it starts from now on is in it too. OSError if it may not."""
        for folder in self.folders:
            (folder / "cgroup.procs").write_text(str(pid))

    def oom_kills(self) -> int | None:
        """Processes that the kernel killed for memory."""
        return self.cgroup.oom_kills()

    def peak(self) -> int | None:
        """The most memory that was in use at once, page cache included; None if not told."""
        group = self.cgroup.groups.get("memory")
        if group is None:
            return None
        file = "memory.peak" if group.version == 2 else "memory.max_usage_in_bytes"
        text = _text(group.path / file).strip()
        return int(text) if text.isdigit() else None

    def counters(self) -> dict[str, Any]:
        """What the kernel counted, as evidence: `memory.events`, or its likes of version 1."""
        counted: dict[str, Any] = {}
        for controller, group in self.cgroup.groups.items():
            for file in _EVIDENCE[group.version, controller]:
                if text := _text(group.path / file):
                    counted[file] = _numbers(text)
        return counted

    def kill_all(self) -> None:
        """Kill every process in it, also those that nothing else ties to the trial."""
        for folder in self.folders:
            _kill_all(folder)

    def remove(self) -> list[str]:
        """Remove the groups once their processes have ended; returns those that stay."""
        return [str(folder) for folder in self.folders if not kin.remove_group(str(folder))]


def make_group(
    name: str, memory: int | None, cpus: float | None, own: Cgroup | None = None
) -> TrialGroup | Refused:
    """A group with a limit of memory (bytes), of CPU time (cores' worth), or of both.

    `own` is the group that we are in.
    """
    own = own or find_cgroup(os.getpid())
    homes: dict[Group, dict[str, float]] = {}
    for controller, amount in _amounts(own, memory, cpus).items():
        group = own.groups.get(controller)
        if group is None:
            return Refused(own.reason or f"no cgroup with the {controller} controller")
        homes.setdefault(group, {})[controller] = amount
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
    stale = [folder for group in set(own.groups.values()) for folder in _stale_near(group)]
    for folder in stale:
        _kill_all(folder)
    return [str(folder) for folder in stale if not kin.remove_group(str(folder))]


def _stale_near(group: Group) -> list[Path]:
    found: list[Path] = []
    for parent in group.lineage():
        found += parent.glob(f"{PREFIX}*")
    return [path for path in found if kin.runner_lives(path.name[len(PREFIX) :]) is False]


def _amounts(own: Cgroup, memory: int | None, cpus: float | None) -> dict[str, float]:
    """What to limit, controller by controller.

    Out of a version 2 group one moves with all controllers at once: what limits us already must not
    be left behind.
    """
    amounts: dict[str, float] = {}
    for controller, asked, holds in (
        ("memory", memory, own.memory_limit()),
        ("cpu", cpus, own.cpu_quota()),
    ):
        group = own.groups.get(controller)
        moves_along = group is not None and group.version == 2
        limits = [limit for limit in (asked, holds) if limit is not None]
        if asked is not None or (moves_along and limits):
            amounts[controller] = min(limits)
    return amounts


def _kill_all(folder: Path) -> None:
    deadline = time.monotonic() + _KILL_S
    while (found := kin.members(str(folder))) and time.monotonic() < deadline:
        if not _killed_by_kernel(folder):
            for member in found:
                kin.send(member, signal.SIGKILL)
        time.sleep(0.01)


def _killed_by_kernel(folder: Path) -> bool:
    """All at once, forks that are under way included: version 2, since Linux 5.14."""
    switch = folder / "cgroup.kill"
    if not switch.exists():
        return False
    switch.write_text("1")
    return True


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
            for setting in _settings(version, controller, amount):
                _apply(folder, setting)
    except OSError:
        kin.remove_group(str(folder), patience_s=0)
        raise


class _Setting(NamedTuple):
    file: str
    value: str
    optional: bool = False
    """A kernel may be built or booted without it: then there is nothing that it would bound."""


def _settings(version: int, controller: str, amount: float) -> Iterator[_Setting]:
    quota = max(_SHORTEST_QUOTA_US, round(amount * _PERIOD_US))
    if (version, controller) == (2, "memory"):
        yield _Setting("memory.max", str(int(amount)))
        yield _Setting("memory.swap.max", "0", optional=True)
    elif (version, controller) == (1, "memory"):
        yield _Setting("memory.limit_in_bytes", str(int(amount)))
        yield _Setting("memory.memsw.limit_in_bytes", str(int(amount)), optional=True)
    elif version == 2:
        yield _Setting("cpu.max", f"{quota} {_PERIOD_US}")
    else:
        yield _Setting("cpu.cfs_period_us", str(_PERIOD_US))
        yield _Setting("cpu.cfs_quota_us", str(quota))


_EVIDENCE = {
    (2, "memory"): ("memory.events", "memory.max", "memory.peak"),
    (1, "memory"): (
        "memory.oom_control", "memory.failcnt", "memory.limit_in_bytes",
        "memory.max_usage_in_bytes",
    ),
    (2, "cpu"): ("cpu.max", "cpu.stat"),
    (1, "cpu"): ("cpu.cfs_quota_us", "cpu.stat"),
}  # fmt: skip


def _apply(folder: Path, setting: _Setting) -> None:
    try:
        (folder / setting.file).write_text(setting.value)
    except OSError:
        if not setting.optional:
            raise


def _numbers(text: str) -> int | str | dict[str, int]:
    """A file of one number, of lines `key number`, or of words."""
    lines = [line.split() for line in text.splitlines()]
    if all(len(words) == 2 and words[1].isdigit() for words in lines) and not lines[0][0].isdigit():
        return {key: int(value) for key, value in lines}
    return int(text) if text.strip().isdigit() else text.strip()


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
