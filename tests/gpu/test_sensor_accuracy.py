"""Accuracy of the GPU sensors, measured with known loads on a real GPU."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.gpu

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    sys.path.insert(0, str(BENCHMARKS))
    try:
        spec = importlib.util.spec_from_file_location("gpu_sensors", BENCHMARKS / "gpu_sensors.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(BENCHMARKS))
    result: dict[str, Any] = module.measure_loads(tmp_path_factory.mktemp("loads"), 3.0)
    return result


def test_copies_are_within_ten_percent_in_their_direction(measured: dict[str, Any]) -> None:
    copies = measured["copies"]
    assert copies["copy_in"]["measured_to_gpu"] == pytest.approx(1, abs=0.1)
    assert copies["copy_in"]["measured_from_gpu"] < 0.1
    assert copies["copy_out"]["measured_from_gpu"] == pytest.approx(1, abs=0.1)
    assert copies["copy_out"]["measured_to_gpu"] < 0.1
    assert copies["bursts_in"]["measured_to_gpu"] == pytest.approx(1, abs=0.1)


def test_allocation_appears_in_device_memory(measured: dict[str, Any]) -> None:
    rise = measured["allocation"]["rise"]
    assert rise["gpu_memory"] == pytest.approx(1, abs=0.02)
    assert rise["gpu_memory_run"] == pytest.approx(1, abs=0.02)


def test_matrix_product_keeps_the_tensor_cores_busy(measured: dict[str, Any]) -> None:
    row = measured["table"]["matrix"]
    assert row["tensor"] > 0.8 and row["sm"] > 0.85 and row["dram"] < 0.4


def test_device_copy_keeps_the_memory_busy(measured: dict[str, Any]) -> None:
    row = measured["table"]["copy_inside"]
    assert row["dram"] > 0.7 and row["tensor"] < 0.02


@pytest.mark.parametrize("load", ["copy_in", "copy_out"])
def test_host_copies_count_as_utilization_without_sm_activity(
    measured: dict[str, Any], load: str
) -> None:
    row = measured["table"][load]
    assert row["utilization"] > 0.9
    assert row["sm"] < 0.02


def test_tiny_kernels_show_little_activity(measured: dict[str, Any]) -> None:
    row = measured["table"]["tiny_kernels"]
    assert row["utilization"] > 0.05
    assert row["sm"] < 0.05


def test_energy_agrees_with_power(measured: dict[str, Any]) -> None:
    energy = measured["energy"]
    assert energy["seconds"] >= 20
    assert energy["power_over_counter"] == pytest.approx(1, abs=0.05)
