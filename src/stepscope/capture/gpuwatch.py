"""Opens NVML beside everything else: a driver that sleeps takes seconds to wake up, and neither the
command nor the first samples shall wait for it."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Mapping
from typing import Any

from stepscope.metrics import of_scope
from stepscope.sensors.gpu import ActivitySensor, Family, GpuSensor, gpu_sensors, visible_gpus
from stepscope.sensors.nvml import GpuFacts, Nvml, NvmlUnavailable, open_nvml

_NOT_YET = "the NVIDIA driver had not answered yet"
_NONE_VISIBLE = "CUDA_VISIBLE_DEVICES leaves the command no GPU"
_NO_GPU = "the NVIDIA driver finds no GPU"


class GpuWatch:
    """The GPUs that a command may use: their sensors once the driver has answered."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.facts: list[GpuFacts] = []
        self.driver: str | None = None
        self.reason = _NOT_YET
        """Why no GPU is watched."""
        self.family = Family()
        """Which processes are watched: told once there are any."""
        self._environment = environment
        self._nvml: Nvml | None = None
        self._sensors: list[GpuSensor] = []
        self._taken = False
        self._thread = threading.Thread(target=self._open, name="stepscope-nvml", daemon=True)
        self._thread.start()

    def wait(self, seconds: float) -> None:
        """Give the driver some time to answer."""
        self._thread.join(seconds)

    def new_sensors(self) -> list[GpuSensor]:
        """The sensors, once, as soon as there are any."""
        if self._taken or self._thread.is_alive():
            return []
        self._taken = True
        return self._sensors

    def last_sensors(self) -> list[GpuSensor]:
        """Those with counters, to be read once more at the end, when their last have moved."""
        if not self._taken or not self._sensors:
            return []
        for sensor in self._sensors:
            if isinstance(sensor, ActivitySensor):
                time.sleep(sensor.settles_in())
        return [sensor for sensor in self._sensors if sensor.counts]

    def missing(self) -> dict[str, str]:
        """Every metric of GPUs with the reason, where none is watched."""
        if self._taken and self._sensors:
            return {}
        return {metric.key: self.reason for metric in of_scope("gpu")}

    def describe(self) -> dict[str, Any]:
        """Facts about the GPUs for run.json; empty where NVML tells nothing."""
        if not self.facts:
            return {}
        gpus = [dataclasses.asdict(each) for each in self.facts]
        for gpu in gpus:
            gpu["model"] = gpu.pop("name")
        return {"gpus": gpus, "driver": self.driver}

    def close(self) -> None:
        if self._nvml is not None and not self._thread.is_alive():
            self._nvml.close()

    def _open(self) -> None:
        try:
            nvml = open_nvml()
            chosen = visible_gpus(nvml.gpus, self._environment)
            self._sensors = gpu_sensors(chosen, self.family) if chosen else []
            for sensor in self._sensors:
                sensor.read()  # the first time costs several times what it costs from then on
            self._nvml, self.driver = nvml, nvml.driver
            self.facts = [gpu.facts for gpu in chosen]
            self.reason = _NONE_VISIBLE if nvml.gpus else _NO_GPU
        except NvmlUnavailable as error:
            self.reason = str(error)
        except Exception as error:  # whatever a driver does, the command is watched
            self.reason = f"NVML failed: {type(error).__name__}: {error}"
