"""Read the segments of samples: Arrow IPC streams, which may be truncated or damaged, and Parquet.

A stream has no checksums. A batch that cannot be decoded, or whose times do not fit those of its
neighbors, is dropped, and reading continues at the next batch. The dropped parts are returned as
gaps.
"""

from __future__ import annotations

import re
import struct
from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator
from itertools import islice, pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.ipc

from stepscope.errors import RunFolderError
from stepscope.metrics import SCOPES
from stepscope.runs.files import STREAM_LIMIT, read_regular
from stepscope.runs.streams import KEYS, schema_of

MAX_CELLS = 16_000_000
"""Rows times columns of a segment. A stream is closed at 16 MiB: 2 million values."""
_FREE_CELLS = 24_000_000
_DECODED_PER_BYTE, _KEPT_PER_BYTE = 100, 25
"""Cells per byte of all segments of a run. The rows of many idle processes are almost equal: their
segments have tens of cells per byte. Rows of single processes are decoded, but not kept."""
MAX_NS = 2**62
"""A time after 146 years is an error."""
_MAX_COLUMNS = 1000
_MAX_TEXT_BYTES = 64 << 20
_MAX_TRIES = 1000
"""Positions of a stream that are tried after damaged batches until a valid one is found."""
_TRY_BYTES = 4 << 20
"""A try at a position counts once more for each 4 MiB that follow it: a damaged batch may claim all
of them, and reading them takes time."""
_BLOCK = 64
"""Number of batches that are combined at once."""

_NUMBER = re.compile(rb"[0-9]{1,9}")
_TYPES = {
    "t_ns": (pa.int64(),),
    "entity": (pa.string(), pa.dictionary(pa.int32(), pa.string())),
    "pid": (pa.int32(),),
}
"""The types of the columns that are not numbers. Texts are read from Parquet with a dictionary."""

INVALID = (
    pa.ArrowException,
    OSError,
    EOFError,
    SystemError,
    UnicodeDecodeError,
    struct.error,
)
"""Errors of pyarrow for invalid data; SystemError for strings with invalid lengths."""


class Gap(NamedTuple):
    """Samples that are missing between two times; None is the start or end of the segment."""

    after_ns: int | None
    before_ns: int | None


class Segment(NamedTuple):
    table: pa.Table
    number: int | None
    """Segments are numbered from 0; None if the number of a live stream is unknown."""
    gaps: tuple[Gap, ...] = ()


class ExpansionLimit:
    """Limits what the segments of a run expand to, in proportion to their size: in Parquet files,
    equal rows take hardly any space."""

    def __init__(self) -> None:
        self._stored_bytes = self._decoded = self._kept = 0

    def store(self, size: int) -> None:
        """Count the bytes of a segment."""
        self._stored_bytes += size

    def decode(self, cells: int) -> None:
        """Count the cells of a Parquet file before they are decoded. Raises ArrowInvalid."""
        self._decoded += cells
        self._check(self._decoded, _DECODED_PER_BYTE)
        if cells > MAX_CELLS:
            raise pa.ArrowInvalid(f"{cells:,} values are more than a segment can have")

    def keep(self, table: pa.Table) -> None:
        """Count the cells in rows that are not of single processes. Raises ArrowInvalid."""
        if "pid" in table.column_names:
            self._kept += table.column("pid").null_count * table.num_columns
            self._check(self._kept, _KEPT_PER_BYTE)

    def _check(self, cells: int, per_byte: int) -> None:
        if cells > _FREE_CELLS + per_byte * self._stored_bytes:
            raise pa.ArrowInvalid("the samples expand to too many values for the size of the files")


class StreamBatch(NamedTuple):
    """A valid batch in a stream: its rows, its position, and its first and last time."""

    rows: pa.RecordBatch
    begin: int
    end: int
    first_ns: int
    last_ns: int


def read_segment(
    path: Path,
    columns: Collection[str] | None = None,
    limit: ExpansionLimit | None = None,
    *,
    coded: bool = False,
) -> Segment:
    """Return the rows of a segment, without the incomplete last batch of a truncated stream.

    Only the `columns` are decoded. `limit` is shared by all segments of a run. With `coded`, the
    column `entity` stays dictionary-encoded if it is stored so: a run of a day has millions of rows
    and only a few entities.
    """
    # Not memory-mapped: on a full disk the writer truncates the file, and accessing the truncated
    # part of a mapping would kill the reader.
    data = read_regular(path, STREAM_LIMIT)
    limit = limit or ExpansionLimit()
    limit.store(len(data))
    if path.suffix == ".parquet":
        return Segment(_read_parquet(data, columns, limit, coded), _number(path))
    stream = StreamReader(path, columns)
    batches, gaps = in_order(stream.batches(data))
    if batches and batches[0].begin > stream.begin:
        gaps.insert(0, Gap(None, batches[0].first_ns))
    number, is_closed = _number(path), True
    if number is None:  # the live stream, which may end with a part of a batch
        stored = (stream.schema.metadata or {}).get(b"stepscope.segment", b"")
        number, is_closed = int(stored) if _NUMBER.fullmatch(stored) else None, False
    if is_closed and (batches[-1].end if batches else stream.begin) < len(data):
        gaps.append(Gap(batches[-1].last_ns if batches else None, None))
    # There is one batch per second, and many small chunks are slow. Combining some of them while
    # they are in the CPU cache halves the time.
    blocks = []
    rows = (batch.rows for batch in batches)
    while block := list(islice(rows, _BLOCK)):
        blocks.append(pa.Table.from_batches(block).combine_chunks())
    if not blocks:
        return Segment(pa.table({}), number, tuple(gaps))
    table = pa.concat_tables(blocks)
    if columns is not None:
        table = table.select([name for name in columns if name in table.column_names])
    return Segment(table.combine_chunks(), number, tuple(gaps))


def read_stored(
    path: Path,
    columns: Collection[str] | None = None,
    limit: ExpansionLimit | None = None,
    *,
    coded: bool = False,
) -> Segment:
    """Call `read_segment` for a run that may be damaged, or whose stream may be converted to
    Parquet at the same time."""
    try:
        try:
            return read_segment(path, columns, limit, coded=coded)
        except FileNotFoundError:
            return read_segment(path.with_suffix(".parquet"), columns, limit, coded=coded)
    except INVALID as error:
        raise unreadable(path, error) from None


def unreadable(path: Path, error: BaseException) -> RunFolderError:
    hint = "The run folder is damaged: copy it again"
    return RunFolderError(f"{path} cannot be read: {error}", hint)


class StreamReader:
    """Finds the batches in the bytes of a stream, at once or as it grows."""

    def __init__(self, path: Path, columns: Collection[str] | None = None) -> None:
        scope = path.name.partition(".")[0]
        self._columns = columns
        self.schema = schema_of(scope if scope in SCOPES else "host")
        """Until the schema of the stream is read, and if it is damaged."""
        empty_row = [pa.nulls(1, field.type) for field in self.schema]
        example = pa.RecordBatch.from_arrays(empty_row, schema=self.schema).serialize()
        self._batch_header = example.to_pybytes()[:8]
        """The batches of a stream begin with the same bytes: a marker and the size of their
        metadata, which follows from the schema."""
        self.begin = 0
        """The position of the first batch, behind the schema."""
        self._tries = _MAX_TRIES

    def batches(self, data: bytes, *, is_start: bool = True) -> Iterator[StreamBatch]:
        """Yield the valid batches in `data`, which is the start of the stream or continues it."""
        buffer = pa.py_buffer(data)
        if is_start:
            self._read_schema(buffer)
        position = self.begin if is_start else 0
        while position < len(data):
            batch = self._batch_at(buffer, position)
            if batch is None:
                batch = self._next_batch(data, buffer, position + 1)
            if batch is None:
                return
            self._batch_header = data[batch.begin : batch.begin + 8]
            yield batch
            position = batch.end

    def _read_schema(self, buffer: pa.Buffer) -> None:
        source = pa.BufferReader(buffer)
        try:
            message = pa.ipc.read_message(source)
            if message.type != "schema":  # pyarrow would crash
                return
            schema = pa.ipc.read_schema(message)
        except (*INVALID, ValueError):
            return
        check_schema(schema)
        self.schema = schema
        self.begin = int(source.tell())

    def _next_batch(self, data: bytes, buffer: pa.Buffer, position: int) -> StreamBatch | None:
        """Return the first valid batch after a damaged one."""
        while self._tries > 0 and (position := data.find(self._batch_header, position)) >= 0:
            batch = self._batch_at(buffer, position)
            if batch is not None:
                return batch
            self._tries -= 1 + (len(data) - position) // _TRY_BYTES
            position += 1
        return None

    def _batch_at(self, buffer: pa.Buffer, position: int) -> StreamBatch | None:
        source = pa.BufferReader(buffer.slice(position))
        try:
            message = pa.ipc.read_message(source)
            if _is_compressed(message):  # never by stepscope; its size is not limited by the file's
                return None
            rows = pa.ipc.read_record_batch(message, self.schema)
            if self._columns is not None:
                names = {"t_ns", *self._columns}
                rows = rows.select([name for name in self.schema.names if name in names])
            rows.validate(full=True)
        except INVALID:
            return None
        times = _times(rows.column("t_ns"))
        if times is None:  # also zeros after a power failure
            return None
        return StreamBatch(rows, position, position + source.tell(), int(times[0]), int(times[-1]))


def _is_compressed(message: pa.ipc.Message) -> bool:
    """Whether the buffers of a record batch are compressed, from its FlatBuffers metadata."""
    metadata = message.metadata.to_pybytes()

    def field(table: int, index: int) -> int:
        """Return the position of a field in a table; 0 if it is not set."""
        (distance,) = struct.unpack_from("<i", metadata, table)
        (size,) = struct.unpack_from("<H", metadata, table - distance)
        if 4 + 2 * index >= size:
            return 0
        (offset,) = struct.unpack_from("<H", metadata, table - distance + 4 + 2 * index)
        return table + offset if offset else 0

    (root,) = struct.unpack_from("<I", metadata, 0)
    header = field(root, 2)
    if message.type != "record batch" or not header:
        raise pa.ArrowInvalid("not a record batch")
    (offset,) = struct.unpack_from("<I", metadata, header)
    return field(header + offset, 3) > 0


def _times(column: pa.Array) -> np.ndarray | None:
    """Return the times of a batch; None if it has none or they are not valid times in order."""
    if column.type != pa.int64() or column.null_count or not len(column):
        return None
    end = column.offset + len(column)
    times = np.frombuffer(column.buffers()[1], np.int64, end)[column.offset :]
    if times[0] <= 0 or times[-1] >= MAX_NS or (times[1:] < times[:-1]).any():
        return None
    return times


def in_order(found: Iterable[StreamBatch]) -> tuple[list[StreamBatch], list[Gap]]:
    """Return the batches whose times are in order, as many as possible, and the gaps between them.

    A damaged time may be too early or too late: the longest sequence in order is without it.
    """
    batches = list(found)
    if any(a.last_ns > b.first_ns for a, b in pairwise(batches)):
        batches = _longest_in_order(batches)
    neighbors = pairwise(batches)
    return batches, [Gap(a.last_ns, b.first_ns) for a, b in neighbors if a.end != b.begin]


def _longest_in_order(batches: list[StreamBatch]) -> list[StreamBatch]:
    ends: list[int] = []  # the earliest end of a sequence of each length
    last: list[int] = []  # the batch at that end
    before: list[int] = []  # of each batch, the previous one in its sequence
    for number, batch in enumerate(batches):
        length = bisect_right(ends, batch.first_ns)
        before.append(last[length - 1] if length else -1)
        if length == len(ends):
            ends.append(batch.last_ns)
            last.append(number)
        elif batch.last_ns < ends[length]:
            ends[length], last[length] = batch.last_ns, number
    kept = []
    number = last[-1]
    while number >= 0:
        kept.append(batches[number])
        number = before[number]
    return kept[::-1]


def _number(path: Path) -> int | None:
    """Return the number of a closed segment; None for a live stream."""
    digits = path.stem.rpartition(".")[2]
    return int(digits) if digits.isdecimal() else None


def check_schema(schema: pa.Schema, columns: Collection[str] | None = None) -> None:
    """Raise ArrowInvalid if key columns are missing or columns have an unexpected type. Newer
    versions may have more metrics, which are numbers too."""
    for key in KEYS:
        if key not in schema.names and (columns is None or key in columns):
            raise pa.ArrowInvalid(f"column {key} is missing")
    if len(schema.names) > _MAX_COLUMNS:
        raise pa.ArrowInvalid(f"{len(schema.names):,} columns are more than a segment can have")
    if len(set(schema.names)) < len(schema.names):
        raise pa.ArrowInvalid("a column occurs twice")
    for field in schema:
        if field.type not in _TYPES.get(field.name, (pa.float64(),)):
            raise pa.ArrowInvalid(f"column {field.name} has the unexpected type {field.type}")


def _read_parquet(
    data: bytes, columns: Collection[str] | None, limit: ExpansionLimit, coded: bool
) -> pa.Table:
    from pyarrow import parquet

    metadata = parquet.read_metadata(pa.BufferReader(data))
    rows = metadata.num_rows
    if not rows:
        return pa.table({})  # a stream without rows has no columns
    with parquet.ParquetFile(
        pa.BufferReader(data),
        metadata=metadata,
        # Equal texts are stored once. Without a dictionary they would have any size in memory.
        read_dictionary=["entity"] if "entity" in metadata.schema.names else [],
        page_checksum_verification=True,
    ) as file:
        check_schema(file.schema_arrow, columns)
        stored = file.schema_arrow.names
        wanted = [name for name in columns or stored if name in stored]
        limit.decode(rows * len(wanted))
        table = file.read(wanted).select(wanted)
    if "t_ns" in wanted and _times(table.column("t_ns").combine_chunks()) is None:
        raise pa.ArrowInvalid("the times are not in order")
    return table if coded or "entity" not in wanted else _decoded(table)


def _decoded(table: pa.Table) -> pa.Table:
    """Return the table with plain texts in place of dictionaries."""
    number = table.column_names.index("entity")
    column = table.column(number)
    lengths = (len(text or "") for c in column.chunks for text in c.dictionary.to_pylist())
    if max(lengths, default=0) * table.num_rows > _MAX_TEXT_BYTES:
        raise pa.ArrowInvalid("the names of the entities are too long")
    field = table.field(number)
    plain = pa.field(field.name, pa.string(), field.nullable, field.metadata)
    return table.set_column(number, plain, column.cast(pa.string()))
