"""The cgroup of a process: limits, usage and OOM kills.

Version 1 (one hierarchy per controller), version 2 (one hierarchy) and the hybrid layout are
located in the same way: from the paths in /proc/PID/cgroup and our own mount table. The mount table
must be our own because the kernel writes both relative to the reader; mount points of another mount
namespace would be wrong here.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from stepscope.records import Entity, Reading
from stepscope.records.facts import CgroupFacts
from stepscope.sensors import procfs
from stepscope.sensors.contract import error_reason
from stepscope.sensors.host import FileSensor, Source

CONTROLLERS = ("cpu", "cpuacct", "memory")

_UNLIMITED = 1 << 60
"""Version 1 represents "no limit" as the largest multiple of the page size."""


@dataclass(frozen=True)
class Group:
    """The folder of a group for one controller, and the highest visible ancestor."""

    version: int
    path: Path
    top: Path

    def lineage(self) -> Iterator[Path]:
        """Yield the group and its visible ancestors; the lowest of their limits applies."""
        path = self.path
        yield path
        while path != self.top and self.top in path.parents:
            path = path.parent
            yield path

    def number(self, file: str, key: str) -> int | None:
        """Return the number after `key` in a file of `key number` lines."""
        for line in _text(self.path / file).splitlines():
            name, _, value = line.partition(" ")
            if name == key:
                return _integer(value)
        return None


@dataclass(frozen=True)
class Cgroup:
    """The groups of a process by controller, as far as they can be located."""

    groups: dict[str, Group] = field(default_factory=dict)
    reason: str = ""
    """Why no group was found."""
    hint: str = ""
    """How to make the group available."""
    unified_mounted: bool = False

    @property
    def version(self) -> str:
        """`v1`, `v2`, `hybrid` (v1 controllers and a v2 hierarchy) or `none`."""
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
        """Return the lowest memory limit of the group and its ancestors in bytes, if any."""
        group = self.groups.get("memory")
        if group is None:
            return None
        if group.version == 2:
            limits = [_integer(_text(path / "memory.max")) for path in group.lineage()]
        else:
            limits = [_integer(_text(path / "memory.limit_in_bytes")) for path in group.lineage()]
            # Includes ancestors that are not visible in a container.
            limits.append(group.number("memory.stat", "hierarchical_memory_limit"))
        known = (limit for limit in limits if limit is not None and limit < _UNLIMITED)
        return min(known, default=None)

    def cpu_quota(self) -> float | None:
        """Return the lowest CPU quota of the group and its ancestors in cores, if any."""
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
        """Return the number of OOM kills; v2 includes descendant groups, v1 does not."""
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


def find_cgroup(
    pid: int, proc: str = procfs.PROC, controllers: Sequence[str] = CONTROLLERS
) -> Cgroup:
    """Locate the group of a process; if there is none, return an empty one with a reason."""
    try:
        names = procfs.cgroup_paths(pid, proc)
    except OSError as error:
        return Cgroup(reason=error_reason(error))
    mounts: dict[str, list[procfs.Mount]] = {}
    for mount in procfs.mounts(proc):
        if mount.filesystem == "cgroup2":
            mounts.setdefault("", []).append(mount)
        elif mount.filesystem == "cgroup":
            for controller in mount.options.split(","):
                mounts.setdefault(controller, []).append(mount)
    groups = {}
    for controller in controllers:
        # The hybrid layout also has a version 2 line, but without controllers.
        version, key = (1, controller) if controller in names else (2, "")
        if key in names and (group := _locate(version, names[key], mounts.get(key, []))):
            groups[controller] = group
    if groups:
        return Cgroup(groups, unified_mounted="" in mounts)
    return Cgroup(
        reason="no cgroup file system is mounted",
        hint="In a container, mount it with -v /sys/fs/cgroup:/sys/fs/cgroup:ro",
    )


def allowed_cpus(pid: int, cgroup: Cgroup | None = None) -> float:
    """Return the number of cores that a process may use: its affinity or a lower quota."""
    try:
        cores = float(len(os.sched_getaffinity(pid)))
    except OSError:
        cores = float(os.cpu_count() or 1)
    quota = cgroup.cpu_quota() if cgroup else None
    return cores if quota is None else min(cores, quota)


def _locate(version: int, path: str, mounts: list[procfs.Mount]) -> Group | None:
    """Return the group in the first mount that contains it; otherwise the mount point.

    In a container, the root of the mount is the group of the container, while the path may still be
    the full path as seen from the host.
    """
    for mount in mounts:
        point, root = Path(mount.point), mount.root.rstrip("/")
        if path == root or path.startswith(f"{root}/"):
            below = path[len(root) :].strip("/")
            # "/../x" is a group outside our own cgroup namespace.
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
    """Usage of the whole group, including processes that are not monitored."""

    name = "cgroup"
    _controllers: ClassVar[Mapping[str, str]] = {
        "cgroup_cpu": "cpuacct",
        "cgroup_throttled": "cpu",
        "cgroup_memory": "memory",
        "cgroup_oom_kills": "memory",
    }
    metrics = (*_controllers, "cgroup_memory_limit")

    LIMIT_EVERY = 10
    """Readings per reading of the limit, which seldom changes and takes many files to read."""

    def __init__(self, cgroup: Cgroup) -> None:
        super().__init__(Entity("cgroup"), _sources(cgroup))
        self._cgroup = cgroup
        self._limit: int | None = None
        self._until_limit = 0
        for metric, controller in self._controllers.items():
            if cgroup.reason:
                self.mark_missing(cgroup.reason, metric, hint=cgroup.hint)
            elif controller not in cgroup.groups:
                hint = "Enable the controller for the cgroup"
                self.mark_missing(
                    f"the cgroup does not have the {controller} controller", metric, hint=hint
                )
        self.mark_missing(
            cgroup.reason or "no memory limit is set", "cgroup_memory_limit", hint=cgroup.hint
        )
        if not cgroup.reason:
            self.not_configured.add("cgroup_memory_limit")

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


_ABSENT = "not available in the root cgroup or in a cgroup without this controller"
_ABSENT_HINT = "Run the command in its own cgroup: systemd-run --scope --user COMMAND"


def _number_source(path: Path, metric: str, scale: float) -> Source:

    def parse(text: bytes) -> dict[str, float]:
        return {metric: int(text) / scale}

    return Source(str(path), (metric,), parse, 64, _ABSENT, _ABSENT_HINT)


def _lines_source(path: Path, lines: dict[str, tuple[str, float]]) -> Source:
    """A file of `key number` lines. `lines` maps a key to its metric and divisor."""
    pattern = re.compile(rb"^(%s) (\d+)$" % b"|".join(map(str.encode, lines)), re.MULTILINE)

    def parse(text: bytes) -> dict[str, float]:
        values = {}
        for key, number in pattern.findall(text):
            metric, scale = lines[key.decode()]
            values[metric] = int(number) / scale
        return values

    metrics = tuple(metric for metric, _ in lines.values())
    return Source(str(path), metrics, parse, absent=_ABSENT, hint=_ABSENT_HINT)
