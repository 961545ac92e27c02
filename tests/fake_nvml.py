"""A fake NVML that replays recordings of a real GPU, for the functions that stepscope calls.

A scenario defines the GPUs, the recorded load of each, and its errors over time. Constants, errors
and structures come from the real package. The suite in `tests/contract/` tests this fake and the
real library.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
from functools import cache
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

STAND_IN = Path(__file__).parent / "fakes"
"""The folder of a `pynvml` module that imports this fake, for the front of PYTHONPATH."""
RECORDINGS = Path(__file__).parent / "data" / "nvml"
SCENARIO_VARIABLE = "FAKE_NVML"
"""A scenario as JSON, for processes that import this fake instead of the real package."""

ONE_H200: dict[str, Any] = {"gpus": [{}]}
TWO_GPUS: dict[str, Any] = {"gpus": [{"load": "matmul"}, {"load": "idle"}]}
MIG: dict[str, Any] = {"gpus": [{"slices": 2, "load": "matmul"}]}
BEFORE_HOPPER: dict[str, Any] = {
    "gpus": [{"gpm": False, "name": "Tesla T4", "pcie": [3, 16], "load": "tiny"}]
}
SAMPLES_ONLY: dict[str, Any] = {
    "gpus": [{"gpm": False, "name": "NVIDIA A100", "pcie": [4, 16], "load": "h2d"}]
}

SAMPLE_US = 166_667
"""Period of the driver's samples of running processes."""


@cache
def real() -> ModuleType:
    """Return the real package, even if this fake precedes it on the path."""
    paths = [p for p in sys.path if Path(p or ".").resolve() != STAND_IN]
    found = PathFinder.find_spec("pynvml", paths)
    assert found is not None and found.origin is not None
    spec = importlib.util.spec_from_file_location("_real_pynvml", found.origin)
    assert spec is not None and spec.loader is not None
    module = sys.modules["_real_pynvml"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@cache
def recording(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((RECORDINGS / f"{name}.json").read_text())
    return loaded


class FakeGpu:
    """A GPU or MIG slice. `row` is the current row of its recorded load."""

    def __init__(self, index: int, spec: dict[str, Any], of: FakeGpu | None = None) -> None:
        recorded = recording(spec.get("recording", "h200"))
        self.spec, self.of, self.index = spec, of, index
        self.rows = recorded["loads"][spec.get("load", "matmul")][1:]  # the first row precedes it
        self.facts = {**recorded["gpu"], **spec}
        kind = "MIG" if of else "GPU"
        self.uuid = spec.get("uuid", f"{kind}-{index:08x}-0000-0000-0000-{len(spec):012x}")
        self.slices: list[FakeGpu] = []
        self.began = time.monotonic()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    def row(self) -> dict[str, Any]:
        """Return the current row; the recording repeats while counters keep growing."""
        span = self.rows[-1]["t"] - self.rows[0]["t"]
        rounds, within = divmod(self.seconds, span)
        place = min(int(within / span * len(self.rows)), len(self.rows) - 1)
        row = dict(self.rows[place])
        row["energy"] = (
            row["energy"]
            - self.rows[0]["energy"]
            + int(rounds) * (self.rows[-1]["energy"] - self.rows[0]["energy"])
        )
        return row

    def error_code(self, function: str) -> int:
        """Return the error code of a function that fails at this time, else 0."""
        errors = self.spec.get("errors", {})
        for name in (function, "*"):
            if name in errors:
                error = errors[name]
                if error.get("after", 0.0) <= self.seconds < error.get("until", float("inf")):
                    return int(error["code"])
        return 0


class FakeNvml:
    """A replacement for the module `pynvml`."""

    def __getattribute__(self, name: str) -> Any:
        """Hide names that an old version of the package does not have."""
        if not name.startswith("_") and name in object.__getattribute__(self, "__dict__").get(
            "scenario", {}
        ).get("unknown", ()):
            raise AttributeError(name)
        return object.__getattribute__(self, name)

    def __init__(self, scenario: dict[str, Any]) -> None:
        self.scenario = scenario
        self.open = False
        self.gpus: list[FakeGpu] = []

    def __getattr__(self, name: str) -> Any:
        if name in self.scenario.get("unknown", ()):
            raise AttributeError(name)
        if name.startswith("nvml") and callable(getattr(real(), name, None)):
            raise AttributeError(f"the fake has no {name}")
        return getattr(real(), name)

    def nvmlInit(self) -> None:
        time.sleep(self.scenario.get("wakes_up_in", 0.0))
        if "init" in self.scenario:
            raise real().NVMLError(self.scenario["init"])
        self.open = True
        self.gpus = [FakeGpu(i, spec) for i, spec in enumerate(self.scenario["gpus"])]
        for gpu in self.gpus:
            for place in range(gpu.spec.get("slices", 0)):
                part = {k: v for k, v in gpu.spec.items() if k != "slices"} | {"place": place}
                part["uuid"] = f"MIG-{gpu.index:08x}-0000-0000-0000-{place:012x}"
                gpu.slices.append(FakeGpu(gpu.index, part, gpu))

    def nvmlShutdown(self) -> None:
        self.open = False

    def nvmlSystemGetDriverVersion(self) -> str:
        return str(self.scenario.get("driver", recording("h200")["driver"]))

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeGpu:
        return self._checked(self.gpus[index], "nvmlDeviceGetHandleByIndex")

    def nvmlDeviceGetUUID(self, gpu: FakeGpu) -> str:
        return self._checked(gpu, "nvmlDeviceGetUUID").uuid

    def nvmlDeviceGetName(self, gpu: FakeGpu) -> str:
        return str(self._checked(gpu, "nvmlDeviceGetName").facts["name"])

    def nvmlDeviceGetMemoryInfo(self, gpu: FakeGpu) -> Any:
        row = self._row(gpu, "nvmlDeviceGetMemoryInfo")
        parts = len(gpu.of.slices) if gpu.of else 1
        return SimpleNamespace(total=gpu.facts["memory"] // parts, used=row["used"] // parts)

    def nvmlDeviceGetEnforcedPowerLimit(self, gpu: FakeGpu) -> int:
        self._whole(gpu, "nvmlDeviceGetEnforcedPowerLimit")
        return int(gpu.facts["power_limit"])

    def nvmlDeviceGetPciInfo(self, gpu: FakeGpu) -> Any:
        self._whole(gpu, "nvmlDeviceGetPciInfo")
        return SimpleNamespace(busId=f"00000000:{gpu.index + 1:02X}:00.0")

    def nvmlDeviceGetMaxPcieLinkGeneration(self, gpu: FakeGpu) -> int:
        self._whole(gpu, "nvmlDeviceGetMaxPcieLinkGeneration")
        return int(gpu.facts["pcie"][0])

    def nvmlDeviceGetMaxPcieLinkWidth(self, gpu: FakeGpu) -> int:
        self._whole(gpu, "nvmlDeviceGetMaxPcieLinkWidth")
        return int(gpu.facts["pcie"][1])

    def nvmlDeviceGetMigMode(self, gpu: FakeGpu) -> list[int]:
        return [int(bool(gpu.slices))] * 2

    def nvmlDeviceGetMaxMigDeviceCount(self, gpu: FakeGpu) -> int:
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, gpu: FakeGpu, place: int) -> FakeGpu:
        if place >= len(gpu.slices):
            raise real().NVMLError(real().NVML_ERROR_NOT_FOUND)
        return gpu.slices[place]

    def nvmlDeviceGetGpuInstanceId(self, gpu: FakeGpu) -> int:
        return int(gpu.spec["place"])

    def nvmlDeviceGetUtilizationRates(self, gpu: FakeGpu) -> Any:
        if gpu.slices:
            raise real().NVMLError(real().NVML_ERROR_NOT_SUPPORTED)
        row = self._whole(gpu, "nvmlDeviceGetUtilizationRates")
        return SimpleNamespace(gpu=row["gpu"], memory=row["memory"])

    def nvmlDeviceGetComputeRunningProcesses(self, gpu: FakeGpu) -> list[Any]:
        self._row(gpu, "nvmlDeviceGetComputeRunningProcesses")
        listed = gpu.spec.get("processes", [])
        now = [p for p in listed if p.get("after", 0.0) <= gpu.seconds]
        return [SimpleNamespace(pid=p["pid"], usedGpuMemory=p["bytes"]) for p in now]

    def nvmlDeviceGetProcessUtilization(self, gpu: FakeGpu, after_us: int) -> list[Any]:
        """Return the driver's samples of every process that has a value `sm`."""
        self._whole(gpu, "nvmlDeviceGetProcessUtilization")
        now_us = time.time_ns() // 1000
        began_us = now_us - int(gpu.seconds * 1e6)
        samples = [SimpleNamespace(pid=0, timeStamp=0, smUtil=0xFFFFFFFF)]  # an unset entry
        for process in gpu.spec.get("processes", []):
            since_us = max(began_us + int(process.get("after", -5.0) * 1e6), after_us)
            samples += [
                SimpleNamespace(pid=process["pid"], timeStamp=at_us, smUtil=process["sm"])
                for at_us in range(since_us - since_us % SAMPLE_US + SAMPLE_US, now_us, SAMPLE_US)
                if "sm" in process
            ]
        if len(samples) == 1:
            raise real().NVMLError(real().NVML_ERROR_NOT_FOUND)
        return samples

    def nvmlDeviceGetFieldValues(self, gpu: FakeGpu, fields: list[int]) -> list[Any]:
        row = self._whole(gpu, "nvmlDeviceGetFieldValues")
        return [self._field(gpu, row, field) for field in fields]

    def _field(self, gpu: FakeGpu, row: dict[str, Any], field: int) -> Any:
        known = {
            real().NVML_FI_DEV_POWER_INSTANT: row["power_now"],
            real().NVML_FI_DEV_PCIE_COUNT_RX_BYTES: int(self._rate(gpu, 21) * gpu.seconds),
            real().NVML_FI_DEV_PCIE_COUNT_TX_BYTES: int(self._rate(gpu, 20) * gpu.seconds),
        }
        refused = gpu.error_code(f"field {field}")
        value = known.get(field, 0) % (1 << 32)
        return SimpleNamespace(
            fieldId=field,
            nvmlReturn=refused or (0 if field in known else real().NVML_ERROR_NOT_SUPPORTED),
            valueType=real().NVML_VALUE_TYPE_UNSIGNED_INT,
            value=SimpleNamespace(uiVal=value, ullVal=value),
        )

    def _rate(self, gpu: FakeGpu, metric: int) -> float:
        """Return the mean bytes/s of a load, for synthetic counters."""
        values = [row["gpm"][str(metric)] for row in gpu.rows]
        return sum(values) / len(values) * (1 << 20)

    def nvmlDeviceGetPowerUsage(self, gpu: FakeGpu) -> int:
        return int(self._whole(gpu, "nvmlDeviceGetPowerUsage")["power"])

    def nvmlDeviceGetTotalEnergyConsumption(self, gpu: FakeGpu) -> int:
        return int(self._whole(gpu, "nvmlDeviceGetTotalEnergyConsumption")["energy"])

    def nvmlDeviceGetTemperature(self, gpu: FakeGpu, sensor: int) -> int:
        return int(self._whole(gpu, "nvmlDeviceGetTemperature")["temperature"])

    def nvmlDeviceGetClockInfo(self, gpu: FakeGpu, kind: int) -> int:
        row = self._whole(gpu, "nvmlDeviceGetClockInfo")
        return int(row["sm_clock"] if kind == real().NVML_CLOCK_SM else row["memory_clock"])

    def nvmlDeviceGetCurrentClocksEventReasons(self, gpu: FakeGpu) -> int:
        return int(self._whole(gpu, "nvmlDeviceGetCurrentClocksEventReasons")["reasons"])

    def nvmlDeviceGetTotalEccErrors(self, gpu: FakeGpu, kind: int, counter: int) -> int:
        self._whole(gpu, "nvmlDeviceGetTotalEccErrors")
        return int(gpu.spec.get("ecc", [0, 0])[kind])

    def nvmlDeviceGetPcieThroughput(self, gpu: FakeGpu, counter: int) -> int:
        row = self._whole(gpu, "nvmlDeviceGetPcieThroughput")
        time.sleep(0.02)
        received = counter == real().NVML_PCIE_UTIL_RX_BYTES
        return int(row["gpm"]["21" if received else "20"] * (1 << 20) / 1e3)

    def nvmlGpmQueryDeviceSupport(self, gpu: FakeGpu) -> Any:
        return SimpleNamespace(isSupportedDevice=int(gpu.spec.get("gpm", True)))

    def nvmlGpmSampleAlloc(self) -> Any:
        return SimpleNamespace(gpu=None, at=0.0)

    def nvmlGpmSampleFree(self, sample: Any) -> None:
        sample.gpu = None

    def nvmlGpmSampleGet(self, gpu: FakeGpu, sample: Any) -> Any:
        if gpu.slices:
            raise real().NVMLError(real().NVML_ERROR_NOT_SUPPORTED)
        self._row(gpu, "nvmlGpmSampleGet")
        sample.gpu, sample.at = gpu, time.monotonic()
        return sample

    def nvmlGpmMigSampleGet(self, gpu: FakeGpu, instance: int, sample: Any) -> Any:
        part = next(s for s in gpu.slices if s.spec["place"] == instance)
        self._row(part, "nvmlGpmMigSampleGet")
        sample.gpu, sample.at = part, time.monotonic()
        return sample

    def c_nvmlGpmMetricsGet_t(self) -> Any:
        slots = [SimpleNamespace(metricId=0, nvmlReturn=0, value=0.0) for _ in range(32)]
        return SimpleNamespace(version=0, numMetrics=0, sample1=None, sample2=None, metrics=slots)

    def nvmlGpmMetricsGet(self, request: Any) -> Any:
        gpu: FakeGpu = request.sample2.gpu
        if request.sample1.gpu is not gpu or request.sample2.at <= request.sample1.at:
            raise real().NVMLError(real().NVML_ERROR_INVALID_ARGUMENT)
        values = _performance(self._row(gpu, "nvmlGpmMetricsGet"))
        for slot in request.metrics[: request.numMetrics]:
            slot.nvmlReturn = gpu.error_code(f"gpm {slot.metricId}")
            slot.value = values[str(slot.metricId)]
        return request

    def _checked(self, gpu: FakeGpu, function: str) -> FakeGpu:
        assert self.open, "called before nvmlInit or after nvmlShutdown"
        nap = gpu.spec.get("naps", {}).get(function)
        if nap and gpu.seconds >= nap["after"]:
            time.sleep(nap["seconds"])
        code = gpu.error_code(function) or (gpu.of.error_code(function) if gpu.of else 0)
        if code:
            raise real().NVMLError(code)
        return gpu

    def _row(self, gpu: FakeGpu, function: str) -> dict[str, Any]:
        return self._checked(gpu, function).row()

    def _whole(self, gpu: FakeGpu, function: str) -> dict[str, Any]:
        """Return the row of a whole GPU; a MIG slice does not support the query."""
        row = self._row(gpu, function)
        if gpu.of is not None:
            raise real().NVMLError(real().NVML_ERROR_NOT_SUPPORTED)
        return row


def _performance(row: dict[str, Any]) -> dict[str, float]:
    """Return the GPM values; derive "graphics" for recordings that lack it."""
    return {"1": float(row["gpu"]) if row["gpm"]["2"] else 0.0, **row["gpm"]}


def from_environment() -> FakeNvml:
    """Create the fake for the scenario in the environment."""
    scenario = os.environ.get(SCENARIO_VARIABLE)
    return FakeNvml(json.loads(scenario) if scenario else ONE_H200)
