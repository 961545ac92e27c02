"""Buries the processes of a watched tree, and takes over what they used before it is forgotten."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from typing import Any

from stepscope.capture.session import Session
from stepscope.capture.spawn import has_ended


class Reaper:
    """For the root, which is our child, and for orphans that fell to us as their subreaper."""

    def __init__(self, session: Session, pid: int) -> None:
        self._session = session
        self._pid = pid
        self.status: int | None = None
        """The root's wait status, once it is buried; 0 where somebody else took it."""

    def safely(self, act: Callable[..., None], *arguments: Any) -> None:
        """Whatever goes wrong with watching, the command's end and code must not suffer from it."""
        try:
            act(*arguments)
        except Exception as error:
            self._session.trouble(f"watching failed in part: {type(error).__name__}: {error}")

    def root_has_ended(self) -> bool:
        """Whether the root is a zombie, or buried; a zombie is buried now."""
        if self.status is None and (has_ended(self._pid) or not self._is_ours()):
            self._bury_root()
        return self.status is not None

    def _is_ours(self) -> bool:
        """A program may wait for all of its children itself, or have the kernel bury them."""
        try:
            os.waitid(os.P_PID, self._pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return False
        return True

    def reap_orphans(self) -> None:
        """Orphans of the tree became our children: bury those that ended."""
        for pid in self._session.tree.zombies_of_adopter():
            if pid != self._pid and has_ended(pid):
                self._reap(pid)

    def _bury_root(self) -> None:
        """The command has ended: read its last figures, then take its status."""
        self._session.mark_end_time(time.monotonic_ns())
        self.safely(self._session.usage.account, True)
        self.safely(self.reap_orphans)
        with contextlib.suppress(ChildProcessError):
            self._reap(self._pid)
        if self.status is None:
            self._session.tree.forget(self._pid)
            self.status = 0

    def _reap(self, pid: int) -> None:
        """Bury a process, and take over what it and its children used."""
        session = self._session
        session.io.reaped(pid)
        _, status, usage = os.wait4(pid, 0)
        if pid == self._pid:
            self.status = status
        session.usage.reaped(pid, usage.ru_utime + usage.ru_stime)
        session.tree.forget(pid)
