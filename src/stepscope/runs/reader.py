"""Reads a run folder: one that is being written, one that ended, one that was cut off."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepscope.errors import RunFolderError
from stepscope.metrics import BY_KEY, SCOPES, Scope
from stepscope.records import Ending, Gpu, Summary
from stepscope.runs import runfile
from stepscope.runs.paths import DEFAULT_FOLDER, RunPaths

if TYPE_CHECKING:
    import pyarrow as pa

    from stepscope.analysis.passes import Timeline
    from stepscope.analysis.series import Series
    from stepscope.analysis.summary import Recorded
    from stepscope.runs.events import ProcessEvents


def open_run(path: str | Path) -> Run:
    """Open a run by its folder, or by any file in it; of a folder of runs, the newest."""
    folder = Path(path)
    if folder.is_file():
        folder = folder.parent
    if folder.name in ("derived", "events"):
        folder = folder.parent
    if not (folder / "run.json").exists() and next(folder.glob("*/run.json"), None):
        folder = latest_run(folder)
    return Run(folder, runfile.read_facts(folder))


def latest_run(parent: str | Path = DEFAULT_FOLDER) -> Path:
    """The newest run below a folder of runs."""
    folders = sorted(p.parent for p in Path(parent).glob("*/run.json"))
    if not folders:
        raise RunFolderError(
            f"There are no runs in {parent}", "Make one with: stepscope run -- python train.py"
        )
    return max(folders, key=lambda p: (p / "run.json").stat().st_mtime)


class Run:
    """A run as it is in its folder now. Everything is read when it is asked for."""

    def __init__(self, folder: Path, facts: dict[str, Any]) -> None:
        self.path = folder
        self.paths = RunPaths(folder)
        self.facts = facts

    @property
    def name(self) -> str:
        return str(self.facts.get("name", self.path.name))

    @property
    def command(self) -> list[str]:
        return [str(word) for word in self.facts.get("command") or []]

    @cached_property
    def ending(self) -> Ending:
        return runfile.ending_of(self.facts, self.path)

    @property
    def begin_ns(self) -> int:
        return int(self.facts["clock"]["monotonic_ns"])

    @cached_property
    def end_ns(self) -> int:
        """When the command ended, or the last that is known of it."""
        told = self.facts["ending"].get("monotonic_ns")
        if told is not None:
            return int(told)
        last = [int(p.records["t"][-1]) for p in self.processes if len(p.records)]
        for scope in SCOPES:
            times = self.samples(scope, ["t_ns"])
            if times.num_rows:
                last.append(times.column("t_ns")[-1].as_py())
        return max(last, default=self.begin_ns)

    def samples(self, scope: Scope = "process", columns: list[str] | None = None) -> pa.Table:
        """The samples of a scope as an Arrow table (`.to_pandas()` for pandas)."""
        import pyarrow as pa

        from stepscope.runs.streams import read_segment, schema_of

        tables = []
        for path in self.paths.segments(scope):
            try:
                tables.append(read_segment(path, columns))
            except FileNotFoundError:  # rolled to Parquet while we looked
                tables.append(read_segment(path.with_suffix(".parquet"), columns))
            except (OSError, pa.ArrowException) as error:
                raise RunFolderError(
                    f"{path} cannot be read: {error}", "The folder is damaged: copy it again"
                ) from None
        tables = [table for table in tables if table.num_columns]
        if not tables:
            schema = schema_of(scope)
            empty = schema.empty_table()
            return empty if columns is None else empty.select(columns)
        return pa.concat_tables(tables, promote_options="default")

    @cached_property
    def processes(self) -> list[ProcessEvents]:
        """What each watched process reported of itself."""
        from stepscope.runs.events import read_folder

        return read_folder(self.paths.events)

    def marks(self) -> pa.Table:
        """Marks and the edges of phases: t_ns, pid, rank, name, value, edge, source."""
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
        fields = [("t_ns", pa.int64()), ("pid", pa.int32()), ("rank", pa.int32())]
        fields += [(key, pa.string()) for key in ("name", "value", "edge", "source")]
        return pa.Table.from_pylist(rows, schema=pa.schema(fields)).sort_by("t_ns")

    def steps(self) -> pa.Table:
        """Batches and optimizer steps: t_ns, pid, rank, kind, wait_s, samples, steps."""
        from stepscope.runs.timelines import steps_table

        return steps_table(self.processes)

    def timelines(self) -> list[Timeline]:
        from stepscope.runs.timelines import timeline_of

        return [timeline_of(process) for process in self.processes]

    def gpus(self) -> tuple[Gpu, ...]:
        """The GPUs that are known of, used or not."""
        from stepscope.runs.timelines import gpus_of

        sampled = self.samples("gpu", ["entity"]).column("entity").unique().to_pylist()
        told = (uuid for _, uuid in self._allocators(sampled))
        return gpus_of(self.facts, {*sampled, *told})

    def series(self) -> dict[tuple[str, str], Series]:
        """Every metric of every entity (single processes left out), the derived ones included."""
        from stepscope.analysis.summary import with_memory
        from stepscope.runs.timelines import series_of

        found: dict[tuple[str, str], Series] = {}
        for scope in SCOPES:
            found.update(series_of(self.samples(scope)))
        found.update(self._allocators(_gpu_entities(found)))
        return with_memory(found)

    def recorded(self) -> Recorded:
        """All that the analysis needs, in memory."""
        from stepscope.analysis.summary import Recorded
        from stepscope.runs.timelines import gpus_of

        allowed = (self.facts.get("environment") or {}).get("cpu", {}).get("allowed")
        series = self.series()
        gpus = gpus_of(self.facts, _gpu_entities(series))
        return Recorded(series, self.timelines(), self.begin_ns, self.end_ns, allowed, gpus)

    def summary(self) -> Summary:
        """What the run consumed so far."""
        from stepscope.analysis.summary import summarise

        return summarise(self.recorded())

    def _allocators(self, sampled: Iterable[str]) -> dict[tuple[str, str], Series]:
        """What PyTorch's allocators told, by the names that the facts and samples have for GPUs."""
        from stepscope.runs.timelines import allocator_series, gpus_of

        known = gpus_of(self.facts, sampled)
        return allocator_series(self.processes, [gpu.uuid for gpu in known])


def _gpu_entities(series: Iterable[tuple[str, str]]) -> set[str]:
    return {entity for metric, entity in series if BY_KEY[metric].scope == "gpu"}
