"""Convert sample rows to series, segment by segment, so that a long run is not in memory twice.

Values are read directly from Arrow's buffers. Arrow's filters would copy every column for every
entity, and its conversion to numpy imports pandas, which takes longer than everything here.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain, product
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from stepscope.analysis.run.series import Floats, Ints, Series
from stepscope.errors import RunFolderError
from stepscope.metrics import BY_KEY

_LARGEST = 1e21
_LONGEST_S = 1e8
"""Of a window. Three years."""
_MAX_ENTITIES = 1000
"""Roles, GPUs and network namespaces in a segment."""

_Bools = npt.NDArray[np.bool_]
_Times = tuple[Ints, Floats]
"""Times and windows. Metrics that are read together share these arrays."""
_Piece = tuple[_Times, Floats]
_Key = tuple[str, str]
"""An entity and a metric."""


def series_of(segments: Iterable[pa.Table]) -> dict[tuple[str, str], Series]:
    """Return the series by (metric, entity), without rows of single processes."""
    times: dict[_Key, list[_Times]] = {}
    values: dict[_Key, list[Floats]] = {}
    batches = chain.from_iterable(map(pa.Table.to_batches, segments))
    for pieces in map(pieces_of, batches):  # `map` keeps no reference to the previous segment
        for key, (piece_times, piece_values) in pieces.items():
            times.setdefault(key, []).append(piece_times)
            values.setdefault(key, []).append(piece_values)
    pa.default_memory_pool().release_unused()  # 134 MiB after a run of a day
    # Entities in order of appearance, the metrics of each in the order of the metrics table.
    entities = list(dict.fromkeys(entity for entity, _ in values))
    joined: dict[tuple[int, ...], _Times] = {}
    series: dict[tuple[str, str], Series] = {}
    for entity, metric in product(entities, BY_KEY):
        if (entity, metric) in values:
            parts = times[entity, metric]
            ids = tuple(map(id, parts))
            if ids not in joined:  # metrics that were read together share their times
                t, window = zip(*parts, strict=True)
                joined[ids] = np.concatenate(t), np.concatenate(window)
            value = np.concatenate(values.pop((entity, metric)))
            series[metric, entity] = Series(*joined[ids], value)
    return series


def pieces_of(batch: pa.RecordBatch) -> dict[_Key, _Piece]:
    """Return the times and values of every metric of every entity in a batch."""
    pieces: dict[_Key, _Piece] = {}
    t, window = _numbers(batch.column("t_ns")), np.zeros(len(batch))
    windows = batch.column("window_s")
    if windows.null_count < len(windows):
        seconds = _numbers(windows)
        is_possible = _usable(windows) & (seconds > 0) & (seconds < _LONGEST_S)
        window = np.where(is_possible, seconds, 0.0)
    whole = ~_known(batch.column("pid"))
    together = _read_together(batch, whole)
    for entity, rows in _rows_by_entity(batch.column("entity"), whole):
        for mask, columns in together:
            kept = rows[mask[rows]]
            if len(kept):
                times = t[kept], window[kept]
                pieces |= {(entity, metric): (times, v[kept]) for metric, v in columns.items()}
    return pieces


def _rows_by_entity(column: pa.Array, whole: _Bools) -> list[tuple[str, Ints]]:
    """Return the rows of each entity, in the order of the first row."""
    coded = column if pa.types.is_dictionary(column.type) else column.dictionary_encode()
    if len(coded.dictionary) > _MAX_ENTITIES:
        raise RunFolderError(
            f"The samples have {len(coded.dictionary):,} entities; the limit is {_MAX_ENTITIES:,}",
            "The run folder is damaged: copy it again",
        )
    codes = np.where(whole, _numbers(coded.indices), -1)
    rows = [np.flatnonzero(codes == code) for code in range(len(coded.dictionary))]
    pairs = [each for each in zip(coded.dictionary.to_pylist(), rows, strict=True) if len(each[1])]
    return sorted(pairs, key=lambda each: int(each[1][0]))


def _read_together(batch: pa.RecordBatch, whole: _Bools) -> list[tuple[_Bools, dict[str, Floats]]]:
    """Group the metrics whose values are in the same `whole` rows. Return the mask of these rows
    and the columns of each group."""
    groups: dict[bytes, tuple[_Bools, dict[str, Floats]]] = {}
    for metric, column in zip(batch.schema.names, batch.columns, strict=True):
        if metric in BY_KEY and column.null_count < len(column):  # newer versions have more
            mask = whole & _usable(column)
            group = groups.setdefault(np.packbits(mask).tobytes(), (mask, {}))
            group[1][metric] = _numbers(column)
    return list(groups.values())


def _usable(column: pa.Array) -> _Bools:
    """Return which values are present and finite. Larger ones than any metric has would overflow
    in sums and products."""
    known, values = _known(column), _numbers(column)
    is_small = np.abs(values) < _LARGEST
    return known if is_small.all() else known & is_small


def _known(column: pa.Array) -> _Bools:
    validity = column.buffers()[0]
    if validity is None:
        return np.ones(len(column), np.bool_)
    bits = np.unpackbits(np.frombuffer(validity, np.uint8), bitorder="little")
    return bits[column.offset : column.offset + len(column)].view(np.bool_)


def _numbers(column: pa.Array) -> npt.NDArray[Any]:
    """Return the values of a column as in memory; missing values are undefined."""
    kind = column.type.to_pandas_dtype()
    end = column.offset + len(column)
    return np.frombuffer(column.buffers()[1], kind, end)[column.offset :]
