"""Records what NVML says of the first GPU under known loads: what `tests/fake_nvml.py` plays back.

PYTHONPATH=benchmarks python tests/data/nvml/record.py OUT.json      needs a GPU and PyTorch
"""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pynvml  # noqa: TID251  (raw answers are what is recorded)

import gpu_sensors as loads

METRICS = (1, 2, 3, 5, 10, 12, 13, 20, 21, 60, 61)
ROWS, PAUSE_S, SECONDS = 20, 0.22, 6.5
LOADS = {
    "idle": loads._idle,
    "matmul": loads._matrix,
    "d2d": loads._copy_inside,
    "h2d": loads._copy_in,
    "d2h": loads._copy_out,
    "tiny": loads._tiny_kernels,
}


class Recorder:
    """Asks everything that stepscope asks."""

    def __init__(self) -> None:
        pynvml.nvmlInit()
        self.gpu = pynvml.nvmlDeviceGetHandleByIndex(0)
        self._request = pynvml.c_nvmlGpmMetricsGet_t()
        self._request.version = pynvml.NVML_GPM_METRICS_GET_VERSION
        self._request.numMetrics = len(METRICS)
        for place, metric in enumerate(METRICS):
            self._request.metrics[place].metricId = metric
        self._before, self._now = pynvml.nvmlGpmSampleAlloc(), pynvml.nvmlGpmSampleAlloc()
        pynvml.nvmlGpmSampleGet(self.gpu, self._now)

    def gpm(self) -> dict[int, float]:
        self._before, self._now = self._now, self._before
        pynvml.nvmlGpmSampleGet(self.gpu, self._now)
        self._request.sample1, self._request.sample2 = self._before, self._now
        pynvml.nvmlGpmMetricsGet(self._request)
        slots = (self._request.metrics[place] for place in range(len(METRICS)))
        return {slot.metricId: float(f"{slot.value:.6g}") for slot in slots}

    def row(self, begun: float) -> dict[str, Any]:
        gpu = self.gpu
        rates = pynvml.nvmlDeviceGetUtilizationRates(gpu)
        (power_now,) = pynvml.nvmlDeviceGetFieldValues(gpu, [pynvml.NVML_FI_DEV_POWER_INSTANT])
        return {
            "t": round(time.monotonic() - begun, 4),
            "gpu": rates.gpu,
            "memory": rates.memory,
            "used": pynvml.nvmlDeviceGetMemoryInfo(gpu).used,
            "power": pynvml.nvmlDeviceGetPowerUsage(gpu),
            "power_now": power_now.value.uiVal,
            "energy": pynvml.nvmlDeviceGetTotalEnergyConsumption(gpu),
            "temperature": pynvml.nvmlDeviceGetTemperature(gpu, pynvml.NVML_TEMPERATURE_GPU),
            "sm_clock": pynvml.nvmlDeviceGetClockInfo(gpu, pynvml.NVML_CLOCK_SM),
            "memory_clock": pynvml.nvmlDeviceGetClockInfo(gpu, pynvml.NVML_CLOCK_MEM),
            "reasons": pynvml.nvmlDeviceGetCurrentClocksEventReasons(gpu),
            "gpm": self.gpm(),
        }

    def facts(self) -> dict[str, Any]:
        return {
            "name": pynvml.nvmlDeviceGetName(self.gpu),
            "memory": pynvml.nvmlDeviceGetMemoryInfo(self.gpu).total,
            "power_limit": pynvml.nvmlDeviceGetEnforcedPowerLimit(self.gpu),
            "pcie": [
                pynvml.nvmlDeviceGetMaxPcieLinkGeneration(self.gpu),
                pynvml.nvmlDeviceGetMaxPcieLinkWidth(self.gpu),
            ],
        }


def main() -> None:
    loads._matrix(0.1)  # so that CUDA is there when the first load begins
    recorder = Recorder()
    recorded: dict[str, list[dict[str, Any]]] = {}
    for name, load in LOADS.items():
        thread = threading.Thread(target=load, args=(SECONDS,))
        thread.start()
        time.sleep(1.5)
        recorder.gpm()  # from here on
        begun = time.monotonic()
        recorded[name] = []
        for _ in range(ROWS):
            time.sleep(PAUSE_S)
            recorded[name].append(recorder.row(begun))
        thread.join()
    told = {
        "driver": pynvml.nvmlSystemGetDriverVersion(),
        "gpu": recorder.facts(),
        "loads": recorded,
    }
    text = json.dumps(told, separators=(",", ":")).replace('{"t"', '\n{"t"')
    Path(sys.argv[1]).write_text(text + "\n")


if __name__ == "__main__":
    main()
