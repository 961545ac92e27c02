"""Reads a run into memory, once: `load(run)` gives what every analysis and report takes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import pyarrow as pa

from stepscope.analysis.run.data import RunData
from stepscope.analysis.run.series import MEMORY_FROM, Series, with_memory
from stepscope.metrics import BY_KEY, SCOPES, Scope, of_scope
from stepscope.records import Gpu
from stepscope.records.facts import RunFacts
from stepscope.runs.reader import Run
from stepscope.runs.samples import series_of
from stepscope.runs.streams import KEYS, read_stored
from stepscope.runs.timelines import allocator_series, batch_timing, timeline_of, trainer_of


def load(run: Run, metrics: Collection[str] | None = None) -> RunData:
    """All that is recorded of a run; with `metrics`, only these of the samples.

    Of a run of a day the samples are nearly all there is to read: who needs only some metrics
    says so. Those that they are derived from are read too.
    """
    timelines = [timeline_of(process) for process in run.processes]
    trainers = (trainer_of(*each) for each in zip(run.processes, timelines, strict=True))
    # The records of the loader workers are let go before the samples are read.
    preparation, collation = batch_timing(run.paths.events, run.processes)
    samples = _Samples(run, metrics)
    series = samples.read()
    return RunData(
        series=series,
        timelines=timelines,
        begin_ns=run.begin_ns,
        end_ns=samples.end_ns(),
        facts=run.facts,
        gpus=gpus_of(run.facts, gpu_entities(series)),
        ending=run.ending,
        trainers=tuple(trainer for trainer in trainers if trainer.did_anything),
        preparation=preparation,
        collation=collation,
        events_dropped=sum(process.dropped for process in run.processes),
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
        self._last_ns: dict[Scope, int] = {}

    def read(self) -> dict[tuple[str, str], Series]:
        """Every metric of every entity (single processes left out), the derived ones included."""
        found: dict[tuple[str, str], Series] = {}
        for scope, columns in self._columns.items():
            if columns != []:
                found |= series_of(self._segments(scope, columns))
        known = [gpu.uuid for gpu in gpus_of(self._run.facts, gpu_entities(found))]
        found |= allocator_series(self._run.processes, known)
        return with_memory(found) if self._with_memory else found

    def end_ns(self) -> int:
        """When the command ended, or the last that is known of it."""
        stored = self._run.facts.ending.monotonic_ns
        if stored is not None:
            return stored
        ends = [int(p.records["t"][-1]) for p in self._run.processes if len(p.records)]
        for scope in SCOPES:
            if self._columns[scope] == []:  # nothing of it was read
                segments = reversed(self._run.paths.segments(scope))
                times = (read_stored(path, ["t_ns"]) for path in segments)
                self._remember_end(scope, next((t for t in times if t.num_rows), None))
        return max([self._run.begin_ns, *ends, *self._last_ns.values()])

    def _segments(self, scope: Scope, columns: list[str] | None) -> Iterator[pa.Table]:
        """The samples of a scope, segment by segment; each is let go when it was taken in."""
        wanted = None if columns is None else [*KEYS, *columns]
        read = partial(read_stored, columns=wanted, coded=True)
        for segment in _one_ahead(read, self._run.paths.segments(scope)):
            self._remember_end(scope, segment)
            yield segment
            del segment

    def _remember_end(self, scope: Scope, segment: pa.Table | None) -> None:
        if segment is not None and segment.num_rows:
            self._last_ns[scope] = int(segment.column("t_ns")[-1].as_py())


def _one_ahead(read: Callable[[Path], pa.Table], paths: Iterable[Path]) -> Iterator[pa.Table]:
    """What is read of each path. The next one is read while one is looked at: most of the time goes
    to unpacking it, outside of the interpreter."""
    ahead: deque[Future[pa.Table]] = deque()
    with ThreadPoolExecutor(1) as background:
        for path in paths:
            ahead.append(background.submit(read, path))
            if len(ahead) > 1:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()


def gpus_of(facts: RunFacts, seen: Iterable[str]) -> tuple[Gpu, ...]:
    """The GPUs that run.json tells of, then those that were only `seen`, by their UUIDs."""
    known = []
    for place, gpu in enumerate(facts.environment.gpus):
        label = gpu.label or f"GPU {place if gpu.index is None else gpu.index}"
        known.append(replace(gpu, uuid=gpu.uuid or label, label=label))
    others = sorted(set(seen) - {gpu.uuid for gpu in known})
    # Enough of a UUID to tell GPUs apart: GPU-74f7346c.
    return (*known, *(Gpu(uuid, "-".join(uuid.split("-")[:2])) for uuid in others))


def gpu_entities(series: Iterable[tuple[str, str]]) -> set[str]:
    return {entity for metric, entity in series if BY_KEY[metric].scope == "gpu"}
