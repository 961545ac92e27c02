"""Series do not depend on how samples are stored, or on which other metrics are read."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from pyarrow import parquet

from stepscope.metrics import SCOPES, Scope, of_scope
from stepscope.records import Entity
from stepscope.runs.files import write_json
from stepscope.runs.load import load
from stepscope.runs.paths import RunPaths
from stepscope.runs.reader import Run, open_run
from stepscope.runs.samples import series_of
from stepscope.runs.streams import StreamWriter, pack
from synthetic import BEGIN_NS, RUNNING, Plan, facts_of, write_cut_off_run, write_run

Rows = list[tuple[int, float | None, Entity, dict[str, float | None]]]
Points = dict[tuple[str, str], list[tuple[int, float, float]]]

METRICS = [metric.key for metric in of_scope("process")][:5]

values = st.dictionaries(st.sampled_from(METRICS), st.none() | st.floats(-1e12, 1e12))
row = st.tuples(
    st.integers(0, 2),
    st.none() | st.floats(0, 10),
    st.sampled_from(["tree", "main", "worker", "", "è"]),
    st.none() | st.integers(1, 2**22),
    values,
)
segment = st.tuples(st.booleans(), st.lists(st.lists(row, min_size=1, max_size=6), max_size=3))
"""Whether it is packed, and its batches."""


def write_segments(folder: Path, segments: list[tuple[bool, list[list[Any]]]]) -> Rows:
    """Write a running run with these samples. The last segment is the live stream."""
    paths = RunPaths(folder)
    paths.events.mkdir(parents=True)
    write_json(paths.run_json, facts_of(Plan(exit_status=RUNNING)))
    writer = StreamWriter(paths, "process")
    written: Rows = []
    time = BEGIN_NS
    for packed, batches in segments:
        for batch in batches:
            for later, window, name, pid, given_values in batch:
                time += later
                written.append((time, window, Entity(name, pid), given_values))
                writer.append(*written[-1])
            writer.flush()
        closed = writer.roll(at_least=1)
        if closed and packed:
            pack(closed)
    writer.close()
    return written


def expected(rows: Rows) -> Points:
    """The straightforward implementation, row by row."""
    series: Points = {}
    for t, window, entity, given_values in rows:
        for metric, value in given_values.items():
            if entity.pid is None and value is not None:
                series.setdefault((metric, entity.name), []).append((t, window or 0.0, value))
    return series


def points(series: dict[tuple[str, str], Any]) -> Points:
    return {
        key: list(zip(s.t.tolist(), s.window.tolist(), s.value.tolist(), strict=True))
        for key, s in series.items()
    }


def stored(run: Run) -> Points:
    return {key: series for key, series in points(load(run).series).items() if key[0] != "memory"}


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(segments=st.lists(segment, min_size=1, max_size=4), wanted=st.sets(st.sampled_from(METRICS)))
def test_series_round_trip(tmp_path_factory, segments, wanted) -> None:  # type: ignore[no-untyped-def]
    folder = tmp_path_factory.mktemp("run")
    rows = write_segments(folder, segments)
    everything = expected(rows)
    run = open_run(folder)
    assert stored(run) == everything
    assert points(load(open_run(folder), wanted).series) == {
        key: series for key, series in everything.items() if key[0] in wanted
    }
    assert load(run, set()).end_ns == load(run).end_ns == (rows[-1][0] if rows else BEGIN_NS)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)
@given(batches=st.lists(st.lists(row, min_size=1, max_size=8), min_size=1, max_size=3))
def test_row_groups_and_slices(tmp_path_factory, batches) -> None:  # type: ignore[no-untyped-def]
    """Parquet files may have several row groups, and a table may be a slice of another."""
    folder = tmp_path_factory.mktemp("run")
    rows = write_segments(folder, [(True, batches)])
    table = open_run(folder).samples()
    small = folder / "small.parquet"
    parquet.write_table(table, small, row_group_size=3)
    coded = parquet.ParquetFile(small, read_dictionary=["entity"]).read()
    halves = [table.slice(0, 5), table.slice(5)]
    for segments in ([coded], halves):
        assert points(series_of(segments)) == expected(rows)


def test_order_of_entities_and_metrics(tmp_path: Path) -> None:
    first = [
        (1, 0.1, "worker", 7, {"cpu": 1.0}),
        (1, 0.1, "main", None, {"threads": 1.0}),
        (1, 0.1, "worker", None, {"threads": 1.0}),
    ]
    second = [(1, 0.1, "worker", None, {"rss": 1.0}), (1, 0.1, "main", None, {"cpu": 1.0})]
    write_segments(tmp_path / "run", [(True, [first]), (False, [second])])
    assert list(stored(open_run(tmp_path / "run"))) == [
        ("cpu", "main"),
        ("threads", "main"),
        ("rss", "worker"),
        ("threads", "worker"),
    ]


@pytest.mark.parametrize("write", [write_run, write_cut_off_run])
def test_only_requested_metrics_are_read(tmp_path: Path, write: Callable[..., RunPaths]) -> None:
    plan = Plan(seconds=20, gpus=1, idle_gpus=1)
    folder = write(tmp_path / "run", plan).folder
    everything, wanted = load(open_run(folder)), {"cpu", "host_cpu", "gpu_power", "memory"}
    partial = load(open_run(folder), wanted)
    allocator = {
        metric for metric, _ in everything.series if metric.startswith(("gpu_al", "gpu_res"))
    }
    assert {metric for metric, _ in partial.series} == {
        *wanted,
        "rss",
        "processes",
        "pss",
        *allocator,
    }
    assert points(dict(partial.series)) == {
        key: series
        for key, series in points(dict(everything.series)).items()
        if key in partial.series
    }
    assert (partial.begin_ns, partial.end_ns, partial.gpus) == (
        everything.begin_ns,
        everything.end_ns,
        everything.gpus,
    )
    assert load(open_run(folder), set()).end_ns == everything.end_ns, "without reading the samples"


def test_metrics_that_are_read_together_share_their_times(tmp_path: Path) -> None:
    series = load(open_run(write_run(tmp_path / "run", Plan(seconds=10)).folder)).series
    assert series["cpu", "tree"].t is series["rss", "tree"].t
    assert series["cpu", "tree"].window is series["read", "tree"].window
    assert len(series["pss", "tree"]) < len(series["rss", "tree"])


@pytest.mark.parametrize("kind", ["streams", "packed", "nothing"])
def test_no_samples_give_no_series(tmp_path: Path, kind: str) -> None:
    paths = RunPaths(tmp_path / "run")
    paths.events.mkdir(parents=True)
    write_json(paths.run_json, facts_of(Plan(exit_status=RUNNING)))
    for scope in SCOPES if kind != "nothing" else ():
        writer = StreamWriter(paths, scope)
        if kind == "packed":
            pack(writer.finish())
        else:
            writer.close()
    run = open_run(paths.folder)
    data = load(run)
    assert data.series == load(run, {"cpu", "gpu_power"}).series == {}
    assert data.end_ns == run.begin_ns
    assert data.gpus == ()


def test_columns_of_a_newer_version_are_ignored(tmp_path: Path) -> None:
    write_segments(tmp_path / "run", [(True, [[(1, 0.1, "tree", None, {"cpu": 2.0})]])])
    path = tmp_path / "run" / "process.0000.parquet"
    table = parquet.read_table(path)
    parquet.write_table(table.append_column("warp_factor", pa.array([9.5])), path)
    assert list(stored(open_run(tmp_path / "run"))) == [("cpu", "tree")]


def test_reading_does_not_import_pandas(tmp_path: Path) -> None:
    """Importing it takes longer than reading the samples of a day."""
    folder = write_cut_off_run(tmp_path / "run", Plan(gpus=1)).folder
    program = f"""
import sys
from stepscope.runs.load import load
from stepscope.runs.reader import open_run
print(len(load(open_run({str(folder)!r})).series) > 20, "pandas" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "True False\n", done.stderr


@pytest.mark.parametrize("scope", SCOPES)
def test_rows_without_metrics(tmp_path: Path, scope: Scope) -> None:
    """A scope without requested metrics is not read; a scope without values is empty."""
    writer = StreamWriter(RunPaths(tmp_path), scope)
    writer.append(1, None, Entity("tree"), {})
    writer.flush()
    writer.close()
    write_json(RunPaths(tmp_path).run_json, facts_of(Plan(exit_status=RUNNING)))
    run = open_run(tmp_path)
    assert load(run).series == {}
    assert load(run, set()).series == {}
    assert run.samples(scope, ["t_ns"]).column("t_ns").to_pylist() == [1]
