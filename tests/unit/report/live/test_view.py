"""The live view: what a frame says, and that it fits every screen."""

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

GPU_VALUES: dict[str, float | None] = {
    "gpu_utilization": 0.98,
    "gpu_sm": 0.951,
    "gpu_tensor": 0.92,
    "gpu_dram": 0.16,
    "gpu_memory": 71.2e9,
    "gpu_memory_tree": 70.1e9,
    "gpu_power": 690.0,
    "gpu_temperature": 54.0,
    "gpu_pcie_received": 58e9,
    "gpu_pcie_sent": 3e9,
    "gpu_slowed_power": 0.4,
}


def gpu_facts(count: int) -> list[dict[str, Any]]:
    return [
        {
            "index": index,
            "uuid": f"GPU-{index}",
            "model": "NVIDIA H200",
            "memory_bytes": 150e9,
            "power_limit_watts": 700.0,
            "label": f"GPU {index}",
        }
        for index in range(count)
    ]


def with_gpus(folder: Path, count: int, **values: float | None) -> RunPaths:
    """A run of half a minute on GPUs that do the same all the time."""
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
    """A run that is in its second epoch, whose machine went down."""
    return frame_of_run(write_cut_off_run(folder / "cut"))


@pytest.fixture(scope="module")
def frames(folder: Path, frame: Frame) -> list[Frame]:
    """Runs of all sorts."""
    name = "a name\nof 日本語 " * 9
    return [
        frame,
        replace(frame, name=name, command=name, hint=name),
        frame_of_run(write_empty_run(folder / "empty")),
        frame_of_run(with_gpus(folder / "gpu", 1)),
        frame_of_run(with_gpus(folder / "gpus", 9)),
    ]


def test_what_is_told_of_a_run(frame: Frame) -> None:
    lines = lines_of(frame, 80, 24)
    assert lines[0].startswith("resnet18-cifar  lost  0:00:")
    assert lines[0].endswith("watching takes 0.6 % of a core")
    assert lines[1] == "python train.py --batch-size 128 --workers 2"
    assert lines[3].startswith("epoch 2  training  ━")
    assert lines[3].endswith(" of 50 batches")
    assert "samples/s   " in lines[4] and " waiting for data   " in lines[4]
    assert line_with(lines, "CPU").endswith("of 4 cores")
    assert len([line for line in lines if line.startswith("  worker")]) == 2
    assert line_with(lines, "cgroup").endswith("of 4.00 GB")
    assert line_with(lines, "disk").endswith("written")
    assert lines[-1] == "q quits   last 60 s"


def test_values_agree_with_the_report(frame: Frame, folder: Path) -> None:
    """The last seconds of an epoch that goes on are like all of it."""
    told, summary = frame_dict(frame), open_run(folder / "cut").summary()
    epoch = summary.epochs[-1]
    batches = epoch.samples // 128 if epoch.samples else None
    expected = {"index": epoch.index, "phase": "training", "batches": batches, "of": 50}
    assert told["epoch"] == expected
    assert told["steps"] == summary.steps
    assert told["samples_per_second"] == pytest.approx(epoch.samples_per_second, rel=0.1)
    assert told["data_wait_share"] == pytest.approx(epoch.data_wait_share, rel=0.1)
    assert told["watcher_cores"] == pytest.approx(summary.watcher["cores"])
    now = {(each["metric"], each["entity"]): each["now"] for each in told["readings"]}
    assert now["cpu", "tree"] == pytest.approx(now["cpu", "main"] + now["cpu", "worker"])


def test_missing_is_a_dash(folder: Path) -> None:
    frame = frame_of_run(write_empty_run(folder / "nothing"))
    text = plain_text(frame, 80)
    assert "epoch –  hook: DataLoader, optimizer" in text
    assert "– samples/s   – waiting for data   – steps   – steps/s" in text
    assert line_with(text.splitlines(), "CPU").split() == ["CPU", "–", "of", "4", "cores"]
    assert "watching takes – of a core" in text
    told = frame_dict(frame)
    assert all(each["now"] is None for each in told["readings"])
    assert told["epoch"] is None and told["steps"] is None


def test_a_role_that_is_gone_has_no_value(folder: Path) -> None:
    """Workers end with the last epoch: their past is drawn, and nothing is said of now."""
    lines = lines_of(frame_of_run(write_run(folder / "ended")), 80, 24)
    cpu = next(line for line in lines if line.startswith("  worker"))
    assert cpu.split()[-1] == "–"
    assert "▄" in cpu


def test_gpus(folder: Path) -> None:
    lines = lines_of(frame_of_run(with_gpus(folder / "one", 1)), 80, 24)
    at = lines.index("GPU 0  NVIDIA H200  54 °C, slowed by power 40 %")
    endings = {
        "SM activity": "95 %",
        "tensor": "92 %",
        "DRAM": "16 %",
        "utilisation": "98 %",
        "memory": "71.2 GB of 150 GB, run 70.1 GB",
        "power": "690 W of 700 W",
    }
    for label, ending in endings.items():
        assert line_with(lines[at:], label).endswith(ending)
    pcie = line_with(lines[at:], "PCIe")
    assert "58.0 GB/s to" in pcie and pcie.endswith("3.00 GB/s from")
    assert line_with(lines[at:], "SM activity").count("█") >= 14


def test_a_gpu_that_tells_little(folder: Path) -> None:
    silent = dict.fromkeys(GPU_VALUES) | {"gpu_utilization": 0.5}
    frame = frame_of_run(with_gpus(folder / "silent", 1, **silent))
    text = plain_text(frame, 80)
    gpu = text[text.index("GPU 0  NVIDIA H200\n") :].splitlines()
    assert line_with(gpu, "utilisation").split()[-2:] == ["50", "%"]
    for label in ("SM activity", "tensor", "DRAM", "memory", "power", "PCIe"):
        assert not [line for line in gpu if line.startswith(label)], "what it never told"


def test_the_allocator_is_told_once_it_speaks(folder: Path) -> None:
    paths = with_gpus(folder / "allocator", 1)
    uuid = "GPU-0"
    data = [events.RECORD.pack(BEGIN_NS, events.START, 0, 1, -1, 0), events.name_records(uuid)]
    for kind, number, a, b in (
        (events.GPU, 0, events.name_id(uuid), 0),
        (events.GPU_MEMORY, 0, 61_200_000_000, 66_000_000_000),
        (events.GPU_PEAK, 0, 64_000_000_000, 66_000_000_000),
        (events.GPU_RETRIES, 0, 3, 1),
    ):
        data.append(events.RECORD.pack(BEGIN_NS + SECOND, kind, 0, number, a, b))
    (paths.events / "9.bin").write_bytes(b"".join(data))
    frame = frame_of_run(paths)
    line = line_with(lines_of(frame, 100, 40), "allocator")
    said = "61.2 GB in tensors, peak 64.0 GB, 66.0 GB reserved, 3 retries, 1 failed"
    assert line.removeprefix("allocator").strip() == said
    readings = {each["metric"]: each["now"] for each in frame_dict(frame)["readings"]}
    assert readings["gpu_reserved"] == 66e9


def test_many_gpus_get_a_line_each(frames: list[Frame]) -> None:
    lines = lines_of(frames[-1], 80, 24)
    briefs = [line for line in lines if line.startswith("GPU ")]
    assert len(briefs) == 9
    assert briefs[3].startswith("GPU 3       ")
    assert "SM  95 %  71.2 GB  690 W  54 °C  slowed by power" in briefs[3]
    full = lines_of(frames[-1], 160, 80)
    assert len([line for line in full if "GPU 0  NVIDIA H200" in line]) == 1


def test_what_does_not_fit_is_counted(frames: list[Frame]) -> None:
    lines = lines_of(frames[-1], 80, 14)
    shown = [line for line in lines if line.startswith("GPU ")]
    assert lines[-1].endswith(f"not shown: 2 roles, {9 - len(shown)} GPUs")
    assert 0 < len(shown) < 9
    assert lines_of(frames[0], 40, 10)[-1] == "q quits   last 68 s   not shown: 2 roles"


def test_wide_screens_show_more_of_the_past(frame: Frame) -> None:
    narrow, wide = lines_of(frame, 80, 24), lines_of(frame, 170, 24)
    assert narrow[-1] == "q quits   last 60 s"
    assert wide[-1] == "q quits   last 120 s"


@pytest.mark.parametrize(("width", "height"), [(80, 24), (40, 10), (200, 50), (160, 24), (50, 12)])
def test_frames_fit(frames: list[Frame], width: int, height: int) -> None:
    for frame in frames:
        lines = screen_lines(frame, width, height)
        assert len(lines) == height
        assert max(line.cell_len for line in lines) <= width
        assert "q quits" in lines[-1].plain


@settings(max_examples=60)
@given(width=st.integers(1, 260), height=st.integers(1, 90), which=st.integers(0, 4))
def test_every_size_is_kept(frames: list[Frame], width: int, height: int, which: int) -> None:
    lines = screen_lines(frames[which], width, height)
    assert len(lines) <= height
    assert max(line.cell_len for line in lines) <= width
    assert not any(c in line.plain for line in lines for c in "\n\x1b")


def test_it_is_drawn_on_the_whole_screen(frames: list[Frame]) -> None:
    for frame in frames:
        out = io.StringIO()
        console = Console(file=out, width=60, height=15, force_terminal=True, color_system=None)
        with Live(LiveScreen(frame), console=console, screen=True, auto_refresh=False):
            pass
        drawn = out.getvalue().split("\x1b[H")[-1].split("\x1b[?")[0]
        assert len(drawn.split("\n")) == 15


def test_nothing_can_steer_the_terminal(frame: Frame) -> None:
    evil = replace(frame, name="a\x1b[2Jb[red]", command="x\n\x1b[31m", hint="\x1b")
    text = plain_text(evil, 80) + ending_text(evil, "a\x1bb")
    assert "\x1b" not in text
    assert text.startswith("a�[2Jb[red]  lost")


def test_how_it_ended(frame: Frame) -> None:
    first, second = ending_text(frame, "stepscope report runs/x").splitlines()
    assert first.startswith("resnet18-cifar has ended: lost, the watcher was killed")
    assert first.endswith(" s)")
    assert second == "Report    stepscope report runs/x"


def test_plain_text_for_terminals_that_know_ascii_only(frames: list[Frame]) -> None:
    for frame in (frames[0], frames[3]):
        text = plain_text(frame, 80, ascii_only=True)
        assert text.isascii()
        assert max(map(len, text.splitlines())) <= 80
    assert "epoch 2  training  ##" in plain_text(frames[0], 80, ascii_only=True)


def test_the_frame_for_programs(frames: list[Frame]) -> None:
    for frame in frames:
        told = json.loads(json.dumps(frame_dict(frame), allow_nan=False))
        assert told["outcome"] in ("lost", "ok")
        assert {each["unit"] for each in told["readings"]} >= {"cores", "bytes", "bytes/s"}


def rate(*values: float, window: float = 0.5) -> Series:
    """Values one after the other, the first window beginning at 0."""
    t = (np.arange(1, len(values) + 1) * window * SECOND).astype(np.int64)
    return Series(t, np.full(len(values), window), np.array(values))


def test_columns_are_means_over_time() -> None:
    assert columns(rate(1, 3, 5, 5, 0, 0), 3 * SECOND, 3, 1.0).tolist() == [2, 5, 0]
    assert columns(rate(1, 3, 5, 5, 0, 0), 3 * SECOND, 1, 3.0).tolist() == [pytest.approx(14 / 6)]


def test_a_sample_counts_in_each_column_that_its_window_touches() -> None:
    series = Series(np.array([2 * SECOND]), np.array([1.5]), np.array([4.0]))
    assert columns(series, 2 * SECOND, 2, 1.0).tolist() == [4.0, 4.0]


def test_columns_of_which_nothing_is_known_are_empty() -> None:
    before, after = rate(1, 1), rate(1, 1)
    gap = Series(
        np.concatenate([before.t, after.t + 3 * SECOND]),
        np.concatenate([before.window, after.window]),
        np.concatenate([before.value, after.value]),
    )
    drawn = columns(gap, 4 * SECOND, 5, 1.0)
    assert np.isnan(drawn).tolist() == [True, False, True, True, False]


def test_the_past_keeps_its_shape_as_time_goes_on() -> None:
    series = rate(*np.random.default_rng(1).random(40))
    shapes = [columns(series, int(end * SECOND), 12, 1.0) for end in (20.1, 20.5, 20.9)]
    for shape in shapes[1:]:
        assert shape[:-1].tolist() == shapes[0][:-1].tolist()
    moved = columns(series, int(21.3 * SECOND), 12, 1.0)
    assert moved[:-2].tolist() == shapes[0][1:-1].tolist()


def test_the_last_value_holds_for_a_moment() -> None:
    drawn = columns(rate(1, 1), int(2.5 * SECOND), 4, 1.0)
    assert drawn.tolist()[1:] == [1, 1, 1]
    assert np.isnan(columns(rate(1, 1), 9 * SECOND, 4, 1.0)).all()


def test_a_long_history_is_looked_at_now_and_then(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long it takes to look at all events, it takes a small share of the time."""
    paths = write_run(folder / "long", Plan(ending=RUNNING))
    looks = []

    def slow(*_: Any) -> Any:
        import time

        looks.append(1)
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
    assert len(looks) == 1


def test_events_are_looked_at_only_when_there_are_new_ones(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = write_run(folder / "quiet", Plan())
    looks: list[int] = []
    monkeypatch.setattr("stepscope.report.live.follow._SHARE", 1e9)
    monkeypatch.setattr("stepscope.report.live.follow.read_folder", lambda _: looks.append(1) or [])
    follower = Follower(paths.folder)
    for _ in range(5):
        follower.frame()
    assert looks == [1]
