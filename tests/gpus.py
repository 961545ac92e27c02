"""The sensors of GPUs, of the fake NVML and of the real one, for suites that hold both to rules."""

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
from stepscope.sensors.gpu.sensors import GpuSensor, WatchedGpu

NAMES = (
    "gpu activity",
    "gpu power",
    "gpu memory",
    "gpu utilisation",
    "gpu processes",
    "gpu others",
    "gpu state",
    "gpu energy",
    "gpu errors",
)

NOT_SUPPORTED, NO_PERMISSION, LOST = 3, 4, 15


class Clock:
    """Stands in for the module `time`: it goes on when somebody sleeps, and only then."""

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
        """The time of the fake NVML and of the sensors that read it."""
        clock = cls()
        for module in (fake_nvml, pcie, processes, sensors):
            monkeypatch.setattr(module, "time", clock)
        return clock


def fake_library(scenario: dict[str, Any] = fake_nvml.ONE_H200) -> Nvml:
    return Nvml(FakeNvml(scenario))


def refusing(code: int, **more: Any) -> dict[str, Any]:
    """A scenario of one GPU that can be found but refuses all questions that are asked of it
    again and again."""
    once = ("HandleByIndex", "UUID", "Name", "PciInfo", "EnforcedPowerLimit")
    errors = {f"nvmlDeviceGet{name}": {"code": 0} for name in once}
    return {"gpus": [{"gpm": False, "errors": {**errors, "*": {"code": code, **more}}}]}


def sensor_of(library: Nvml, name: str) -> GpuSensor:
    """One sensor by its name; PCIe by both of its ways."""
    if name.startswith("gpu pcie"):
        gpus = [WatchedGpu(gpu) for gpu in library.gpus if gpu.facts.mig_of is None]
        return PcieSensor(gpus, only_look=name == "gpu pcie, looks")
    return next(sensor for sensor in gpu_sensors(library.gpus) if sensor.name == name)


def fake_sensor(name: str, scenario: dict[str, Any] = fake_nvml.ONE_H200) -> GpuSensor:
    return sensor_of(fake_library(scenario), name)


@cache
def real_library() -> Nvml:
    return open_nvml()


def real_sensor(name: str) -> GpuSensor:
    return sensor_of(real_library(), name)


def recorded_mean(load: str, metric: int) -> float:
    """Of one of GPM's metrics while a load was recorded, in NVML's unit."""
    rows = fake_nvml.recording("h200")["loads"][load]
    return sum(row["gpm"][str(metric)] for row in rows[1:]) / (len(rows) - 1)
