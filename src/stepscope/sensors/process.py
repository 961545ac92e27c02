"""What the processes of a tree use: CPU and memory with every sample, the rest at its price."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping, Sequence

from stepscope.metrics import Scope
from stepscope.records import Entity, Reading
from stepscope.sensors.contract import Sensor, why
from stepscope.sensors.ledger import Ledger
from stepscope.sensors.roles import MAIN, OTHER, TREE
from stepscope.sensors.tree import TICK, Process, ProcessTree, ignores_children

_ENTITIES: dict[tuple[str, int | None], Entity] = {}


def _entity(role: str, pid: int | None = None) -> Entity:
    return _ENTITIES.setdefault((role, pid), Entity(role, pid))


class UsageSensor(Sensor):
    """CPU, RSS, threads of every role and of the tree; keeps the tree fresh for the others."""

    name = "process"
    scope: Scope = "process"
    metrics = ("cpu", "rss", "processes", "threads")
    period = 0.0
    share = 0.03

    def __init__(self, tree: ProcessTree, born_here: bool = True) -> None:
        super().__init__()
        self.tree = tree
        self.cpu = Ledger(rounding=2 * TICK)  # user and system time, each to whole ticks
        self.appeared = False
        """Whether processes appeared since somebody last asked (and set it back)."""
        if not born_here:
            for process in tree:
                self.cpu.baseline(process.pid, process.cpu_s, process.reaped_s)
        self._roles_gone: dict[int, str] = {}
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
        """Read the tree again and credit what was used since."""
        changes = self.tree.refresh(thorough)
        if not changes.full:
            self.cpu.observe_own((p.pid, p.cpu_s, p.role) for p in self.tree)
            return
        self.appeared = self.appeared or changes.appeared
        for process in changes.gone:
            self._roles_gone[process.parent] = process.role
            self._roles_gone.pop(process.pid, None)
            self.cpu.vanished(process.pid, reaper_of(process.parent))
        observe, roles_gone = self.cpu.observe, self._roles_gone
        for process in self.tree:
            observe(
                process.pid,
                process.cpu_s,
                process.reaped_s,
                process.role,
                roles_gone.get(process.pid, OTHER),
            )

    def reaped(self, pid: int, cpu_s: float) -> None:
        """The watcher waited for a process: all its time is known."""
        process = self.tree.processes.get(pid)
        role = process.role if process else MAIN if pid == self.tree.root else OTHER
        self.cpu.reaped_by_us(pid, cpu_s, role)


def _usage(role: str, cpu: float, row: list[float]) -> Reading:
    return Reading(
        _entity(role), {"cpu": cpu, "rss": row[0], "processes": row[1], "threads": row[2]}
    )


def reaper_of(parent: int) -> int | None:
    """Who gets what a vanished child used: its parent, unless that lets the kernel bury it."""
    return None if ignores_children(parent) else parent


class _Followers:
    """Several counters that jump into the parent when a child is reaped."""

    def __init__(self, count: int) -> None:
        self.ledgers = [Ledger() for _ in range(count)]
        self._parents: dict[int, int] = {}

    def baseline(self, process: Process, amounts: Sequence[float]) -> None:
        self._parents[process.pid] = process.parent
        for ledger, amount in zip(self.ledgers, amounts, strict=True):
            ledger.baseline(process.pid, 0, amount)

    def observe(self, read: Mapping[Process, Sequence[float]]) -> None:
        """Take in what was read, parents first, of all that could be read; the others are gone."""
        living = {process.pid for process in read}
        for pid in [pid for pid in reversed(self._parents) if pid not in living]:
            reaper = reaper_of(self._parents.pop(pid))
            for ledger in self.ledgers:
                ledger.vanished(pid, reaper)
        for process, amounts in read.items():
            self.observe_one(process.pid, process.parent, process.role, amounts)

    def observe_one(self, pid: int, parent: int, role: str, amounts: Sequence[float]) -> None:
        self._parents[pid] = parent
        for ledger, amount in zip(self.ledgers, amounts, strict=True):
            ledger.observe(pid, 0, amount, role, role)

    def reaped_by_us(self, pid: int) -> None:
        """Nobody else gets what it used."""
        self._parents.pop(pid, None)
        for ledger in self.ledgers:
            ledger.vanished(pid, None)

    def readings(self, metrics: Sequence[str]) -> list[Reading]:
        """The totals of every role and of the tree."""
        roles = {role for ledger in self.ledgers for role in ledger.totals}
        found = [
            Reading(
                _entity(role),
                {k: lg.totals.get(role, 0.0) for k, lg in zip(metrics, self.ledgers, strict=True)},
            )
            for role in roles
        ]
        whole = {k: lg.total for k, lg in zip(metrics, self.ledgers, strict=True)}
        return [*found, Reading(_entity(TREE), dict(whole))]


class DetailSensor(Sensor):
    """CPU, RSS and threads of every single process, and page faults by role."""

    name = "process detail"
    scope: Scope = "process"
    metrics = ("cpu", "rss", "threads", "faults_minor", "faults_major")
    period = 1.0

    def __init__(self, tree: ProcessTree, born_here: bool = True) -> None:
        super().__init__()
        self.tree = tree
        self._faults = _Followers(2)
        if not born_here:
            for process in tree:
                self._faults.baseline(process, (process.faults_minor, process.faults_major))

    def read(self) -> list[Reading]:
        self._faults.observe({p: (p.faults_minor, p.faults_major) for p in self.tree})
        readings = [
            Reading(
                Entity(process.role, process.pid),
                {
                    "cpu": process.cpu_s,
                    "rss": float(process.rss),
                    "threads": float(process.threads),
                },
            )
            for process in self.tree
        ]
        return readings + self._faults.readings(("faults_minor", "faults_major"))


class IoSensor(Sensor):
    """Bytes that the tree read and wrote: at the storage, and by calls."""

    name = "process io"
    scope: Scope = "process"
    metrics = ("read", "write", "read_calls", "write_calls")
    period = 0.5
    _FIELDS = (b"read_bytes", b"write_bytes", b"rchar", b"wchar")

    def __init__(self, tree: ProcessTree, born_here: bool = True) -> None:
        super().__init__()
        self.tree = tree
        self._bytes = _Followers(len(self.metrics))
        self._descriptors: dict[int, int] = {}
        if not born_here:
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
        """The watcher is about to bury a zombie: it tells its last, and nobody else gets it."""
        self._account()  # of all: what its children did may have become its own just now
        self._bytes.reaped_by_us(pid)
        descriptor = self._descriptors.pop(pid, None)
        if descriptor is not None:
            os.close(descriptor)

    def close(self) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()

    def _amounts(self, pid: int) -> list[int]:
        try:
            descriptor = self._descriptors.get(pid)
            if descriptor is None:
                descriptor = os.open(f"/proc/{pid}/io", os.O_RDONLY | os.O_CLOEXEC)
                self._descriptors[pid] = descriptor
            data = os.pread(descriptor, 256, 0)
        except (ProcessLookupError, FileNotFoundError):
            return []
        except OSError as error:
            self.lacks(why(error))
            return []
        found = dict(line.split(b": ") for line in data.splitlines())
        return [int(found[field]) for field in self._FIELDS]


_ThreadCounts = tuple[int, int, int]
"""Switches because it waited, because others had their turn, and nanoseconds without a CPU."""


class SwitchesSensor(Sensor):
    """Context switches of every thread, and its waits for a CPU; told only thread by thread."""

    name = "context switches"
    scope: Scope = "process"
    metrics = ("switches_voluntary", "switches_involuntary", "cpu_wait")
    period = 2.0
    share = 0.001

    def __init__(self, tree: ProcessTree, born_here: bool = True, proc: str = "/proc") -> None:
        super().__init__()
        self.tree = tree
        self._proc = proc
        self._tells_waits = self._does_it_tell_waits()
        self._last: dict[int, _ThreadCounts] = {}
        self._totals: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
        if not born_here:
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
            "cpu_wait": waited_ns * 1e-9 if self._tells_waits else None,
        }

    def _count(self) -> None:
        seen: dict[int, _ThreadCounts] = {}
        for process in self.tree:
            for thread in _threads_of(f"{self._proc}/{process.pid}/task"):
                now = self._counts_of(f"{self._proc}/{process.pid}/task/{thread}")
                if now is None:
                    continue
                row = self._totals[process.role]
                for place, before in enumerate(self._last.get(thread, (0, 0, 0))):
                    row[place] += max(0, now[place] - before)
                seen[thread] = now
        self._last = seen

    def _counts_of(self, folder: str) -> _ThreadCounts | None:
        """What the kernel counts of a thread; None for one that has ended."""
        try:
            status = _content(f"{folder}/status")
            waited_ns = int(_content(f"{folder}/schedstat").split()[1]) if self._tells_waits else 0
        except (OSError, IndexError):
            return None
        tail = status[status.rfind(b"voluntary_ctxt_switches", 0, status.rfind(b"nonvol")) :]
        fields = tail.split()
        return (int(fields[1]), int(fields[3]), waited_ns) if len(fields) >= 4 else None

    def _does_it_tell_waits(self) -> bool:
        """A kernel may lack the file, or not count: then it says that nobody ever got a CPU."""
        try:
            counts = _content(f"{self._proc}/self/schedstat").split()
        except OSError as error:
            self.lacks(f"{why(error)} (the kernel was built without it)", "cpu_wait")
            return False
        if counts[2:] in ([], [b"0"]):
            self.lacks("the kernel does not count waits (its delay accounting is off)", "cpu_wait")
            return False
        return True


def _threads_of(folder: str) -> list[int]:
    try:
        return [int(entry) for entry in os.listdir(folder)]
    except OSError:
        return []


def _content(path: str) -> bytes:
    """All of a small file; half the price of a file object."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(descriptor, 1 << 14)
    finally:
        os.close(descriptor)


class SharedMemorySensor(Sensor):
    """PSS: memory with every shared page divided among its users. Dear, so on a budget.

    Reading it walks the page tables: 12 to 15 ms per GB and process.
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
            values: dict[str, float | None] = {"pss": amounts[0], "swap": amounts[1]}
            readings.append(Reading(Entity(process.role, process.pid), values))
            for role in (process.role, TREE):
                row = sums.setdefault(role, [0.0, 0.0])
                row[0] += amounts[0]
                row[1] += amounts[1]
        readings += [
            Reading(_entity(role), {"pss": row[0], "swap": row[1]}) for role, row in sums.items()
        ]
        return readings

    def _amounts(self, pid: int) -> tuple[float, float] | None:
        try:
            with open(f"/proc/{pid}/smaps_rollup", "rb") as file:
                data = file.read()
        except (ProcessLookupError, FileNotFoundError):
            return None
        except OSError as error:
            self.lacks(why(error))
            return None
        found = {line.split()[0]: line.split()[1] for line in data.splitlines()[1:]}
        try:
            return int(found[b"Pss:"]) * 1024.0, int(found.get(b"SwapPss:", 0)) * 1024.0
        except KeyError:
            return None
