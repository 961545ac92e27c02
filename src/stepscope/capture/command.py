"""Runs a command and monitors its process tree until it ends."""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from stepscope.capture import spawn
from stepscope.capture.outcome import KernelEvidence, judge
from stepscope.capture.request import RunRequest
from stepscope.capture.schedule import sample_times
from stepscope.capture.session import Session
from stepscope.capture.signals import (
    ASKING,
    Signals,
    asked_to_end_already,
    pass_on,
    wait_for_signal,
)
from stepscope.errors import CannotWatch
from stepscope.records import Ending
from stepscope.runs.paths import RunPaths


@dataclass(frozen=True)
class FinishedCommand:
    """A command that was monitored to its end."""

    paths: RunPaths
    ending: Ending
    status: int
    survivors: list[str]


def monitor_command(
    request: RunRequest, tell: Callable[[str], None], signals: Signals
) -> FinishedCommand:
    """Start a command, monitor it and all that it starts, and write down how it ended."""
    path = spawn.find_command(request.command)
    paths = request.make_folder()
    adopts = spawn.become_subreaper()
    try:
        session = Session(request, paths, tell)
        pattern = request.epoch_pattern
        output = spawn.capture_output(paths, pattern) if pattern else spawn.Output()
        if asked_to_end_already(signals):
            raise CannotWatch("Interrupted before the command was started")
        session.restart_clock()
        born_ns = time.monotonic_ns()
        environment = spawn.environment_of(request, paths)
        pid = spawn.spawn(path, request.command, environment, signals, output)
    except (OSError, CannotWatch) as error:
        shutil.rmtree(paths.folder, ignore_errors=True)
        if isinstance(error, CannotWatch):
            raise
        raise CannotWatch(f"{request.command[0]} was not started: {error}") from None
    output.command_started()
    spawn.allow_many_descriptors()
    ours = [signals.sentinel.pid] + ([output.pump.pid] if output.pump else [])
    session.begin(pid, os.getpid() if adopts else None, born_ns, tuple(ours))
    gc.freeze()  # what is loaded now stays: no need to look through it again and again
    reaper = Reaper(session, pid)
    asked_to_end = _sample_until_ended(session, reaper, signals)
    assert reaper.status is not None
    if not session.tree.survivors():
        session.mark_end_time(time.monotonic_ns())
    reaper.safely(session.last_sample)
    after, shm_share = KernelEvidence.now(session.cgroup), session.shm_share()
    gpu_oom = session.gpu_oom() if reaper.status else None
    ending = judge(reaper.status, session.evidence, after, shm_share, asked_to_end, gpu_oom)
    survivors = session.survivors()
    output.drain()
    reaper.safely(session.end, ending, survivors)
    return FinishedCommand(paths, ending, reaper.status, survivors)


def _sample_until_ended(session: Session, reaper: Reaper, signals: Signals) -> bool:
    """Sample at every interval, and in between sleep until a signal; whether one asked to end."""
    waits, asked_to_end = session.request.wait_tree, False
    for next_sample in sample_times(reaper.tick, session.request.interval_s):
        if reaper.root_has_ended() and not (waits and session.tree.survivors()):
            break
        info = wait_for_signal(signals, next_sample - time.monotonic())
        if info is not None and reaper.status is None:
            asked_to_end = pass_on(info, reaper.root, signals) or asked_to_end
        elif info is not None:
            waits = waits and info.si_signo not in ASKING
    return asked_to_end


class Reaper:
    """Buries the root of a tree, which is our child, and orphans that fell to us as their
    subreaper, and takes over what they used before it is forgotten."""

    def __init__(self, session: Session, root: int) -> None:
        self._session = session
        self.root = root
        self.status: int | None = None
        """The root's wait status, once it is buried; 0 where somebody else took it."""

    def safely(self, act: Callable[..., None], *arguments: Any) -> None:
        """Whatever goes wrong with monitoring, the command's end and code must not suffer."""
        try:
            act(*arguments)
        except Exception as error:
            self._session.trouble(f"watching failed in part: {type(error).__name__}: {error}")

    def tick(self, late_s: float) -> None:
        """One sample, and the burial of orphans that have ended by then."""
        self.safely(self._session.tick, late_s)
        self.safely(self.reap_orphans)

    def root_has_ended(self) -> bool:
        """Whether the root is a zombie, or buried; a zombie is buried now."""
        if self.status is not None:
            return True
        # A program may wait for all of its children itself, or have the kernel bury them.
        if not _has_ended(self.root, if_gone=True):
            return False
        self._session.mark_end_time(time.monotonic_ns())
        self.safely(self._session.usage.account, True)
        self.safely(self.reap_orphans)
        with contextlib.suppress(ChildProcessError):
            self._reap(self.root)
        if self.status is None:
            self._session.tree.forget(self.root)
            self.status = 0
        return True

    def reap_orphans(self) -> None:
        """Orphans of the tree became our children: bury those that ended."""
        for pid in self._session.tree.zombies_of_adopter():
            if pid != self.root and _has_ended(pid, if_gone=False):
                self._reap(pid)

    def _reap(self, pid: int) -> None:
        session = self._session
        session.io.reaped(pid)
        _, status, usage = os.wait4(pid, 0)
        if pid == self.root:
            self.status = status
        session.usage.reaped(pid, usage.ru_utime + usage.ru_stime)
        session.tree.forget(pid)


def _has_ended(pid: int, if_gone: bool) -> bool:
    """Whether a child is a zombie, which it stays: its last figures can still be read."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return if_gone
