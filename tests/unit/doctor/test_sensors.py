"""The table of sensors, from synthetic run facts."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fake_nvml import FakeNvml
from stepscope.doctor.run import disk_folder, sensor_metrics, sensor_states
from stepscope.records.facts import SensorCost, SensorFacts
from stepscope.sensors.cgroup import CgroupSensor, find_cgroup
from stepscope.sensors.gpu.nvml import Nvml, unreadable
from stepscope.sensors.gpu.registry import gpu_sensors
from stepscope.sensors.host import HostSensor, ShmSensor

NO_PRESSURE = "this kernel does not provide pressure stall information (CONFIG_PSI, psi=1)"


def facts(missing: dict[str, str], backoff_period_s: float = 0.0, **costs: float) -> SensorFacts:
    each = {name: SensorCost(cost, 1.0, backoff_period_s) for name, cost in costs.items()}
    return SensorFacts(missing, costs=each)


def test_working_sensor() -> None:
    (shm,) = sensor_states(facts({}, shm=30e-6), set(ShmSensor.metrics))
    assert (shm.name, shm.state, shm.missing) == ("shm", "works", {})
    assert shm.share == 30e-6


def test_slowed_sensor_costs_less() -> None:
    (shm,) = sensor_states(facts({}, backoff_period_s=3.0, shm=30e-6), set(ShmSensor.metrics))
    assert (shm.period_s, shm.share) == (3.0, pytest.approx(10e-6))


def test_partly_missing_sensor_has_a_reason_and_a_hint() -> None:
    missing = [metric for metric in HostSensor.metrics if metric.startswith("pressure")]
    recorded = set(HostSensor.metrics) - set(missing)
    reasons = facts(dict.fromkeys(missing, NO_PRESSURE), host=2e-4)
    (host,) = sensor_states(replace(reasons, hints={missing[0]: "psi=1"}), recorded)
    assert host.state == "partial"
    assert set(host.missing) == set(missing)
    assert host.hints == ("psi=1",)


def test_sensor_without_any_value_is_missing() -> None:
    reason = "no NVIDIA driver is installed (libnvidia-ml.so.1 not found)"
    states = sensor_states(facts({"gpu_power": reason, "shm_used": "x", "shm_size": "x"}), set())
    assert {state.name: state.state for state in states} == {
        "shm": "missing",
        "gpu power": "missing",
    }


def test_temporarily_missing_metric_works() -> None:
    (shm,) = sensor_states(facts({"shm_used": "gone"}, shm=1e-5), {"shm_used", "shm_size"})
    assert shm.state == "works"


def test_unset_limit_is_not_missing() -> None:
    reasons = facts({"cgroup_memory_limit": "no memory limit is set"}, cgroup=1e-4)
    (cgroup,) = sensor_states(replace(reasons, not_configured=("cgroup_memory_limit",)), set())
    assert cgroup.state == "works"


def test_hints(tmp_path: Path) -> None:
    assert "PCIe traffic is sampled" in str(hints_of_gpu({"gpm": False}))
    assert "Reboot the machine" in nvml_hint(18)
    assert "--gpus all" in nvml_hint(12)
    (tmp_path / "stat").write_text("cpu 1 2 3 4 5 6 7 8\n")
    host = HostSensor(str(tmp_path))
    assert host.hints["pressure_cpu"] == "Boot a kernel that has CONFIG_PSI, with psi=1"
    shm = ShmSensor(str(tmp_path / "none"))
    shm.read()
    assert "--shm-size" in shm.hints["shm_used"]
    shm.mark_missing(PermissionError(13, "Permission denied", "/proc/12/io"), "shm_size")
    assert "sudo" in shm.hints["shm_size"]
    cgroup = find_cgroup(os.getpid(), str(tmp_path))
    assert CgroupSensor(cgroup).not_configured == set()


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
    assert {"process", "process io", "pss", "host", "cgroup", "network", "shm", "monitor"} <= set(
        known
    )


def test_folder_in_memory_is_not_a_disk(tmp_path: Path) -> None:
    assert disk_folder([Path("/dev/shm"), Path("/proc")]) == (None, "")
    folder, filesystem = disk_folder([Path("/dev/shm"), tmp_path / "runs"])
    assert (folder, bool(filesystem)) in ((tmp_path, True), (None, False))
