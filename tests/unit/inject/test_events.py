"""Event records: written with the standard library, read with numpy."""

from __future__ import annotations

import ast
import os
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from stepscope.inject import events
from stepscope.marks import mark, phase
from stepscope.runs.events import parse, read_file, read_folder

texts = st.text(max_size=80)
numbers = st.integers(-(2**63), 2**63 - 1)
marks = st.tuples(
    texts, st.none() | numbers | st.floats(allow_nan=False) | texts.filter(lambda text: text != "")
)


@given(st.lists(marks, max_size=20))
def test_marks_round_trip(tmp_path_factory: Any, given_marks: Any) -> None:
    folder = tmp_path_factory.mktemp("events")
    writer = events.Writer(str(folder))
    for name, value in given_marks:
        writer.mark(events.MARK, name, value)
    marks_read = [
        (process.name(record["a"]), process.value(int(record["flags"]), int(record["b"])))
        for process in read_folder(folder)
        for record in process.of(events.MARK)
    ]
    assert marks_read == given_marks


@given(st.binary(max_size=400))
def test_arbitrary_bytes_can_be_read(tmp_path_factory: Any, data: bytes) -> None:
    path = tmp_path_factory.mktemp("events") / "77.bin"
    path.write_bytes(data)
    for process in read_file(path):
        assert process.pid == 77


def test_truncated_or_zero_filled_tail_is_dropped(tmp_path: Path) -> None:
    writer = events.Writer(str(tmp_path))
    for _ in range(3):
        writer.write(events.STEP, a=1)
    data = (tmp_path / f"{os.getpid()}.bin").read_bytes()
    for tail in (data[:31], bytes(64), b"\xff" * 32):
        assert len(parse(data + tail)) == 4, "START and three steps"


def test_forked_child_has_its_own_file(tmp_path: Path) -> None:
    events.report_to(str(tmp_path))
    events.current.write(events.STEP, a=1)
    child = os.fork()
    if child == 0:
        events.current.write(events.STEP, a=1)
        os._exit(0)
    os.waitpid(child, 0)
    events.current.write(events.STEP, a=1)
    events.report_to(None)
    steps = {p.pid: len(p.of(events.STEP)) for p in read_folder(tmp_path)}
    assert steps == {os.getpid(): 2, child: 1}


def test_reused_pid_makes_two_processes(tmp_path: Path) -> None:
    for _ in range(2):
        events.Writer(str(tmp_path)).write(events.STEP, a=1)
    assert [len(p.of(events.STEP)) for p in read_folder(tmp_path)] == [1, 1]


def test_marks_do_nothing_if_not_monitored() -> None:
    events.report_to(None)
    mark("epoch", 1)
    with phase("eval"):
        pass
    assert events.current is None


def test_missing_folder_does_not_raise(tmp_path: Path) -> None:
    writer = events.Writer(str(tmp_path / "gone"))
    writer.mark(events.MARK, "epoch", 1)
    assert not (tmp_path / "gone").exists()


def test_unwritable_records_are_buffered_and_then_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "_MAX_BUFFERED", 4 * events.SIZE)
    folder = tmp_path / "later"
    writer = events.Writer(str(folder))
    for _ in range(9):
        writer.write(events.STEP, a=1)
    folder.mkdir()
    writer.write(events.STEP, a=1)
    (process,) = read_folder(folder)
    assert process.dropped == 5
    assert len(process.of(events.STEP)) == 5


@pytest.mark.parametrize("variable", ["RANK", "SLURM_PROCID"])
def test_rank_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    writer = events.Writer(str(tmp_path))
    writer.write(events.STEP, a=1)
    monkeypatch.setenv(variable, "3")
    writer.update_rank()
    (process,) = read_folder(tmp_path)
    assert process.rank == 3


def test_gpu_uuid_is_written_once_and_peaks_when_they_change(tmp_path: Path) -> None:
    writer = events.Writer(str(tmp_path))
    for held in (5, 6, 7):
        writer.gpu_memory(1, "GPU-abc", (held, 10), (7, 10), (0, 0))
    writer.gpu_memory(1, "GPU-abc", (8, 12), (8, 12), (1, 0))
    writer.release_gpus()
    (process,) = read_folder(tmp_path)
    (gpu,) = process.of(events.GPU)
    assert (gpu["number"], process.name(gpu["a"])) == (1, "GPU-abc")
    assert process.of(events.GPU_MEMORY)["a"].tolist() == [5, 6, 7, 8, 0]
    assert process.of(events.GPU_PEAK)["a"].tolist() == [7, 8]
    assert process.of(events.GPU_RETRIES)["a"].tolist() == [0, 1]


def test_injected_code_runs_on_old_versions_of_python() -> None:
    files = list(Path(events.__file__).parent.rglob("*.py"))
    assert len(files) > 8
    for file in files:
        ast.parse(file.read_text(encoding="utf-8"), feature_version=(3, 7))
