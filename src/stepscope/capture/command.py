"""Run a command and monitor its process tree until it exits."""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

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
from stepscope.capture.startup import start_error
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
    """Start a command, monitor its process tree, and record its exit status.

    Once the command has started, a failure of monitoring is reported and the command continues.
    """
    path = spawn.find_command(request.command)
    paths = request.make_folder()
    is_subreaper = spawn.become_subreaper()
    output = spawn.Output()
    try:
        if request.epoch_pattern:
            output.capture(paths, request.epoch_pattern)
        session = Session(request, paths, notify)
        output.wait_until_ready()
        if termination_pending(signals):
            raise MonitorError("Interrupted before the command was started")
        session.restart_clock()
        started_ns = time.monotonic_ns()
        environment = spawn.environment_of(request, paths)
        pid = spawn.spawn(path, request.command, environment, signals, output)
    except Exception as error:
        output.abandon()
        shutil.rmtree(paths.folder, ignore_errors=True)
        raise start_error(f"`{request.command[0]}` was not started", error) from None
    output.command_started()
    spawn.allow_many_descriptors()

    def is_orphan(child: int) -> bool:
        return child not in (signals.group_member.pid, *(p.process.pid for p in output.pumps))

    adopter = os.getpid() if is_subreaper else None
    session.safely(session.begin, pid, adopter, started_ns, (), is_orphan)
    gc.freeze()  # objects that exist now stay: the collector need not scan them
    reaper = Reaper(session, pid)
    termination_requested = _sample_until_exit(session, reaper, signals, output)
    assert reaper.status is not None
    if not session.survivors():
        session.mark_end_time(time.monotonic_ns())
    session.safely(session.last_sample)
    survivors = session.survivors()
    exit_status = judge(
        reaper.status,
        session.evidence,
        session.safely(KernelEvidence.now, session.cgroup) or KernelEvidence(None, None),
        session.safely(session.shm_share),
        termination_requested,
        session.safely(session.gpu_oom) if reaper.status else None,
    )
    if exit_status.signal == "SIGPIPE" and output.closed_because:
        exit_status = replace(exit_status, reason=f"{exit_status.reason}: {output.closed_because}")
    session.record(exit_status, survivors)
    session.safely(output.drain, session.report_problem)
    session.finish()
    return FinishedCommand(paths, exit_status, reaper.status, survivors)


def _sample_until_exit(
    session: Session, reaper: Reaper, signals: Signals, output: spawn.Output
) -> bool:
    """Sample at every interval and sleep in between, waking up for signals. Return whether the
    command received a termination signal."""
    waits, termination_requested = session.request.wait_tree, False
    for next_sample in sample_times(reaper.tick, session.request.interval_s):
        if reaper.root_has_ended() and not (waits and session.survivors()):
            break
        session.safely(signals.group_member.restart_if_killed)
        wait_s = next_sample - time.monotonic()
        if not session.safely(output.restart_killed, session.report_problem):
            wait_s = min(wait_s, spawn.RESTART_S)
        info = wait_for_signal(signals, wait_s)
        if info is not None and reaper.status is None:
            is_termination = session.safely(forward, info, reaper.root, signals)
            termination_requested = termination_requested or bool(is_termination)
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

    def tick(self, late_s: float) -> None:
        """Take one sample and reap the orphans that have exited."""
        self._session.safely(self._session.tick, late_s)
        self._session.safely(self.reap_orphans)

    def root_has_ended(self) -> bool:
        """Return whether the root has exited, and reap it if it is a zombie."""
        if self.status is not None:
            return True
        # Another part of the program may have reaped it, or SIGCHLD is ignored.
        if not _has_exited(self.root, if_gone=True):
            return False
        session = self._session
        session.mark_end_time(time.monotonic_ns())
        session.safely(session.account)
        session.safely(self.reap_orphans)
        with contextlib.suppress(ChildProcessError):
            self._reap(self.root)
        if self.status is None:
            self.status = 0
            if session.has_tree:
                session.tree.forget(self.root)
        return True

    def reap_orphans(self) -> None:
        """Reap the orphans of the tree, which are children of the monitor, that have exited."""
        if self._session.has_tree:
            for pid in self._session.tree.zombies_of_adopter():
                if pid != self.root and _has_exited(pid, if_gone=False):
                    self._reap(pid)

    def _reap(self, pid: int) -> None:
        session = self._session
        session.safely(session.read_zombie, pid)
        _, status, usage = os.wait4(pid, 0)
        if pid == self.root:
            self.status = status
        session.safely(session.reaped, pid, usage.ru_utime + usage.ru_stime)


def _has_exited(pid: int, if_gone: bool) -> bool:
    """Return whether a child is a zombie. It is not reaped: its counters stay readable."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return if_gone
