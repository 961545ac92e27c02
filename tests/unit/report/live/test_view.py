"""The live view: the content of a frame, and its layout on screens of any size."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from rich.console import Console
from rich.live import Live

from stepscope.analysis.run.series import Series
from stepscope.inject import events
from stepscope.metrics import BY_KEY
from stepscope.opened_run import open_run
from stepscope.records import Entity
from stepscope.report.live.follow import Follower
from stepscope.report.live.screen import LiveScreen, ending_text, plain_text, screen_lines
from stepscope.report.live.traces import columns
from stepscope.report.live.view import Frame, frame_dict
from stepscope.runs.paths import RunPaths
from stepscope.runs.streams import StreamWriter
from synthetic import BEGIN_NS, RUNNING, Plan, write_cut_off_run, write_empty_run, write_run

SECOND = 10**9
GIB = 1 << 30
THROTTLED = BY_KEY["gpu_throttled_power"].label

GPU_VALUES: dict[str, float | None] = {
    "gpu_utilization": 0.98,
    "gpu_sm": 0.951,
    "gpu_tensor": 0.92,
    "gpu_dram": 0.16,
    "gpu_memory": 71.2 * GIB,
    "gpu_memory_run": 70.1 * GIB,
    "gpu_power": 690.0,
    "gpu_temperature": 54.0,
    "gpu_pcie_received": 58 * GIB,
    "gpu_pcie_sent": 3 * GIB,
    "gpu_throttled_power": 0.4,
}


def gpu_facts(count: int) -> list[dict[str, Any]]:
    return [
        {
            "index": index,
            "uuid": f"GPU-{index}",
            "model": "NVIDIA H200",
            "memory_bytes": 150 * GIB,
            "power_limit_watts": 700.0,
            "label": f"GPU {index}",
        }
        for index in range(count)
    ]


def with_gpus(folder: Path, count: int, **values: float | None) -> RunPaths:
    """A run of half a minute with constant GPU metrics."""
    environment = {"cpu": {"allowed": 4.0}, "gpus": gpu_facts(count)}
    plan = Plan(seconds=30, facts={"environment": environment})
    paths = write_run(folder, plan)
    paths.live_stream("gpu").unlink(missing_ok=True)
    writer = StreamWriter(paths, "gpu")
    for second in range(1, 31):
        for index in range(count):
            entity = Entity(f"GPU-{index}")
            writer.append(BEGIN_NS + second * SECOND, 1.0, entity, {**GPU_VALUES, **values})
        writer.flush()
    writer.close()
    return paths


def frame_of_run(paths: RunPaths) -> Frame:
    return Follower(paths.folder).frame(wait=True)


def lines_of(frame: Frame, width: int, height: int) -> list[str]:
    return [line.plain.rstrip() for line in screen_lines(frame, width, height)]


def line_with(lines: list[str], label: str) -> str:
    (found,) = (line for line in lines if line.startswith(label))
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def frame(folder: Path) -> Frame:
    """A run whose machine went down in its third epoch."""
    return frame_of_run(write_cut_off_run(folder / "cut"))


@pytest.fixture(scope="module")
def frames(folder: Path, frame: Frame) -> list[Frame]:
    """Various runs."""
    name = "a name\nof 日本語 " * 9
    return [
        frame,
        replace(frame, name=name, command=name, hint=name),
        frame_of_run(write_empty_run(folder / "empty")),
        frame_of_run(with_gpus(folder / "gpu", 1)),
        frame_of_run(with_gpus(folder / "gpus", 9)),
    ]


def test_content(frame: Frame) -> None:
    lines = lines_of(frame, 80, 24)
    assert lines[0].startswith("resnet18-cifar  lost  0:00:")
    assert lines[0].endswith("Monitoring overhead 0.6% of one core")
    assert lines[1] == "python train.py --batch-size 128 --workers 2"
    assert lines[3].startswith("epoch 3  training  ━")
    assert lines[3].endswith(" of 50 batches")
    assert "samples/s   " in lines[4] and "   data wait " in lines[4]
    assert line_with(lines, "CPU").endswith("of 4 cores")
    assert len([line for line in lines if line.startswith("  worker")]) == 2
    assert line_with(lines, "cgroup").endswith("of 3.73 GiB")
    assert line_with(lines, "disk").endswith("write")
    assert lines[-1] == "q: quit   last 60 s"


def test_values_agree_with_the_report(frame: Frame, folder: Path) -> None:
    """The last seconds of the current epoch are like the whole epoch."""
    shown, summary = frame_dict(frame), open_run(folder / "cut").summary()
    epoch = summary.epochs[-1]
    batches = epoch.samples // 128 if epoch.samples else None
    expected = {"index": epoch.index, "phase": "training", "batches": batches, "total_batches": 50}
    assert shown["epoch"] == expected
    assert shown["steps"] == summary.steps
    assert shown["samples_per_second"] == pytest.approx(epoch.samples_per_second, rel=0.1)
    assert shown["data_wait_share"] == pytest.approx(epoch.data_wait_share, rel=0.1)
    assert shown["monitor_cores"] == pytest.approx(summary.monitor["cores"])
    now = {(each["metric"], each["entity"]): each["now"] for each in shown["readings"]}
    assert now["cpu", "tree"] == pytest.approx(now["cpu", "main"] + now["cpu", "worker"])


def test_missing_values_are_dashes(folder: Path) -> None:
    frame = frame_of_run(write_empty_run(folder / "nothing"))
    text = plain_text(frame, 80)
    assert "epoch –  tracking epochs and steps (PyTorch DataLoader and optimizer)" in text
    assert "– samples/s   data wait –   – steps   – steps/s" in text
    assert line_with(text.splitlines(), "CPU").split() == ["CPU", "–", "of", "4", "cores"]
    assert "Monitoring overhead – of one core" in text
    data = frame_dict(frame)
    assert all(each["now"] is None for each in data["readings"])
    assert data["epoch"] is None and data["steps"] is None


def test_role_without_processes_has_no_value(folder: Path) -> None:
    """Workers exit after the last epoch: only their history is shown."""
    lines = lines_of(frame_of_run(write_run(folder / "ended")), 80, 24)
    cpu = next(line for line in lines if line.startswith("  worker"))
    assert cpu.split()[-1] == "–"
    assert "▄" in cpu


def test_gpus(folder: Path) -> None:
    lines = lines_of(frame_of_run(with_gpus(folder / "one", 1)), 80, 24)
    at = lines.index(f"GPU 0  NVIDIA H200  54 °C, {THROTTLED} 40%")
    endings = {
        "SM activity": "95%",
        "tensor": "92%",
        "DRAM": "16%",
        "utilization": "98%",
        "memory": "71.2 GiB of 150 GiB, run 70.1 GiB",
        "power": "690 W of 700 W",
    }
    for label, ending in endings.items():
        assert line_with(lines[at:], label).endswith(ending)
    pcie = line_with(lines[at:], "PCIe")
    assert "58.0 GiB/s in" in pcie and pcie.endswith("3.00 GiB/s out")
    assert line_with(lines[at:], "SM activity").count("█") >= 14


def test_gpu_with_few_metrics(folder: Path) -> None:
    few = dict.fromkeys(GPU_VALUES) | {"gpu_utilization": 0.5}
    frame = frame_of_run(with_gpus(folder / "few", 1, **few))
    text = plain_text(frame, 80)
    gpu = text[text.index("GPU 0  NVIDIA H200\n") :].splitlines()
    assert line_with(gpu, "utilization").split()[-1] == "50%"
    for label in ("SM activity", "tensor", "DRAM", "memory", "power", "PCIe"):
        assert not [line for line in gpu if line.startswith(label)], "never read"


def test_allocator_is_shown_once_it_reports(folder: Path) -> None:
    paths = with_gpus(folder / "allocator", 1)
    uuid = "GPU-0"
    data = [events.RECORD.pack(BEGIN_NS, events.START, 0, 1, -1, 0), events.name_records(uuid)]
    for kind, number, a, b in (
        (events.GPU, 0, events.name_id(uuid), 0),
        (events.GPU_MEMORY, 0, int(61.2 * GIB), 66 * GIB),
        (events.GPU_PEAK, 0, 64 * GIB, 66 * GIB),
        (events.GPU_RETRIES, 0, 3, 1),
    ):
        data.append(events.RECORD.pack(BEGIN_NS + SECOND, kind, 0, number, a, b))
    (paths.events / "9.bin").write_bytes(b"".join(data))
    frame = frame_of_run(paths)
    line = line_with(lines_of(frame, 100, 40), "allocator")
    expected = "61.2 GiB allocated, peak 64.0 GiB, 66.0 GiB reserved, 3 retries, 1 failed"
    assert line.removeprefix("allocator").strip() == expected
    readings = {each["metric"]: each["now"] for each in frame_dict(frame)["readings"]}
    assert readings["gpu_reserved"] == 66 * GIB


def test_many_gpus_have_one_line_each(frames: list[Frame]) -> None:
    lines = lines_of(frames[-1], 80, 24)
    briefs = [line for line in lines if line.startswith("GPU ")]
    assert len(briefs) == 9
    assert briefs[3].startswith("GPU 3       ")
    assert f"SM   95%  71.2 GiB  690 W  54 °C  {THROTTLED}"[:40] in briefs[3]
    full = lines_of(frames[-1], 160, 80)
    assert len([line for line in full if "GPU 0  NVIDIA H200" in line]) == 1


def test_omitted_rows_are_counted(frames: list[Frame]) -> None:
    lines = lines_of(frames[-1], 80, 14)
    shown = [line for line in lines if line.startswith("GPU ")]
    assert lines[-1].endswith(f"not shown: 2 roles, {9 - len(shown)} GPUs")
    assert 0 < len(shown) < 9
    assert lines_of(frames[0], 40, 10)[-1] == "q: quit   last 64 s   not shown: 2 roles"


def test_wide_screens_show_a_longer_history(frame: Frame) -> None:
    narrow, wide = lines_of(frame, 80, 24), lines_of(frame, 170, 24)
    assert narrow[-1] == "q: quit   last 60 s"
    assert wide[-1] == "q: quit   last 120 s"


@pytest.mark.parametrize(("width", "height"), [(80, 24), (40, 10), (200, 50), (160, 24), (50, 12)])
def test_frames_fit(frames: list[Frame], width: int, height: int) -> None:
    for frame in frames:
        lines = screen_lines(frame, width, height)
        assert len(lines) == height
        assert max(line.cell_len for line in lines) <= width
        assert "q: quit" in lines[-1].plain


@settings(max_examples=60)
@given(width=st.integers(1, 260), height=st.integers(1, 90), which=st.integers(0, 4))
def test_frames_fit_screens_of_any_size(
    frames: list[Frame], width: int, height: int, which: int
) -> None:
    lines = screen_lines(frames[which], width, height)
    assert len(lines) <= height
    assert max(line.cell_len for line in lines) <= width
    assert not any(c in line.plain for line in lines for c in "\n\x1b")


def test_frame_fills_the_screen(frames: list[Frame]) -> None:
    for frame in frames:
        out = io.StringIO()
        console = Console(file=out, width=60, height=15, force_terminal=True, color_system=None)
        with Live(LiveScreen(frame), console=console, screen=True, auto_refresh=False):
            pass
        drawn = out.getvalue().split("\x1b[H")[-1].split("\x1b[?")[0]
        assert len(drawn.split("\n")) == 15


def test_texts_cannot_control_the_terminal(frame: Frame) -> None:
    unsafe = replace(frame, name="a\x1b[2Jb[red]", command="x\n\x1b[31m", hint="\x1b")
    text = plain_text(unsafe, 80) + ending_text(unsafe, "a\x1bb")
    assert "\x1b" not in text
    assert text.startswith("a�[2Jb[red]  lost")


def test_ending(frame: Frame) -> None:
    first, second = ending_text(frame, "stepscope report runs/x").splitlines()
    assert first.startswith("resnet18-cifar ended after ")
    assert first.endswith(f" s: lost, {frame.exit_status.reason}")
    assert second == "Report    stepscope report runs/x"


def test_plain_text_for_ascii_terminals(frames: list[Frame]) -> None:
    for frame in (frames[0], frames[3]):
        text = plain_text(frame, 80, ascii_only=True)
        assert text.isascii()
        assert max(map(len, text.splitlines())) <= 80
    assert "epoch 3  training  ##" in plain_text(frames[0], 80, ascii_only=True)


def test_frame_as_json(frames: list[Frame]) -> None:
    for frame in frames:
        data = json.loads(json.dumps(frame_dict(frame), allow_nan=False))
        assert data["outcome"] in ("lost", "ok")
        assert {each["unit"] for each in data["readings"]} >= {"cores", "bytes", "bytes/s"}


def rate(*values: float, window: float = 0.5) -> Series:
    """Consecutive values, from time 0."""
    t = (np.arange(1, len(values) + 1) * window * SECOND).astype(np.int64)
    return Series(t, np.full(len(values), window), np.array(values))


def test_columns_are_means_over_time() -> None:
    assert columns(rate(1, 3, 5, 5, 0, 0), 3 * SECOND, 3, 1.0).tolist() == [2, 5, 0]
    assert columns(rate(1, 3, 5, 5, 0, 0), 3 * SECOND, 1, 3.0).tolist() == [pytest.approx(14 / 6)]


def test_sample_counts_in_each_column_that_its_window_overlaps() -> None:
    series = Series(np.array([2 * SECOND]), np.array([1.5]), np.array([4.0]))
    assert columns(series, 2 * SECOND, 2, 1.0).tolist() == [4.0, 4.0]


def test_columns_without_data_are_empty() -> None:
    before, after = rate(1, 1), rate(1, 1)
    gap = Series(
        np.concatenate([before.t, after.t + 3 * SECOND]),
        np.concatenate([before.window, after.window]),
        np.concatenate([before.value, after.value]),
    )
    drawn = columns(gap, 4 * SECOND, 5, 1.0)
    assert np.isnan(drawn).tolist() == [True, False, True, True, False]


def test_history_keeps_its_shape_as_time_passes() -> None:
    series = rate(*np.random.default_rng(1).random(40))
    shapes = [columns(series, int(end * SECOND), 12, 1.0) for end in (20.1, 20.5, 20.9)]
    for shape in shapes[1:]:
        assert shape[:-1].tolist() == shapes[0][:-1].tolist()
    moved = columns(series, int(21.3 * SECOND), 12, 1.0)
    assert moved[:-2].tolist() == shapes[0][1:-1].tolist()


def test_last_value_holds_for_a_moment() -> None:
    drawn = columns(rate(1, 1), int(2.5 * SECOND), 4, 1.0)
    assert drawn.tolist()[1:] == [1, 1, 1]
    assert np.isnan(columns(rate(1, 1), 9 * SECOND, 4, 1.0)).all()


def test_reading_all_events_takes_a_small_share_of_the_time(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = write_run(folder / "long", Plan(exit_status=RUNNING))
    readings = []

    def slow(*_: Any) -> Any:
        import time

        readings.append(1)
        end = time.thread_time() + 0.05
        while time.thread_time() < end:
            pass
        return []

    monkeypatch.setattr("stepscope.report.live.follow.read_folder", slow)
    follower = Follower(paths.folder)
    for _ in range(20):
        with (paths.events / "4100.bin").open("ab") as file:
            file.write(events.RECORD.pack(BEGIN_NS, events.STEP, 0, 1, 1, 0))
        follower.frame()
    assert len(readings) == 1


def test_events_are_read_only_if_there_are_new_ones(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = write_run(folder / "quiet", Plan())
    readings: list[int] = []
    monkeypatch.setattr("stepscope.report.live.follow._SHARE", 1e9)
    monkeypatch.setattr(
        "stepscope.report.live.follow.read_folder", lambda *_: readings.append(1) or []
    )
    follower = Follower(paths.folder)
    for _ in range(5):
        follower.frame()
    assert readings == [1]
