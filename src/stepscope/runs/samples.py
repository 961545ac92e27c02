"""From rows of samples to series, segment by segment: a day of them is not in memory twice.

Values are taken out of Arrow's buffers. Its own filters would copy every column for every entity,
and its way to numpy imports pandas, which takes longer than all that is done here.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain, product
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from stepscope.analysis.run.series import Floats, Ints, Series
from stepscope.metrics import BY_KEY

_Bools = npt.NDArray[np.bool_]
_Times = tuple[Ints, Floats]
"""Times and windows. Metrics that are read together share them, as arrays too."""
_Piece = tuple[_Times, Floats]
_Key = tuple[str, str]
"""An entity and a metric."""


def series_of(segments: Iterable[pa.Table]) -> dict[tuple[str, str], Series]:
    """(metric, entity) to its values, for rows that are not of a single process."""
    times: dict[_Key, list[_Times]] = {}
    values: dict[_Key, list[Floats]] = {}
    batches = chain.from_iterable(map(pa.Table.to_batches, segments))
    for pieces in map(pieces_of, batches):  # by map: no name keeps a segment while one is read
        for key, (when, what) in pieces.items():
            times.setdefault(key, []).append(when)
            values.setdefault(key, []).append(what)
    pa.default_memory_pool().release_unused()  # of a day Arrow keeps 140 MB for the next
    # Entities as they came, and of each its metrics as the table has them.
    entities = list(dict.fromkeys(entity for entity, _ in values))
    joined: dict[tuple[int, ...], _Times] = {}
    found: dict[tuple[str, str], Series] = {}
    for entity, metric in product(entities, BY_KEY):
        if (entity, metric) in values:
            parts = times[entity, metric]
            which = tuple(map(id, parts))
            if which not in joined:  # metrics that were read together share their times
                t, window = zip(*parts, strict=True)
                joined[which] = np.concatenate(t), np.concatenate(window)
            value = np.concatenate(values.pop((entity, metric)))
            found[metric, entity] = Series(*joined[which], value)
    return found


def pieces_of(batch: pa.RecordBatch) -> dict[_Key, _Piece]:
    """What a batch has of every metric of every entity."""
    found: dict[_Key, _Piece] = {}
    t, window = _numbers(batch.column("t_ns")), np.zeros(len(batch))
    windows = batch.column("window_s")
    if windows.null_count < len(windows):
        window = np.where(_known(windows), _numbers(windows), 0.0)
    whole = ~_known(batch.column("pid"))
    together = _read_together(batch, whole)
    for entity, rows in _rows_by_entity(batch.column("entity"), whole):
        for there, columns in together:
            kept = rows[there[rows]]
            if len(kept):
                when = t[kept], window[kept]
                found |= {(entity, metric): (when, v[kept]) for metric, v in columns.items()}
    return found


def _rows_by_entity(column: pa.Array, whole: _Bools) -> list[tuple[str, Ints]]:
    """Each entity with its rows, the one that comes first in front."""
    coded = column if pa.types.is_dictionary(column.type) else column.dictionary_encode()
    codes = np.where(whole, _numbers(coded.indices), -1)
    rows = [np.flatnonzero(codes == code) for code in range(len(coded.dictionary))]
    found = [each for each in zip(coded.dictionary.to_pylist(), rows, strict=True) if len(each[1])]
    return sorted(found, key=lambda each: int(each[1][0]))


def _read_together(batch: pa.RecordBatch, whole: _Bools) -> list[tuple[_Bools, dict[str, Floats]]]:
    """Metrics that have their values in the same of the `whole` rows, with these rows."""
    groups: dict[bytes, tuple[_Bools, dict[str, Floats]]] = {}
    for metric, column in zip(batch.schema.names, batch.columns, strict=True):
        if metric in BY_KEY and column.null_count < len(column):  # a newer version has more
            there = whole & _known(column)
            group = groups.setdefault(np.packbits(there).tobytes(), (there, {}))
            group[1][metric] = _numbers(column)
    return list(groups.values())


def _known(column: pa.Array) -> _Bools:
    validity = column.buffers()[0]
    if validity is None:
        return np.ones(len(column), np.bool_)
    bits = np.unpackbits(np.frombuffer(validity, np.uint8), bitorder="little")
    return bits[column.offset : column.offset + len(column)].view(np.bool_)


def _numbers(column: pa.Array) -> npt.NDArray[Any]:
    """The values of a column as they lie in memory; whatever is there where it has none."""
    kind = column.type.to_pandas_dtype()
    end = column.offset + len(column)
    return np.frombuffer(column.buffers()[1], kind, end)[column.offset :]
