"""Follows a run for the live view: what is cheap with every frame, what is dear now and then."""

from __future__ import annotations

import time
from pathlib import Path

from stepscope.report.live import Frame, frame_of
from stepscope.report.progress import Told, pace_of, told_by
from stepscope.report.traces import SECONDS_BACK
from stepscope.runs.events import read_folder
from stepscope.runs.tail import RunTail

_SHARE = 0.02
"""Of the time, for looking at all events since the run began."""


class Follower:
    """Makes a frame of a run whenever it is asked to."""

    def __init__(self, folder: Path) -> None:
        self.tail = RunTail(folder, SECONDS_BACK)
        self._told = Told()
        self._outdated = True
        self._affordable_at = 0.0

    def frame(self) -> Frame:
        """The run as it is now."""
        tail = self.tail
        self._outdated = tail.poll() or self._outdated
        recorded, now_ns = tail.recorded(), tail.now_ns
        if self._outdated and time.monotonic() >= self._affordable_at:
            began = time.thread_time()
            processes = read_folder(tail.paths.events)
            self._told = told_by(processes, recorded.gpus, tail.begin_ns, now_ns)
            self._outdated = False
            self._affordable_at = time.monotonic() + (time.thread_time() - began) / _SHARE
        pace = pace_of(tail.events.recent, self._told.loaders, now_ns)
        return frame_of(tail.facts, tail.ending, recorded, self._told, pace, now_ns)
