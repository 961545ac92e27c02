"""Find and read the GPUs that a command may use, in a background thread."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from stepscope.capture.schedule import BackgroundReader
from stepscope.metrics import of_scope
from stepscope.records import Gpu
from stepscope.records.facts import Environment
from stepscope.sensors.gpu.nvml import Nvml, NvmlUnavailable, open_nvml
from stepscope.sensors.gpu.registry import gpu_sensors
from stepscope.sensors.gpu.selection import select_gpus
from stepscope.sensors.gpu.sensors import GpuSensor, MonitoredProcesses


class GpuMonitor:
    """The GPUs of a run, known as soon as the driver has answered. `reader` reads them."""

    def __init__(
        self, environment: Mapping[str, str], report_problem: Callable[[str], None]
    ) -> None:
        self.processes = MonitoredProcesses()
        """The monitored processes, set when the command has started."""
        self._environment = environment
        self._reason, self._hint = "the NVIDIA driver did not respond", ""
        self._facts: list[Gpu] = []
        self._nvml: Nvml | None = None
        self._announced = False
        self.reader = BackgroundReader("the NVIDIA driver", self._open, report_problem)

    def missing(self) -> tuple[dict[str, str], dict[str, str]]:
        """Return the reason and the hint by metric if no GPU is monitored."""
        metrics = [] if self._facts else [metric.key for metric in of_scope("gpu")]
        hints = dict.fromkeys(metrics, self._hint) if self._hint else {}
        return dict.fromkeys(metrics, self._reason), hints

    def add_to(self, environment: Environment) -> Environment:
        """Return the environment with the GPUs that NVML reports."""
        if not self._facts or self._nvml is None:
            return environment
        self._announced = True
        return replace(environment, gpus=tuple(self._facts), driver=self._nvml.driver)

    def has_new_gpus(self) -> bool:
        """Return whether GPUs were found that `add_to` has not added yet."""
        return bool(self._facts) and not self._announced

    def close(self) -> None:
        """Release the driver, unless a call into it still blocks."""
        if self._nvml is not None and not self.reader.is_alive():
            self._nvml.close()

    def _open(self) -> list[GpuSensor]:
        try:
            self._nvml = open_nvml()
            chosen = select_gpus(self._nvml.gpus, self._environment).gpus
            self._reason = "the NVIDIA driver found no GPU"
            if self._nvml.gpus:
                self._reason = "CUDA_VISIBLE_DEVICES hides all GPUs from the command"
            sensors = gpu_sensors(chosen, self.processes) if chosen else []
            self._facts = [gpu.facts for gpu in chosen]
            return sensors
        except NvmlUnavailable as error:
            self._reason, self._hint = str(error), error.hint
        except Exception as error:  # a driver failure must not end monitoring
            self._reason = f"NVML failed: {type(error).__name__}: {error}"
        return []
