"""Exact cumulative counters of a process tree, by role, while processes start and exit.

The kernel adds the usage of an exited child to the process that waits for it: the CPU time of a
worker jumps into its parent. A sum over running processes would lose the usage of unseen children
and move time between roles; adding the usage of every exited process would count it twice.
Therefore each process tracks how much of its children's usage was already credited while they were
running (`pending`), and subtracts it on arrival.

Two rules keep the counters exact. Processes are read parents first, so that a child that is reaped
during the read is missing before its usage shows up in its parent. And exited processes are
reported (children first) before running ones are observed, because their parent may already have
received their usage.
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
    """Whether the pending usage may still arrive with the next observation."""


class CounterAccounting:
    """One counter of a tree. All values are cumulative, in the unit of the counter.

    `rounding` is the amount by which the kernel may round a value down.
    """

    def __init__(self, rounding: float = 0.0) -> None:
        self._rounding = rounding
        self.totals: dict[str, float] = defaultdict(float)
        self._accounts: dict[int, _Account] = {}

    def baseline(self, pid: int, own: float, reaped: float) -> None:
        """Exclude the usage of a process before monitoring started."""
        self._accounts[pid] = _Account(own, reaped)

    def observe(self, pid: int, own: float, reaped: float, role: str, reaped_role: str) -> None:
        """Record the usage of a process and of the children that it has waited for."""
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
            account.pending = 0.0  # the kernel reaped the child: no process received its usage
        account.awaited = False

    def observe_own(self, used: Iterable[tuple[int, float, str]]) -> None:
        """Record (pid, own usage, role) for an interval in which no child can have been reaped."""
        accounts, totals = self._accounts, self.totals
        for pid, own, role in used:
            account = accounts[pid]
            if own > account.own:
                totals[role] += own - account.own
                account.own = own

    def exited(self, pid: int, reaper: int | None) -> None:
        """Record that a process has exited. Its usage will arrive at its reaper, if any."""
        account = self._accounts.pop(pid, None)
        if account is not None and reaper is not None and reaper in self._accounts:
            self._accounts[reaper].pending += account.own + account.reaped + account.pending
            self._accounts[reaper].awaited = True

    def reaped_by_monitor(self, pid: int, lifetime: float, role: str) -> None:
        """Record that the monitor reaped a process, which gives its total usage with children."""
        account = self._accounts.pop(pid, _Account())
        missed = lifetime - account.own - account.reaped - account.pending
        if missed > 0:
            self.totals[role] += missed

    @property
    def total(self) -> float:
        return sum(self.totals.values())
