"""Keeps a cumulative counter of a process tree, by role, exact while processes come and go.

The kernel hands what an exited child used to the process that waits for it: the time of a worker
jumps into its parent. Summing the living would lose what died unseen and move time between roles;
adding every exit would count it twice. So each process remembers how much of what its children used
was already credited while they lived (`pending`), and takes that off when it arrives.

Two rules keep it exact. Processes are read parents first, so that a child reaped meanwhile is found
gone before it is found in its parent. And those found gone are reported (children first) before the
living are observed, since their parent may have received their time already.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass
class _Account:
    own: float = 0.0
    reaped: float = 0.0
    pending: float = 0.0
    awaited: bool = False
    """Whether the pending amount may still arrive with the next observation."""


class CounterLedger:
    """One counter of a tree. All amounts are cumulative, in the counter's unit.

    `rounding` is how much less than the truth the kernel may show.
    """

    def __init__(self, rounding: float = 0.0) -> None:
        self._rounding = rounding
        self.totals: dict[str, float] = defaultdict(float)
        self._accounts: dict[int, _Account] = {}

    def baseline(self, pid: int, own: float, reaped: float) -> None:
        """What a process had used before it was watched does not count."""
        self._accounts[pid] = _Account(own, reaped)

    def observe(self, pid: int, own: float, reaped: float, role: str, reaped_role: str) -> None:
        """What a process used itself, and what the children it waited for had used."""
        account = self._accounts.get(pid)
        if account is None:
            account = self._accounts[pid] = _Account()
        if own > account.own:
            self.totals[role] += own - account.own
            account.own = own
        arrived = reaped - account.reaped
        if arrived > 0:
            account.reaped = reaped
            known = min(account.pending, arrived)
            account.pending -= known
            if arrived > known:
                self.totals[reaped_role] += arrived - known
        if account.pending > self._rounding and not account.awaited:
            account.pending = 0.0  # the kernel buried the child: nobody got its time
        account.awaited = False

    def observe_own(self, used: Iterable[tuple[int, float, str]]) -> None:
        """Pid, what it used itself, role: for a time in which no child can have been reaped."""
        accounts, totals = self._accounts, self.totals
        for pid, own, role in used:
            account = accounts[pid]
            if own > account.own:
                totals[role] += own - account.own
                account.own = own

    def vanished(self, pid: int, reaper: int | None) -> None:
        """A process is gone. What was credited to it will arrive at its reaper, if it has one."""
        account = self._accounts.pop(pid, None)
        if account is not None and reaper is not None and reaper in self._accounts:
            self._accounts[reaper].pending += account.own + account.reaped + account.pending
            self._accounts[reaper].awaited = True

    def reaped_by_us(self, pid: int, lifetime: float, role: str) -> None:
        """The watcher waited for a process itself and knows all that it and its children used."""
        account = self._accounts.pop(pid, _Account())
        missed = lifetime - account.own - account.reaped - account.pending
        if missed > 0:
            self.totals[role] += missed

    @property
    def total(self) -> float:
        return sum(self.totals.values())
