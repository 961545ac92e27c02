"""Usage of a process tree: CPU and memory with every sample, other metrics less often."""

from __future__ import annotations

import os
import signal
from collections import defaultdict
from collections.abc import Mapping, Sequence

from stepscope.metrics import Scope
from stepscope.records import Entity, Reading
from stepscope.sensors import procfs
from stepscope.sensors.accounting import CounterAccounting
from stepscope.sensors.contract import Sensor, error_reason
from stepscope.sensors.tree import MAIN, OTHER, TREE, Process, ProcessTree

_ENTITIES: dict[tuple[str, int | None], Entity] = {}


def _entity(role: str, pid: int | None = None) -> Entity:
    return _ENTITIES.setdefault((role, pid), Entity(role, pid))


class UsageSensor(Sensor):
    """CPU, RSS and threads by role and of the tree; also refreshes the tree for other sensors."""

    name = "process"
    scope: Scope = "process"
    metrics = ("cpu", "rss", "processes", "threads")
    period = 0.0
    share = 0.03

    def __init__(self, tree: ProcessTree, started_here: bool = True) -> None:
        super().__init__()
        self.tree = tree
        # User and system time are each rounded down to whole ticks.
        self.cpu = CounterAccounting(rounding=2 * procfs.TICK)
        self.appeared = False
        """Whether processes have appeared since the caller last reset this flag."""
        if not started_here:
            for process in tree:
                self.cpu.baseline(process.pid, process.cpu_s, process.reaped_s)
        self._roles_of_exited: dict[int, str] = {}
        self.account(thorough=True)

    def read(self) -> list[Reading]:
        self.account()
        sums: dict[str, list[float]] = {role: [0, 0, 0] for role in self.cpu.totals}
        for process in self.tree.processes.values():
            if process.state != "Z":
                row = sums.get(process.role)
                if row is None:
                    row = sums[process.role] = [0, 0, 0]
                row[0] += process.rss
                row[1] += 1
                row[2] += process.threads
        whole = [sum(column) for column in zip(*sums.values(), strict=True)] or [0, 0, 0]
        readings = [_usage(TREE, self.cpu.total, whole)]
        readings += [_usage(role, self.cpu.totals[role], row) for role, row in sums.items()]
        return readings

    def account(self, thorough: bool = False) -> None:
        """Refresh the tree and add the usage since the last call."""
        changes = self.tree.refresh(thorough)
        if self.tree.unreadable and not self.notes:
            reason = self.tree.unreadable.strerror
            self.notes.append(f"Some processes are not monitored: {reason}")
        if not changes.full:
            self.cpu.observe_own((p.pid, p.cpu_s, p.role) for p in self.tree)
            return
        self.appeared = self.appeared or changes.appeared
        for process in changes.exited:
            self._roles_of_exited[process.parent] = process.role
            self._roles_of_exited.pop(process.pid, None)
            self.cpu.exited(process.pid, reaper_of(process.parent))
        for p in self.tree:
            reaped_role = self._roles_of_exited.get(p.pid, OTHER)
            self.cpu.observe(p.pid, p.cpu_s, p.reaped_s, p.role, reaped_role)

    def reaped(self, pid: int, cpu_s: float) -> None:
        """Record that the monitor reaped a process, which gives its total CPU time."""
        process = self.tree.processes.get(pid)
        role = process.role if process else MAIN if pid == self.tree.root else OTHER
        self.cpu.reaped_by_monitor(pid, cpu_s, role)


def _usage(role: str, cpu: float, row: list[float]) -> Reading:
    return Reading(
        _entity(role), {"cpu": cpu, "rss": row[0], "processes": row[1], "threads": row[2]}
    )


def reaper_of(parent: int) -> int | None:
    """Return the process that receives the usage of an exited child: its parent, unless the parent
    ignores SIGCHLD and the kernel reaps the child."""
    status = procfs.status(parent)
    return None if status is not None and status.ignores(signal.SIGCHLD) else parent


class _TreeCounters:
    """Several counters that move to the parent when a child is reaped."""

    def __init__(self, count: int) -> None:
        self.counters = [CounterAccounting() for _ in range(count)]
        self._parents: dict[int, int] = {}

    def baseline(self, process: Process, amounts: Sequence[float]) -> None:
        self._parents[process.pid] = process.parent
        for counter, amount in zip(self.counters, amounts, strict=True):
            counter.baseline(process.pid, 0, amount)

    def observe(self, read: Mapping[Process, Sequence[float]]) -> None:
        """Record the readings of all running processes, parents first."""
        running = {process.pid for process in read}
        for pid in [pid for pid in reversed(self._parents) if pid not in running]:
            reaper = reaper_of(self._parents.pop(pid))
            for counter in self.counters:
                counter.exited(pid, reaper)
        for process, amounts in read.items():
            self._parents[process.pid] = process.parent
            for counter, amount in zip(self.counters, amounts, strict=True):
                counter.observe(process.pid, 0, amount, process.role, process.role)

    def reaped_by_monitor(self, pid: int) -> None:
        """Record that the monitor reaped a process: no other process receives its usage."""
        self._parents.pop(pid, None)
        for counter in self.counters:
            counter.exited(pid, None)

    def readings(self, metrics: Sequence[str]) -> list[Reading]:
        """Return the totals of every role and of the tree."""
        named = list(zip(metrics, self.counters, strict=True))
        roles = {role for counter in self.counters for role in counter.totals}
        rows = {role: {key: each.totals.get(role, 0.0) for key, each in named} for role in roles}
        rows[TREE] = {key: each.total for key, each in named}
        return [Reading(_entity(role), {**row}) for role, row in rows.items()]


class DetailSensor(Sensor):
    """CPU, RSS and threads of every process, and page faults by role."""

    name = "process detail"
    scope: Scope = "process"
    metrics = ("cpu", "rss", "threads", "faults_minor", "faults_major")
    period = 1.0

    def __init__(self, tree: ProcessTree, started_here: bool = True) -> None:
        super().__init__()
        self.tree = tree
        self._faults = _TreeCounters(2)
        if not started_here:
            for process in tree:
                self._faults.baseline(process, (process.faults_minor, process.faults_major))

    def read(self) -> list[Reading]:
        self._faults.observe({p: (p.faults_minor, p.faults_major) for p in self.tree})
        readings = []
        for process in self.tree:
            rss, threads = float(process.rss), float(process.threads)
            values = {"cpu": process.cpu_s, "rss": rss, "threads": threads}
            readings.append(Reading(Entity(process.role, process.pid), {**values}))
        return readings + self._faults.readings(("faults_minor", "faults_major"))


class IoSensor(Sensor):
    """Bytes that the tree reads and writes, from and to storage and through system calls."""

    name = "process io"
    scope: Scope = "process"
    metrics = ("read", "write", "read_calls", "write_calls")
    period = 0.5

    def __init__(self, tree: ProcessTree, started_here: bool = True) -> None:
        super().__init__()
        self.tree = tree
        self._bytes = _TreeCounters(len(self.metrics))
        self._descriptors: dict[int, int] = {}
        if not started_here:
            for process in tree:
                amounts = self._amounts(process.pid)
                if amounts:
                    self._bytes.baseline(process, amounts)

    def read(self) -> list[Reading]:
        readable = self._account()
        for pid in self._descriptors.keys() - self.tree.processes.keys():
            os.close(self._descriptors.pop(pid))
        if self.missing and not readable:
            return []
        return self._bytes.readings(self.metrics)

    def _account(self) -> int:
        read = {process: self._amounts(process.pid) for process in self.tree}
        readable = {process: amounts for process, amounts in read.items() if amounts}
        self._bytes.observe(readable)
        return len(readable)

    def reaped(self, pid: int) -> None:
        """Read a zombie for the last time before the monitor reaps it."""
        self._account()  # all processes: the usage of its children may just have moved to it
        self._bytes.reaped_by_monitor(pid)
        descriptor = self._descriptors.pop(pid, None)
        if descriptor is not None:
            os.close(descriptor)

    def close(self) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()

    def _amounts(self, pid: int) -> Sequence[int]:
        try:
            descriptor = self._descriptors.get(pid)
            if descriptor is None:
                descriptor = self._descriptors[pid] = procfs.open_file(pid, "io")
            return procfs.parse_io(os.pread(descriptor, 256, 0))
        except (ProcessLookupError, FileNotFoundError):
            return ()
        except OSError as error:
            self.mark_missing(error)
            return ()


_ThreadCounts = tuple[int, int, int]
"""Voluntary and involuntary context switches, and nanoseconds waiting for a CPU."""


class SwitchesSensor(Sensor):
    """Context switches and CPU wait, which the kernel reports per thread."""

    name = "context switches"
    scope: Scope = "process"
    metrics = ("switches_voluntary", "switches_involuntary", "cpu_wait")
    period = 2.0
    share = 0.001

    def __init__(
        self, tree: ProcessTree, started_here: bool = True, proc: str = procfs.PROC
    ) -> None:
        super().__init__()
        self.tree = tree
        self._proc = proc
        self._has_waits = self._kernel_counts_waits()
        self._last: dict[int, _ThreadCounts] = {}
        self._totals: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
        if not started_here:
            self._count()
            self._totals.clear()

    def read(self) -> list[Reading]:
        self._count()
        whole = [sum(column) for column in zip(*self._totals.values(), strict=True)]
        rows = {**self._totals, TREE: whole or [0.0, 0.0, 0.0]}
        return [Reading(_entity(role), self._values(row)) for role, row in rows.items()]

    def _values(self, row: Sequence[float]) -> dict[str, float | None]:
        voluntary, involuntary, waited_ns = row
        return {
            "switches_voluntary": voluntary,
            "switches_involuntary": involuntary,
            "cpu_wait": waited_ns * 1e-9 if self._has_waits else None,
        }

    def _count(self) -> None:
        seen: dict[int, _ThreadCounts] = {}
        for process in self.tree:
            for thread in procfs.threads(process.pid, self._proc):
                now = self._counts_of(f"{self._proc}/{process.pid}/task/{thread}")
                if now is None:
                    continue
                row = self._totals[process.role]
                for place, before in enumerate(self._last.get(thread, (0, 0, 0))):
                    row[place] += max(0, now[place] - before)
                seen[thread] = now
        self._last = seen

    def _counts_of(self, folder: str) -> _ThreadCounts | None:
        """Return the counters of a thread; None for an exited thread."""
        try:
            switches = procfs.switches(folder)
            if not self._has_waits:
                return switches and (*switches, 0)
            waits = procfs.waits_for_cpu(folder)
        except OSError:
            return None
        return (*switches, waits[0]) if switches and waits else None

    def _kernel_counts_waits(self) -> bool:
        """Whether the kernel counts waits: the file may be missing, or always 0."""
        try:
            waits = procfs.waits_for_cpu(f"{self._proc}/self")
        except OSError as error:
            self.mark_missing(f"{error_reason(error)} (not supported by this kernel)", "cpu_wait")
            return False
        if waits is None or not waits[1]:
            self.mark_missing(
                "the kernel does not count CPU waits (delay accounting is off)", "cpu_wait"
            )
            return False
        return True


class SharedMemorySensor(Sensor):
    """Proportional set size and swap. Expensive, therefore read within a budget.

    A reading walks the page tables: 12 to 15 ms per GiB and process.
    """

    name = "pss"
    scope: Scope = "process"
    metrics = ("pss", "swap")
    period = 1.0
    share = 0.0005
    first_after = 0.4

    def __init__(self, tree: ProcessTree) -> None:
        super().__init__()
        self.tree = tree

    def read(self) -> list[Reading]:
        readings = []
        sums: dict[str, list[float]] = {}
        for process in self.tree:
            amounts = self._amounts(process.pid) if process.state != "Z" else None
            if amounts is None:
                continue
            values: dict[str, float | None] = {"pss": amounts.pss, "swap": amounts.swap}
            readings.append(Reading(Entity(process.role, process.pid), values))
            for role in (process.role, TREE):
                row = sums.setdefault(role, [0.0, 0.0])
                row[0] += amounts.pss
                row[1] += amounts.swap
        readings += [
            Reading(_entity(role), {"pss": row[0], "swap": row[1]}) for role, row in sums.items()
        ]
        return readings

    def _amounts(self, pid: int) -> procfs.ProportionalMemory | None:
        try:
            return procfs.read_smaps_rollup(pid)
        except (ProcessLookupError, FileNotFoundError):
            return None
        except OSError as error:
            self.mark_missing(error)
            return None
