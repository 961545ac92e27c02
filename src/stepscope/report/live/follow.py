"""Follows a run for the live view: recent samples in every frame, all events occasionally."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from stepscope.analysis.run.data import RunData
from stepscope.analysis.run.progress import (
    ReportedProgress,
    progress_of,
    throughput_of,
    updated,
)
from stepscope.analysis.run.series import SeriesTable
from stepscope.report.live.traces import SECONDS_BACK
from stepscope.report.live.view import Frame, frame_of
from stepscope.runs.events import read_folder
from stepscope.runs.facts import event_span
from stepscope.runs.tail import RunTail
from stepscope.runs.timelines import allocator_series, timeline_of

_SHARE = 0.02  # of CPU time, for reading all events of the run
_MAX_WAIT_S = 0.05  # how long a frame waits for that; enough for a short run


class Follower:
    """Makes frames of a run."""

    def __init__(self, folder: Path) -> None:
        self.tail = RunTail(folder, SECONDS_BACK)
        self._reported = ReportedProgress()
        self._allocators: SeriesTable = {}
        self._outdated = True
        self._reading: _EventsReading | None = None
        self._next_reading_at = 0.0

    def frame(self, wait: bool = False) -> Frame:
        """Return the current state of the run. With `wait`, wait until all events are read."""
        self._outdated = self.tail.poll() or self._outdated
        data, now_ns = self.tail.data(), self.tail.now_ns
        if self._reading is None and self._outdated and time.monotonic() >= self._next_reading_at:
            self._outdated = False
            self._reading = _EventsReading(self.tail.paths.events, data, now_ns)
            self._reading.start()
        if self._reading is not None:
            self._reading.join(None if wait else _MAX_WAIT_S)
            if not self._reading.is_alive():
                if self._reading.error is not None:
                    raise self._reading.error
                self._reported, self._allocators = self._reading.reported, self._reading.allocators
                self._next_reading_at = time.monotonic() + self._reading.seconds / _SHARE
                self._reading = None
        progress = updated(self._reported, data.timelines)
        throughput = throughput_of(data.timelines, progress.loaders, now_ns)
        return frame_of(data, self._allocators, progress, throughput, now_ns)


class _EventsReading(threading.Thread):
    """Reads all events in the background, so that a long run does not block the screen."""

    def __init__(self, events: Path, data: RunData, now_ns: int) -> None:
        super().__init__(daemon=True)
        self.seconds = 0.0
        self.reported = ReportedProgress()
        self.allocators: SeriesTable = {}
        self.error: Exception | None = None
        self._events, self._data, self._now_ns = events, data, now_ns

    def run(self) -> None:
        began = time.thread_time()
        try:
            processes = read_folder(self._events, event_span(self._data.facts))
            timelines = [timeline_of(process) for process in processes]
            self.reported = progress_of(timelines, self._data.begin_ns, self._now_ns)
            self.allocators = allocator_series(processes, [gpu.uuid for gpu in self._data.gpus])
        except Exception as error:  # raised in `frame`
            self.error = error
        self.seconds = time.thread_time() - began
