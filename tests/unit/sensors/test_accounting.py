"""Counter accounting, tested against a model of the kernel with arbitrary process histories."""

from __future__ import annotations

from dataclasses import dataclass, field

import hypothesis.strategies as st
from hypothesis import given

from stepscope.sensors.accounting import CounterAccounting

MONITOR, ROOT = 1, 2


@dataclass
class Proc:
    parent: int
    own: float = 0.0
    reaped: float = 0.0
    zombie: bool = False


@dataclass
class Kernel:
    """Processes that use CPU time, fork, exit and wait, with the accounting of the kernel."""

    procs: dict[int, Proc] = field(default_factory=lambda: {ROOT: Proc(MONITOR)})
    burned: float = 0.0
    next_pid: int = ROOT + 1

    def burn(self, which: int, amount: float) -> None:
        proc = self._pick(which, running=True)
        if proc is not None:
            self.procs[proc].own += amount
            self.burned += amount

    def fork(self, which: int) -> None:
        parent = self._pick(which, running=True)
        if parent is not None:
            self.procs[self.next_pid] = Proc(parent)
            self.next_pid += 1

    def exit(self, which: int) -> None:
        pid = self._pick(which, running=True)
        if pid is not None and pid != ROOT:
            self.procs[pid].zombie = True
            for child in self.procs.values():
                if child.parent == pid:
                    child.parent = MONITOR

    def wait(self, which: int) -> None:
        """Let a parent in the tree reap one of its zombies."""
        zombies = [p for p, proc in self.procs.items() if proc.zombie and proc.parent != MONITOR]
        if zombies:
            pid = zombies[which % len(zombies)]
            proc = self.procs.pop(pid)
            self.procs[proc.parent].reaped += proc.own + proc.reaped

    def _pick(self, which: int, running: bool) -> int | None:
        pids = [pid for pid, proc in self.procs.items() if proc.zombie != running]
        return pids[which % len(pids)] if pids else None


class Reader:
    """Reads the kernel as the sensors do."""

    def __init__(self) -> None:
        self.accounting = CounterAccounting()
        self.known: dict[int, int] = {}
        self.totals = [0.0]

    def tick(self, kernel: Kernel, between: list[tuple[str, int, float]]) -> None:
        """Read parents first; actions happen between the reads."""
        read: dict[int, tuple[float, float]] = {}
        exited = []
        for pid in list(self.known):
            if pid in kernel.procs:
                proc = kernel.procs[pid]
                read[pid] = (proc.own, proc.reaped)
                self.known[pid] = proc.parent
            else:
                exited.append(pid)
            if between:
                act(kernel, *between.pop(0))
        for pid in sorted(kernel.procs.keys() - self.known.keys()):  # parents first
            proc = kernel.procs[pid]
            self.known[pid] = proc.parent
            read[pid] = (proc.own, proc.reaped)
        for pid in reversed(exited):
            self.accounting.exited(pid, self.known.pop(pid))
        for pid, (own, reaped) in read.items():
            self.accounting.observe(pid, own, reaped, "role", "role")
        zombies = [p for p in read if p in kernel.procs and kernel.procs[p].zombie]
        for pid in [p for p in zombies if kernel.procs[p].parent == MONITOR]:
            proc = kernel.procs[pid]
            if (proc.own, proc.reaped) == read[pid]:
                self.accounting.reaped_by_monitor(pid, proc.own + proc.reaped, "role")
                del kernel.procs[pid], self.known[pid]
        self.totals.append(self.accounting.total)


def act(kernel: Kernel, what: str, which: int, amount: float) -> None:
    if what == "burn":
        kernel.burn(which, amount)
    else:
        getattr(kernel, what)(which)


actions = st.tuples(
    st.sampled_from(["burn", "burn", "fork", "exit", "wait"]),
    st.integers(0, 50),
    st.integers(1, 100).map(float),
)
ticks = st.lists(
    st.tuples(st.lists(actions, max_size=8), st.lists(actions, max_size=6)), max_size=25
)


@given(ticks)
def test_totals_are_monotonic_bounded_and_finally_exact(
    history: list[tuple[list[tuple[str, int, float]], list[tuple[str, int, float]]]],
) -> None:
    kernel, reader = Kernel(), Reader()
    for before, between in history:
        for action in before:
            act(kernel, *action)
        reader.tick(kernel, list(between))
        assert reader.totals[-1] <= kernel.burned + 1e-6
        assert reader.totals[-1] >= reader.totals[-2] - 1e-6
    for _ in range(3):  # reap all zombies, then let nothing happen
        while any(p.zombie and p.parent != MONITOR for p in kernel.procs.values()):
            kernel.wait(0)
        reader.tick(kernel, [])
    assert abs(reader.totals[-1] - kernel.burned) < 1e-6


def test_usage_before_monitoring_is_excluded() -> None:
    accounting = CounterAccounting()
    accounting.baseline(7, own=100.0, reaped=50.0)
    accounting.observe(7, 101.0, 52.0, "main", "other")
    assert accounting.totals == {"main": 1.0, "other": 2.0}


def test_observed_child_is_not_counted_twice() -> None:
    accounting = CounterAccounting()
    accounting.observe(1, 0.0, 0.0, "main", "other")
    accounting.observe(2, 5.0, 0.0, "worker", "other")
    accounting.exited(2, reaper=1)
    accounting.observe(1, 0.0, 5.5, "main", "worker")
    assert accounting.totals == {"worker": 5.5}


def test_usage_that_never_arrives_does_not_hide_later_usage() -> None:
    """SA_NOCLDWAIT is not visible from outside: the usage of the child never arrives."""
    accounting = CounterAccounting(rounding=0.02)
    accounting.observe(1, 0.0, 0.0, "main", "other")
    accounting.observe(2, 5.0, 0.0, "worker", "other")
    accounting.exited(2, reaper=1)
    accounting.observe(1, 0.0, 0.0, "main", "other")
    accounting.observe(1, 0.0, 0.0, "main", "other")
    accounting.observe(1, 0.0, 3.0, "main", "other")
    assert accounting.total == 8.0


def test_children_reaped_by_the_kernel_keep_their_usage() -> None:
    accounting = CounterAccounting()
    accounting.observe(1, 0.0, 0.0, "main", "other")
    accounting.observe(2, 5.0, 0.0, "worker", "other")
    accounting.exited(2, reaper=None)
    accounting.observe(1, 0.0, 3.0, "main", "other")
    assert accounting.total == 8.0
