"""Following a run returns each row and record that reading the whole run returns, once."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings

from stepscope.inject import events
from stepscope.records import Entity, Outcome
from stepscope.runs.events import parse
from stepscope.runs.facts import identity, identity_of_self, read_run_json
from stepscope.runs.files import write_json
from stepscope.runs.paths import RunPaths
from stepscope.runs.segments import read_segment
from stepscope.runs.streams import StreamWriter, pack
from stepscope.runs.tail import EventsTail, Recent, RunTail, StreamTail
from synthetic import RUNNING, Plan, write_run

SECOND = 10**9
LONG = 10**6

many_examples = settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40
)


def append(writer: StreamWriter, *seconds: int) -> None:
    """Append a batch with a row at each of these seconds."""
    for second in seconds:
        writer.append(second * SECOND, 1.0, Entity("host"), {"host_cpu": float(second)})
    writer.flush()


def seconds_of(batches: list[pa.RecordBatch]) -> list[int]:
    return [t // SECOND for batch in batches for t in batch.column("t_ns").to_pylist()]


def rows_of(batches: list[pa.RecordBatch]) -> list[dict[str, Any]]:
    return [row for batch in batches for row in batch.to_pylist()]


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    return RunPaths(tmp_path)


@pytest.fixture(scope="module")
def stream(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A stream of several batches, some with many rows."""
    paths = RunPaths(tmp_path_factory.mktemp("complete"))
    writer = StreamWriter(paths, "host")
    for begin, count in ((1, 1), (2, 30), (40, 3), (50, 1), (60, 12)):
        append(writer, *range(begin, begin + count))
    writer.close()
    return paths.live_stream("host")


@many_examples
@given(cuts=st.lists(st.floats(0, 1), max_size=12))
def test_any_split_of_the_stream_gives_the_same_rows(
    stream: Path, tmp_path_factory: pytest.TempPathFactory, cuts: list[float]
) -> None:
    paths = RunPaths(tmp_path_factory.mktemp("split"))
    data = stream.read_bytes()
    edges = [0, *sorted(int(cut * len(data)) for cut in cuts), len(data)]
    tail = StreamTail(paths, "host", LONG)
    batches = []
    for begin, end in zip(edges, edges[1:], strict=False):
        with paths.live_stream("host").open("ab") as file:
            file.write(data[begin:end])
        batches += tail.poll()
    assert rows_of(batches) == read_segment(stream).table.to_pylist()


def test_only_the_end_of_a_long_stream_is_decoded(paths: RunPaths) -> None:
    writer = StreamWriter(paths, "host")
    for second in range(1, 501):
        append(writer, second)
    tail = StreamTail(paths, "host", 10)
    assert seconds_of(tail.poll()) == list(range(489, 501))
    append(writer, 501)
    assert seconds_of(tail.poll()) == [501]


def test_missing_stream(paths: RunPaths) -> None:
    tail = StreamTail(paths, "host", 10)
    assert tail.poll() == []
    append(StreamWriter(paths, "host"), 1)
    assert seconds_of(tail.poll()) == [1]
    assert tail.poll() == []


@pytest.mark.parametrize("packed", [False, True])
def test_stream_is_rolled_while_it_is_followed(paths: RunPaths, packed: bool) -> None:
    writer, tail = StreamWriter(paths, "host"), StreamTail(paths, "host", LONG)
    append(writer, 1)
    assert seconds_of(tail.poll()) == [1]
    append(writer, 2)  # not read before the file is renamed
    closed = writer.roll(at_least=1)
    assert closed is not None
    if packed:
        pack(closed)
    append(writer, 3)
    assert seconds_of(tail.poll()) == [2, 3]
    append(writer, 4)
    assert seconds_of(tail.poll()) == [4]


def test_stream_is_packed_at_the_end(paths: RunPaths) -> None:
    writer, tail = StreamWriter(paths, "host"), StreamTail(paths, "host", LONG)
    append(writer, 1)
    tail.poll()
    append(writer, 2)
    pack(writer.finish())
    assert seconds_of(tail.poll()) == [2]
    assert tail.poll() == []


def test_first_poll_reads_only_the_segments_it_needs(paths: RunPaths) -> None:
    writer = StreamWriter(paths, "host")
    for begin in (1, 101, 201):
        append(writer, *range(begin, begin + 100))
        closed = writer.roll(at_least=1)
        assert closed is not None
        if begin == 101:
            pack(closed)
    append(writer, 301, 302)
    paths.closed_stream("host", 0).write_bytes(b"never read")
    assert seconds_of(StreamTail(paths, "host", 150).poll()) == list(range(151, 303))


def test_finished_run(paths: RunPaths) -> None:
    writer = StreamWriter(paths, "host")
    append(writer, *range(1, 100))
    pack(writer.finish())
    assert seconds_of(StreamTail(paths, "host", 10).poll()) == list(range(88, 100))


def test_batch_that_is_truncated_and_written_again(paths: RunPaths) -> None:
    writer, tail = StreamWriter(paths, "host"), StreamTail(paths, "host", LONG)
    live = paths.live_stream("host")
    append(writer, 1)
    tail.poll()
    complete = live.stat().st_size
    append(writer, 2)
    second = live.read_bytes()[complete:]
    os.truncate(live, complete + 100)
    assert tail.poll() == []
    os.truncate(live, complete)
    assert tail.poll() == []
    with live.open("ab") as file:
        file.write(second)
    assert seconds_of(tail.poll()) == [2]


def test_replaced_file_returns_only_new_rows(paths: RunPaths) -> None:
    writer, tail = StreamWriter(paths, "host"), StreamTail(paths, "host", LONG)
    append(writer, 1)
    append(writer, 2)
    assert seconds_of(tail.poll()) == [1, 2]
    append(writer, 3)
    live = paths.live_stream("host")
    copy = live.with_name("copy")
    copy.write_bytes(live.read_bytes())
    copy.replace(live)
    assert seconds_of(tail.poll())[-1:] == [3]
    assert tail.poll() == []


@pytest.mark.parametrize("zeros", [1, 8, 100, 4096, 100_000])
def test_tail_of_zeros_is_dropped(paths: RunPaths, stream: Path, zeros: int) -> None:
    data = stream.read_bytes()
    paths.live_stream("host").write_bytes(data + bytes(zeros))
    assert rows_of(StreamTail(paths, "host", LONG).poll()) == read_segment(stream).table.to_pylist()
    paths.live_stream("host").write_bytes(data[:-200] + bytes(200))
    assert max(seconds_of(StreamTail(paths, "host", LONG).poll())) < 72


def test_recent_keeps_the_last_seconds_of_each_metric(paths: RunPaths) -> None:
    writer, tail, recent = StreamWriter(paths, "host"), StreamTail(paths, "host", 10), Recent(10)
    writer.append(SECOND, None, Entity("shm"), {"shm_used": 7.0})
    for second in range(1, 41):
        append(writer, second)
        for batch in tail.poll():
            recent.add(batch)
        if second == 20:  # reading in between is optional
            assert recent.series("host_cpu", "host").value.tolist() == list(range(10, 21))
    assert recent.series("host_cpu", "host").value.tolist() == list(range(30, 41))
    assert recent.series("host_cpu", "host").window.tolist() == [1.0] * 11
    assert recent.series("shm_used", "shm").value.tolist() == [7.0]
    assert len(recent.series("host_cpu", "missing")) == 0
    assert set(recent.all_series()) == {("host_cpu", "host"), ("shm_used", "shm")}


def test_rows_of_single_processes_are_dropped(paths: RunPaths) -> None:
    writer, recent = StreamWriter(paths, "process"), Recent(10)
    writer.append(SECOND, 0.1, Entity("main"), {"cpu": 2.0, "rss": None})
    writer.append(SECOND, 0.1, Entity("main", 77), {"cpu": 1.0, "rss": 5.0})
    writer.flush()
    for batch in StreamTail(paths, "process", 10).poll():
        recent.add(batch)
    assert {key: s.value.tolist() for key, s in recent.all_series().items()} == {
        ("cpu", "main"): [2.0]
    }


def test_following_does_not_import_pandas(tmp_path: Path) -> None:
    write_run(tmp_path / "run", Plan(seconds=3))
    program = f"""
import sys
from pathlib import Path
from stepscope.runs.tail import RunTail
tail = RunTail(Path({str(tmp_path / "run")!r}), 10)
tail.poll()
print(len(tail.data().of("cpu")) > 0, "pandas" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "True False\n", done.stderr


def event(second: float, kind: int, **fields: int) -> bytes:
    values = {"flags": 0, "number": 0, "a": 0, "b": 0, **fields}
    record: bytes = events.RECORD.pack(int(second * SECOND), kind, *values.values())
    return record


@many_examples
@given(cuts=st.lists(st.integers(0, 500), max_size=8))
def test_any_split_of_events_gives_the_same_records(
    tmp_path_factory: pytest.TempPathFactory, cuts: list[int]
) -> None:
    folder = tmp_path_factory.mktemp("events")
    batches = b"".join(event(second, events.BATCH, number=1, b=8) for second in range(2, 12))
    data = event(1, events.START) + events.name_records("a long name, several records") + batches
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    tail = EventsTail(folder, LONG)
    for begin, end in zip(edges, edges[1:], strict=False):
        with (folder / "77.bin").open("ab") as file:
            file.write(data[begin:end])
        tail.poll()
    expected = parse(data)
    assert np.array_equal(tail.recent[77], expected[expected["kind"] != events.NAME])
    assert tail.last_ns == 11 * SECOND
    assert not tail.poll()


def test_events_of_the_last_seconds_with_a_minimum(tmp_path: Path) -> None:
    tail = EventsTail(tmp_path, 10)
    path = tmp_path / "5.bin"
    path.write_bytes(b"".join(event(1 + n / 100, events.STEP) for n in range(40_000)))
    assert tail.poll()
    assert len(tail.recent[5]) == 1001
    with path.open("ab") as file:
        file.write(event(1000, events.STEP))
    assert tail.poll()
    assert len(tail.recent[5]) == 256


def test_reused_pid(tmp_path: Path) -> None:
    tail = EventsTail(tmp_path, LONG)
    (tmp_path / "5.bin").write_bytes(event(1, events.START) + event(2, events.STEP))
    (tmp_path / "interpreters.bin").write_bytes(event(1, events.START))
    tail.poll()
    assert len(tail.recent[5]) == 2
    with (tmp_path / "5.bin").open("ab") as file:
        file.write(event(3, events.START))
    tail.poll()
    assert tail.recent[5]["t"].tolist() == [3 * SECOND]
    assert list(tail.recent) == [5]


def test_exit_status_is_read_when_it_is_written(tmp_path: Path) -> None:
    paths = write_run(
        tmp_path / "run", Plan(exit_status=RUNNING, facts={"monitor": identity_of_self()})
    )
    tail = RunTail(paths.folder, LONG)
    tail.poll()
    assert tail.exit_status.outcome is Outcome.RUNNING
    assert abs(tail.now_ns - time.monotonic_ns()) < 5 * SECOND
    facts = read_run_json(paths.folder)
    end_ns = tail.begin_ns + 7 * SECOND
    exit_status = {"outcome": "crashed", "reason": "exit code 1", "monotonic_ns": end_ns}
    write_json(paths.run_json, {**facts, "exit_status": exit_status})
    tail.poll()
    assert (tail.exit_status.outcome, tail.exit_status.reason) == (Outcome.CRASHED, "exit code 1")
    assert tail.now_ns == end_ns
    assert tail.data().of("rss").t[-1] <= end_ns < tail.recent.last_ns


def test_run_is_lost_if_its_monitor_is_killed(tmp_path: Path) -> None:
    monitor = subprocess.Popen(["sleep", "60"])
    plan = Plan(seconds=20, exit_status=RUNNING, facts={"monitor": identity(monitor.pid)})
    tail = RunTail(write_run(tmp_path / "run", plan).folder, 10)
    tail.poll()
    assert tail.exit_status.outcome is Outcome.RUNNING
    monitor.kill()
    monitor.wait()
    tail.poll()
    assert tail.exit_status.outcome is Outcome.LOST
    assert tail.now_ns == tail.begin_ns + 20 * SECOND  # the time of the last data
