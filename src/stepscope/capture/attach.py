"""Watches a process that is running already, until it ends or somebody says stop."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable

from stepscope.capture.outcome import Evidence
from stepscope.capture.session import Plan, Session
from stepscope.records import Ending, Outcome
from stepscope.runs.masking import mask_text
from stepscope.runs.paths import RunPaths

READY = b"ready\n"
DONE = b"done\n"
FAILED = b"failed "


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
    ending = _judge(session, said)
    session.end(ending, [])
    return ending


def _sample_until_told(session: Session, control: int) -> bytes:
    interval = session.plan.interval_s
    planned = time.monotonic()
    said = b""
    while session.tree.root in session.tree.processes:
        now = time.monotonic()
        if now >= planned:
            session.tick(now - planned)
            planned += interval * max(1, int((time.monotonic() - planned) / interval) + 1)
        readable, _, _ = select.select([control], [], [], max(0.0, planned - time.monotonic()))
        if readable:
            data = os.read(control, 4096)
            said += data
            # Children that were forked in the block hold the pipe open: its end may never come.
            if not data or said.endswith(b"\n"):
                return said
    return said


def _judge(session: Session, said: bytes) -> Ending:
    """The watched block says how it ended; if it says nothing, its process died in it."""
    if said.startswith(DONE):
        return Ending(Outcome.OK, "the watched block ended normally")
    if said.startswith(FAILED):
        what = said[len(FAILED) :].decode("utf-8", "replace").strip()
        if what.startswith("KeyboardInterrupt"):
            return Ending(Outcome.INTERRUPTED, "the watched block was interrupted")
        return Ending(Outcome.CRASHED, f"the watched block raised {mask_text(what)}")
    now = Evidence.now(session.cgroup)
    before = session.evidence.cgroup_kills
    if before is not None and now.cgroup_kills is not None and now.cgroup_kills > before:
        reason = "the process died inside the watched block; its cgroup counted an OOM kill"
        return Ending(Outcome.HOST_OOM, reason)
    return Ending(Outcome.CRASHED, "the process died inside the watched block")
