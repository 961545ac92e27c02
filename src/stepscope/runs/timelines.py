"""From what is stored to what the analysis takes: timelines and series as plain arrays."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from stepscope.analysis.passes import MarkEvent, Source, Timeline
from stepscope.analysis.series import Series
from stepscope.inject import events as written
from stepscope.metrics import BY_KEY

if TYPE_CHECKING:
    from stepscope.runs.events import ProcessEvents


def timeline_of(process: ProcessEvents) -> Timeline:
    """The analysis' view of one process. Where Keras tells the steps, torch's are left out."""
    steps = process.of(written.STEP)
    from_fit = (steps["flags"] & written.FROM_FIT) > 0
    return Timeline(
        process.pid,
        process.rank,
        process.of(written.LOADER_BEGIN),
        process.of(written.BATCH),
        process.of(written.LOADER_END),
        steps[from_fit] if from_fit.any() else steps,
        _marks(process),
    )


def _marks(process: ProcessEvents) -> list[MarkEvent]:
    edges = {written.MARK: None, written.PHASE_BEGIN: "begin", written.PHASE_END: "end"}
    return [
        MarkEvent(
            int(record["t"]),
            process.name(record["a"]),
            process.value(record),
            edges[int(record["kind"])],  # type: ignore[arg-type]
            _source(int(record["flags"])),
        )
        for record in process.of(*edges)
    ]


def _source(flags: int) -> Source:
    if flags & written.FROM_FIT:
        return "fit"
    return "pattern" if flags & written.FROM_PATTERN else "marks"


def steps_table(processes: list[ProcessEvents]) -> pa.Table:
    """Batches and steps of all processes, in time."""
    tables = []
    for process in processes:
        records = process.of(written.BATCH, written.STEP)
        is_step = records["kind"] == written.STEP
        tables.append(
            pa.table(
                {
                    "t_ns": pa.array(records["t"]),
                    "pid": pa.array(np.full(len(records), process.pid, np.int32)),
                    "rank": pa.array([process.rank] * len(records), pa.int32()),
                    "kind": pa.array(np.where(is_step, "step", "batch"), pa.string()),
                    "wait_s": pa.array(records["a"] / 1e9, mask=is_step),
                    "samples": pa.array(records["b"], mask=is_step | (records["b"] < 0)),
                    "steps": pa.array(records["a"], mask=~is_step),
                }
            )
        )
    if not tables:
        return pa.table(
            {
                "t_ns": pa.array([], pa.int64()),
                "pid": pa.array([], pa.int32()),
                "rank": pa.array([], pa.int32()),
                "kind": pa.array([], pa.string()),
                "wait_s": pa.array([], pa.float64()),
                "samples": pa.array([], pa.int64()),
                "steps": pa.array([], pa.int64()),
            }
        )
    return pa.concat_tables(tables).sort_by("t_ns")


def series_of(samples: pa.Table) -> dict[tuple[str, str], Series]:
    """(metric, entity) to its values, for rows that are not of a single process."""
    found: dict[tuple[str, str], Series] = {}
    if not samples.num_rows:
        return found
    whole = samples.filter(pc.is_null(samples.column("pid")))
    metrics = [name for name in whole.column_names if name in BY_KEY]  # a newer version has more
    for entity in pc.unique(whole.column("entity")).to_pylist():
        rows = whole.filter(pc.equal(whole.column("entity"), entity))
        t = rows.column("t_ns").to_numpy()
        window = rows.column("window_s").fill_null(0.0).to_numpy()
        for metric in metrics:
            column = rows.column(metric)
            if column.null_count == len(column):
                continue
            there = column.is_valid().to_numpy()
            values = column.filter(column.is_valid()).to_numpy()
            found[metric, entity] = Series(t[there], window[there], values)
    return found
