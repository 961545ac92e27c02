"""Monitors a process that is running already, until it ends or somebody says stop."""

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
from stepscope.capture.signals import ASKING, signals_as_bytes
from stepscope.capture.spawn import allow_many_descriptors
from stepscope.capture.target import Target
from stepscope.errors import CannotWatch
from stepscope.records import Ending, Outcome
from stepscope.runs.paths import RunPaths


@dataclass(frozen=True)
class AttachedRun:
    """A process that was monitored until it ended, or until we were told to stop."""

    paths: RunPaths
    ending: Ending
    survivors: list[str]


def monitor_process(
    request: RunRequest, target: Target, tell: Callable[[str], None]
) -> AttachedRun:
    """Monitor a process until it ends, a signal stops us, or the time asked for is over."""
    with stop_requests() as stop:
        session = _begin(request, target, tell)
        wakers = [stop] if target.pidfd is None else [stop, target.pidfd]
        seconds = request.duration_s
        stopped = False
        for readable in sampling(session, wakers, math.inf if seconds is None else seconds):
            stopped = stop in readable
            if stopped or target.has_ended():
                break
        ended = target.has_ended()
        status = target.status() if ended else None  # at once: its parent may bury it
        session.mark_end_time(time.monotonic_ns())
        session.last_sample()
        survivors = []
        if ended:
            after = KernelEvidence.now(session.cgroup)
            ending = judge_end(status, session.evidence, after, session.shm_share())
            survivors = session.survivors()
        else:
            why = (
                "watching was stopped" if stopped else f"it was watched for {seconds:g} s, as asked"
            )
            ending = Ending(Outcome.INTERRUPTED, f"{why}; the process runs on")
        session.end(ending, survivors)
    return AttachedRun(session.paths, ending, survivors)


def _begin(request: RunRequest, target: Target, tell: Callable[[str], None]) -> Session:
    paths = request.make_folder()
    try:
        session = Session(request, paths, tell, target.environment, target.pid)
        session.restart_clock()
        allow_many_descriptors()
        session.begin(target.pid, None, None, exclude=(os.getpid(),))
        if target.has_ended() or target.pid not in session.tree.processes:
            raise CannotWatch(f"Process {target.pid} ended before watching could begin")
    except BaseException:
        shutil.rmtree(paths.folder, ignore_errors=True)
        raise
    message = "hook: none, since the process was running already: epochs and steps are not seen"
    elsewhere = f" here, but in {target.reports_to}" if target.reports_to else ""
    session.hook.message = message + elsewhere
    return session


def sampling(session: Session, wakers: list[int], seconds: float = math.inf) -> Iterator[list[int]]:
    """Sample at every interval; yields at each wake-up the descriptors that became readable.

    Ends when the root is gone, or after so many seconds.
    """
    end = time.monotonic() + seconds
    for next_sample in sample_times(session.tick, session.request.interval_s):
        now = time.monotonic()
        if session.tree.root not in session.tree.processes or now >= end:
            return
        yield select.select(wakers, [], [], max(0.0, min(next_sample, end) - now))[0]


def stop_requests() -> AbstractContextManager[int]:
    """A descriptor that is readable once we are asked to end. What was ignored (nohup) stays so."""
    return signals_as_bytes([n for n in ASKING if signal.getsignal(n) != signal.SIG_IGN])


def judge_end(
    status: int | None, before: KernelEvidence, after: KernelEvidence, shm_share: float | None
) -> Ending:
    """How a process ended that is not our child. Without its status nothing good is claimed."""
    if status is not None:
        # A signal that asks to end and ended it was a request, whoever sent it.
        return judge(status, before, after, shm_share, os.WIFSIGNALED(status))
    if kills := after.cgroup_kills_since(before):
        reason = f"it ended, how is not known, but {oom_kills_text('its cgroup', kills)}"
        return Ending(Outcome.HOST_OOM, reason, evidence={"cgroup_oom_kills": kills})
    return Ending(
        Outcome.LOST,
        "it ended, but how is not known: its parent took the exit status, and this kernel does "
        "not tell it to others",
    )
