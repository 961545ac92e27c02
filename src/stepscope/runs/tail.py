"""Follows a run that is being written: reads what was appended, and keeps the last seconds of it.

The rest of `runs` reads a folder as a whole, which a view that looks twice a second cannot afford.
"""

from __future__ import annotations

import os
import time
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.ipc

from stepscope.analysis.run.data import RunData
from stepscope.analysis.run.passes import Records, Timeline
from stepscope.analysis.run.series import EMPTY, Series, concatenated
from stepscope.inject import events as written
from stepscope.metrics import SCOPES, Scope
from stepscope.records import Outcome
from stepscope.runs.events import GrowingEvents, ProcessEvents, parse
from stepscope.runs.facts import ending_of, read_facts
from stepscope.runs.load import gpu_entities, gpus_of
from stepscope.runs.paths import RunPaths
from stepscope.runs.samples import pieces_of
from stepscope.runs.streams import check_schema, read_segment
from stepscope.runs.timelines import timeline_of
from stepscope.sensors import procfs

_FIRST_EVENTS = 16384 * written.SIZE
"""Bytes of a long file of events that are looked at first."""
_FEWEST_EVENTS = 256
"""Kept however old they are: a step may take minutes."""
_STEP = {written.name_id("step"): "step"}
"""Told once, so perhaps in the part of a long file that is not looked at."""

_BROKEN = (pa.ArrowException, OSError, EOFError, SystemError)
"""What pyarrow makes of bytes that are no Arrow; the last, of a text with lengths that are none."""


class StreamTail:
    """`<scope>.arrows` as it grows, is rolled to a segment, and is packed at the end."""

    def __init__(self, paths: RunPaths, scope: Scope, seconds: float) -> None:
        self._paths = paths
        self._scope = scope
        self._keep_ns = int(seconds * 1e9)
        self._fd = -1
        self._offset = 0
        self._schema: pa.Schema | None = None
        self._last_ns = 0
        self._begun = False

    def poll(self) -> list[pa.RecordBatch]:
        """What was appended since the last call; the first time, the last seconds there are."""
        if not self._begun:
            self._begun = True
            return self._first_look()
        found = self._read_on()
        if self._is_replaced():
            found += self._read_on()  # what came before it was closed
            self._open()
            found += self._read_on()
        return found

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1

    def _first_look(self) -> list[pa.RecordBatch]:
        self._open()
        found = self._read_on()
        first = _first_ns(found[0]) if found else None
        for path in reversed(self._paths.segments(self._scope)):
            if first is not None and first < self._last_ns - self._keep_ns:
                break
            if path != self._paths.live_stream(self._scope):
                found = self._end_of_segment(path, first) + found
                first = _first_ns(found[0]) if found else None
        return found

    def _end_of_segment(self, path: Path, until_ns: int | None) -> list[pa.RecordBatch]:
        """The last rows of a closed segment, less those that were read from the live stream."""
        try:
            table = read_segment(path)
        except _BROKEN:  # packed while we looked: less of the past to show
            return []
        if not table.num_rows:
            return []
        times = np.array(table.column("t_ns").to_pylist(), np.int64)
        last = int(times[-1]) if until_ns is None else min(int(times[-1]), until_ns - 1)
        self._last_ns = max(self._last_ns, last)
        begin, end = np.searchsorted(times, (self._last_ns - self._keep_ns, last + 1))
        begin = max(0, begin - 1)  # one that is too old tells that no more are needed
        return list(table.slice(begin, max(0, end - begin)).combine_chunks().to_batches())

    def _open(self) -> None:
        self.close()
        self._offset, self._schema = 0, None
        try:
            live = self._paths.live_stream(self._scope)
            self._fd = os.open(live, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:  # not begun yet, or packed: nothing more to come
            self._fd = -1

    def _is_replaced(self) -> bool:
        """Whether the live stream is another file now, or none."""
        try:
            now = os.stat(self._paths.live_stream(self._scope))
        except OSError:
            return self._fd >= 0
        return self._fd < 0 or not os.path.samestat(now, os.fstat(self._fd))

    def _read_on(self) -> list[pa.RecordBatch]:
        if self._fd < 0:
            return []
        size = os.fstat(self._fd).st_size
        if size < self._offset:  # written anew; what was seen before is told by its time
            self._offset, self._schema = 0, None
        if size == self._offset:
            return []
        return self._decoded(self._messages(os.pread(self._fd, size - self._offset, self._offset)))

    def _messages(self, data: bytes) -> list[Any]:
        """Whole messages; one that is still being written is left for the next time."""
        source, begin, found = pa.BufferReader(data), self._offset, []
        while True:
            try:
                message = pa.ipc.read_message(source)
                if self._schema is None:
                    schema = pa.ipc.read_schema(message)
                    check_schema(schema)
                    self._schema = schema
                else:
                    found.append(message)
            except _BROKEN:
                return found
            self._offset = begin + source.tell()

    def _decoded(self, messages: list[Any]) -> list[pa.RecordBatch]:
        """The batches of the last seconds. Zeros after a power cut read as rows at time 0."""
        found: deque[pa.RecordBatch] = deque()
        latest: int | None = None
        for message in reversed(messages):
            batch = _batch(message, self._schema)
            if batch is None or _first_ns(batch) > _last_ns(batch):
                continue
            if _first_ns(batch) < self._last_ns:
                break
            latest = _last_ns(batch) if latest is None else latest
            found.appendleft(batch)
            if _first_ns(batch) < latest - self._keep_ns:
                break
        self._last_ns = self._last_ns if latest is None else latest
        return list(found)


def _batch(message: Any, schema: pa.Schema | None) -> pa.RecordBatch | None:
    try:
        batch = pa.ipc.read_record_batch(message, schema)
        batch.validate(full=True)
    except _BROKEN:
        return None
    times = batch.column(0)
    return batch if len(times) and not times.null_count and _first_ns(batch) > 0 else None


def _first_ns(batch: pa.RecordBatch) -> int:
    return int(batch.column(0)[0].as_py())


def _last_ns(batch: pa.RecordBatch) -> int:
    return int(batch.column(0)[-1].as_py())


class Recent:
    """The last seconds of every metric of every entity; rows of single processes are left out."""

    def __init__(self, seconds: float) -> None:
        self.last_ns = 0
        self._keep_ns = int(seconds * 1e9)
        self._pieces: dict[tuple[str, str], list[Series]] = {}

    def add(self, batch: pa.RecordBatch) -> None:
        self.last_ns = max(self.last_ns, _last_ns(batch))
        for (entity, metric), ((t, window), value) in pieces_of(batch).items():
            self._pieces.setdefault((metric, entity), []).append(Series(t, window, value))

    def series(self, metric: str, entity: str) -> Series:
        """What is known of a metric; its last value however old that is."""
        pieces = self._pieces.get((metric, entity))
        if not pieces:
            return EMPTY
        whole = concatenated(pieces)
        first = int(np.searchsorted(whole.t, self.last_ns - self._keep_ns))
        keep = slice(min(first, len(whole) - 1), None)
        pieces[:] = [Series(whole.t[keep], whole.window[keep], whole.value[keep])]
        return pieces[0]

    def all_series(self) -> dict[tuple[str, str], Series]:
        """(metric, entity) to what is kept of it."""
        return {key: self.series(*key) for key in self._pieces}


class EventsTail:
    """The last records of every `events/<pid>.bin` as they appear and grow."""

    def __init__(self, folder: Path, seconds: float) -> None:
        self.recent: dict[int, Records] = {}
        """By the number of the process."""
        self._events = GrowingEvents(folder, _FIRST_EVENTS)
        self._keep_ns = int(seconds * 1e9)

    def poll(self) -> bool:
        """Read what was appended; whether there was anything."""
        news = False
        for pid, fresh in self._events.poll():
            news = True
            records = np.concatenate([self.recent.get(pid, parse(b"")), fresh])
            starts = np.flatnonzero(records["kind"] == written.START)
            if starts.size:  # the number may have been used before
                records = records[starts[-1] :]
            if len(records):
                old = int(np.searchsorted(records["t"], records["t"][-1] - self._keep_ns))
                records = records[max(0, min(old, len(records) - _FEWEST_EVENTS)) :]
            self.recent[pid] = records
        return news

    @property
    def last_ns(self) -> int:
        """When anything was last reported."""
        return max((int(r["t"][-1]) for r in self.recent.values() if len(r)), default=0)

    def timelines(self) -> list[Timeline]:
        """What the processes did lately, as the analysis takes it."""
        names = self._events.names
        return [
            timeline_of(ProcessEvents(pid, None, _with_few_marks(records), _STEP | names[pid]))
            for pid, records in self.recent.items()
        ]


def _with_few_marks(records: Records) -> Records:
    """Marks become objects, one by one: a script that marks its steps sets thousands of them."""
    marks = np.flatnonzero(records["kind"] == written.MARK)[:-_FEWEST_EVENTS]
    return np.delete(records, marks) if len(marks) else records


class RunTail:
    """A run as it is now: call `poll`, then look."""

    def __init__(self, folder: Path, seconds: float) -> None:
        self.paths = RunPaths(folder)
        self.recent = Recent(seconds)
        self.events = EventsTail(self.paths.events, seconds)
        self._streams = [StreamTail(self.paths, scope, seconds) for scope in SCOPES]
        self._facts_version: tuple[int, int] | None = None
        self._look_at_facts()

    def poll(self) -> bool:
        """Read what was appended; whether processes reported anything.

        The ending comes first: what is read after it is all that there will be.
        """
        self._look_at_facts()
        for stream in self._streams:
            for batch in stream.poll():
                self.recent.add(batch)
        return self.events.poll()

    def close(self) -> None:
        for stream in self._streams:
            stream.close()

    @property
    def begin_ns(self) -> int:
        return self.facts.clock.monotonic_ns

    @property
    def now_ns(self) -> int:
        """The time on the clock of the run: its end, or the last that is known of another boot."""
        stored = self.facts.ending.monotonic_ns
        if stored is not None:
            return stored
        here = self.facts.watcher.boot_id == procfs.boot_id()
        if here and self.ending.outcome is Outcome.RUNNING:
            return time.monotonic_ns()
        return max(self.begin_ns, self.recent.last_ns, self.events.last_ns)

    def data(self) -> RunData:
        """The last seconds of samples as the analysis takes them, up to the end of the command:
        the very last sample of a run finds nobody."""
        series, end_ns = self.recent.all_series(), min(self.recent.last_ns, self.now_ns)
        if end_ns < self.recent.last_ns:
            series = {key: each.between(0, end_ns) for key, each in series.items()}
        gpus = gpus_of(self.facts, gpu_entities(series))
        timelines = self.events.timelines()
        return RunData(series, timelines, self.begin_ns, end_ns, self.facts, gpus, self.ending)

    def _look_at_facts(self) -> None:
        try:
            found = self.paths.run_json.stat()
            version = (found.st_ino, found.st_mtime_ns)
        except OSError:
            version = None
        if version is None or version != self._facts_version:
            self._facts_version = version
            self.facts = read_facts(self.paths.folder)
        self.ending = ending_of(self.facts, self.paths.folder)
        if self.ending.outcome is Outcome.LOST:  # unless it wrote its ending just before it went
            self.facts = read_facts(self.paths.folder)
            self.ending = ending_of(self.facts, self.paths.folder)
