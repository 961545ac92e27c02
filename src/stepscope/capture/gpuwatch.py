"""The GPUs that a command may use: found and read beside everything else."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from stepscope.capture.aside import Aside
from stepscope.metrics import of_scope
from stepscope.sensors.gpu import Family, GpuSensor
from stepscope.sensors.gpus import gpu_sensors, visible_gpus
from stepscope.sensors.nvml import GpuFacts, Nvml, NvmlUnavailable, open_nvml

_NOT_YET = "the NVIDIA driver had not answered yet"
_NONE_VISIBLE = "CUDA_VISIBLE_DEVICES leaves the command no GPU"
_NO_GPU = "the NVIDIA driver finds no GPU"


class GpuWatch:
    """Knows the GPUs once the driver has answered; `aside` reads them."""

    def __init__(self, environment: Mapping[str, str], trouble: Callable[[str], None]) -> None:
        self.family = Family()
        """Which processes are watched: told once there are any."""
        self._environment = environment
        self._reason = _NOT_YET
        self._facts: list[GpuFacts] = []
        self._nvml: Nvml | None = None
        self._told = False
        self.aside = Aside("the NVIDIA driver", self._open, trouble)

    def missing(self) -> dict[str, str]:
        """Every metric of GPUs with the reason, where none is watched."""
        if self._facts:
            return {}
        return {metric.key: self._reason for metric in of_scope("gpu")}

    def describe(self) -> dict[str, Any]:
        """Facts about the GPUs for run.json; empty where NVML tells nothing."""
        if not self._facts or self._nvml is None:
            return {}
        self._told = True
        gpus = [dataclasses.asdict(each) for each in self._facts]
        for gpu in gpus:
            gpu["model"] = gpu.pop("name")
        return {"gpus": gpus, "driver": self._nvml.driver}

    def news(self) -> bool:
        """Whether GPUs have been found that nobody was told of."""
        return bool(self._facts) and not self._told

    def close(self) -> None:
        """Give the driver back, unless it is the one that does not answer."""
        if self._nvml is not None and not self.aside.is_alive():
            self._nvml.close()

    def _open(self) -> list[GpuSensor]:
        try:
            self._nvml = open_nvml()
            chosen = visible_gpus(self._nvml.gpus, self._environment)
            self._reason = _NONE_VISIBLE if self._nvml.gpus else _NO_GPU
            sensors = gpu_sensors(chosen, self.family) if chosen else []
            self._facts = [gpu.facts for gpu in chosen]
            return sensors
        except NvmlUnavailable as error:
            self._reason = str(error)
        except Exception as error:  # whatever a driver does, the command is watched
            self._reason = f"NVML failed: {type(error).__name__}: {error}"
        return []
