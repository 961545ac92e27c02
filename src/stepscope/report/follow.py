"""Follows a run for the live view: what is cheap with every frame, what is dear now and then."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from stepscope.analysis.summary import Recorded
from stepscope.report.live import Frame, frame_of
from stepscope.report.progress import Told, counted_on, pace_of, told_by
from stepscope.report.traces import SECONDS_BACK
from stepscope.runs.events import read_folder
from stepscope.runs.tail import RunTail

_SHARE = 0.02
"""Of the time, for looking at all events since the run began."""
_PATIENCE_S = 0.05
"""How long a frame waits for that; of a short run it is done by then."""


class Follower:
    """Makes a frame of a run whenever it is asked to."""

    def __init__(self, folder: Path) -> None:
        self.tail = RunTail(folder, SECONDS_BACK)
        self._told = Told()
        self._outdated = True
        self._look: _Look | None = None
        self._affordable_at = 0.0

    def frame(self, wait: bool = False) -> Frame:
        """The run as it is now. With `wait`, when all events were looked at."""
        tail = self.tail
        self._outdated = tail.poll() or self._outdated
        recorded, now_ns = tail.recorded(), tail.now_ns
        self._look_at_events(recorded, now_ns, wait)
        recent = tail.events.recent
        told = counted_on(self._told, recent)
        pace = pace_of(recent, told.loaders, now_ns)
        return frame_of(tail.facts, tail.ending, recorded, told, pace, now_ns)

    def _look_at_events(self, recorded: Recorded, now_ns: int, wait: bool) -> None:
        if self._look is None and self._outdated and time.monotonic() >= self._affordable_at:
            self._outdated = False
            self._look = _Look(self.tail, recorded, now_ns)
            self._look.start()
        if self._look is not None:
            self._look.join(None if wait else _PATIENCE_S)
            if not self._look.is_alive():
                self._told = self._look.result()
                self._affordable_at = time.monotonic() + self._look.seconds / _SHARE
                self._look = None


class _Look(threading.Thread):
    """Looks at all events aside, so that a long run does not stop the screen."""

    def __init__(self, tail: RunTail, recorded: Recorded, now_ns: int) -> None:
        super().__init__(daemon=True)
        self.seconds = 0.0
        self._given = (tail, recorded, now_ns)
        self._found: Told | Exception = Told()

    def run(self) -> None:
        tail, recorded, now_ns = self._given
        began = time.thread_time()
        try:
            processes = read_folder(tail.paths.events)
            self._found = told_by(processes, recorded.gpus, tail.begin_ns, now_ns)
        except Exception as error:  # told to who asked
            self._found = error
        self.seconds = time.thread_time() - began

    def result(self) -> Told:
        if isinstance(self._found, Exception):
            raise self._found
        return self._found
