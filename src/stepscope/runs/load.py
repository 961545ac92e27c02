"""Read a run into memory: `load(run)` returns the input of every analysis and report."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import pyarrow as pa

from stepscope.analysis.run.data import RunData, SampleGap
from stepscope.analysis.run.series import MEMORY_FROM, Series, with_memory
from stepscope.metrics import BY_KEY, SCOPES, Scope, of_scope
from stepscope.records import Gpu, Outcome
from stepscope.records.facts import RunFacts
from stepscope.runs.reader import Run
from stepscope.runs.samples import series_of
from stepscope.runs.segments import ExpansionLimit, Gap, Segment, read_stored, unreadable
from stepscope.runs.streams import KEYS
from stepscope.runs.timelines import allocator_series, batch_timing, timeline_of, trainer_of

_LATE_S = 5.0
"""Samples are missing if the last one is that long before the end of a run that ended regularly."""


def load(run: Run, metrics: Collection[str] | None = None) -> RunData:
    """Return the recorded data of a run; with `metrics`, only the samples of these metrics and of
    the metrics that they are derived from. Samples dominate the loading time of a long run.
    """
    timelines = [timeline_of(process) for process in run.processes]
    trainers = (trainer_of(*each) for each in zip(run.processes, timelines, strict=True))
    # The records of loader workers are released before the samples are read.
    preparation, collation = batch_timing(run.paths.events, run.processes)
    samples = _Samples(run, metrics)
    series = samples.read()
    end_ns = samples.end_ns()
    return RunData(
        series=series,
        timelines=timelines,
        begin_ns=run.begin_ns,
        end_ns=end_ns,
        facts=run.facts,
        gpus=gpus_of(run.facts, gpu_entities(series)),
        exit_status=run.exit_status,
        trainers=tuple(trainer for trainer in trainers if trainer.has_events),
        preparation=preparation,
        collation=collation,
        events_dropped=sum(process.dropped for process in run.processes),
        events_outside=sum(process.outside for process in run.processes),
        gaps=samples.gaps(end_ns),
    )


class _Samples:
    """The samples of a run, read scope by scope."""

    def __init__(self, run: Run, metrics: Collection[str] | None) -> None:
        self._run = run
        self._with_memory = metrics is None or "memory" in metrics
        wanted = metrics
        if metrics is not None and self._with_memory:
            wanted = {*metrics, *MEMORY_FROM}
        self._columns: dict[Scope, list[str] | None] = {
            scope: None
            if wanted is None
            else [metric.key for metric in of_scope(scope) if metric.key in wanted]
            for scope in SCOPES
        }
        self._limit = ExpansionLimit()
        self._last_ns: dict[Scope, int] = {}
        self._gaps: list[SampleGap] = []
        self._open_gaps: dict[Scope, int] = {}
        """The start of a gap whose end is in a later segment."""

    def read(self) -> dict[tuple[str, str], Series]:
        """Return all metrics, also derived ones, of all entities except single processes."""
        series: dict[tuple[str, str], Series] = {}
        for scope, columns in self._columns.items():
            if columns != []:
                series |= series_of(self._segments(scope, columns))
        known = [gpu.uuid for gpu in gpus_of(self._run.facts, gpu_entities(series))]
        series |= allocator_series(self._run.processes, known)
        return with_memory(series) if self._with_memory else series

    def end_ns(self) -> int:
        """Return when the command exited, or the time of the last recorded data."""
        stored = self._run.facts.exit_status.monotonic_ns
        if stored is not None:
            return stored
        ends = [int(p.records["t"][-1]) for p in self._run.processes if len(p.records)]
        for scope in SCOPES:
            if self._columns[scope] == []:  # this scope was not read
                segments = reversed(self._run.paths.segments(scope))
                times = (read_stored(path, ["t_ns"], self._limit).table for path in segments)
                self._remember_end(scope, next((t for t in times if t.num_rows), None))
        return max([self._run.begin_ns, *ends, *self._last_ns.values()])

    def gaps(self, end_ns: int) -> tuple[SampleGap, ...]:
        """Return the times without samples because files are damaged or missing."""
        late_s = max(_LATE_S, 3 * (self._run.facts.interval_s or 0.0))
        ended = self._run.exit_status.outcome not in (Outcome.RUNNING, Outcome.LOST)
        missing_end = {
            scope: last_ns
            for scope, last_ns in self._last_ns.items()
            if ended and end_ns - last_ns > late_s * 1e9
        }
        at_end = {**missing_end, **self._open_gaps}.items()
        return (*self._gaps, *(SampleGap(scope, begin_ns, end_ns) for scope, begin_ns in at_end))

    def _segments(self, scope: Scope, columns: list[str] | None) -> Iterator[pa.Table]:
        """Yield the samples of a scope by segment. Each is released before the next is read."""
        wanted = None if columns is None else [*KEYS, *columns]
        read = partial(read_stored, columns=wanted, limit=self._limit, coded=True)
        expected = 0
        for segment in _one_ahead(read, self._run.paths.segments(scope)):
            number = expected if segment.number is None else segment.number
            self._find_gaps(scope, segment, is_missing_before=number > expected)
            expected = number + 1
            self._remember_end(scope, segment.table)
            try:
                self._limit.keep(segment.table)
            except pa.ArrowInvalid as error:
                raise unreadable(self._run.path, error) from None
            yield segment.table
            del segment

    def _find_gaps(self, scope: Scope, segment: Segment, is_missing_before: bool) -> None:
        """Remember the gaps before and in a segment. One at the end of a segment is closed by the
        next segment."""
        last_ns = self._last_ns.get(scope, self._run.begin_ns)
        gaps = list(segment.gaps)
        if (is_missing_before or scope in self._open_gaps) and segment.table.num_rows:
            first_ns = int(segment.table.column("t_ns")[0].as_py())
            gaps = [Gap(self._open_gaps.pop(scope, last_ns), first_ns), *gaps]
        for after_ns, before_ns in gaps:
            begin_ns = last_ns if after_ns is None else after_ns
            if before_ns is None:
                self._open_gaps[scope] = begin_ns
            elif before_ns > begin_ns:
                self._gaps.append(SampleGap(scope, begin_ns, before_ns))

    def _remember_end(self, scope: Scope, segment: pa.Table | None) -> None:
        if segment is not None and segment.num_rows:
            self._last_ns[scope] = int(segment.column("t_ns")[-1].as_py())


def _one_ahead(read: Callable[[Path], Segment], paths: Iterable[Path]) -> Iterator[Segment]:
    """Yield the segment of each path, reading one ahead in a thread. Most of the time is spent on
    decompression, which releases the GIL."""
    ahead: deque[Future[Segment]] = deque()
    with ThreadPoolExecutor(1) as background:
        for path in paths:
            ahead.append(background.submit(read, path))
            if len(ahead) > 1:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()


def gpus_of(facts: RunFacts, seen: Iterable[str]) -> tuple[Gpu, ...]:
    """Return the GPUs of run.json, followed by further UUIDs that were `seen` in the samples."""
    known = []
    for position, gpu in enumerate(facts.environment.gpus):
        label = gpu.label or f"GPU {position if gpu.index is None else gpu.index}"
        known.append(replace(gpu, uuid=gpu.uuid or label, label=label))
    unknown = sorted(set(seen) - {gpu.uuid for gpu in known})
    # The start of a UUID is enough to distinguish GPUs: GPU-74f7346c.
    return (*known, *(Gpu(uuid, "-".join(uuid.split("-")[:2])) for uuid in unknown))


def gpu_entities(series: Iterable[tuple[str, str]]) -> set[str]:
    return {entity for metric, entity in series if BY_KEY[metric].scope == "gpu"}
