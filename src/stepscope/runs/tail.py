"""Follows a run that is being written: reads what was appended, and keeps the last seconds of it.

The rest of `runs` reads a folder as a whole, which a view that looks twice a second cannot afford.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.ipc

from stepscope.analysis.series import EMPTY, Floats, Ints, Series
from stepscope.analysis.summary import Recorded
from stepscope.inject import events as written
from stepscope.metrics import BY_KEY, SCOPES, Scope
from stepscope.records import Outcome
from stepscope.runs import runfile
from stepscope.runs.events import Records, parse
from stepscope.runs.paths import RunPaths
from stepscope.runs.streams import read_segment
from stepscope.runs.timelines import gpus_of

_FIRST_EVENTS = 16384 * written.SIZE
"""Bytes of a long file of events that are looked at first."""
_FEWEST_EVENTS = 256
"""Kept however old they are: a step may take minutes."""

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
        if self._fd < 0:
            return True
        ours = os.fstat(self._fd)
        return (now.st_ino, now.st_dev) != (ours.st_ino, ours.st_dev)

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
                    self._schema = pa.ipc.read_schema(message)
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


_Chunk = tuple[Ints, Floats, Floats]


class Recent:
    """The last seconds of every metric of every entity; rows of single processes are left out."""

    def __init__(self, seconds: float) -> None:
        self.last_ns = 0
        self._keep_ns = int(seconds * 1e9)
        self._chunks: dict[tuple[str, str], list[_Chunk]] = {}

    def add(self, batch: pa.RecordBatch) -> None:
        """Copies what it keeps: a batch may be a part of a large buffer."""
        times = np.array(batch.column("t_ns").to_pylist(), np.int64)
        windows = np.nan_to_num(_floats(batch.column("window_s")))
        entities = np.array(batch.column("entity").to_pylist(), object)
        whole = np.array([pid is None for pid in batch.column("pid").to_pylist()], bool)
        self.last_ns = max(self.last_ns, int(times[-1]))
        places = {name: whole & (entities == name) for name in dict.fromkeys(entities[whole])}
        for metric in batch.schema.names:
            column = batch.column(metric)
            if metric not in BY_KEY or column.null_count == len(column):
                continue
            values = _floats(column)
            there = ~np.isnan(values)
            for entity, rows in places.items():
                keep = rows & there
                if keep.any():
                    chunk = times[keep], windows[keep], values[keep]
                    self._chunks.setdefault((metric, entity), []).append(chunk)

    def series(self, metric: str, entity: str) -> Series:
        """What is known of a metric; its last value however old that is."""
        chunks = self._chunks.get((metric, entity))
        if not chunks:
            return EMPTY
        if len(chunks) > 1:
            chunks[:] = [_joined(chunks)]
        times, windows, values = chunks[0]
        first = int(np.searchsorted(times, self.last_ns - self._keep_ns))
        keep = slice(min(first, len(times) - 1), None)
        chunks[0] = times[keep], windows[keep], values[keep]
        return Series(*chunks[0])

    def all_series(self) -> dict[tuple[str, str], Series]:
        """(metric, entity) to what is kept of it."""
        return {key: self.series(*key) for key in self._chunks}


def _joined(chunks: list[_Chunk]) -> _Chunk:
    times, windows, values = zip(*chunks, strict=True)
    return np.concatenate(times), np.concatenate(windows), np.concatenate(values)


def _floats(column: pa.Array) -> Floats:
    """NaN is missing. `to_numpy` would import pandas, half a second for a few numbers."""
    return np.array(column.to_pylist(), np.float64)


@dataclass
class EventFile:
    """The last records of `events/<pid>.bin`, without the texts."""

    path: Path
    offset: int = -1
    records: Records = field(default_factory=lambda: parse(b""))

    def poll(self, keep_ns: int) -> bool:
        """Read what was appended; whether there was anything."""
        try:
            with self.path.open("rb") as file:
                data = self._appended(file)
        except OSError:
            return False
        fresh = parse(data)
        self._keep(np.concatenate([self.records, fresh[fresh["kind"] != written.NAME]]), keep_ns)
        return bool(data)

    def _appended(self, file: Any) -> bytes:
        size = os.fstat(file.fileno()).st_size // written.SIZE * written.SIZE
        if self.offset < 0:
            self.offset = max(0, size - _FIRST_EVENTS)
        if size <= self.offset:
            return b""
        data = os.pread(file.fileno(), size - self.offset, self.offset)
        self.offset += len(data) // written.SIZE * written.SIZE
        return data

    def _keep(self, records: Records, keep_ns: int) -> None:
        starts = np.flatnonzero(records["kind"] == written.START)
        if starts.size:  # the number may have been used before
            records = records[starts[-1] :]
        if len(records):
            old = int(np.searchsorted(records["t"], records["t"][-1] - keep_ns))
            records = records[max(0, min(old, len(records) - _FEWEST_EVENTS)) :]
        self.records = records


class EventsTail:
    """All files of events as they appear and grow."""

    def __init__(self, folder: Path, seconds: float) -> None:
        self._folder = folder
        self._keep_ns = int(seconds * 1e9)
        self._files: dict[str, EventFile] = {}

    def poll(self) -> bool:
        """Read what was appended; whether there was anything."""
        news = False
        for name, size in self._listed():
            file = self._files.get(name)
            if file is None:
                file = self._files[name] = EventFile(self._folder / name)
            if size != file.offset:
                news = file.poll(self._keep_ns) or news
        return news

    def _listed(self) -> Iterable[tuple[str, int]]:
        try:
            with os.scandir(self._folder) as entries:
                return [
                    (entry.name, entry.stat().st_size)
                    for entry in entries
                    if entry.name.endswith(".bin") and entry.name[:-4].isdigit()
                ]
        except OSError:
            return []

    @property
    def last_ns(self) -> int:
        """When anything was last reported."""
        return max((int(r["t"][-1]) for r in self.recent.values() if len(r)), default=0)

    @property
    def recent(self) -> dict[int, Records]:
        """The last records of every process, by its number."""
        return {int(name[:-4]): file.records for name, file in self._files.items()}


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
        return int(self.facts["clock"]["monotonic_ns"])

    @property
    def now_ns(self) -> int:
        """The time on the clock of the run: its end, or the last that is known of another boot."""
        told = self.facts["ending"].get("monotonic_ns")
        if told is not None:
            return int(told)
        here = self.facts["watcher"].get("boot_id") == runfile.boot_id()
        if here and self.ending.outcome is Outcome.RUNNING:
            return time.monotonic_ns()
        return max(self.begin_ns, self.recent.last_ns, self.events.last_ns)

    def recorded(self) -> Recorded:
        """The last seconds of samples as the analysis takes them, up to the end of the command:
        the very last sample of a run finds nobody."""
        environment = self.facts.get("environment") or {}
        allowed = (environment.get("cpu") or {}).get("allowed")
        series, end_ns = self.recent.all_series(), min(self.recent.last_ns, self.now_ns)
        if end_ns < self.recent.last_ns:
            series = {key: each.between(0, end_ns) for key, each in series.items()}
        seen = {entity for metric, entity in series if BY_KEY[metric].scope == "gpu"}
        gpus = gpus_of(self.facts, seen)
        return Recorded(series, (), self.begin_ns, end_ns, allowed, gpus)

    def _look_at_facts(self) -> None:
        version = _version(self.paths.run_json)
        if version is None or version != self._facts_version:
            self._facts_version = version
            self.facts = runfile.read_facts(self.paths.folder)
        self.ending = runfile.ending_of(self.facts, self.paths.folder)
        if self.ending.outcome is Outcome.LOST:  # unless it wrote its ending just before it went
            self.facts = runfile.read_facts(self.paths.folder)
            self.ending = runfile.ending_of(self.facts, self.paths.folder)


def _version(path: Path) -> tuple[int, int] | None:
    """Another one means that the file was replaced."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns
