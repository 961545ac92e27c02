"""The processes of a tree: detects new and exited processes, and reads them efficiently."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from stepscope.sensors import procfs

# The role of a process in a training run, as seen from outside; ranks are "rank0", "rank1", …
TREE = "tree"
MAIN = "main"
WORKER = "worker"
OTHER = "other"

LOADER_WORKER = "pt_data_worker"
"""The process name of PyTorch loader workers, for every start method."""

_RANK_VARIABLES = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")

_FULL_EVERY_S = 0.95
_SCAN_INTERVAL_RATIO = 100
"""Minimum time between two scans of all processes, as a multiple of the duration of a scan."""


@dataclass(eq=False)
class Process(procfs.ProcessUsage):
    """A process of the tree, as last read."""

    pid: int
    stat: int
    statm: int
    """Open descriptors of the two files that are read with every sample."""
    clock: int
    found_at: float
    comm: bytes = b""
    role: str = ""
    rank: int | None = None
    settled: bool = False
    """Whether the role was determined after the process had time to exec and rename itself."""
    cpu_s: float = 0.0
    network: int | None = None

    @property
    def name(self) -> str:
        return self.comm.decode("utf-8", "replace")


@dataclass(slots=True)
class Changes:
    """Result of a refresh. `exited` lists children before parents."""

    exited: list[Process] = field(default_factory=list)
    appeared: bool = False
    full: bool = True
    """False if only CPU and RSS were read because nothing else can have changed."""


class ProcessTree:
    """All running descendants of `root`, parents before children.

    `adopter` is the process that adopts orphans of the tree: the monitor, as their subreaper. If it
    has children of its own, `is_orphan` decides which of its new children belong to the tree.
    """

    def __init__(
        self,
        root: int,
        adopter: int | None = None,
        exclude: Iterable[int] = (),
        is_orphan: Callable[[int], bool] = lambda pid: True,
    ) -> None:
        self.root = root
        self.adopter = adopter
        self._is_orphan = is_orphan
        self.processes: dict[int, Process] = {}
        self.trains: set[int] = set()
        """Processes that have reported training steps."""
        self._excluded = set(exclude) | {os.getpid()}
        self._foreign: set[int] = set()
        self._newest = self._scanned_up_to = b""
        self._unsettled = False
        self._next_full = 0.0
        self._next_scan = 0.0
        self.unreadable: OSError | None = None
        """Why a running process cannot be read, for example because too many files are open."""
        if not self._track(root) and self.unreadable:
            raise self.unreadable
        self._loadavg = -1
        with contextlib.suppress(FileNotFoundError):  # /proc may be mounted with subset=pid
            self._loadavg = os.open(f"{procfs.PROC}/loadavg", os.O_RDONLY | os.O_CLOEXEC)

    def __iter__(self) -> Iterator[Process]:
        return iter(self.processes.values())

    def refresh(self, thorough: bool = False) -> Changes:
        """Read every process again, and scan for new ones if any process was started.

        The scan has a time budget unless `thorough`: at the end of a run no process may be missed.
        """
        changes = Changes()
        now = time.monotonic()
        started = True  # unless it is known that no process was
        if self._loadavg >= 0:
            self._newest = procfs.parse_newest_process(os.pread(self._loadavg, 64, 0))
            started = self._newest != self._scanned_up_to
        # No process started or exited, and all had time to take their names: then no child can have
        # been reaped, and the cheap reading covers everything that changes between samples.
        due = started or thorough or self._unsettled or now >= self._next_full
        if not due and self._read_all_quick():
            changes.full = False
            return changes
        self._next_full = now + _FULL_EVERY_S
        for process in list(self.processes.values()):
            if not self._read_full(process, now):
                changes.exited.append(process)
                self._forget(process)
        changes.exited.reverse()
        if started and (thorough or now >= self._next_scan):
            changes.appeared = self._scan(now)
        self._unsettled = bool(changes.exited) or not all(p.settled for p in self)
        return changes

    def forget(self, pid: int) -> None:
        """Drop a process that was waited for."""
        process = self.processes.get(pid)
        if process is not None:
            self._forget(process)

    def zombies_of_adopter(self) -> list[int]:
        """Return exited orphans (and the root) that the monitor must reap."""
        return [
            p.pid for p in self.processes.values() if p.state == "Z" and p.parent == self.adopter
        ]

    def survivors(self) -> list[Process]:
        """Return the running processes other than the root."""
        return [p for p in self.processes.values() if p.pid != self.root and p.state != "Z"]

    def network_namespaces(self) -> dict[int, int]:
        """Return each network namespace with a running process in it."""
        namespaces: dict[int, int] = {}
        for process in self.processes.values():
            if process.network is None and process.state != "Z":
                process.network = procfs.network_namespace(process.pid) or 0
            if process.network:
                namespaces.setdefault(process.network, process.pid)
        return namespaces

    def now_trains(self, pid: int) -> None:
        """Record that a process reported a batch or a step."""
        if pid not in self.trains:
            self.trains.add(pid)
            if pid in self.processes:
                self._assign_role(self.processes[pid])

    def close(self) -> None:
        for process in list(self.processes.values()):
            self._forget(process)
        if self._loadavg >= 0:
            os.close(self._loadavg)

    def _scan(self, now: float) -> bool:
        self._scanned_up_to = self._newest
        pids = set(procfs.pids())
        self._foreign &= pids
        parents = {
            pid: _parent_of(pid)
            for pid in sorted(pids - self._foreign - self.processes.keys() - self._excluded)
        }
        found = False
        more = True
        while more:
            more = False
            for pid, parent in list(parents.items()):
                if parent in self.processes or (parent == self.adopter and self._is_orphan(pid)):
                    del parents[pid]
                    more = self._track(pid) or more
            found = found or more
        # A process whose parent has just exited may have been adopted after its parent was read.
        self._foreign.update(pid for pid, parent in parents.items() if _parent_of(pid) == parent)
        self._next_scan = now + (time.monotonic() - now) * _SCAN_INTERVAL_RATIO
        return found

    def _track(self, pid: int) -> bool:
        try:
            stat = procfs.open_file(pid, "stat")
            try:
                statm = procfs.open_file(pid, "statm")
            except OSError:
                os.close(stat)
                raise
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ESRCH):  # it has not exited
                self.unreadable = error
            return False
        process = Process(pid, stat, statm, ((~pid) << 3) | 2, time.monotonic())
        if not self._read_full(process, process.found_at):
            os.close(stat)
            os.close(statm)
            return False
        self.processes[pid] = process
        self._assign_role(process)
        return True

    def _forget(self, process: Process) -> None:
        os.close(process.stat)
        os.close(process.statm)
        del self.processes[process.pid]

    def _read_all_quick(self) -> bool:
        """Read CPU and RSS of all processes; return False if one has exited or is about to."""
        pread, clock = os.pread, time.clock_gettime_ns
        try:
            for process in self.processes.values():
                rss = procfs.parse_rss(pread(process.statm, 64, 0))
                if not rss and process.state != "Z":
                    return False
                process.rss = rss
                process.cpu_s = clock(process.clock) * 1e-9
        except OSError:
            return False
        return True

    def _read_full(self, process: Process, now: float) -> bool:
        """Read /proc/PID/stat; return False if the process has exited."""
        try:
            stat = os.pread(process.stat, procfs.STAT_BYTES, 0)
        except OSError:
            return False
        comm = process.update(stat)
        if process.state == "X":
            return False
        try:
            process.cpu_s = time.clock_gettime_ns(process.clock) * 1e-9
        except OSError:  # a kernel without access to the CPU clocks of other processes
            process.cpu_s = procfs.cpu_seconds(stat)
        # The role may change when a process renames itself or has had time to exec.
        settles = not process.settled and now - process.found_at >= 1
        if comm != process.comm or settles:
            process.comm = comm
            process.settled = settles or process.settled
            if process.pid in self.processes:
                self._assign_role(process)
        return True

    def _assign_role(self, process: Process) -> None:
        if process.rank is None:
            process.rank = rank_in(procfs.environ(process.pid))
        parent = self.processes.get(process.parent)
        process.role = role_of(
            process.name,
            process.pid == self.root,
            process.pid in self.trains,
            process.rank,
            parent.rank if parent else None,
        )


def _parent_of(pid: int) -> int | None:
    stat = procfs.stat(pid)
    return stat.parent if stat else None


def role_of(
    name: str, is_root: bool, trains: bool, rank: int | None, parent_rank: int | None
) -> str:
    """Return the role: main (the command or a process that reported training steps), a rank, a
    loader worker, or other."""
    if name.startswith(LOADER_WORKER):
        return WORKER
    if is_root:
        return MAIN
    if rank is not None and rank != parent_rank:
        return f"rank{rank}"
    return MAIN if trains else OTHER


def rank_in(environment: Mapping[str, str]) -> int | None:
    for name in _RANK_VARIABLES:
        value = environment.get(name, "")
        if value.isdigit():
            return int(value)
    return None
