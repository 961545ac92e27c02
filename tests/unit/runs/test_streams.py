"""Streams are readable wherever they are truncated."""

from __future__ import annotations

import random
import subprocess
import sys
from itertools import chain
from pathlib import Path

import hypothesis.strategies as st
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from pyarrow import parquet

from stepscope.errors import RunFolderError
from stepscope.metrics import SCOPES, of_scope
from stepscope.records import Entity
from stepscope.runs import streams
from stepscope.runs.paths import RunPaths
from stepscope.runs.segments import ExpansionLimit, read_segment, read_stored
from stepscope.runs.streams import StreamWriter, pack

METRICS = [metric.key for metric in of_scope("process")]
values = st.dictionaries(
    st.sampled_from(METRICS),
    st.none() | st.floats(allow_nan=False, allow_infinity=False),
    max_size=5,
)
rows = st.tuples(
    st.none() | st.floats(0, 10), st.text(max_size=8), st.none() | st.integers(1, 2**22), values
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
@given(batches=st.lists(st.lists(rows, min_size=1, max_size=12), min_size=1, max_size=4))
def test_round_trip(tmp_path_factory, batches) -> None:  # type: ignore[no-untyped-def]
    paths = RunPaths(tmp_path_factory.mktemp("run"))
    writer = StreamWriter(paths, "process")
    expected, time = [], 0
    for batch in batches:
        for window, name, pid, given_values in batch:
            time += 1
            writer.append(time, window, Entity(name, pid), given_values)
            expected.append((time, window, name, pid, *(given_values.get(k) for k in METRICS)))
        writer.flush()
    for path in (paths.live_stream("process"), pack(writer.finish())):
        table = read_segment(path).table if path.exists() else None
        if table is not None:
            assert [tuple(row.values()) for row in table.to_pylist()] == expected


def two_batches(folder: Path) -> tuple[Path, int]:
    """Write a stream of two batches, and return the offset of the second."""
    paths = RunPaths(folder)
    writer = StreamWriter(paths, "host")
    sizes = []
    for begin in (1, 11):
        for time in range(begin, begin + 10):
            writer.append(time, 0.1, Entity("host"), {"host_cpu": float(time)})
        writer.flush()
        sizes.append(paths.live_stream("host").stat().st_size)
    writer.close()
    return paths.live_stream("host"), sizes[0]


def test_truncated_stream_is_read_to_the_last_complete_batch(tmp_path: Path) -> None:
    path, first = two_batches(tmp_path)
    data = path.read_bytes()
    edges = (
        range(max(0, edge - 64), min(edge + 64, len(data)) + 1) for edge in (0, first, len(data))
    )
    for cut in sorted({*range(0, len(data), 5), *chain(*edges)}):
        path.write_bytes(data[:cut])
        count = read_segment(path).table.num_rows
        assert count == (20 if cut == len(data) else 10 if cut >= first else 0), cut


@pytest.mark.parametrize("columns", [["t_ns"], ["host_cpu", "entity"]])
def test_truncated_stream_with_some_columns(tmp_path: Path, columns: list[str]) -> None:
    path, first = two_batches(tmp_path)
    data = path.read_bytes()
    for cut in (*range(0, len(data), 97), first - 1, first, len(data) - 1, len(data)):
        path.write_bytes(data[:cut])
        everything = read_segment(path).table
        some = read_segment(path, columns).table
        assert some.num_rows == everything.num_rows, cut
        if everything.num_rows:
            assert some == everything.select(columns)


@pytest.mark.parametrize("columns", [None, ["t_ns"], ["host_cpu"]])
@pytest.mark.parametrize("zeros", [1, 8, 100, 4096, 100_000])
def test_tail_of_zeros_is_dropped(tmp_path: Path, zeros: int, columns: list[str] | None) -> None:
    path, _ = two_batches(tmp_path)
    path.write_bytes(path.read_bytes() + bytes(zeros))
    table = read_segment(path, columns).table
    assert table.column(0).to_pylist() == list(range(1, 21))


@pytest.mark.parametrize("columns", [None, ["t_ns"], ["host_cpu"]])
def test_batch_of_zeros_is_dropped(tmp_path: Path, columns: list[str] | None) -> None:
    """A power failure after the length of the file was written, but not its end."""
    path, first = two_batches(tmp_path)
    data = path.read_bytes()
    body = first + 8 + int.from_bytes(data[first + 4 : first + 8], "little")
    path.write_bytes(data[:body] + bytes(len(data) - body))
    assert read_segment(path, columns).table.num_rows == 10


def test_stream_without_its_schema(tmp_path: Path) -> None:
    """pyarrow crashes if another message is read as a schema."""
    path, first = two_batches(tmp_path)
    path.write_bytes(path.read_bytes()[first:])
    assert read_segment(path).table.column("t_ns").to_pylist() == list(range(11, 21))


def test_columns_have_the_requested_order(tmp_path: Path) -> None:
    path, _ = two_batches(tmp_path)
    columns = ["host_cpu", "t_ns", "not_there", "entity"]
    stream = read_segment(path, columns).table
    packed = read_segment(pack(path), columns).table
    coded = read_segment(path.with_suffix(".parquet"), columns, coded=True).table
    assert stream.column_names == packed.column_names == ["host_cpu", "t_ns", "entity"]
    assert stream == packed
    assert coded.to_pylist() == packed.to_pylist()
    assert len(coded.column("entity").chunk(0).dictionary) == 1


def test_streams_of_many_batches(tmp_path: Path) -> None:
    """Batches are combined in blocks."""
    paths = RunPaths(tmp_path)
    writer = StreamWriter(paths, "host")
    for time in range(1, 151):
        writer.append(time, None, Entity("host"), {"host_cpu": float(time)})
        writer.flush()
    table = read_segment(paths.live_stream("host"), ["t_ns", "host_cpu"]).table
    assert table.column("t_ns").to_pylist() == table.column("host_cpu").to_pylist()
    assert table.column("t_ns").num_chunks == 1 and table.num_rows == 150


def test_rolled_segments_read_in_order(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    writer = StreamWriter(paths, "host")
    for time in range(1, 31):
        writer.append(time, None, Entity("host"), {"host_cpu": 1.0})
        if time % 10 == 0:
            writer.flush()
            closed = writer.roll(at_least=1)
            assert closed is not None
            if time == 10:
                pack(closed)
    names = [path.name for path in paths.segments("host")]
    assert names == ["host.0000.parquet", "host.0001.arrows", "host.0002.arrows", "host.arrows"]
    *rolled, live = [read_segment(path).table for path in paths.segments("host")]
    assert live.num_rows == 0
    assert [t for table in rolled for t in table.column("t_ns").to_pylist()] == list(range(1, 31))


def test_failed_write_leaves_complete_batches_and_keeps_the_rows(tmp_path: Path) -> None:
    """/dev/full rejects every write, like a full disk."""
    import os

    paths = RunPaths(tmp_path)
    writer = StreamWriter(paths, "host")
    writer.append(1, None, Entity("host"), {"host_cpu": 1.0})
    writer.flush()
    real, writer._fd = writer._fd, os.open("/dev/full", os.O_WRONLY)
    writer.append(2, None, Entity("host"), {"host_cpu": 2.0})
    with pytest.raises(OSError):
        writer.flush()
    writer._fd = real
    assert read_segment(paths.live_stream("host")).table.num_rows == 1
    writer.append(3, None, Entity("host"), {"host_cpu": 3.0})
    writer.flush()
    assert read_segment(paths.live_stream("host")).table.column("t_ns").to_pylist() == [1, 2, 3]


def test_kept_batches_are_encoded_once_and_the_oldest_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk may be full for hours, and samples are taken every tenth of a second."""
    encoded: list[int] = []
    batch_of = StreamWriter._batch

    def counted(writer: StreamWriter) -> pa.RecordBatch:
        encoded.append(len(writer._rows))
        return batch_of(writer)

    monkeypatch.setattr(StreamWriter, "_batch", counted)
    monkeypatch.setattr(streams, "MAX_ROWS_KEPT", 4)
    paths = RunPaths(tmp_path)
    writer = StreamWriter(paths, "host")
    with monkeypatch.context() as full:
        full.setattr("os.write", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left")))
        for t in range(1, 11, 2):
            writer.append(t, None, Entity("host"), {"host_cpu": 1.0})
            writer.append(t + 1, None, Entity("host"), {"host_cpu": None})
            with pytest.raises(OSError):
                writer.flush()
    writer.flush()
    assert encoded == [2] * 5
    assert writer.rows_dropped == 6
    stored = read_segment(paths.live_stream("host")).table
    assert stored.column("t_ns").to_pylist() == [7, 8, 9, 10]
    assert stored.column("host_cpu").to_pylist() == [1.0, None, 1.0, None]


def test_full_disk_at_a_new_segment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = RunPaths(tmp_path)
    writer = StreamWriter(paths, "host")
    writer.append(1, None, Entity("host"), {"host_cpu": 1.0})
    writer.flush()
    with monkeypatch.context() as full:
        full.setattr("os.write", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left")))
        with pytest.raises(OSError):
            writer.roll(at_least=1)
    writer.append(2, None, Entity("host"), {"host_cpu": 2.0})
    writer.flush()
    assert [path.name for path in paths.segments("host")] == ["host.arrows"]
    assert read_segment(paths.live_stream("host")).table.column("t_ns").to_pylist() == [1, 2]


def test_writing_does_not_import_pandas(tmp_path: Path) -> None:
    """It would block the monitor for half a second."""
    program = f"""
import sys
from pathlib import Path
from stepscope.records import Entity
from stepscope.runs.paths import RunPaths
from stepscope.runs.streams import StreamWriter
for scope in {SCOPES!r}:
    writer = StreamWriter(RunPaths(Path({str(tmp_path)!r})), scope)
    writer.append(1, None, Entity("host", 3), {{"cpu": 1.0, "host_cpu": None}})
    writer.flush()
print("pandas" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"entity": ["tree"], "window_s": [1.0], "pid": [None]}, "column t_ns is missing"),
        ({"t_ns": ["now"], "window_s": [1.0], "entity": ["tree"], "pid": [1]}, "column t_ns has"),
    ],
)
def test_table_with_wrong_columns_is_an_error(
    tmp_path: Path, columns: dict[str, list[object]], words: str
) -> None:
    parquet.write_table(pa.table(columns), tmp_path / "host.0000.parquet")
    with pytest.raises(RunFolderError, match=words):
        read_stored(tmp_path / "host.0000.parquet")


def test_idle_processes_are_within_the_expansion_limit(tmp_path: Path) -> None:
    """Their rows are almost equal: the run of a week would be refused with a lower limit."""
    paths, chance = RunPaths(tmp_path), random.Random(1)
    writer = StreamWriter(paths, "process")
    for second in range(1, 101):
        t_ns = second * 10**9 + chance.randrange(10**6)
        usage = {"cpu": chance.random(), "rss": 1e9 + chance.randrange(10**6)}
        writer.append(t_ns, 1.0, Entity("tree"), usage)
        for pid in range(1000):
            writer.append(t_ns, 1.0, Entity("process", pid), {"cpu": 0.0, "rss": 1e6, "threads": 1})
        writer.flush()
    packed = pack(writer.finish())
    limit = ExpansionLimit()
    for _ in range(100):
        limit.keep(read_segment(packed, limit=limit).table)
