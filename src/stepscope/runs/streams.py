"""Write samples as append-only Arrow IPC streams that always contain complete batches.

A batch is assembled in memory and appended with one write. If the disk is full, a partial write is
truncated, and the batch is kept (up to a limit of rows) and written together with the next one.
"""

from __future__ import annotations

import errno
import os
from array import array
from collections import deque
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from stepscope.errors import RunFolderError
from stepscope.metrics import Scope, of_scope
from stepscope.records import Entity
from stepscope.runs.files import replace_atomically
from stepscope.runs.paths import RunPaths

KEYS = ("t_ns", "window_s", "entity", "pid")
"""Columns of every row: the monotonic time, the window of its rates, the entity and its pid."""

MAX_ROWS_KEPT = 200_000
ROLL_BYTES = 16 * 1024 * 1024
"""Limits the part of a killed run that is not Parquet, which is more than ten times as slow to
read."""


def schema_of(scope: Scope) -> pa.Schema:
    """Return the columns of `<scope>.arrows`: the keys, then the metrics, all nullable."""
    keys = [
        pa.field("t_ns", pa.int64(), nullable=False),
        pa.field("window_s", pa.float64()),
        pa.field("entity", pa.string(), nullable=False),
        pa.field("pid", pa.int32()),
    ]
    columns = [pa.field(m.key, pa.float64(), metadata={"unit": m.unit}) for m in of_scope(scope)]
    return pa.schema(keys + columns, metadata={"stepscope.format": "1", "stepscope.scope": scope})


_Row = tuple[int, float | None, Entity, dict[str, float | None]]


class StreamWriter:
    """Collects rows and appends them as record batches. Batches that cannot be written are kept."""

    def __init__(self, paths: RunPaths, scope: Scope) -> None:
        self.scope = scope
        self.rows_dropped = 0
        self._paths = paths
        self._schema = schema_of(scope)
        self._metrics = tuple(metric.key for metric in of_scope(scope))
        self._rows: list[_Row] = []
        self._unwritten: deque[tuple[int, pa.Buffer]] = deque()
        """Number of rows and bytes of each batch; several if the disk is full."""
        self._segment = 0
        self._fd = -1
        self._size = 0
        self._open()

    def append(
        self, t_ns: int, window_s: float | None, entity: Entity, values: dict[str, float | None]
    ) -> None:
        """Add one row, to be written by the next flush."""
        self._rows.append((t_ns, window_s, entity, values))

    def flush(self) -> None:
        """Append the collected rows as one batch. Raises OSError if it cannot be written."""
        if self._rows:
            self._unwritten.append((len(self._rows), self._batch().serialize()))
            self._rows = []
        try:
            while self._unwritten:
                self._write_whole(self._unwritten[0][1])
                self._unwritten.popleft()
        except OSError:
            surplus = sum(rows for rows, _ in self._unwritten) - MAX_ROWS_KEPT
            while surplus > 0:
                rows, _ = self._unwritten.popleft()
                self.rows_dropped += rows
                surplus -= rows
            raise

    def roll(self, at_least: int = ROLL_BYTES) -> Path | None:
        """Close a large stream and start the next one. Return the closed stream, to be packed."""
        if self._size < at_least:
            return None
        live, closed = self._paths.live_stream(self.scope), self._closed()
        old, old_size = self._fd, self._size
        os.rename(live, closed)
        self._segment += 1
        try:
            self._open()
        except OSError:  # the disk is full: continue with the old stream
            os.replace(closed, live)
            self._segment -= 1
            self._fd, self._size = old, old_size
            raise
        os.close(old)
        return closed

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def finish(self) -> Path:
        """Close the writer. The live stream becomes the last segment."""
        self.close()
        os.rename(self._paths.live_stream(self.scope), self._closed())
        return self._closed()

    def _closed(self) -> Path:
        return self._paths.closed_stream(self.scope, self._segment)

    def _open(self) -> None:
        path = self._paths.live_stream(self.scope)
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._size = 0
        try:
            number = {b"stepscope.segment": str(self._segment).encode()}
            numbered = self._schema.with_metadata({**self._schema.metadata, **number})
            self._write_whole(numbered.serialize())
        except OSError:
            self.close()
            raise

    def _write_whole(self, buffer: pa.Buffer) -> None:
        remaining = memoryview(buffer)
        try:
            while remaining:
                remaining = remaining[os.write(self._fd, remaining) :]
        except OSError:
            os.ftruncate(self._fd, self._size)
            raise
        self._size += buffer.size

    def _batch(self) -> pa.RecordBatch:
        times, windows, entities, values = zip(*self._rows, strict=True)
        columns: list[list[Any]] = [
            list(times),
            list(windows),
            [entity.name for entity in entities],
            [entity.pid for entity in entities],
        ]
        present = set().union(*values)
        empty: list[Any] = [None] * len(times)
        columns += [[v.get(k) for v in values] if k in present else empty for k in self._metrics]
        return pa.RecordBatch.from_arrays(
            [_array(c, f.type) for c, f in zip(columns, self._schema, strict=True)],
            schema=self._schema,
        )


_CODES = {pa.int64(): "q", pa.int32(): "i", pa.float64(): "d"}


@lru_cache(maxsize=256)  # most columns of a batch are empty, and there are few batch sizes
def _nulls(count: int, kind: pa.DataType) -> pa.Array:
    return pa.nulls(count, kind)


def _array(values: list[Any], kind: pa.DataType) -> pa.Array:
    """Build an Arrow array from buffers. `pa.array` would import pandas, which blocks the monitor
    for half a second."""
    count = len(values)
    missing = values.count(None)
    if missing == count:
        return _nulls(count, kind)
    validity = None
    if missing:
        present = [value is not None for value in values]
        validity = pa.py_buffer(np.packbits(present, bitorder="little"))
        values = [0 if value is None else value for value in values]
    if kind == pa.string():
        texts = [value.encode() for value in values]
        ends = array("i", [0, *accumulate(len(text) for text in texts)])
        buffers = [validity, pa.py_buffer(ends), pa.py_buffer(b"".join(texts))]
    else:
        buffers = [validity, pa.py_buffer(array(_CODES[kind], values))]
    return pa.Array.from_buffers(kind, count, buffers)


def pack(closed: Path) -> Path:
    """Convert a closed stream to Parquet, and delete the stream afterwards. A damaged stream is
    kept: it may contain more than can be read now."""
    from pyarrow import parquet

    from stepscope.runs.segments import read_segment

    target = closed.with_suffix(".parquet")
    try:
        segment = read_segment(closed)
        if segment.gaps:
            raise OSError(errno.EIO, f"{closed.name} is damaged")
        packed = pa.BufferOutputStream()
        parquet.write_table(segment.table, packed, compression="zstd", write_page_checksum=True)
        replace_atomically(target, memoryview(packed.getvalue()))
    except (OSError, pa.ArrowException, RunFolderError) as error:
        raise OSError(
            getattr(error, "errno", None) or errno.EIO, f"not converted to Parquet: {error}"
        ) from error
    closed.unlink()
    return target
