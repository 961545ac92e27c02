"""What a report shows of GPUs: panels, numbers, tables, notes, and the summary for programs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stepscope.analysis.run.data import RunData
from stepscope.analysis.run.series import Series
from stepscope.metrics import of_scope
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
PANELS = ["Memory", "Transfers", "CPU use"]
GPU_PANELS = ["GPU use", "GPU memory", "GPU transfers", "GPU power"]


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


def test_one_gpu_has_four_panels_after_the_others(one: RunView) -> None:
    assert [each.title for each in one.charts.panels] == PANELS + GPU_PANELS
    use = panel(one, "GPU use")
    assert labels(use) == ["SM activity", "tensor cores", "memory bandwidth", "utilisation"]
    assert (use.unit, use.top) == ("%", 100)
    assert max(line.y.max() for line in use.lines) > 90
    memory = panel(one, "GPU memory")
    assert labels(memory) == [
        "GPU 0 memory",
        "reserved by PyTorch",
        "most in tensors so far",
        "in tensors at step ends",
        "whole device",
    ]
    assert labels(memory, shown=False) == ["size"]
    assert memory.detail == "of 151 GB"
    assert labels(panel(one, "GPU transfers")) == ["PCIe to GPU", "PCIe from GPU"]
    assert panel(one, "GPU transfers").unit == "GB/s"
    power = panel(one, "GPU power")
    assert (labels(power), power.whole) == (["power", "limit"], 700)


def test_of_several_gpus_the_mean_is_drawn_and_each_can_be_asked_for(several: RunView) -> None:
    use = panel(several, "GPU use")
    assert use.detail.startswith("mean of 2 GPUs")
    assert labels(use, shown=False) == ["GPU 0 SM", "GPU 1 SM"]
    mean, first, second = (
        next(line for line in use.lines if line.label == label).y.mean()
        for label in ("SM activity", "GPU 0 SM", "GPU 1 SM")
    )
    assert mean == pytest.approx((first + second) / 2)
    assert labels(panel(several, "GPU memory")) == ["GPU 0 memory", "GPU 1 memory"]
    assert "NVLink to GPU" in labels(panel(several, "GPU transfers"))
    power = panel(several, "GPU power")
    assert labels(power) == ["all 2 GPUs", "limit"]
    assert power.whole == 1400


def test_without_performance_counters_utilisation_takes_their_place(before_hopper: RunView) -> None:
    use = panel(before_hopper, "GPU use")
    assert labels(use) == ["utilisation", "memory controller"]
    assert use.lines[0].style == "bold"
    assert headline(before_hopper)["GPU utilisation"] == ("83 %", "some kernel or copy ran")
    assert headline(before_hopper)["PCIe to GPU"][1].endswith("from GPU")
    assert "SM" not in [column.title for column in before_hopper.ledger.columns]
    assert before_hopper.summary.epochs[0].joules is not None


@pytest.mark.parametrize("plan", [Plan(seconds=5), Plan(seconds=5, idle_gpus=2)])
def test_a_run_that_uses_no_gpu_looks_as_if_there_were_none(plan: Plan, tmp_path: Path) -> None:
    view = made(tmp_path, plan)
    assert [each.title for each in view.charts.panels] == PANELS
    assert len(view.headline) == 8
    assert not view.gpus.rows
    assert not any(column.gpu for column in view.ledger.columns)
    assert not any(row[0].startswith(("GPU", "SM", "PCIe")) for row in view.overview.rows)
    assert "On the GPUs" not in render(page_of(view))
    assert summary_dict(view)["gpu_sm"] is None
    assert summary_dict(view)["joules"] is None


def test_without_epochs_there_is_no_ledger(tmp_path: Path) -> None:
    view = made(tmp_path, Plan(seconds=5, epochs=0, gpus=1))
    assert ">Epochs</h2>" not in render(page_of(view))
    assert ">GPUs</h2>" in render(page_of(view))
    assert headline(view)["Energy"][1] == "of the GPUs"


def test_slow_links_are_shown_in_megabytes() -> None:
    t = np.arange(1, 21) * SECOND
    slow = Series(t, np.ones(20), np.full(20, 3e6))
    series = {("gpu_pcie_sent", "G"): slow, ("gpu_reserved", "G"): slow}
    recorded = RunData(series, [], 0, 20 * SECOND, gpus=(Gpu("G", "GPU 0"),))
    transfers = panels_of(recorded, 20)[-1]
    assert (transfers.title, transfers.unit) == ("GPU transfers", "MB/s")
    assert transfers.lines[0].y[0] == pytest.approx(3)


def test_a_cut_off_run_is_shown_as_far_as_it_goes(tmp_path: Path) -> None:
    paths = write_cut_off_run(tmp_path / "run", Plan(gpus=2))
    view = run_view(open_run(paths.folder))
    assert [each.title for each in view.charts.panels] == PANELS + GPU_PANELS
    assert view.summary.epochs[-1].joules is not None
    json.dumps(summary_dict(view), allow_nan=False)


# Numbers and tables


def test_four_numbers_more_stand_above(one: RunView, several: RunView) -> None:
    found = headline(one)
    assert len(found) == 12
    assert found["GPU busy (SM)"] == ("62 %", "utilisation says 83 %")
    assert found["Tensor cores busy"] == ("26 %", "memory bandwidth 34 %")
    assert found["GPU memory peak"] == ("35.2 GB", "of 151 GB")
    assert found["Energy"] == ("27.4 kJ", "1.03 samples/J in epochs")
    assert headline(several)["GPU memory peak"][1] == "of 151 GB, fullest of 2"


def test_ledger_tells_the_energy_and_what_the_units_did(one: RunView) -> None:
    rest, of_gpus = one.ledger.split_gpus()
    assert [column.title for column in of_gpus.columns] == [
        "Epoch",
        "SM",
        "Tensor",
        "Memory bandwidth",
        "Utilisation",
        "Peak GPU memory",
        "PCIe to GPU",
        "PCIe from GPU",
        "Energy",
        "Samples/J",
    ]
    assert [column.title for column in rest.columns][:3] == ["Epoch", "Start", "Time"]
    assert of_gpus.rows[1] == (
        "1",
        "82 %",
        "34 %",
        "45 %",
        "97 %",
        "32.8 GB",
        "21.9 GB",
        "1.52 GB",
        "6.69 kJ",
        "0.956",
    )


def test_energy_is_that_of_the_counter(one: RunView) -> None:
    """The synthetic counter tells a little more than the readings add up to."""
    (row,) = one.gpu_use.used
    assert row.power_watts is not None
    by_readings = row.power_watts * one.summary.seconds
    assert row.figures.joules == pytest.approx(COUNTER_OVER_READINGS * by_readings, rel=0.01)
    assert one.summary.totals["gpu_energy"] == pytest.approx(row.figures.joules)


def test_each_gpu_of_the_run_has_a_line(several: RunView) -> None:
    assert [row[:2] for row in several.gpus.rows] == [
        ("GPU 0", "NVIDIA H200"),
        ("GPU 1", "NVIDIA H200"),
    ]
    titles = [column.title for column in several.gpus.columns]
    first = dict(zip(titles, several.gpus.rows[0], strict=True))
    assert first["Memory peak"] == "35.2 GB of 151 GB"
    assert first["ECC uncorrected"] == "0"
    assert first["Slowed by heat"] == "0 %"


def test_an_idle_gpu_dilutes_nothing(one: RunView, tmp_path: Path) -> None:
    with_idle = made(tmp_path, Plan(gpus=1, idle_gpus=3))
    beside, alone = with_idle.gpu_use.together, one.gpu_use.together
    assert beside.joules == pytest.approx(alone.joules, rel=0.01)
    assert beside.gpu_sm == pytest.approx(alone.gpu_sm, rel=0.01)
    assert "GPU 1 and 2 others were not used by the run, and in no mean or sum of it" in (
        with_idle.notes
    )


def test_overview_says_what_is_a_mean_and_what_a_sum(one: RunView, several: RunView) -> None:
    assert ("SM activity", "62 %", "86 %", "91 %") in one.overview.rows
    first = [row[0] for row in several.overview.rows]
    assert first[-8:] == [
        "SM activity, mean of 2",
        "tensor cores, mean of 2",
        "GPU memory bandwidth, mean of 2",
        "GPU utilisation, mean of 2",
        "GPU power, all 2",
        "PCIe to GPU, all 2",
        "PCIe from GPU, all 2",
        "GPU memory, fullest of 2",
    ]


def test_statistics_call_gpus_by_their_labels(several: RunView) -> None:
    of_power = [row for row in several.statistics.rows if row[0] == "GPU power"]
    assert [row[1] for row in of_power] == ["GPU 0", "GPU 1", "GPU 2"]
    assert of_power[2][2:6] == ("W", "78 W", "78 W", "78 W")


# For programs


def test_summary_has_the_gpus_and_what_they_did_together(several: RunView) -> None:
    summary = summary_dict(several)
    assert [(each["label"], each["uuid"], each["used"]) for each in summary["gpus"]] == [
        ("GPU 0", gpu_uuid(0), True),
        ("GPU 1", gpu_uuid(1), True),
        ("GPU 2", gpu_uuid(2), False),
    ]
    used = summary["gpus"][:2]
    assert summary["joules"] == pytest.approx(sum(each["joules"] for each in used))
    assert summary["gpu_sm"] == pytest.approx(sum(each["gpu_sm"] for each in used) / 2)
    assert summary["pcie_to_gpu_gb"] == pytest.approx(sum(e["pcie_to_gpu_gb"] for e in used))
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
    told = json.loads(paths.run_json.read_text())
    paths.run_json.write_text(json.dumps({**told, **facts}))
    return run_view(open_run(paths.folder)).notes


ALL_MISSING = dict.fromkeys((metric.key for metric in of_scope("gpu")), "there is no NVIDIA driver")


def test_a_machine_without_gpus_is_no_news(tmp_path: Path) -> None:
    assert notes_with(tmp_path, Plan(seconds=5), missing=ALL_MISSING) == ()


def test_a_gpu_that_cannot_be_watched_is(tmp_path: Path) -> None:
    """The allocator tells that there is one."""
    paths = write_run(tmp_path / "run", Plan(seconds=5, gpus=1))
    paths.live_stream("gpu").unlink()
    told = json.loads(paths.run_json.read_text())
    told["sensors"] = {"missing": ALL_MISSING}
    paths.run_json.write_text(json.dumps(told))
    view = run_view(open_run(paths.folder))
    assert "No GPU is watched (there is no NVIDIA driver)" in view.notes
    assert [each.title for each in view.charts.panels] == [*PANELS, "GPU memory"]
    assert view.summary.epochs[0].gpu_memory_peak_bytes is not None
    assert view.summary.epochs[0].joules is None


def test_what_was_missing_estimated_or_happened_is_told(tmp_path: Path) -> None:
    notes = notes_with(
        tmp_path,
        Plan(seconds=5, gpus=1),
        missing={"gpu_fp16": "GPU 0: not supported", "gpu_fp64": "GPU 0: not supported"},
        estimated={"gpu_memory_tree": "pids cannot be matched here"},
        remarks=["GPU 1 was lost"],
    )
    assert notes == (
        "Not read: gpu_fp64 (GPU 0: not supported)",
        "Estimated: GPU memory of the run (pids cannot be matched here)",
        "GPU 1 was lost",
    )


def test_a_run_that_could_have_used_a_gpu_and_did_not(tmp_path: Path) -> None:
    assert notes_with(tmp_path, Plan(seconds=5, idle_gpus=1)) == (
        "The run used no GPU: nothing of it was seen on GPU 0",
    )


def notes_on(**values: list[float]) -> list[str]:
    """Of a GPU whose metrics are read once a second."""
    table = {
        (metric, "G"): Series(np.arange(1, 1 + len(v)) * SECOND, np.ones(len(v)), np.array(v))
        for metric, v in {"gpu_memory_tree": [9e9, 9e9, 9e9], **values}.items()
    }
    recorded = RunData(table, [], SECOND, 3 * SECOND, gpus=(Gpu("G", "GPU 0"),))
    return list(gpu_notes(recorded, trains=True))


def test_busy_without_work() -> None:
    busy = {"gpu_utilization": [0.98] * 3}
    (note,) = notes_on(**busy, gpu_sm=[0.01] * 3)
    assert note == (
        "The GPU counted as busy 98 % of the time while its multiprocessors had work 1.0 % of the "
        "time: copies or tiny kernels"
    )
    assert notes_on(**busy, gpu_sm=[0.5] * 3) == []
    assert notes_on(**busy) == []
    assert notes_on(gpu_utilization=[0.2] * 3, gpu_sm=[0.01] * 3) == []


def test_the_edge_of_memory() -> None:
    assert notes_on(gpu_alloc_retries=[0, 0, 0], gpu_alloc_ooms=[0, 0, 0]) == []
    assert notes_on(gpu_alloc_retries=[0, 3, 44], gpu_alloc_ooms=[0, 0, 1]) == [
        "The allocator had to free its cache 44 times: the batch is at the edge of GPU memory",
        "GPU memory could not be allocated once",
    ]


def test_energy_that_two_sources_tell_differently() -> None:
    assert notes_on(gpu_power=[100.0] * 3, gpu_energy=[103.0] * 3) == []
    (note,) = notes_on(gpu_power=[100.0] * 3, gpu_energy=[125.0] * 3)
    assert note.startswith("Energy is that of the energy counters, up to 25 % more than")


def test_memory_errors_of_before_the_run_are_not_its_own() -> None:
    assert notes_on(gpu_ecc_uncorrected=[7, 7, 7]) == []
    assert notes_on(gpu_ecc_uncorrected=[7, 7, 9]) == [
        "2 errors in the memory of GPU 0 could not be corrected during the run"
    ]
