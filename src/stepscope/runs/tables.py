"""What processes reported, as Arrow tables for users: marks and steps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from stepscope.inject import events as written
from stepscope.runs.events import ProcessEvents
from stepscope.runs.timelines import timeline_of

_KEYS = [("t_ns", pa.int64()), ("pid", pa.int32()), ("rank", pa.int32())]
_COUNTS = [("wait_s", pa.float64()), ("samples", pa.int64()), ("steps", pa.int64())]
_STEPS = pa.schema([*_KEYS, ("kind", pa.string()), *_COUNTS])
_MARKS = pa.schema([*_KEYS, *((name, pa.string()) for name in ("name", "value", "edge", "source"))])


def steps_table(processes: Sequence[ProcessEvents]) -> pa.Table:
    """Batches and steps of all processes, in time."""
    tables = [_STEPS.empty_table()]
    for process in processes:
        records = process.of(written.BATCH, written.STEP)
        is_step = records["kind"] == written.STEP
        columns = [
            pa.array(records["t"]),
            pa.array(np.full(len(records), process.pid, np.int32)),
            pa.array([process.rank] * len(records), pa.int32()),
            pa.array(np.where(is_step, "step", "batch"), pa.string()),
            pa.array(records["a"] / 1e9, mask=is_step),
            pa.array(records["b"], mask=is_step | (records["b"] < 0)),
            pa.array(records["a"], mask=~is_step),
        ]
        tables.append(pa.table(columns, schema=_STEPS))
    return pa.concat_tables(tables).sort_by("t_ns")


def marks_table(processes: Sequence[ProcessEvents]) -> pa.Table:
    """Marks and the edges of phases of all processes, in time."""
    rows = [
        {
            "t_ns": mark.t,
            "pid": process.pid,
            "rank": process.rank,
            "name": mark.name,
            "value": None if mark.value is None else str(mark.value),
            "edge": mark.edge,
            "source": mark.source,
        }
        for process in processes
        for mark in timeline_of(process).marks
    ]
    return pa.Table.from_pylist(rows, schema=_MARKS).sort_by("t_ns")
