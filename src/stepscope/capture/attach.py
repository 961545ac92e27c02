"""Monitor a process that is already running, until it exits or monitoring is stopped."""

from __future__ import annotations

import math
import os
import select
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass

from stepscope.capture.outcome import KernelEvidence, judge, oom_kills_text
from stepscope.capture.request import RunRequest
from stepscope.capture.schedule import sample_times
from stepscope.capture.session import Session
from stepscope.capture.signals import TERMINATION_SIGNALS, signals_as_bytes
from stepscope.capture.spawn import allow_many_descriptors
from stepscope.capture.startup import start_error
from stepscope.capture.target import Target
from stepscope.errors import MonitorError
from stepscope.records import ExitStatus, Outcome
from stepscope.runs.paths import RunPaths


@dataclass(frozen=True)
class AttachedRun:
    """A process that was monitored until it exited or monitoring was stopped."""

    paths: RunPaths
    exit_status: ExitStatus
    survivors: list[str]


def monitor_process(
    request: RunRequest, target: Target, notify: Callable[[str], None]
) -> AttachedRun:
    """Monitor a process until it exits, a signal arrives, or the requested time is over."""
    with stop_requests() as stop:
        session = _begin(request, target, notify)
        wakers = [stop] if target.pidfd is None else [stop, target.pidfd]
        seconds = request.duration_s
        stopped = False
        for readable in sampling(session, wakers, math.inf if seconds is None else seconds):
            stopped = stop in readable
            if stopped or target.has_exited():
                break
        exited = target.has_exited()
        status = target.status() if exited else None  # at once, before its parent reaps it
        session.mark_end_time(time.monotonic_ns())
        session.safely(session.last_sample)
        survivors = []
        if exited:
            after = KernelEvidence.now(session.cgroup)
            exit_status = judge_exit(status, session.evidence, after, session.shm_share())
            survivors = session.survivors()
        else:
            reason = (
                "monitoring was stopped" if stopped else f"monitoring ended after {seconds:g} s"
            )
            exit_status = ExitStatus(Outcome.INTERRUPTED, f"{reason}; the process is still running")
        session.end(exit_status, survivors)
    return AttachedRun(session.paths, exit_status, survivors)


def _begin(request: RunRequest, target: Target, notify: Callable[[str], None]) -> Session:
    paths = request.make_folder()
    try:
        session = Session(request, paths, notify, target.environment, target.pid)
        session.restart_clock()
        allow_many_descriptors()
        session.safely(session.begin, target.pid, None, None, (os.getpid(),))
        if target.has_exited() or target.pid not in session.tree.processes:
            raise MonitorError(f"Process {target.pid} exited before monitoring could start")
    except BaseException as error:
        shutil.rmtree(paths.folder, ignore_errors=True)
        if isinstance(error, Exception):
            raise start_error(f"Process {target.pid} cannot be monitored", error) from None
        raise
    if session.hook is not None:
        session.hook.attached_late(target.reports_to)
    return session


def sampling(session: Session, wakers: list[int], seconds: float = math.inf) -> Iterator[list[int]]:
    """Sample at every interval, and yield the readable descriptors at each wake-up.

    Ends when the root process is gone, or after the given number of seconds.
    """
    end = time.monotonic() + seconds

    def tick(late_s: float) -> None:
        session.safely(session.tick, late_s)

    for next_sample in sample_times(tick, session.request.interval_s):
        now = time.monotonic()
        if session.tree.root not in session.tree.processes or now >= end:
            return
        yield select.select(wakers, [], [], max(0.0, min(next_sample, end) - now))[0]


def stop_requests() -> AbstractContextManager[int]:
    """Open a descriptor that becomes readable on a termination signal. Ignored signals (nohup)
    stay ignored."""
    return signals_as_bytes(
        [n for n in TERMINATION_SIGNALS if signal.getsignal(n) != signal.SIG_IGN]
    )


def judge_exit(
    status: int | None, before: KernelEvidence, after: KernelEvidence, shm_share: float | None
) -> ExitStatus:
    """Return the exit status of a process that is not a child of the monitor. If its wait status
    is unknown, the outcome is never `ok`."""
    if status is not None:
        # The sender is unknown: any termination signal counts as a request to terminate.
        return judge(status, before, after, shm_share, os.WIFSIGNALED(status))
    if kills := after.cgroup_kills_since(before):
        reason = f"exited with an unknown exit code; {oom_kills_text('in its cgroup', kills)}"
        return ExitStatus(Outcome.HOST_OOM, reason, evidence={"cgroup_oom_kills": kills})
    return ExitStatus(
        Outcome.LOST,
        "exited with an unknown exit code: only its parent process received the code, and this "
        "kernel does not report it to other processes",
    )
