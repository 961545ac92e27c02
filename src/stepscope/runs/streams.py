"""Samples as append-only Arrow IPC streams: whole batches or nothing, whatever happens.

A batch is put together in memory and appended with one write. If the disk is full, what was written
of it is taken back, the batch is kept (up to a limit of rows) and tried again with the next one.
"""

from __future__ import annotations

import os
from array import array
from collections import deque
from collections.abc import Collection, Iterator
from functools import lru_cache
from itertools import accumulate, islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.ipc

from stepscope.errors import RunFolderError
from stepscope.metrics import BY_KEY, Scope, of_scope
from stepscope.records import Entity
from stepscope.runs.paths import RunPaths

KEYS = ("t_ns", "window_s", "entity", "pid")
"""Every row: when (monotonic), over how long its rates are, and what it is about."""

MOST_ROWS_KEPT = 200_000
ROLL_BYTES = 16 * 1024 * 1024
"""What a killed run leaves unpacked is read batch by batch, more than ten times as slowly."""
_BLOCK = 64
"""Batches that are put together at once when a stream is read."""


def schema_of(scope: Scope) -> pa.Schema:
    """The columns of `<scope>.arrows`: the keys, then the metrics of the table, all nullable."""
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
    """Collects rows and appends them as record batches. What `flush` cannot write is kept."""

    def __init__(self, paths: RunPaths, scope: Scope) -> None:
        self.scope = scope
        self.rows_dropped = 0
        self._paths = paths
        self._schema = schema_of(scope)
        self._metrics = tuple(metric.key for metric in of_scope(scope))
        self._rows: list[_Row] = []
        self._unwritten: deque[tuple[int, pa.Buffer]] = deque()
        """Rows and bytes of each batch; several once the disk is full."""
        self._segment = 0
        self._fd = -1
        self._size = 0
        self._open()

    def append(
        self, t_ns: int, window_s: float | None, entity: Entity, values: dict[str, float | None]
    ) -> None:
        """Keep one row until the next flush."""
        self._rows.append((t_ns, window_s, entity, values))

    def flush(self) -> None:
        """Append what was collected as one batch; OSError where it could not be written."""
        if self._rows:
            self._unwritten.append((len(self._rows), self._batch().serialize()))
            self._rows = []
        try:
            while self._unwritten:
                self._write_whole(self._unwritten[0][1])
                self._unwritten.popleft()
        except OSError:
            surplus = sum(rows for rows, _ in self._unwritten) - MOST_ROWS_KEPT
            while surplus > 0:
                rows, _ = self._unwritten.popleft()
                self.rows_dropped += rows
                surplus -= rows
            raise

    def roll(self, at_least: int = ROLL_BYTES) -> Path | None:
        """Close the stream once it is large, and begin the next; the closed one may be packed."""
        if self._size < at_least:
            return None
        live, closed = self._paths.live_stream(self.scope), self._closed()
        old, old_size = self._fd, self._size
        os.rename(live, closed)
        try:
            self._open()
        except OSError:  # no room for a new one: go on with the old
            os.replace(closed, live)
            self._fd, self._size = old, old_size
            raise
        os.close(old)
        self._segment += 1
        return closed

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def finish(self) -> Path:
        """Close for good; the live stream becomes the last segment."""
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
            self._write_whole(self._schema.serialize())
        except OSError:
            self.close()
            raise

    def _write_whole(self, buffer: pa.Buffer) -> None:
        left = memoryview(buffer)
        try:
            while left:
                left = left[os.write(self._fd, left) :]
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
        nothing: list[Any] = [None] * len(times)
        columns += [[v.get(k) for v in values] if k in present else nothing for k in self._metrics]
        return pa.RecordBatch.from_arrays(
            [_array(c, f.type) for c, f in zip(columns, self._schema, strict=True)],
            schema=self._schema,
        )


_CODES = {pa.int64(): "q", pa.int32(): "i", pa.float64(): "d"}


@lru_cache(maxsize=256)
def _nothing(count: int, kind: pa.DataType) -> pa.Array:
    """Most columns of a batch are empty, and most batches are of a few sizes."""
    return pa.nulls(count, kind)


def _array(values: list[Any], kind: pa.DataType) -> pa.Array:
    """An Arrow array from its buffers. `pa.array` would import pandas, half a second in a watcher
    that must not stop."""
    count = len(values)
    missing = values.count(None)
    if missing == count:
        return _nothing(count, kind)
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


def check_schema(schema: pa.Schema, columns: Collection[str] | None = None) -> None:
    """ArrowInvalid where keys are missing, or columns that we know have another type than ours."""
    for key in KEYS:
        if key not in schema.names and (columns is None or key in columns):
            raise pa.ArrowInvalid(f"it has no column {key}")
    ours = {"t_ns": "int64", "pid": "int32", "entity": "string"}
    for field in schema:
        known = field.name in KEYS or field.name in BY_KEY
        kind = field.type.value_type if pa.types.is_dictionary(field.type) else field.type
        if known and kind != ours.get(field.name, "double"):
            raise pa.ArrowInvalid(f"its column {field.name} has the type {field.type}")


def read_segment(
    path: Path, columns: Collection[str] | None = None, *, coded: bool = False
) -> pa.Table:
    """The rows of a segment, to the last whole batch of a stream that was cut off.

    Only the `columns` are decoded. `coded` leaves the names of entities as a dictionary where they
    are stored as one: a day has millions of rows, and a handful of names.
    """
    if path.suffix == ".parquet":
        table = _read_parquet(path, columns, coded)
        if table.num_rows:  # of a stream without rows there are no columns either
            check_schema(table.schema, columns)
        return table
    # Read, not mapped: a writer that meets a full disk takes back what it appended, and a map of
    # bytes that are gone would kill the reader.
    batches = _whole_batches(pa.py_buffer(path.read_bytes()), columns)
    # A batch a second: what follows would pay for each of them. Some at a time are put together
    # while the processor still has them at hand, which halves the time.
    blocks = []
    while block := list(islice(batches, _BLOCK)):
        blocks.append(pa.Table.from_batches(block).combine_chunks())
    if not blocks:
        return pa.table({})
    table = pa.concat_tables(blocks)
    if columns is not None:
        table = table.select([name for name in columns if name in table.column_names])
    check_schema(table.schema, columns)
    return table.combine_chunks()


def read_stored(
    path: Path, columns: Collection[str] | None = None, *, coded: bool = False
) -> pa.Table:
    """As `read_segment`, of a run that may be damaged, or rolled to Parquet meanwhile."""
    try:
        return read_segment(path, columns, coded=coded)
    except FileNotFoundError:
        return read_segment(path.with_suffix(".parquet"), columns, coded=coded)
    except (OSError, pa.ArrowException) as error:
        raise RunFolderError(
            f"{path} cannot be read: {error}", "The folder is damaged: copy it again"
        ) from None


def _read_parquet(path: Path, columns: Collection[str] | None, coded: bool) -> pa.Table:
    from pyarrow import parquet

    metadata = parquet.read_metadata(path)
    present = metadata.schema.names
    wanted = present if columns is None else [name for name in columns if name in present]
    dictionaries = [name for name in wanted if coded and name == "entity"]
    with parquet.ParquetFile(path, metadata=metadata, read_dictionary=dictionaries) as file:
        return file.read(wanted).select(wanted)


def _whole_batches(
    data: pa.Buffer, columns: Collection[str] | None = None
) -> Iterator[pa.RecordBatch]:
    """Batches until the end, a cut, or a tail of zeros (which reads as rows at time 0).

    They have the `columns` and, to be told from zeros, the time.
    """
    try:
        reader = pa.ipc.open_stream(data)
        if columns is not None:
            wanted = [i for i, name in enumerate(reader.schema.names) if i == 0 or name in columns]
            options = pa.ipc.IpcReadOptions(included_fields=wanted, use_threads=False)
            reader = pa.ipc.open_stream(data, options=options)
    except (pa.ArrowException, OSError, EOFError):
        return
    last = 0
    while True:
        try:
            batch = reader.read_next_batch()
            batch.validate(full=True)
        except (StopIteration, pa.ArrowException, OSError, EOFError, SystemError):
            return
        times = batch.column(0)
        if batch.num_rows == 0 or times.null_count or times[0].as_py() < max(last, 1):
            return
        last = times[-1].as_py()
        if last < times[0].as_py():
            return
        yield batch


def pack(closed: Path) -> Path:
    """Roll a closed stream to Parquet; the stream goes once the Parquet file is whole."""
    from pyarrow import parquet

    table = read_segment(closed)
    target = closed.with_suffix(".parquet")
    temporary = closed.with_name(f".{target.name}.tmp")
    try:
        parquet.write_table(table, temporary, compression="zstd")
        os.replace(temporary, target)
    except (OSError, pa.ArrowException) as error:
        temporary.unlink(missing_ok=True)
        raise OSError(getattr(error, "errno", None) or 5, f"not packed: {error}") from error
    closed.unlink()
    return target
