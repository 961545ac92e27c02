"""The control group of a process: its limits, what it uses, and whether the kernel killed in it.

Version 1 (a hierarchy for each controller), version 2 (one for all) and the hybrid of both are
found alike: by what /proc/PID/cgroup names and where our own mount table shows it. Our own, since
the kernel writes both relative to the reader; the mounts of a process in another mount namespace
would be paths that mean something else here.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from stepscope.records import Entity, Reading
from stepscope.records.facts import CgroupFacts
from stepscope.sensors import procfs
from stepscope.sensors.contract import why
from stepscope.sensors.host import FileSensor, Source

CONTROLLERS = ("cpu", "cpuacct", "memory")

_UNLIMITED = 1 << 60
"""Version 1 writes "no limit" as the largest number of whole pages, which depends on their size."""


@dataclass(frozen=True)
class Group:
    """Where one controller keeps the files of a group, and the highest ancestor that we can see."""

    version: int
    path: Path
    top: Path

    def lineage(self) -> Iterator[Path]:
        """The group and its visible ancestors: the tightest of their limits holds."""
        path = self.path
        yield path
        while path != self.top and self.top in path.parents:
            path = path.parent
            yield path

    def number(self, file: str, key: str) -> int | None:
        """The number after `key` in a file of lines `key number`."""
        for line in _text(self.path / file).splitlines():
            name, _, value = line.partition(" ")
            if name == key:
                return _integer(value)
        return None


@dataclass(frozen=True)
class Cgroup:
    """The group of a process, controller by controller, as far as it can be found."""

    groups: dict[str, Group] = field(default_factory=dict)
    reason: str = ""
    """Why there is nothing, where there is nothing."""
    hint: str = ""
    """What would help then."""
    unified_mounted: bool = False

    @property
    def version(self) -> str:
        """`v1`, `v2`, `hybrid` (v1 controllers beside a v2 hierarchy) or `none`."""
        versions = {group.version for group in self.groups.values()}
        if not versions:
            return "none"
        if versions == {2}:
            return "v2"
        return "hybrid" if self.unified_mounted else "v1"

    @property
    def paths(self) -> dict[str, str]:
        return {controller: str(group.path) for controller, group in self.groups.items()}

    def memory_limit(self) -> int | None:
        """Bytes the group may use, by its own or an ancestor's limit; None: as much as there is."""
        group = self.groups.get("memory")
        if group is None:
            return None
        if group.version == 2:
            limits = [_integer(_text(path / "memory.max")) for path in group.lineage()]
        else:
            limits = [_integer(_text(path / "memory.limit_in_bytes")) for path in group.lineage()]
            # Knows of ancestors too that a container does not show us.
            limits.append(group.number("memory.stat", "hierarchical_memory_limit"))
        known = (limit for limit in limits if limit is not None and limit < _UNLIMITED)
        return min(known, default=None)

    def cpu_quota(self) -> float | None:
        """Cores' worth of time the group may use, by the tightest quota; None: no quota."""
        group = self.groups.get("cpu")
        if group is None:
            return None
        quotas = []
        for path in group.lineage():
            if group.version == 2:
                texts = _text(path / "cpu.max").split()
            else:
                texts = [_text(path / "cpu.cfs_quota_us"), _text(path / "cpu.cfs_period_us")]
            quota, period = map(_integer, texts or ("", ""))  # "max" and "-1" mean no quota
            if quota and period:
                quotas.append(quota / period)
        return min(quotas, default=None)

    def oom_kills(self) -> int | None:
        """Processes the kernel killed for memory: v2 counts groups below too, v1 only this one."""
        group = self.groups.get("memory")
        if group is None:
            return None
        return group.number(_oom_file(group.version), "oom_kill")

    def describe(self) -> CgroupFacts:
        return CgroupFacts(
            version=self.version,
            paths=self.paths,
            memory_limit_bytes=self.memory_limit(),
            cpu_quota_cores=self.cpu_quota(),
            oom_kills=self.oom_kills(),
        )


def find_cgroup(pid: int, proc: str = procfs.PROC) -> Cgroup:
    """The group of a process; an empty one with a reason where it cannot be found."""
    try:
        names = procfs.cgroup_paths(pid, proc)
    except OSError as error:
        return Cgroup(reason=why(error))
    mounts: dict[str, list[procfs.Mount]] = {}
    for mount in procfs.mounts(proc):
        if mount.filesystem == "cgroup2":
            mounts.setdefault("", []).append(mount)
        elif mount.filesystem == "cgroup":
            for controller in mount.options.split(","):
                mounts.setdefault(controller, []).append(mount)
    groups = {}
    for controller in CONTROLLERS:
        # In the hybrid layout the line of version 2 is there too, but has no controllers.
        version, key = (1, controller) if controller in names else (2, "")
        if key in names and (group := _locate(version, names[key], mounts.get(key, []))):
            groups[controller] = group
    if groups:
        return Cgroup(groups, unified_mounted="" in mounts)
    return Cgroup(
        reason="no cgroup file system is mounted here",
        hint="mount it: -v /sys/fs/cgroup:/sys/fs/cgroup:ro for a container",
    )


def allowed_cpus(pid: int, cgroup: Cgroup | None = None) -> float:
    """How many cores' worth of time a process may use: its affinity, or a lower quota."""
    try:
        cores = float(len(os.sched_getaffinity(pid)))
    except OSError:
        cores = float(os.cpu_count() or 1)
    quota = cgroup.cpu_quota() if cgroup else None
    return cores if quota is None else min(cores, quota)


def _locate(version: int, path: str, mounts: list[procfs.Mount]) -> Group | None:
    """The first mount that shows the group; otherwise the mount point, as near as we can get.

    In a container the mount shows the group of the container at its top, while the path may still
    be the whole one, as seen from outside.
    """
    for mount in mounts:
        point, root = Path(mount.point), mount.root.rstrip("/")
        if path == root or path.startswith(f"{root}/"):
            below = path[len(root) :].strip("/")
            # "/../x" is how a group outside of our own cgroup namespace looks.
            if not below.startswith("..") and (point / below).is_dir():
                return Group(version, point / below, point)
    if not mounts:
        return None
    return Group(version, Path(mounts[0].point), Path(mounts[0].point))


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _integer(text: str) -> int | None:
    return int(text) if text.strip().isdigit() else None


def _oom_file(version: int) -> str:
    return "memory.events" if version == 2 else "memory.oom_control"


class CgroupSensor(FileSensor):
    """What the whole group uses, the watched processes and whoever else is in it."""

    name = "cgroup"
    _controllers: ClassVar[Mapping[str, str]] = {
        "cgroup_cpu": "cpuacct",
        "cgroup_throttled": "cpu",
        "cgroup_memory": "memory",
        "cgroup_oom_kills": "memory",
    }
    metrics = (*_controllers, "cgroup_memory_limit")

    LIMIT_EVERY = 10
    """Readings between two looks at the limit, which seldom changes and costs many files."""

    def __init__(self, cgroup: Cgroup) -> None:
        super().__init__(Entity("cgroup"), _sources(cgroup))
        self._cgroup = cgroup
        self._limit: int | None = None
        self._until_limit = 0
        for metric, controller in self._controllers.items():
            if cgroup.reason:
                self.lacks(cgroup.reason, metric, hint=cgroup.hint)
            elif controller not in cgroup.groups:
                hint = "enable that controller for the cgroup"
                self.lacks(f"no cgroup with the {controller} controller", metric, hint=hint)
        self.lacks(cgroup.reason or "no limit is set", "cgroup_memory_limit", hint=cgroup.hint)
        if not cgroup.reason:
            self.unset.add("cgroup_memory_limit")

    def read(self) -> list[Reading]:
        readings = super().read()
        if readings:
            if self._until_limit == 0:
                self._limit = self._cgroup.memory_limit()
                self._until_limit = self.LIMIT_EVERY
            self._until_limit -= 1
            readings[0].values["cgroup_memory_limit"] = self._limit
        return readings


def _sources(cgroup: Cgroup) -> Iterator[Source]:
    cpu, cpuacct = cgroup.groups.get("cpu"), cgroup.groups.get("cpuacct")
    if cpu and cpu.version == 2:
        lines = {"usage_usec": ("cgroup_cpu", 1e6), "throttled_usec": ("cgroup_throttled", 1e6)}
        yield _lines_source(cpu.path / "cpu.stat", lines)
    elif cpu:
        yield _lines_source(cpu.path / "cpu.stat", {"throttled_time": ("cgroup_throttled", 1e9)})
    if cpuacct and cpuacct.version == 1:
        yield _number_source(cpuacct.path / "cpuacct.usage", "cgroup_cpu", 1e9)
    if memory := cgroup.groups.get("memory"):
        file = "memory.current" if memory.version == 2 else "memory.usage_in_bytes"
        yield _number_source(memory.path / file, "cgroup_memory", 1.0)
        oom = {"oom_kill": ("cgroup_oom_kills", 1.0)}
        yield _lines_source(memory.path / _oom_file(memory.version), oom)


_ABSENT = "the root cgroup, or one whose controller is not enabled, does not count it"
_ABSENT_HINT = "only a cgroup of its own is counted: systemd-run --scope --user COMMAND"


def _number_source(path: Path, metric: str, scale: float) -> Source:

    def parse(text: bytes) -> dict[str, float]:
        return {metric: int(text) / scale}

    return Source(str(path), (metric,), parse, 64, _ABSENT, _ABSENT_HINT)


def _lines_source(path: Path, lines: dict[str, tuple[str, float]]) -> Source:
    """A file of lines `key number`: key to the metric and to what the number is divided by."""
    pattern = re.compile(rb"^(%s) (\d+)$" % b"|".join(map(str.encode, lines)), re.MULTILINE)

    def parse(text: bytes) -> dict[str, float]:
        values = {}
        for key, number in pattern.findall(text):
            metric, scale = lines[key.decode()]
            values[metric] = int(number) / scale
        return values

    metrics = tuple(metric for metric, _ in lines.values())
    return Source(str(path), metrics, parse, absent=_ABSENT, hint=_ABSENT_HINT)
