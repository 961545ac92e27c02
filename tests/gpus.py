"""GPU sensors on the fake and on the real NVML, for tests that run on both."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

import fake_nvml
from fake_nvml import FakeNvml
from stepscope.sensors.gpu import pcie, processes, sensors
from stepscope.sensors.gpu.nvml import Nvml, open_nvml
from stepscope.sensors.gpu.pcie import PcieSensor
from stepscope.sensors.gpu.registry import gpu_sensors
from stepscope.sensors.gpu.sensors import GpuSensor, MonitoredGpu

NAMES = (
    "gpu activity",
    "gpu power",
    "gpu memory",
    "gpu utilization",
    "gpu processes",
    "gpu other processes",
    "gpu state",
    "gpu energy",
    "gpu errors",
)

NOT_SUPPORTED, NO_PERMISSION, LOST = 3, 4, 15


class Clock:
    """Replaces the module `time`: time passes only in `sleep`."""

    def __init__(self) -> None:
        self.now_s = 1_000.0

    def monotonic(self) -> float:
        return self.now_s

    def time_ns(self) -> int:
        return int(self.now_s * 1e9)

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds

    @classmethod
    def of_gpus(cls, monkeypatch: pytest.MonkeyPatch) -> Clock:
        """Replace the clock of the fake NVML and of the sensors that read it."""
        clock = cls()
        for module in (fake_nvml, pcie, processes, sensors):
            monkeypatch.setattr(module, "time", clock)
        return clock


def fake_library(scenario: dict[str, Any] = fake_nvml.ONE_H200) -> Nvml:
    return Nvml(FakeNvml(scenario))


def refusing(code: int, **more: Any) -> dict[str, Any]:
    """A scenario with one GPU on which all periodic queries fail."""
    once = ("HandleByIndex", "UUID", "Name", "PciInfo", "EnforcedPowerLimit")
    errors = {f"nvmlDeviceGet{name}": {"code": 0} for name in once}
    return {"gpus": [{"gpm": False, "errors": {**errors, "*": {"code": code, **more}}}]}


def sensor_of(library: Nvml, name: str) -> GpuSensor:
    """Return a sensor by name; for PCIe with either method."""
    if name.startswith("gpu pcie"):
        gpus = [MonitoredGpu(gpu) for gpu in library.gpus if gpu.facts.mig_of is None]
        return PcieSensor(gpus, sample_only=name == "gpu pcie, sampled")
    return next(sensor for sensor in gpu_sensors(library.gpus) if sensor.name == name)


def fake_sensor(name: str, scenario: dict[str, Any] = fake_nvml.ONE_H200) -> GpuSensor:
    return sensor_of(fake_library(scenario), name)


@cache
def real_library() -> Nvml:
    return open_nvml()


def real_sensor(name: str) -> GpuSensor:
    return sensor_of(real_library(), name)


def recorded_mean(load: str, metric: int) -> float:
    """Return the mean of a GPM metric in a recorded load, in NVML's unit."""
    rows = fake_nvml.recording("h200")["loads"][load]
    return sum(row["gpm"][str(metric)] for row in rows[1:]) / (len(rows) - 1)
