"""Reads a run folder: one that is being written, one that ended, one that was cut off."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepscope.errors import RunFolderError
from stepscope.metrics import BY_KEY, SCOPES, Scope, of_scope
from stepscope.records import Ending, Gpu, Summary, Verdict
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
        self._last_ns: dict[Scope, int | None] = {}

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
        last += [t for t in map(self._last_sample_ns, SCOPES) if t is not None]
        return max(last, default=self.begin_ns)

    def _last_sample_ns(self, scope: Scope) -> int | None:
        """By what was read before: going through a stream that was never packed takes time."""
        if scope not in self._last_ns:
            paths = reversed(self.paths.segments(scope))
            found = (_last_ns(self._segment(path, ["t_ns"])) for path in paths)
            self._last_ns[scope] = next((t for t in found if t is not None), None)
        return self._last_ns[scope]

    def samples(self, scope: Scope = "process", columns: list[str] | None = None) -> pa.Table:
        """The samples of a scope as an Arrow table (`.to_pandas()` for pandas)."""
        import pyarrow as pa

        from stepscope.runs.streams import schema_of

        segments = (self._segment(path, columns) for path in self.paths.segments(scope))
        tables = [table for table in segments if table.num_columns]
        if not tables:
            schema = schema_of(scope)
            empty = schema.empty_table()
            return empty if columns is None else empty.select(columns)
        return pa.concat_tables(tables, promote_options="default")

    def _segment(
        self, path: Path, columns: Collection[str] | None, *, coded: bool = False
    ) -> pa.Table:
        import pyarrow as pa

        from stepscope.runs.streams import read_segment

        try:
            return read_segment(path, columns, coded=coded)
        except FileNotFoundError:  # rolled to Parquet while we looked
            return read_segment(path.with_suffix(".parquet"), columns, coded=coded)
        except (OSError, pa.ArrowException) as error:
            raise RunFolderError(
                f"{path} cannot be read: {error}", "The folder is damaged: copy it again"
            ) from None

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
        return self._timelines

    @cached_property
    def _timelines(self) -> list[Timeline]:
        from stepscope.runs.timelines import timeline_of

        return [timeline_of(process) for process in self.processes]

    def gpus(self) -> tuple[Gpu, ...]:
        """The GPUs that are known of, used or not."""
        from stepscope.runs.timelines import gpus_of

        sampled = self.samples("gpu", ["entity"]).column("entity").unique().to_pylist()
        told = (uuid for _, uuid in self._allocators(sampled))
        return gpus_of(self.facts, {*sampled, *told})

    def series(self, metrics: Collection[str] | None = None) -> dict[tuple[str, str], Series]:
        """Every metric of every entity (single processes left out), the derived ones included.

        With `metrics`, only these are read from the samples, and those that they are derived from.
        """
        from stepscope.analysis.summary import MEMORY_FROM, with_memory

        with_derived = metrics is None or "memory" in metrics
        if metrics is not None and with_derived:
            metrics = {*metrics, *MEMORY_FROM}
        found: dict[tuple[str, str], Series] = {}
        for scope in SCOPES:
            found.update(self._sampled(scope, metrics))
        found.update(self._allocators(_gpu_entities(found)))
        return with_memory(found) if with_derived else found

    def _sampled(
        self, scope: Scope, metrics: Collection[str] | None
    ) -> dict[tuple[str, str], Series]:
        from stepscope.runs.samples import series_of
        from stepscope.runs.streams import KEYS

        columns: list[str] | None = None
        if metrics is not None:
            wanted = [metric.key for metric in of_scope(scope) if metric.key in metrics]
            if not wanted:
                return {}
            columns = [*KEYS, *wanted]
        return series_of(self._segments(scope, columns))

    def _segments(self, scope: Scope, columns: list[str] | None) -> Iterator[pa.Table]:
        """The samples of a scope, segment by segment; each is let go when it was taken in."""
        last = None
        read = partial(self._segment, columns=columns, coded=True)
        for segment in _one_ahead(read, self.paths.segments(scope)):
            last = _last_ns(segment) or last
            yield segment
            del segment
        self._last_ns[scope] = last

    def recorded(self, metrics: Collection[str] | None = None) -> Recorded:
        """All that the analysis needs, in memory; with `metrics`, only these of the samples."""
        from stepscope.analysis.summary import Recorded
        from stepscope.runs.timelines import gpus_of

        allowed = (self.facts.get("environment") or {}).get("cpu", {}).get("allowed")
        series = self.series(metrics)
        gpus = gpus_of(self.facts, _gpu_entities(series))
        return Recorded(series, self.timelines(), self.begin_ns, self.end_ns, allowed, gpus)

    def summary(self) -> Summary:
        """What the run consumed so far."""
        from stepscope.analysis.summary import summarise

        return summarise(self.recorded())

    def explained(self) -> Verdict:
        """What holds the run back."""
        from stepscope.analysis.bottleneck import explain
        from stepscope.analysis.causes.knobs import in_options
        from stepscope.runs.observed import observe

        verdict = explain(observe(self))
        return in_options(verdict) if isinstance(self.facts.get("workload"), dict) else verdict

    def _allocators(self, sampled: Iterable[str]) -> dict[tuple[str, str], Series]:
        """What PyTorch's allocators told, by the names that the facts and samples have for GPUs."""
        from stepscope.runs.timelines import allocator_series, gpus_of

        known = gpus_of(self.facts, sampled)
        return allocator_series(self.processes, [gpu.uuid for gpu in known])


def _one_ahead(read: Callable[[Path], pa.Table], paths: Iterable[Path]) -> Iterator[pa.Table]:
    """What is read of each path. The next one is read while one is looked at: most of the time goes
    to unpacking it, outside of the interpreter."""
    from concurrent.futures import Future, ThreadPoolExecutor

    ahead: deque[Future[pa.Table]] = deque()
    with ThreadPoolExecutor(1) as aside:
        for path in paths:
            ahead.append(aside.submit(read, path))
            if len(ahead) > 1:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()


def _last_ns(segment: pa.Table) -> int | None:
    return int(segment.column("t_ns")[-1].as_py()) if segment.num_rows else None


def _gpu_entities(series: Iterable[tuple[str, str]]) -> set[str]:
    return {entity for metric, entity in series if BY_KEY[metric].scope == "gpu"}
