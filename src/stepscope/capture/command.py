"""Run a command and monitor its process tree until it exits."""

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
    TERMINATION_SIGNALS,
    Signals,
    forward,
    termination_pending,
    wait_for_signal,
)
from stepscope.errors import MonitorError
from stepscope.records import ExitStatus
from stepscope.runs.paths import RunPaths


@dataclass(frozen=True)
class FinishedCommand:
    """A command that was monitored until it exited."""

    paths: RunPaths
    exit_status: ExitStatus
    status: int
    """The wait status."""
    survivors: list[str]
    """Processes of its tree that are still running."""


def monitor_command(
    request: RunRequest, notify: Callable[[str], None], signals: Signals
) -> FinishedCommand:
    """Start a command, monitor its process tree, and record its exit status."""
    path = spawn.find_command(request.command)
    paths = request.make_folder()
    is_subreaper = spawn.become_subreaper()
    try:
        session = Session(request, paths, notify)
        pattern = request.epoch_pattern
        output = spawn.capture_output(paths, pattern) if pattern else spawn.Output()
        if termination_pending(signals):
            raise MonitorError("Interrupted before the command was started")
        session.restart_clock()
        started_ns = time.monotonic_ns()
        environment = spawn.environment_of(request, paths)
        pid = spawn.spawn(path, request.command, environment, signals, output)
    except (OSError, MonitorError) as error:
        shutil.rmtree(paths.folder, ignore_errors=True)
        if isinstance(error, MonitorError):
            raise
        raise MonitorError(f"`{request.command[0]}` was not started: {error}") from None
    output.command_started()
    spawn.allow_many_descriptors()
    helpers = [signals.group_member.pid] + ([output.pump.pid] if output.pump else [])
    session.begin(pid, os.getpid() if is_subreaper else None, started_ns, tuple(helpers))
    gc.freeze()  # objects that exist now stay: the collector need not scan them
    reaper = Reaper(session, pid)
    termination_requested = _sample_until_exit(session, reaper, signals)
    assert reaper.status is not None
    if not session.tree.survivors():
        session.mark_end_time(time.monotonic_ns())
    reaper.safely(session.last_sample)
    after, shm_share = KernelEvidence.now(session.cgroup), session.shm_share()
    gpu_oom = session.gpu_oom() if reaper.status else None
    exit_status = judge(
        reaper.status, session.evidence, after, shm_share, termination_requested, gpu_oom
    )
    survivors = session.survivors()
    output.drain()
    reaper.safely(session.end, exit_status, survivors)
    return FinishedCommand(paths, exit_status, reaper.status, survivors)


def _sample_until_exit(session: Session, reaper: Reaper, signals: Signals) -> bool:
    """Sample at every interval and sleep in between, waking up for signals. Return whether the
    command received a termination signal."""
    waits, termination_requested = session.request.wait_tree, False
    for next_sample in sample_times(reaper.tick, session.request.interval_s):
        if reaper.root_has_ended() and not (waits and session.tree.survivors()):
            break
        info = wait_for_signal(signals, next_sample - time.monotonic())
        if info is not None and reaper.status is None:
            termination_requested = forward(info, reaper.root, signals) or termination_requested
        elif info is not None:
            waits = waits and info.si_signo not in TERMINATION_SIGNALS
    return termination_requested


class Reaper:
    """Reaps the root of a process tree and the orphans that the monitor inherits as subreaper, and
    accounts for the resources that they used."""

    def __init__(self, session: Session, root: int) -> None:
        self._session = session
        self.root = root
        self.status: int | None = None
        """The root's wait status after it was reaped; 0 if another thread reaped it."""

    def safely(self, action: Callable[..., None], *arguments: Any) -> None:
        """Call `action`. A failure of monitoring must not affect the command or its exit code."""
        try:
            action(*arguments)
        except Exception as error:
            self._session.report_problem(
                f"part of the monitoring failed: {type(error).__name__}: {error}"
            )

    def tick(self, late_s: float) -> None:
        """Take one sample and reap the orphans that have exited."""
        self.safely(self._session.tick, late_s)
        self.safely(self.reap_orphans)

    def root_has_ended(self) -> bool:
        """Return whether the root has exited, and reap it if it is a zombie."""
        if self.status is not None:
            return True
        # Another part of the program may have reaped it, or SIGCHLD is ignored.
        if not _has_exited(self.root, if_gone=True):
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
        """Reap the orphans of the tree, which are children of the monitor, that have exited."""
        for pid in self._session.tree.zombies_of_adopter():
            if pid != self.root and _has_exited(pid, if_gone=False):
                self._reap(pid)

    def _reap(self, pid: int) -> None:
        session = self._session
        session.io.reaped(pid)
        _, status, usage = os.wait4(pid, 0)
        if pid == self.root:
            self.status = status
        session.usage.reaped(pid, usage.ru_utime + usage.ru_stime)
        session.tree.forget(pid)


def _has_exited(pid: int, if_gone: bool) -> bool:
    """Return whether a child is a zombie. It is not reaped: its counters stay readable."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return if_gone
