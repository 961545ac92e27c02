"""Follow a run that is being written: read the appended data, and keep the last seconds of it.

The other readers of `runs` read a whole folder, which is too slow for a view that updates twice a
second.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pyarrow as pa

from stepscope.analysis.run.data import RunData
from stepscope.analysis.run.passes import Records, Timeline
from stepscope.analysis.run.series import EMPTY, Series, concatenated
from stepscope.inject import events as written
from stepscope.metrics import SCOPES, Scope
from stepscope.records import Outcome
from stepscope.runs.events import (
    EVER,
    GrowingEvents,
    ProcessEvents,
    parse,
    sorted_by_time,
    within,
)
from stepscope.runs.facts import event_span, exit_status_of, read_facts
from stepscope.runs.files import STREAM_LIMIT, open_regular
from stepscope.runs.load import gpu_entities, gpus_of
from stepscope.runs.paths import RunPaths
from stepscope.runs.samples import pieces_of
from stepscope.runs.segments import INVALID, ExpansionLimit, StreamReader, in_order, read_segment
from stepscope.runs.timelines import timeline_of
from stepscope.sensors import procfs

_FIRST_EVENTS = 16384 * written.SIZE
"""Bytes at the end of a long event file that are read first."""
_MIN_EVENTS = 256
"""Events that are kept regardless of their age: a step may take minutes."""
_STEP = {written.name_id("step"): "step"}
"""A name is written once, perhaps in the part of a long file that is not read."""


class StreamTail:
    """Follows `<scope>.arrows` as it grows, is closed as a segment, and is packed at the end."""

    def __init__(
        self, paths: RunPaths, scope: Scope, seconds: float, limit: ExpansionLimit | None = None
    ) -> None:
        """`limit` is shared by all streams of a run."""
        self._limit = limit or ExpansionLimit()
        self._paths = paths
        self._scope = scope
        self._keep_ns = int(seconds * 1e9)
        self._file: BinaryIO | None = None
        self._last_ns = 0
        self._begun = False

    def poll(self) -> list[pa.RecordBatch]:
        """Return the batches since the last call; on the first call, those of the last seconds."""
        if not self._begun:
            self._begun = True
            return self._read_first()
        batches = self._read_new()
        if self._is_replaced():
            batches += self._read_new()  # appended before it was closed
            self._open()
            batches += self._read_new()
        return batches

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file = None

    def _read_first(self) -> list[pa.RecordBatch]:
        self._open()
        batches = self._read_new()
        first = _first_ns(batches[0]) if batches else None
        for path in reversed(self._paths.segments(self._scope)):
            if first is not None and first < self._last_ns - self._keep_ns:
                break
            if path != self._paths.live_stream(self._scope):
                batches = self._end_of_segment(path, first) + batches
                first = _first_ns(batches[0]) if batches else None
        return batches

    def _end_of_segment(self, path: Path, until_ns: int | None) -> list[pa.RecordBatch]:
        """Return the last rows of a closed segment that were not read from the live stream."""
        try:
            table = read_segment(path, limit=self._limit).table
            self._limit.keep(table)
        except INVALID:  # converted to Parquet at the same time: show less of the past
            return []
        if not table.num_rows:
            return []
        times = np.array(table.column("t_ns").to_pylist(), np.int64)
        last = int(times[-1]) if until_ns is None else min(int(times[-1]), until_ns - 1)
        self._last_ns = max(self._last_ns, last)
        begin, end = np.searchsorted(times, (self._last_ns - self._keep_ns, last + 1))
        begin = max(0, begin - 1)  # one older row shows that no further segment is needed
        return list(table.slice(begin, max(0, end - begin)).combine_chunks().to_batches())

    def _open(self) -> None:
        self.close()
        live = self._paths.live_stream(self._scope)
        self._offset, self._reader = 0, StreamReader(live)
        with contextlib.suppress(OSError):  # not created yet, or packed at the end
            self._file = open_regular(live, STREAM_LIMIT)

    def _is_replaced(self) -> bool:
        """Return whether the live stream is now another file, or gone."""
        try:
            now = os.stat(self._paths.live_stream(self._scope))
        except OSError:
            return self._file is not None
        return self._file is None or not os.path.samestat(now, os.fstat(self._file.fileno()))

    def _read_new(self) -> list[pa.RecordBatch]:
        """Return the new batches of the last seconds. A batch that is still being written is read
        later."""
        if self._file is None:
            return []
        descriptor = self._file.fileno()
        size = min(os.fstat(descriptor).st_size, STREAM_LIMIT)
        if size < self._offset:  # rewritten; rows that were read before are recognized by time
            self._offset = 0
        if size == self._offset:
            return []
        data = os.pread(descriptor, size - self._offset, self._offset)
        try:
            new, _ = in_order(self._reader.batches(data, is_start=self._offset == 0))
        except INVALID:  # columns of an unknown type
            return []
        self._offset += new[-1].end if new else 0
        new = [batch for batch in new if batch.first_ns >= self._last_ns]
        self._last_ns = new[-1].last_ns if new else self._last_ns
        since = self._last_ns - self._keep_ns
        # One older batch shows that no older segment is needed.
        old = sum(batch.first_ns < since for batch in new[1:])
        return [batch.rows for batch in new[old:]]


def _first_ns(rows: pa.RecordBatch) -> int:
    return int(rows.column("t_ns")[0].as_py())


def _last_ns(rows: pa.RecordBatch) -> int:
    return int(rows.column("t_ns")[-1].as_py())


class Recent:
    """The last seconds of every metric of every entity, without rows of single processes."""

    def __init__(self, seconds: float) -> None:
        self.last_ns = 0
        self._keep_ns = int(seconds * 1e9)
        self._pieces: dict[tuple[str, str], list[Series]] = {}

    def add(self, batch: pa.RecordBatch) -> None:
        self.last_ns = max(self.last_ns, _last_ns(batch))
        for (entity, metric), ((t, window), value) in pieces_of(batch).items():
            self._pieces.setdefault((metric, entity), []).append(Series(t, window, value))

    def series(self, metric: str, entity: str) -> Series:
        """Return the recent samples of a metric; at least the last one, regardless of its age."""
        pieces = self._pieces.get((metric, entity))
        if not pieces:
            return EMPTY
        whole = concatenated(pieces)
        first = int(np.searchsorted(whole.t, self.last_ns - self._keep_ns))
        keep = slice(min(first, len(whole) - 1), None)
        pieces[:] = [Series(whole.t[keep], whole.window[keep], whole.value[keep])]
        return pieces[0]

    def all_series(self) -> dict[tuple[str, str], Series]:
        """Return the recent samples by (metric, entity)."""
        return {key: self.series(*key) for key in self._pieces}


class EventsTail:
    """The last records of all files `events/<pid>.bin`, which may appear and grow."""

    def __init__(self, folder: Path, seconds: float) -> None:
        self.recent: dict[int, Records] = {}
        """Records by pid."""
        self.span = EVER
        self._events = GrowingEvents(folder, _FIRST_EVENTS)
        self._keep_ns = int(seconds * 1e9)

    def poll(self) -> bool:
        """Read the appended records. Return whether there were any."""
        has_new = False
        for pid, new in self._events.poll():
            has_new = True
            known = self.recent.get(pid, parse(b""))
            records = sorted_by_time(np.concatenate([known, within(new, self.span)]))
            starts = np.flatnonzero(records["kind"] == written.START)
            if starts.size:  # the pid may have been used before
                records = records[starts[-1] :]
            if len(records):
                old = int(np.searchsorted(records["t"], records["t"][-1] - self._keep_ns))
                records = records[max(0, min(old, len(records) - _MIN_EVENTS)) :]
            self.recent[pid] = records
        return has_new

    @property
    def last_ns(self) -> int:
        """The time of the last event."""
        return max((int(r["t"][-1]) for r in self.recent.values() if len(r)), default=0)

    def timelines(self) -> list[Timeline]:
        """Return the recent timelines of the processes, for the analysis."""
        names = self._events.names
        return [
            timeline_of(ProcessEvents(pid, None, _with_few_marks(records), _STEP | names[pid]))
            for pid, records in self.recent.items()
        ]


def _with_few_marks(records: Records) -> Records:
    """Drop older marks. Each becomes an object, and a script that marks its steps has thousands."""
    marks = np.flatnonzero(records["kind"] == written.MARK)[:-_MIN_EVENTS]
    return np.delete(records, marks) if len(marks) else records


class RunTail:
    """The current state of a run. Call `poll` before reading it."""

    def __init__(self, folder: Path, seconds: float) -> None:
        self.paths = RunPaths(folder)
        self.recent = Recent(seconds)
        self.events = EventsTail(self.paths.events, seconds)
        limit = ExpansionLimit()
        self._streams = [StreamTail(self.paths, scope, seconds, limit) for scope in SCOPES]
        self._facts_version: tuple[int, int] | None = None
        self._read_facts()

    def poll(self) -> bool:
        """Read the appended data. Return whether processes reported events.

        The exit status is read first: data that is read after it is complete.
        """
        self._read_facts()
        for stream in self._streams:
            for batch in stream.poll():
                self.recent.add(batch)
        self.events.span = event_span(self.facts)
        return self.events.poll()

    def close(self) -> None:
        for stream in self._streams:
            stream.close()

    @property
    def begin_ns(self) -> int:
        return self.facts.clock.monotonic_ns

    @property
    def now_ns(self) -> int:
        """The current time on the clock of the run, or its end; for a run of another boot, the time
        of the last recorded data."""
        stored = self.facts.exit_status.monotonic_ns
        if stored is not None:
            return stored
        here = self.facts.monitor.boot_id == procfs.boot_id()
        if here and self.exit_status.outcome is Outcome.RUNNING:
            return time.monotonic_ns()
        return max(self.begin_ns, self.recent.last_ns, self.events.last_ns)

    def data(self) -> RunData:
        """Return the last seconds of samples for the analysis, up to the exit of the command: the
        very last sample of a run has no processes."""
        series, end_ns = self.recent.all_series(), min(self.recent.last_ns, self.now_ns)
        if end_ns < self.recent.last_ns:
            series = {key: each.between(0, end_ns) for key, each in series.items()}
        gpus = gpus_of(self.facts, gpu_entities(series))
        timelines = self.events.timelines()
        return RunData(series, timelines, self.begin_ns, end_ns, self.facts, gpus, self.exit_status)

    def _read_facts(self) -> None:
        try:
            stat = self.paths.run_json.stat()
            version = (stat.st_ino, stat.st_mtime_ns)
        except OSError:
            version = None
        if version is None or version != self._facts_version:
            self._facts_version = version
            self.facts = read_facts(self.paths.folder)
        self.exit_status = exit_status_of(self.facts, self.paths.folder)
        if self.exit_status.outcome is Outcome.LOST:
            # The monitor may have written the exit status just before it exited.
            self.facts = read_facts(self.paths.folder)
            self.exit_status = exit_status_of(self.facts, self.paths.folder)
