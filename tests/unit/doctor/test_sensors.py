"""The table of sensors, from facts of runs that never were."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fake_nvml import FakeNvml
from stepscope.doctor.examine import disk_folder, sensor_metrics, sensor_states
from stepscope.records.facts import SensorCost, SensorFacts
from stepscope.sensors.cgroup import CgroupSensor, find_cgroup
from stepscope.sensors.gpu.nvml import Nvml, unreadable
from stepscope.sensors.gpu.registry import gpu_sensors
from stepscope.sensors.host import HostSensor, ShmSensor

NO_PRESSURE = "this kernel keeps no pressure stall information (CONFIG_PSI, psi=1)"


def facts(missing: dict[str, str], slowed_to_s: float = 0.0, **costs: float) -> SensorFacts:
    each = {name: SensorCost(cost, 1.0, slowed_to_s) for name, cost in costs.items()}
    return SensorFacts(missing, costs=each)


def test_a_sensor_that_works() -> None:
    (shm,) = sensor_states(facts({}, shm=30e-6), set(ShmSensor.metrics))
    assert (shm.name, shm.state, shm.missing) == ("shm", "works", {})
    assert shm.share == 30e-6


def test_a_sensor_that_was_slowed_down_costs_less() -> None:
    (shm,) = sensor_states(facts({}, slowed_to_s=3.0, shm=30e-6), set(ShmSensor.metrics))
    assert (shm.period_s, shm.share) == (3.0, pytest.approx(10e-6))


def test_what_is_missing_in_part_has_a_reason_and_a_hint() -> None:
    lost = [metric for metric in HostSensor.metrics if metric.startswith("pressure")]
    recorded = set(HostSensor.metrics) - set(lost)
    told = replace(facts(dict.fromkeys(lost, NO_PRESSURE), host=2e-4), hints={lost[0]: "psi=1"})
    (host,) = sensor_states(told, recorded)
    assert host.state == "in part"
    assert set(host.missing) == set(lost)
    assert host.hints == ("psi=1",)


def test_a_sensor_without_any_value_is_missing_also_if_it_was_never_read() -> None:
    reason = "no NVIDIA driver is installed (libnvidia-ml.so.1 is not there)"
    states = sensor_states(facts({"gpu_power": reason, "shm_used": "x", "shm_size": "x"}), set())
    assert {state.name: state.state for state in states} == {
        "shm": "missing",
        "gpu power": "missing",
    }


def test_what_was_missing_for_a_moment_is_not_missing() -> None:
    (shm,) = sensor_states(facts({"shm_used": "gone"}, shm=1e-5), {"shm_used", "shm_size"})
    assert shm.state == "works"


def test_no_limit_is_no_loss() -> None:
    told = facts({"cgroup_memory_limit": "no limit is set"}, cgroup=1e-4)
    (cgroup,) = sensor_states(replace(told, unset=("cgroup_memory_limit",)), set())
    assert cgroup.state == "works"


def test_hints(tmp_path: Path) -> None:
    """Who knows why something cannot be read knows what would help."""
    assert "PCIe traffic is sampled" in str(hints_of_gpu({"gpm": False}))
    assert "restart the machine" in nvml_hint(18)
    assert "--gpus all" in nvml_hint(12)
    (tmp_path / "stat").write_text("cpu 1 2 3 4 5 6 7 8\n")
    host = HostSensor(str(tmp_path))
    assert host.hints["pressure_cpu"] == "boot with psi=1, on a kernel with CONFIG_PSI"
    shm = ShmSensor(str(tmp_path / "none"))
    shm.read()
    assert "--shm-size" in shm.hints["shm_used"]
    shm.lacks(PermissionError(13, "Permission denied", "/proc/12/io"), "shm_size")
    assert "sudo" in shm.hints["shm_size"]
    cgroup = find_cgroup(os.getpid(), str(tmp_path))
    assert CgroupSensor(cgroup).unset == set()


def hints_of_gpu(gpu: dict[str, Any]) -> dict[str, str]:
    hints: dict[str, str] = {}
    for sensor in gpu_sensors(Nvml(FakeNvml({"gpus": [gpu]})).gpus):
        hints |= sensor.hints
        sensor.close()
    return hints


def nvml_hint(code: int) -> str:
    return unreadable(code).hint


def test_every_sensor_is_known() -> None:
    known = sensor_metrics()
    assert {"process", "process io", "pss", "host", "cgroup", "network", "shm", "watcher"} <= set(
        known
    )


def test_a_folder_in_memory_is_no_disk(tmp_path: Path) -> None:
    assert disk_folder([Path("/dev/shm"), Path("/proc")]) == (None, "")
    folder, filesystem = disk_folder([Path("/dev/shm"), tmp_path / "runs"])
    assert (folder, bool(filesystem)) in ((tmp_path, True), (None, False))
