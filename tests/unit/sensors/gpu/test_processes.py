"""Processes on a GPU: memory of the run and time of other processes, with the fake NVML."""

from __future__ import annotations

from typing import Any

import pytest

from fake_nvml import SAMPLE_US
from gpus import NO_PERMISSION, Clock, fake_library
from stepscope.records import Reading
from stepscope.sensors.gpu.nvml import Nvml
from stepscope.sensors.gpu.processes import OtherProcessesSensor, ProcessesSensor, ProcessOwnership
from stepscope.sensors.gpu.sensors import MonitoredGpu, MonitoredProcesses

MINE, FOREIGN, LATE = 4100, 77, 90_001
NOT_FOUND = 6


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock.of_gpus(monkeypatch)


def values(readings: list[Reading]) -> dict[str, float | None]:
    (reading,) = readings
    return reading.values


def gpu_with(*processes: dict[str, Any], **spec: Any) -> Nvml:
    return fake_library({"gpus": [{"processes": list(processes), **spec}]})


def make(
    sensor: type[ProcessesSensor] | type[OtherProcessesSensor],
    library: Nvml,
    *,
    pids_match: bool,
    ran_before: bool = False,
) -> ProcessesSensor | OtherProcessesSensor:
    """Create a sensor for a run of one process."""
    gpus = [MonitoredGpu(gpu) for gpu in library.gpus]
    return sensor(
        gpus, ProcessOwnership(gpus, MonitoredProcesses(lambda: {MINE}, ran_before), pids_match)
    )


def memory(library: Nvml, **how: bool) -> ProcessesSensor | OtherProcessesSensor:
    return make(ProcessesSensor, library, **how)


def others(library: Nvml, **how: bool) -> ProcessesSensor | OtherProcessesSensor:
    return make(OtherProcessesSensor, library, **how)


def test_memory_of_the_run_is_the_sum_of_its_processes() -> None:
    library = gpu_with({"pid": MINE, "bytes": 3e9}, {"pid": FOREIGN, "bytes": 5e9})
    sensor = memory(library, pids_match=True)
    assert values(sensor.read()) == {"gpu_memory_run": 3e9}
    assert sensor.estimated == {}


def test_container_attributes_later_processes_to_the_run(clock: Clock) -> None:
    library = gpu_with({"pid": FOREIGN, "bytes": 5e9}, {"pid": LATE, "bytes": 3e9, "after": 0.1})
    sensor = memory(library, pids_match=False)
    assert values(sensor.read()) == {"gpu_memory_run": 0.0}
    assert sensor.estimated == {}
    clock.sleep(0.22)
    assert values(sensor.read()) == {"gpu_memory_run": 3e9}
    assert "container" in sensor.estimated["gpu_memory_run"]


def test_container_with_matching_pids_is_not_an_estimate(clock: Clock) -> None:
    sensor = memory(gpu_with({"pid": MINE, "bytes": 3e9, "after": 0.05}), pids_match=False)
    clock.sleep(0.1)
    assert values(sensor.read()) == {"gpu_memory_run": 3e9}
    assert sensor.estimated == {}


def test_without_a_process_list_the_memory_increase_is_used() -> None:
    sensor = memory(fake_library(), pids_match=False)
    found = values(sensor.read())["gpu_memory_run"]
    assert found is not None and 0 <= found < 1e9
    assert "so the increase since the start" in sensor.estimated["gpu_memory_run"]


@pytest.mark.parametrize("sensor", [ProcessesSensor, OtherProcessesSensor])
def test_container_does_not_attribute_earlier_processes(
    sensor: type[ProcessesSensor] | type[OtherProcessesSensor],
) -> None:
    library = gpu_with({"pid": FOREIGN, "bytes": 5e9, "sm": 50})
    made = make(sensor, library, pids_match=False, ran_before=True)
    assert made.read() == []
    assert "container" in made.missing[made.metrics[0]]


def test_unreported_process_memory_is_missing() -> None:
    sensor = memory(gpu_with({"pid": MINE, "bytes": None}), pids_match=True)
    assert sensor.read() == []
    assert "memory per process" in sensor.missing["gpu_memory_run"]


def test_time_of_other_processes_is_summed() -> None:
    library = gpu_with(
        {"pid": MINE, "bytes": 3e9, "sm": 60},
        {"pid": FOREIGN, "bytes": 5e9, "sm": 25},
        {"pid": LATE, "bytes": 1e9, "sm": 10, "after": -0.9},
    )
    sensor = others(library, pids_match=True)
    assert values(sensor.read()) == {"gpu_other_processes": pytest.approx(0.35)}
    assert sensor.estimated == sensor.missing == {}


def test_container_counts_earlier_processes_as_others(clock: Clock) -> None:
    library = gpu_with(
        {"pid": FOREIGN, "bytes": 5e9, "sm": 25},
        {"pid": LATE, "bytes": 3e9, "sm": 60, "after": 0.1},
    )
    sensor = others(library, pids_match=False)
    assert values(sensor.read()) == {"gpu_other_processes": pytest.approx(0.25)}
    assert sensor.estimated == {}
    clock.sleep(OtherProcessesSensor.SAMPLED_WITHIN_S)
    assert values(sensor.read()) == {"gpu_other_processes": pytest.approx(0.25)}
    assert "container" in sensor.estimated["gpu_other_processes"]


@pytest.mark.parametrize("pids_match", [True, False])
def test_idle_gpu_has_no_other_processes(pids_match: bool) -> None:
    sensor = others(gpu_with({"pid": FOREIGN, "bytes": 5e9}), pids_match=pids_match)
    assert values(sensor.read()) == {"gpu_other_processes": 0.0}
    assert sensor.missing == {}


def test_gpu_used_only_by_the_run_has_no_other_processes() -> None:
    sensor = others(gpu_with({"pid": MINE, "bytes": 5e9, "sm": 100}), pids_match=True)
    assert values(sensor.read()) == {"gpu_other_processes": 0.0}


def test_time_is_limited_to_one() -> None:
    library = gpu_with(
        {"pid": FOREIGN, "bytes": 5e9, "sm": 4_000_000}, {"pid": LATE, "bytes": 5e9, "sm": 70}
    )
    assert values(others(library, pids_match=True).read()) == {"gpu_other_processes": 1.0}


def test_early_reading_is_skipped(clock: Clock) -> None:
    sensor = others(gpu_with({"pid": FOREIGN, "bytes": 5e9, "sm": 25}), pids_match=True)
    assert sensor.read()
    assert sensor.read() == []
    clock.sleep(OtherProcessesSensor.SAMPLED_WITHIN_S)
    assert values(sensor.read()) == {"gpu_other_processes": pytest.approx(0.25)}


def test_every_sample_is_used_once(clock: Clock) -> None:
    (gpu,) = gpu_with({"pid": FOREIGN, "bytes": 5e9, "sm": 25}).gpus
    first = gpu.process_samples(clock.time_ns() // 1000 - 10 * SAMPLE_US)
    clock.sleep(2.5 * SAMPLE_US / 1e6)
    second = gpu.process_samples(max(sample.at_us for sample in first))
    assert len(first) >= 9 and len(second) >= 2
    assert {sample.at_us for sample in first}.isdisjoint(sample.at_us for sample in second)


def test_unlisted_processes_cannot_be_attributed() -> None:
    errors = {"nvmlDeviceGetComputeRunningProcesses": {"code": NOT_FOUND}}
    library = gpu_with({"pid": LATE, "bytes": 1e9, "sm": 90}, errors=errors)
    sensor = others(library, pids_match=False)
    assert sensor.read() == []
    assert sensor.missing["gpu_other_processes"]
    assert sensor.estimated == {}


def test_time_without_permission_is_missing() -> None:
    errors = {"nvmlDeviceGetProcessUtilization": {"code": NO_PERMISSION}}
    sensor = others(gpu_with(errors=errors), pids_match=True)
    assert sensor.read() == []
    assert "permission" in sensor.missing["gpu_other_processes"]
