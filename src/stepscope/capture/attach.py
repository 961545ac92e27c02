"""Watches a process that is running already, until it ends or somebody says stop."""

from __future__ import annotations

import math
import os
import select
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from stepscope.capture.environment import environment_record
from stepscope.capture.outcome import Evidence, judge
from stepscope.capture.session import (
    Plan,
    Session,
    allow_many_descriptors,
    next_tick,
    prepare_folder,
)
from stepscope.capture.target import Target
from stepscope.errors import CannotWatch
from stepscope.records import Ending, Outcome
from stepscope.runs.masking import mask_text
from stepscope.runs.paths import RunPaths

READY = b"ready\n"
DONE = b"done\n"
FAILED = b"failed "

_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def watch_process(
    plan: Plan, paths: RunPaths, pid: int, control: int, ready: int, tell: Callable[[str], None]
) -> Ending:
    """Watch `pid` until `control` says how it went, or closes because the process died."""
    session = Session(plan, paths, tell)
    session.restart_clock()
    session.begin(pid, None, None, exclude=(os.getpid(),))
    os.write(ready, READY)
    said = _sample_until_told(session, control)
    session.mark_end_time(time.monotonic_ns())
    session.last_sample()
    ending = _judge_block(session, said)
    session.end(ending, [])
    return ending


@dataclass(frozen=True)
class Attached:
    """A process that was watched until it ended, or until we were told to stop."""

    paths: RunPaths
    ending: Ending
    survivors: list[str]


def watch_target(
    plan: Plan, target: Target, tell: Callable[[str], None], seconds: float | None = None
) -> Attached:
    """Watch a process until it ends, until a signal stops us, or for so many seconds."""
    with _told_to_stop() as stop:
        session = _begin(plan, target, tell)
        why_stopped = _sample_until_ended(session, target, stop, seconds)
        status = None if why_stopped else target.status()  # at once: its parent may bury it
        session.mark_end_time(time.monotonic_ns())
        session.last_sample()
        if why_stopped:
            ending = Ending(Outcome.INTERRUPTED, f"{why_stopped}; the process runs on")
            survivors = []
        else:
            ending = _judge_end(session, status)
            survivors = [f"{p.name} (pid {p.pid})" for p in session.tree.survivors()]
        session.end(ending, survivors)
    return Attached(session.paths, ending, survivors)


def _begin(plan: Plan, target: Target, tell: Callable[[str], None]) -> Session:
    paths = prepare_folder(plan)
    try:
        session = Session(plan, paths, tell, target.environment)
        session.facts["environment"] = environment_record(plan.command, plan.cwd, target.pid)
        session.restart_clock()
        allow_many_descriptors()
        session.begin(target.pid, None, None, exclude=(os.getpid(),))
        if target.has_ended() or target.pid not in session.tree.processes:
            raise CannotWatch(f"Process {target.pid} ended before watching could begin")
    except BaseException:
        shutil.rmtree(paths.folder, ignore_errors=True)
        raise
    session.hookwatch.message = _no_hook(target)
    return session


def _no_hook(target: Target) -> str:
    """Why there are no epochs and steps, and where they may be."""
    message = "hook: none, since the process was running already: epochs and steps are not seen"
    return f"{message} here, but in {target.reports_to}" if target.reports_to else message


def _sampling(
    session: Session, wakers: list[int], seconds: float = math.inf
) -> Iterator[list[int]]:
    """Sample at every interval; yields at each wake-up the descriptors that became readable.

    Ends when the root is gone, or after so many seconds.
    """
    interval = session.plan.interval_s
    planned = time.monotonic()
    end = planned + seconds
    while session.tree.root in session.tree.processes:
        now = time.monotonic()
        if now >= planned:
            session.tick(now - planned)
            planned = next_tick(planned, interval)
        if now >= end:
            return
        pause = min(planned, end) - time.monotonic()
        yield select.select(wakers, [], [], max(0.0, pause))[0]


def _sample_until_told(session: Session, control: int) -> bytes:
    said = b""
    for readable in _sampling(session, [control]):
        if readable:
            data = os.read(control, 4096)
            said += data
            # Children that were forked in the block hold the pipe open: its end may never come.
            if not data or said.endswith(b"\n"):
                break
    return said


def _sample_until_ended(
    session: Session, target: Target, stop: int, seconds: float | None
) -> str | None:
    """Why watching stops although the process runs on; None where it has ended."""
    wakers = [stop] if target.pidfd is None else [stop, target.pidfd]
    for readable in _sampling(session, wakers, math.inf if seconds is None else seconds):
        if target.has_ended():
            return None
        if stop in readable:
            return "watching was stopped"
    return None if target.has_ended() else f"it was watched for {seconds:g} s, as asked"


@contextmanager
def _told_to_stop() -> Iterator[int]:
    """A descriptor that is readable once we are asked to end. What was ignored (nohup) stays so."""
    source, sink = os.pipe()
    os.set_blocking(sink, False)
    heard = [number for number in _STOPPING if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, lambda *_: None) for number in heard}
    woken_before = signal.set_wakeup_fd(sink, warn_on_full_buffer=False)
    try:
        yield source
    finally:
        signal.set_wakeup_fd(woken_before)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(source)
        os.close(sink)


def _judge_block(session: Session, said: bytes) -> Ending:
    """The watched block says how it ended; if it says nothing, its process died in it."""
    if said.startswith(DONE):
        return Ending(Outcome.OK, "the watched block ended normally")
    if said.startswith(FAILED):
        what = said[len(FAILED) :].decode("utf-8", "replace").strip()
        if what.startswith("KeyboardInterrupt"):
            return Ending(Outcome.INTERRUPTED, "the watched block was interrupted")
        return Ending(Outcome.CRASHED, f"the watched block raised {mask_text(what)}")
    if _oom_kills(session.evidence, Evidence.now(session.cgroup)):
        reason = "the process died inside the watched block; its cgroup counted an OOM kill"
        return Ending(Outcome.HOST_OOM, reason)
    return Ending(Outcome.CRASHED, "the process died inside the watched block")


def _judge_end(session: Session, status: int | None) -> Ending:
    """How a process ended that is not our child. Without its status nothing good is claimed."""
    before, after = session.evidence, Evidence.now(session.cgroup)
    if status is not None:
        # A signal that asks to end and ended it was a request, whoever sent it.
        return judge(status, before, after, session.shm_share(), os.WIFSIGNALED(status))
    if kills := _oom_kills(before, after):
        counted = f"its cgroup counted {kills} OOM kill{'s' * (kills > 1)}"
        reason = f"it ended, how is not known, but {counted}"
        return Ending(Outcome.HOST_OOM, reason, evidence={"cgroup_oom_kills": kills})
    return Ending(
        Outcome.LOST,
        "it ended, but how is not known: its parent took the exit status, and this kernel does "
        "not tell it to others",
    )


def _oom_kills(before: Evidence, after: Evidence) -> int:
    """Processes of its cgroup that were killed for memory meanwhile."""
    if before.cgroup_kills is None or after.cgroup_kills is None:
        return 0
    return max(0, after.cgroup_kills - before.cgroup_kills)
