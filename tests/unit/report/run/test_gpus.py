"""GPUs in the report of a run: panels, tiles, tables, notes and JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stepscope.analysis.run.data import RunData
from stepscope.analysis.run.series import Series
from stepscope.metrics import BY_KEY, of_scope
from stepscope.records import Gpu
from stepscope.report.kit.document import Panel
from stepscope.report.kit.html import render
from stepscope.report.run.document import page_of
from stepscope.report.run.json import summary_dict
from stepscope.report.run.notes import gpu_notes
from stepscope.report.run.panels import panels_of
from stepscope.report.run.view import RunView, run_view
from stepscope.runs.reader import open_run
from synthetic import Plan, write_cut_off_run, write_run
from synthetic_gpus import COUNTER_OVER_READINGS, gpu_uuid

SECOND = 10**9
PANELS = ["Memory", "Disk and network", "CPU usage"]
GPU_PANELS = ["GPU activity", "GPU memory", "GPU transfers", "GPU power"]


def made(folder: Path, plan: Plan) -> RunView:
    return run_view(open_run(write_run(folder / "run", plan).folder))


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> RunView:
    return made(tmp_path_factory.mktemp("one"), Plan(gpus=1))


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> RunView:
    return made(tmp_path_factory.mktemp("several"), Plan(gpus=2, idle_gpus=1))


@pytest.fixture(scope="module")
def before_hopper(tmp_path_factory: pytest.TempPathFactory) -> RunView:
    return made(tmp_path_factory.mktemp("old"), Plan(gpus=1, gpm=False, allocator=False))


def panel(view: RunView, title: str) -> Panel:
    return next(panel for panel in view.charts.panels if panel.title == title)


def labels(found: Panel, shown: bool = True) -> list[str]:
    return [line.label for line in found.lines if line.shown == shown]


def headline(view: RunView) -> dict[str, tuple[str, str]]:
    return {each.label: (each.value, each.detail) for each in view.headline}


# Panels


def test_panels_of_one_gpu(one: RunView) -> None:
    assert [each.title for each in one.charts.panels] == PANELS + GPU_PANELS
    use = panel(one, "GPU activity")
    assert labels(use) == [
        "SM activity",
        "tensor core activity",
        "memory bandwidth",
        "utilization",
    ]
    assert (use.unit, use.top) == ("%", 100)
    assert max(line.y.max() for line in use.lines) > 90
    memory = panel(one, "GPU memory")
    assert labels(memory) == [
        "GPU 0 memory",
        "reserved by PyTorch",
        "peak allocated",
        "allocated at the end of a step",
        "all processes",
    ]
    assert labels(memory, shown=False) == ["capacity"]
    assert memory.detail == "capacity 140 GiB"
    assert labels(panel(one, "GPU transfers")) == ["PCIe to GPU", "PCIe from GPU"]
    assert panel(one, "GPU transfers").unit == "GiB/s"
    power = panel(one, "GPU power")
    assert (labels(power), power.full_scale) == (["power", "limit"], 700)


def test_panels_of_several_gpus_show_means_and_hide_the_lines_of_each_gpu(several: RunView) -> None:
    use = panel(several, "GPU activity")
    assert use.detail.startswith("mean of 2 GPUs")
    assert labels(use, shown=False) == ["GPU 0 SM activity", "GPU 1 SM activity"]
    mean, first, second = (
        next(line for line in use.lines if line.label == label).y.mean()
        for label in ("SM activity", "GPU 0 SM activity", "GPU 1 SM activity")
    )
    assert mean == pytest.approx((first + second) / 2)
    assert labels(panel(several, "GPU memory")) == ["GPU 0 memory", "GPU 1 memory"]
    assert "NVLink to GPU" in labels(panel(several, "GPU transfers"))
    power = panel(several, "GPU power")
    assert labels(power) == ["sum of 2 GPUs", "limit"]
    assert power.full_scale == 1400


def test_utilization_replaces_missing_performance_counters(before_hopper: RunView) -> None:
    use = panel(before_hopper, "GPU activity")
    assert labels(use) == ["utilization", "memory controller"]
    assert use.lines[0].style == "bold"
    assert headline(before_hopper)["GPU utilization"] == (
        "83%",
        "time with any kernel or copy",
    )
    assert headline(before_hopper)["PCIe to GPU"][1].endswith("from GPU")
    assert "SM" not in [column.title for column in before_hopper.epochs_table.columns]
    assert before_hopper.summary.epochs[0].joules is not None


@pytest.mark.parametrize("plan", [Plan(seconds=5), Plan(seconds=5, idle_gpus=2)])
def test_run_without_a_used_gpu_shows_none(plan: Plan, tmp_path: Path) -> None:
    view = made(tmp_path, plan)
    assert [each.title for each in view.charts.panels] == PANELS
    assert len(view.headline) == 8
    assert not view.gpus.rows
    assert not any(column.gpu for column in view.epochs_table.columns)
    assert not any(row[0].startswith(("GPU", "SM", "PCIe")) for row in view.overview.rows)
    assert "GPU metrics" not in render(page_of(view))
    assert summary_dict(view)["gpu_sm"] is None
    assert summary_dict(view)["joules"] is None


def test_no_epochs_table_without_epochs(tmp_path: Path) -> None:
    view = made(tmp_path, Plan(seconds=5, epochs=0, gpus=1))
    assert ">Epochs</h2>" not in render(page_of(view))
    assert ">GPUs</h2>" in render(page_of(view))
    assert headline(view)["Energy"][1] == "GPUs only"


def test_slow_links_are_in_mebibytes() -> None:
    t = np.arange(1, 21) * SECOND
    slow = Series(t, np.ones(20), np.full(20, 3 << 20))
    series = {("gpu_pcie_sent", "G"): slow, ("gpu_reserved", "G"): slow}
    recorded = RunData(series, [], 0, 20 * SECOND, gpus=(Gpu("G", "GPU 0"),))
    transfers = panels_of(recorded, 20)[-1]
    assert (transfers.title, transfers.unit) == ("GPU transfers", "MiB/s")
    assert transfers.lines[0].y[0] == pytest.approx(3)


def test_cut_off_run_has_gpu_panels(tmp_path: Path) -> None:
    paths = write_cut_off_run(tmp_path / "run", Plan(gpus=2))
    view = run_view(open_run(paths.folder))
    assert [each.title for each in view.charts.panels] == PANELS + GPU_PANELS
    assert view.summary.epochs[-1].joules is not None
    json.dumps(summary_dict(view), allow_nan=False)


# Tiles and tables


def test_gpu_tiles(one: RunView, several: RunView) -> None:
    found = headline(one)
    assert len(found) == 12
    assert found["SM activity"] == ("62%", "utilization 83%")
    assert found["Tensor core activity"] == ("26%", "memory bandwidth 34%")
    assert found["Peak GPU memory"] == ("32.8 GiB", "of 140 GiB")
    assert found["Energy"] == ("27.4 kJ", "1.03 samples/J in epochs")
    assert headline(several)["Peak GPU memory"][1] == "of 140 GiB, highest of 2 GPUs"


def test_epochs_table_has_gpu_columns(one: RunView) -> None:
    rest, gpu_table = one.epochs_table.split_gpus()
    assert [column.title for column in gpu_table.columns] == [
        "Epoch",
        "SM",
        "Tensor cores",
        "Memory bandwidth",
        "Utilization",
        "Peak GPU memory",
        "PCIe to GPU",
        "PCIe from GPU",
        "Energy",
        "Samples/J",
    ]
    assert [column.title for column in rest.columns][:3] == ["Epoch", "Start", "Time"]
    assert gpu_table.rows[1] == (
        "2",
        "82%",
        "34%",
        "45%",
        "97%",
        "30.5 GiB",
        "20.4 GiB",
        "1.42 GiB",
        "6.69 kJ",
        "0.956",
    )


def test_energy_is_from_the_counter(one: RunView) -> None:
    """The synthetic counter reports slightly more than the readings add up to."""
    (row,) = one.gpu_use.used
    assert row.power_watts is not None
    by_readings = row.power_watts * one.summary.seconds
    assert row.figures.joules == pytest.approx(COUNTER_OVER_READINGS * by_readings, rel=0.01)
    assert one.summary.totals["gpu_energy"] == pytest.approx(row.figures.joules)


def test_gpu_table_has_a_row_per_used_gpu(several: RunView) -> None:
    assert [row[:2] for row in several.gpus.rows] == [
        ("GPU 0", "NVIDIA H200"),
        ("GPU 1", "NVIDIA H200"),
    ]
    titles = [column.title for column in several.gpus.columns]
    first = dict(zip(titles, several.gpus.rows[0], strict=True))
    assert first["Peak memory"] == "32.8 GiB of 140 GiB"
    assert first["Uncorrectable ECC errors"] == "0"
    assert first["Thermal throttling"] == "0%"


def test_means_and_sums_exclude_idle_gpus(one: RunView, tmp_path: Path) -> None:
    with_idle = made(tmp_path, Plan(gpus=1, idle_gpus=3))
    use, expected = with_idle.gpu_use.overall, one.gpu_use.overall
    assert use.joules == pytest.approx(expected.joules, rel=0.01)
    assert use.gpu_sm == pytest.approx(expected.gpu_sm, rel=0.01)
    excluded = "were not used by the run and are excluded from its means and sums"
    assert f"GPU 1 and 2 other GPUs {excluded}" in with_idle.notes


def test_overview_of_several_gpus_has_means_and_sums(one: RunView, several: RunView) -> None:
    def title(metric: str) -> str:
        label = BY_KEY[metric].label
        return label[0].upper() + label[1:]

    assert ("SM activity", "62%", "86%", "91%") in one.overview.rows
    first = [row[0] for row in several.overview.rows]
    assert first[-8:] == [
        *(f"{title(m)}, mean of 2" for m in ("gpu_sm", "gpu_tensor", "gpu_dram")),
        "GPU utilization, mean of 2",
        "GPU power, sum of 2",
        "PCIe to GPU, sum of 2",
        "PCIe from GPU, sum of 2",
        "GPU memory, max of 2",
    ]


def test_statistics_use_gpu_labels(several: RunView) -> None:
    of_power = [row for row in several.statistics.rows if row[0] == "GPU power"]
    assert [row[1] for row in of_power] == ["GPU 0", "GPU 1", "GPU 2"]
    assert of_power[2][2:6] == ("W", "78 W", "78 W", "78 W")


# JSON


def test_summary_has_each_gpu_and_totals(several: RunView) -> None:
    summary = summary_dict(several)
    assert [(each["label"], each["uuid"], each["used"]) for each in summary["gpus"]] == [
        ("GPU 0", gpu_uuid(0), True),
        ("GPU 1", gpu_uuid(1), True),
        ("GPU 2", gpu_uuid(2), False),
    ]
    used = summary["gpus"][:2]
    assert summary["joules"] == pytest.approx(sum(each["joules"] for each in used))
    assert summary["gpu_sm"] == pytest.approx(sum(each["gpu_sm"] for each in used) / 2)
    assert summary["pcie_to_gpu_bytes"] == pytest.approx(sum(e["pcie_to_gpu_bytes"] for e in used))
    assert summary["gpu_memory_peak_bytes"] == max(e["gpu_memory_peak_bytes"] for e in used)
    epochs = summary["epochs"]
    assert summary["samples_per_joule"] == pytest.approx(
        sum(row["samples"] for row in epochs) / sum(row["joules"] for row in epochs)
    )
    assert all(0 < row["gpu_tensor"] < row["gpu_sm"] < 1 for row in epochs)
    assert summary["totals"]["gpu_nvlink_sent"] > 0


# Notes


def notes_with(folder: Path, plan: Plan, **sensors: Any) -> tuple[str, ...]:
    facts = {"sensors": sensors, "hook": {"frameworks": {"torch": "2.14.1"}}}
    paths = write_run(folder / "run", plan)
    stored = json.loads(paths.run_json.read_text())
    paths.run_json.write_text(json.dumps({**stored, **facts}))
    return run_view(open_run(paths.folder)).notes


ALL_MISSING = dict.fromkeys((metric.key for metric in of_scope("gpu")), "there is no NVIDIA driver")


def test_no_note_on_a_machine_without_gpus(tmp_path: Path) -> None:
    assert notes_with(tmp_path, Plan(seconds=5), missing=ALL_MISSING) == ()


def test_note_on_a_gpu_that_cannot_be_monitored(tmp_path: Path) -> None:
    """The allocator shows that there is one."""
    paths = write_run(tmp_path / "run", Plan(seconds=5, gpus=1))
    paths.live_stream("gpu").unlink()
    facts = json.loads(paths.run_json.read_text())
    facts["sensors"] = {"missing": ALL_MISSING}
    paths.run_json.write_text(json.dumps(facts))
    view = run_view(open_run(paths.folder))
    assert "GPUs were not monitored (there is no NVIDIA driver)" in view.notes
    assert [each.title for each in view.charts.panels] == [*PANELS, "GPU memory"]
    assert view.summary.epochs[0].gpu_memory_peak_bytes is not None
    assert view.summary.epochs[0].joules is None


def test_notes_on_missing_and_estimated_metrics(tmp_path: Path) -> None:
    notes = notes_with(
        tmp_path,
        Plan(seconds=5, gpus=1),
        missing={"gpu_fp16": "GPU 0: not supported", "gpu_fp64": "GPU 0: not supported"},
        estimated={"gpu_memory_run": "pids cannot be matched here"},
        notes=["GPU 1 was lost"],
    )
    assert notes == (
        "Not available: gpu_fp64 (GPU 0: not supported)",
        f"Estimated: {BY_KEY['gpu_memory_run'].label} (pids cannot be matched here)",
        "GPU 1 was lost",
    )


def test_note_on_an_unused_gpu(tmp_path: Path) -> None:
    assert notes_with(tmp_path, Plan(seconds=5, idle_gpus=1)) == (
        "The run used no GPU: its processes were not seen on GPU 0",
    )


def notes_on(**values: list[float]) -> list[str]:
    """The notes on a GPU whose metrics are read once a second."""
    table = {
        (metric, "G"): Series(np.arange(1, 1 + len(v)) * SECOND, np.ones(len(v)), np.array(v))
        for metric, v in {"gpu_memory_run": [9e9, 9e9, 9e9], **values}.items()
    }
    recorded = RunData(table, [], SECOND, 3 * SECOND, gpus=(Gpu("G", "GPU 0"),))
    return list(gpu_notes(recorded, trains=True))


def test_note_on_high_utilization_with_low_sm_activity() -> None:
    busy = {"gpu_utilization": [0.98] * 3}
    (note,) = notes_on(**busy, gpu_sm=[0.01] * 3)
    assert note == (
        "GPU utilization is 98%, but SM activity is only 1.0%: the GPU mostly runs copies or "
        "tiny kernels"
    )
    assert notes_on(**busy, gpu_sm=[0.5] * 3) == []
    assert notes_on(**busy) == []
    assert notes_on(gpu_utilization=[0.2] * 3, gpu_sm=[0.01] * 3) == []


def test_note_on_allocator_retries() -> None:
    assert notes_on(gpu_alloc_retries=[0, 0, 0], gpu_alloc_ooms=[0, 0, 0]) == []
    assert notes_on(gpu_alloc_retries=[0, 3, 44], gpu_alloc_ooms=[0, 0, 1]) == [
        "The allocator had to free its cache 44 times: the batch size is at the limit of GPU "
        "memory",
        "GPU memory allocation failed once",
    ]


def test_note_on_different_energy_sources() -> None:
    assert notes_on(gpu_power=[100.0] * 3, gpu_energy=[103.0] * 3) == []
    (note,) = notes_on(gpu_power=[100.0] * 3, gpu_energy=[125.0] * 3)
    assert note.startswith("Energy is taken from the energy counters; it is up to 25% higher than")


def test_note_on_memory_errors_during_the_run() -> None:
    assert notes_on(gpu_ecc_uncorrected=[7, 7, 7]) == []
    assert notes_on(gpu_ecc_uncorrected=[7, 7, 9]) == [
        "2 uncorrectable ECC errors occurred on GPU 0 during the run"
    ]
