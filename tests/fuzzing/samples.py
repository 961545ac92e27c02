"""Hostile samples: Arrow streams and Parquet files."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
from pyarrow import parquet

from stepscope.errors import StepscopeError
from stepscope.runs.segments import read_stored
from stepscope.runs.streams import schema_of

FLOATS = (float("nan"), float("inf"), -float("inf"), 1e308, -1e308, 1e20, -1.0, 5e-324, 0.0)
TIMES = (0, -1, 1, 2**62, 2**63 - 1, -(2**63))
TEXTS = ("", "tree", "\x1b[31mred\x07\x9b", "<script>alert(1)</script>", "x" * 70_000, "a\nb\0c")
TYPES = (
    pa.string(),
    pa.binary(),
    pa.large_string(),
    pa.bool_(),
    pa.float32(),
    pa.uint64(),
    pa.decimal128(30, 2),
    pa.timestamp("ns"),
    pa.null(),
    pa.list_(pa.int64()),
    pa.struct([("a", pa.int64())]),
    pa.dictionary(pa.int8(), pa.string()),
)
ROWS = 20_000_000


def hostile_samples(path: Path, bombs: Path, rng: random.Random) -> str:
    """Replace a segment by a hostile one, as a stream or as Parquet."""
    if path.suffix == ".parquet" and rng.random() < 0.2:
        name = rng.choice(sorted(_BOMBS))
        bomb = bombs / f"{name}.parquet"
        if not bomb.exists():
            parquet.write_table(_BOMBS[name](), bomb, compression="zstd")
        path.write_bytes(bomb.read_bytes())
        return f"hostile samples ({name})"
    try:
        table = read_stored(path).table
    except StepscopeError:  # damaged before
        table = pa.table({})
    if not table.num_columns:
        table = schema_of("host").empty_table()
    done = []
    for _ in range(rng.choice((1, 1, 2, 4))):
        change = rng.choice(_CHANGES)
        table = change(table, rng)
        done.append(change.__name__)
    write = _write_parquet if path.suffix == ".parquet" else _write_stream
    if rng.random() < 0.05:
        write = rng.choice((_write_parquet, _write_stream))
    write(table, path, rng)
    return f"hostile samples ({', '.join(done)})"


def _write_parquet(table: pa.Table, path: Path, rng: random.Random) -> None:
    file = pa.BufferOutputStream()
    parquet.write_table(
        table,
        file,
        compression=rng.choice(("zstd", "snappy", "gzip", "none")),
        use_dictionary=rng.random() < 0.7,
        row_group_size=rng.choice((None, 1 + table.num_rows // 100)),
        write_page_checksum=rng.random() < 0.3,
    )
    path.write_bytes(file.getvalue())


def _write_stream(table: pa.Table, path: Path, rng: random.Random) -> None:
    options = pa.ipc.IpcWriteOptions(
        compression=rng.choice((None, None, None, "zstd", "lz4")),
        emit_dictionary_deltas=rng.random() < 0.5,
    )
    new = pa.ipc.new_file if rng.random() < 0.05 else pa.ipc.new_stream
    file = pa.BufferOutputStream()
    with new(file, table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=rng.choice((1 + table.num_rows // 200, 10**6)))
    path.write_bytes(file.getvalue())


def _equal_rows() -> pa.Table:
    """Return many equal rows, which are a small file."""
    columns = dict.fromkeys(("window_s", "cpu", "rss"), pa.repeat(1.0, ROWS))
    return _with_keys(ROWS, **columns)


def _with_keys(rows: int, **columns: pa.Array) -> pa.Table:
    keys = {
        "t_ns": pa.repeat(6_000_000_000_000, rows),
        "window_s": pa.repeat(0.1, rows),
        "entity": pa.repeat("tree", rows),
        "pid": pa.nulls(rows, pa.int32()),
        "cpu": pa.repeat(1.0, rows),
    }
    return pa.table({**keys, **columns})


def _long_texts(kind: pa.DataType) -> pa.Table:
    """Return equal long texts, which are stored once."""
    texts = pa.DictionaryArray.from_arrays(pa.repeat(0, 100_000), pa.array(["x" * 100_000], kind))
    return (
        _with_keys(100_000, entity=texts)
        if kind == pa.string()
        else _with_keys(100_000, notes=texts)
    )


_BOMBS: dict[str, Callable[[], pa.Table]] = {
    "equal rows": _equal_rows,
    "long texts": lambda: _long_texts(pa.string()),
    "long binaries": lambda: _long_texts(pa.binary()),
    "many entities": lambda: _with_keys(
        300_000, entity=pa.array([f"rank{number}" for number in range(300_000)])
    ),
    "many columns": lambda: _with_keys(
        1000, **{f"column{number}": pa.repeat(1.0, 1000) for number in range(20_000)}
    ),
}
"""Small files that expand when they are read, or take long to read."""


def _column(table: pa.Table, rng: random.Random) -> int:
    return rng.randrange(table.num_columns)


def drop_column(table: pa.Table, rng: random.Random) -> pa.Table:
    return table.remove_column(_column(table, rng)) if table.num_columns > 1 else table


def repeat_column(table: pa.Table, rng: random.Random) -> pa.Table:
    number = _column(table, rng)
    return table.append_column(table.field(number), table.column(number))


def rename_column(table: pa.Table, rng: random.Random) -> pa.Table:
    names = list(table.column_names)
    names[_column(table, rng)] = rng.choice(("\x1b[31m", "cpu", "t_ns", "", "x" * 100_000))
    return table.rename_columns(names)


def change_type(table: pa.Table, rng: random.Random) -> pa.Table:
    number, kind = _column(table, rng), rng.choice(TYPES)
    return table.set_column(
        number, pa.field(table.column_names[number], kind), pa.nulls(table.num_rows, kind)
    )


def change_values(table: pa.Table, rng: random.Random) -> pa.Table:
    """Put extreme values into one or all columns of numbers, texts and times."""
    share = rng.choice((0.02, 0.5, 1.0))
    chosen = range(table.num_columns) if rng.random() < 0.3 else [_column(table, rng)]
    for number in chosen:
        column = table.column(number)
        kinds = {pa.float64(): FLOATS, pa.int64(): TIMES, pa.string(): TEXTS, pa.int32(): (-1, 0)}
        if column.type in kinds:
            values = [
                rng.choice((*kinds[column.type], None)) if rng.random() < share else value
                for value in column.to_pylist()
            ]
            field = pa.field(table.column_names[number], column.type)
            table = table.set_column(number, field, pa.array(values, column.type))
    return table


def disorder(table: pa.Table, rng: random.Random) -> pa.Table:
    order = list(range(table.num_rows))
    rng.choice((rng.shuffle, list.reverse))(order)
    return table.take(pa.array(order, pa.int64()))


def shift_times(table: pa.Table, rng: random.Random) -> pa.Table:
    names = table.column_names
    number = names.index("t_ns") if "t_ns" in names else 0
    if table.field(number).type != pa.int64():
        return table
    times = np.array(table.column(number).fill_null(0).to_pylist(), np.float64)
    factor, offset = rng.choice(((1, 1e17), (1e4, 0), (0, 1), (1, -1e12)))
    moved = np.clip(times * factor + offset, 1, 2**61).astype(np.int64)
    return table.set_column(number, names[number], pa.array(moved))


def repeat_rows(table: pa.Table, rng: random.Random) -> pa.Table:
    return pa.concat_tables([table] * rng.choice((2, 100) if table.num_rows < 2000 else (2,)))


def no_rows(table: pa.Table, rng: random.Random) -> pa.Table:
    return table.slice(0, rng.choice((0, 1)))


def change_metadata(table: pa.Table, rng: random.Random) -> pa.Table:
    number = rng.choice((b"-1", b"9" * 5000, b"7", b"\xff", b"0" * 100, b""))
    return table.replace_schema_metadata({b"stepscope.segment": number})


_CHANGES = (
    drop_column,
    repeat_column,
    rename_column,
    change_type,
    change_values,
    change_values,
    disorder,
    shift_times,
    repeat_rows,
    no_rows,
    change_metadata,
)
