"""The ledger against a model of the kernel: whatever lives, forks, dies and is read when."""

from __future__ import annotations

from dataclasses import dataclass, field

import hypothesis.strategies as st
from hypothesis import given

from stepscope.sensors.ledger import CounterLedger

WATCHER, ROOT = 1, 2


@dataclass
class Proc:
    parent: int
    own: float = 0.0
    reaped: float = 0.0
    zombie: bool = False


@dataclass
class Kernel:
    """Processes that burn, fork, exit and wait as the kernel accounts it."""

    procs: dict[int, Proc] = field(default_factory=lambda: {ROOT: Proc(WATCHER)})
    burned: float = 0.0
    next_pid: int = ROOT + 1

    def burn(self, which: int, amount: float) -> None:
        proc = self._pick(which, living=True)
        if proc is not None:
            self.procs[proc].own += amount
            self.burned += amount

    def fork(self, which: int) -> None:
        parent = self._pick(which, living=True)
        if parent is not None:
            self.procs[self.next_pid] = Proc(parent)
            self.next_pid += 1

    def exit(self, which: int) -> None:
        pid = self._pick(which, living=True)
        if pid is not None and pid != ROOT:
            self.procs[pid].zombie = True
            for child in self.procs.values():
                if child.parent == pid:
                    child.parent = WATCHER

    def wait(self, which: int) -> None:
        """A parent in the tree reaps one of its zombies."""
        zombies = [p for p, proc in self.procs.items() if proc.zombie and proc.parent != WATCHER]
        if zombies:
            pid = zombies[which % len(zombies)]
            proc = self.procs.pop(pid)
            self.procs[proc.parent].reaped += proc.own + proc.reaped

    def _pick(self, which: int, living: bool) -> int | None:
        pids = [pid for pid, proc in self.procs.items() if proc.zombie != living]
        return pids[which % len(pids)] if pids else None


class Reader:
    """Follows the kernel as the sensors do."""

    def __init__(self) -> None:
        self.ledger = CounterLedger()
        self.known: dict[int, int] = {}
        self.totals = [0.0]

    def tick(self, kernel: Kernel, between: list[tuple[str, int, float]]) -> None:
        """Read parents first; things happen between the reads."""
        read: dict[int, tuple[float, float]] = {}
        gone = []
        for pid in list(self.known):
            if pid in kernel.procs:
                proc = kernel.procs[pid]
                read[pid] = (proc.own, proc.reaped)
                self.known[pid] = proc.parent
            else:
                gone.append(pid)
            if between:
                act(kernel, *between.pop(0))
        for pid in sorted(kernel.procs.keys() - self.known.keys()):  # parents first
            proc = kernel.procs[pid]
            self.known[pid] = proc.parent
            read[pid] = (proc.own, proc.reaped)
        for pid in reversed(gone):
            self.ledger.vanished(pid, self.known.pop(pid))
        for pid, (own, reaped) in read.items():
            self.ledger.observe(pid, own, reaped, "role", "role")
        zombies = [p for p in read if p in kernel.procs and kernel.procs[p].zombie]
        for pid in [p for p in zombies if kernel.procs[p].parent == WATCHER]:
            proc = kernel.procs[pid]
            if (proc.own, proc.reaped) == read[pid]:
                self.ledger.reaped_by_us(pid, proc.own + proc.reaped, "role")
                del kernel.procs[pid], self.known[pid]
        self.totals.append(self.ledger.total)


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
def test_never_too_much_never_back_and_in_the_end_exact(
    history: list[tuple[list[tuple[str, int, float]], list[tuple[str, int, float]]]],
) -> None:
    kernel, reader = Kernel(), Reader()
    for before, between in history:
        for action in before:
            act(kernel, *action)
        reader.tick(kernel, list(between))
        assert reader.totals[-1] <= kernel.burned + 1e-6
        assert reader.totals[-1] >= reader.totals[-2] - 1e-6
    for _ in range(3):  # all that ended is reaped, then nothing happens any more
        while any(p.zombie and p.parent != WATCHER for p in kernel.procs.values()):
            kernel.wait(0)
        reader.tick(kernel, [])
    assert abs(reader.totals[-1] - kernel.burned) < 1e-6


def test_time_from_before_does_not_count() -> None:
    ledger = CounterLedger()
    ledger.baseline(7, own=100.0, reaped=50.0)
    ledger.observe(7, 101.0, 52.0, "main", "other")
    assert ledger.totals == {"main": 1.0, "other": 2.0}


def test_a_seen_child_is_not_counted_again_in_its_parent() -> None:
    ledger = CounterLedger()
    ledger.observe(1, 0.0, 0.0, "main", "other")
    ledger.observe(2, 5.0, 0.0, "worker", "other")
    ledger.vanished(2, reaper=1)
    ledger.observe(1, 0.0, 5.5, "main", "worker")
    assert ledger.totals == {"worker": 5.5}


def test_time_that_never_arrives_does_not_swallow_that_of_others() -> None:
    """SA_NOCLDWAIT cannot be seen from outside: the child's time was awaited in vain."""
    ledger = CounterLedger(rounding=0.02)
    ledger.observe(1, 0.0, 0.0, "main", "other")
    ledger.observe(2, 5.0, 0.0, "worker", "other")
    ledger.vanished(2, reaper=1)
    ledger.observe(1, 0.0, 0.0, "main", "other")
    ledger.observe(1, 0.0, 0.0, "main", "other")
    ledger.observe(1, 0.0, 3.0, "main", "other")
    assert ledger.total == 8.0


def test_children_that_the_kernel_buries_keep_what_was_seen() -> None:
    ledger = CounterLedger()
    ledger.observe(1, 0.0, 0.0, "main", "other")
    ledger.observe(2, 5.0, 0.0, "worker", "other")
    ledger.vanished(2, reaper=None)
    ledger.observe(1, 0.0, 3.0, "main", "other")
    assert ledger.total == 8.0
