"""Runs a command and watches its tree until it ends."""

from __future__ import annotations

import gc
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import stepscope.inject
from stepscope.capture.outcome import Evidence, judge
from stepscope.capture.output import Output, capture_output
from stepscope.capture.reaper import Reaper
from stepscope.capture.session import (
    Plan,
    Session,
    allow_many_descriptors,
    next_tick,
    prepare_folder,
)
from stepscope.capture.spawn import (
    Signals,
    asked_to_end_already,
    asks_to_end,
    become_subreaper,
    find_command,
    pass_on,
    spawn,
    wait_for_signal,
)
from stepscope.errors import CannotWatch
from stepscope.inject.events import FOLDER_VARIABLE
from stepscope.records import Ending
from stepscope.runs.paths import RunPaths


@dataclass(frozen=True)
class Watched:
    """A command that was watched to its end."""

    paths: RunPaths
    ending: Ending
    status: int
    survivors: list[str]


def watch_command(
    plan: Plan,
    tell: Callable[[str], None],
    signals: Signals,
    pattern: str | None = None,
    wait_tree: bool = False,
) -> Watched:
    """Start a command, watch it and all that it starts, and write down how it ended."""
    path = find_command(plan.command)
    paths = prepare_folder(plan)
    adopts = become_subreaper()
    try:
        session = Session(plan, paths, tell)
        output = capture_output(paths, pattern) if pattern else Output()
        if asked_to_end_already(signals):
            raise CannotWatch("Interrupted before the command was started")
        session.restart_clock()
        born_ns = time.monotonic_ns()
        pid = spawn(path, plan.command, environment_of(plan, paths), signals, output)
    except (OSError, CannotWatch) as error:
        shutil.rmtree(paths.folder, ignore_errors=True)
        if isinstance(error, CannotWatch):
            raise
        raise CannotWatch(f"{plan.command[0]} was not started: {error}") from None
    output.command_started()
    allow_many_descriptors()
    ours = [signals.sentinel.pid] + ([output.pump.pid] if output.pump else [])
    session.begin(pid, os.getpid() if adopts else None, born_ns, tuple(ours))
    return _Loop(session, pid, signals, output).run(wait_tree)


def environment_of(plan: Plan, paths: RunPaths) -> dict[str, str]:
    """The command's environment: ours, with where to report and the hook in front of PYTHONPATH."""
    environment = dict(os.environ)
    environment[FOLDER_VARIABLE] = str(paths.events)
    if plan.hook:
        site = str(Path(stepscope.inject.__file__).with_name("site"))
        others = environment.get("PYTHONPATH")  # an empty entry in it means the current folder
        environment["PYTHONPATH"] = site + (os.pathsep + others if others else "")
    return environment


class _Loop:
    """Samples at every interval, and in between sleeps until a signal."""

    def __init__(self, session: Session, pid: int, signals: Signals, output: Output) -> None:
        self._session = session
        self._pid = pid
        self._signals = signals
        self._output = output
        self._reaper = Reaper(session, pid)
        self._asked_to_end = False

    def run(self, waits: bool) -> Watched:
        gc.freeze()  # what is loaded now stays: no need to look through it again and again
        reaper, interval = self._reaper, self._session.plan.interval_s
        planned = time.monotonic()
        while True:
            now = time.monotonic()
            if now >= planned:
                reaper.safely(self._session.tick, now - planned)
                reaper.safely(reaper.reap_orphans)
                planned = next_tick(planned, interval)
            if reaper.root_has_ended() and not (waits and self._session.tree.survivors()):
                return self._finish()
            info = wait_for_signal(self._signals, planned - time.monotonic())
            if info is not None and reaper.status is None:
                self._asked_to_end = pass_on(info, self._pid, self._signals) or self._asked_to_end
            elif info is not None:
                waits = waits and not asks_to_end(info)

    def _finish(self) -> Watched:
        session, reaper = self._session, self._reaper
        assert reaper.status is not None
        if not session.tree.survivors():
            session.mark_end_time(time.monotonic_ns())
        reaper.safely(session.last_sample)
        ending = judge(
            reaper.status,
            session.evidence,
            Evidence.now(session.cgroup),
            session.shm_share(),
            self._asked_to_end,
            session.gpu_oom() if reaper.status else None,
        )
        survivors = [f"{p.name} (pid {p.pid})" for p in session.tree.survivors()]
        self._output.drain()
        reaper.safely(session.end, ending, survivors)
        return Watched(session.paths, ending, reaper.status, survivors)
