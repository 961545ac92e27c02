"""Open a run folder: of a running command, of a finished one, or of one that was cut off."""

from __future__ import annotations

import os
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepscope.errors import RunFolderError
from stepscope.metrics import Scope
from stepscope.records import ExitStatus
from stepscope.runs.facts import event_span, exit_status_of, parse_facts, read_run_json
from stepscope.runs.files import entries_in, refuse_link
from stepscope.runs.paths import DEFAULT_FOLDER, RunPaths

if TYPE_CHECKING:
    import pyarrow as pa

    from stepscope.runs.events import ProcessEvents


def open_run(path: str | Path) -> Run:
    """Open a run by its folder, by any file in it, or by a folder of runs (the newest run)."""
    folder = find_run(path)
    return Run(folder, read_run_json(folder))


def find_run(path: str | Path) -> Path:
    """Return the run folder for a run folder, a file in it, or a folder of runs (the newest)."""
    folder = Path(path)
    if folder.is_file():
        folder = folder.parent
        if not any(os.path.exists(each / "run.json") for each in (folder, folder.parent)):
            raise RunFolderError(
                f"{path} is not in a run folder", "Pass the folder that `stepscope run` printed"
            )
    if folder.name in ("derived", "events", "trial"):
        folder = folder.parent
    if not os.path.lexists(folder / "run.json") and runs_in(folder):
        return latest_run(folder)
    return folder


def runs_in(parent: Path) -> list[Path]:
    """Return the run folders in a folder. Links to others are left out: somebody else may have
    made them."""
    folders = [entry.path for entry in entries_in(parent) if entry.is_dir(follow_symlinks=False)]
    return [Path(folder) for folder in folders if os.path.exists(f"{folder}/run.json")]


def latest_run(parent: str | Path = DEFAULT_FOLDER) -> Path:
    """Return the folder of the newest run in a folder of runs. Raises RunFolderError if it has no
    runs."""
    folders = runs_in(Path(parent))
    if not folders:
        raise RunFolderError(
            f"There are no runs in {parent}", "Create one with `stepscope run -- python train.py`"
        )
    return max(folders, key=lambda folder: os.path.getmtime(folder / "run.json"))


class Run:
    """The current state of a run folder: its facts, and the recorded data as tables.

    Analyses use `runs.load.load(run)` instead, which reads everything once.
    """

    def __init__(self, folder: Path, run_json: dict[str, Any]) -> None:
        self.path = folder
        self.paths = RunPaths(folder)
        for inner in (self.paths.events, self.paths.trial, self.paths.derived):
            refuse_link(inner)
        self.json = run_json
        """The contents of `run.json`."""
        self.facts = parse_facts(run_json, folder)
        """The validated contents of `run.json`."""

    @property
    def name(self) -> str:
        return self.facts.name or self.path.name

    @property
    def command(self) -> tuple[str, ...]:
        return self.facts.command

    @cached_property
    def exit_status(self) -> ExitStatus:
        return exit_status_of(self.facts, self.path)

    @property
    def begin_ns(self) -> int:
        return self.facts.clock.monotonic_ns

    @cached_property
    def processes(self) -> list[ProcessEvents]:
        """The events of each monitored process."""
        from stepscope.runs.events import read_folder

        return read_folder(self.paths.events, event_span(self.facts))

    def samples(self, scope: Scope = "process", columns: list[str] | None = None) -> pa.Table:
        """Return the samples of a scope as an Arrow table (`.to_pandas()` for pandas)."""
        import pyarrow as pa

        from stepscope.runs.segments import ExpansionLimit, read_stored
        from stepscope.runs.streams import schema_of

        limit = ExpansionLimit()
        segments = (read_stored(path, columns, limit).table for path in self.paths.segments(scope))
        tables = [table for table in segments if table.num_columns]
        if not tables:
            empty = schema_of(scope).empty_table()
            return empty if columns is None else empty.select(columns)
        return pa.concat_tables(tables, promote_options="default")

    def marks(self) -> pa.Table:
        """Return marks and the edges of phases: t_ns, pid, rank, name, value, edge, source."""
        import pyarrow as pa

        from stepscope.runs.timelines import timeline_of

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
            for process in self.processes
            for mark in timeline_of(process).marks
        ]
        keys = [("t_ns", pa.int64()), ("pid", pa.int32()), ("rank", pa.int32())]
        texts = [(name, pa.string()) for name in ("name", "value", "edge", "source")]
        return pa.Table.from_pylist(rows, schema=pa.schema([*keys, *texts])).sort_by("t_ns")

    def steps(self) -> pa.Table:
        """Return batches and optimizer steps: t_ns, pid, rank, kind, wait_s, samples, steps."""
        import numpy as np
        import pyarrow as pa

        from stepscope.inject.events import BATCH, STEP

        schema = pa.schema(
            [
                ("t_ns", pa.int64()),
                ("pid", pa.int32()),
                ("rank", pa.int32()),
                ("kind", pa.string()),
                ("wait_s", pa.float64()),
                ("samples", pa.int64()),
                ("steps", pa.int64()),
            ]
        )
        tables = [schema.empty_table()]
        for process in self.processes:
            records = process.of(BATCH, STEP)
            is_step = records["kind"] == STEP
            columns = [
                pa.array(records["t"]),
                pa.array(np.full(len(records), process.pid, np.int32)),
                pa.array([process.rank] * len(records), pa.int32()),
                pa.array(np.where(is_step, "step", "batch"), pa.string()),
                pa.array(records["a"] / 1e9, mask=is_step),
                pa.array(records["b"], mask=is_step | (records["b"] < 0)),
                pa.array(records["a"], mask=~is_step),
            ]
            tables.append(pa.table(columns, schema=schema))
        return pa.concat_tables(tables).sort_by("t_ns")
