"""Whose the processes on a GPU are: memory of the run, time of others. On the fake NVML."""

from __future__ import annotations

from typing import Any

import pytest

from fake_nvml import SAMPLE_US
from gpus import NO_PERMISSION, Clock, fake_library
from stepscope.records import Reading
from stepscope.sensors.gpu.nvml import Nvml
from stepscope.sensors.gpu.processes import OthersSensor, ProcessesSensor, ProcessOwnership
from stepscope.sensors.gpu.sensors import MonitoredProcesses, WatchedGpu

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
    sensor: type[ProcessesSensor] | type[OthersSensor],
    library: Nvml,
    *,
    numbers_match: bool,
    ran_before: bool = False,
) -> ProcessesSensor | OthersSensor:
    """A sensor for a run of one process."""
    gpus = [WatchedGpu(gpu) for gpu in library.gpus]
    return sensor(
        gpus, ProcessOwnership(gpus, MonitoredProcesses(lambda: {MINE}, ran_before), numbers_match)
    )


def memory(library: Nvml, **how: bool) -> ProcessesSensor | OthersSensor:
    return make(ProcessesSensor, library, **how)


def others(library: Nvml, **how: bool) -> ProcessesSensor | OthersSensor:
    return make(OthersSensor, library, **how)


def test_memory_of_the_tree_is_that_of_its_processes() -> None:
    library = gpu_with({"pid": MINE, "bytes": 3e9}, {"pid": FOREIGN, "bytes": 5e9})
    sensor = memory(library, numbers_match=True)
    assert values(sensor.read()) == {"gpu_memory_tree": 3e9}
    assert sensor.estimated == {}


def test_in_a_container_what_came_after_the_start_is_taken_for_ours(clock: Clock) -> None:
    library = gpu_with({"pid": FOREIGN, "bytes": 5e9}, {"pid": LATE, "bytes": 3e9, "after": 0.1})
    sensor = memory(library, numbers_match=False)
    assert values(sensor.read()) == {"gpu_memory_tree": 0.0}
    assert sensor.estimated == {}
    clock.sleep(0.22)
    assert values(sensor.read()) == {"gpu_memory_tree": 3e9}
    assert "container" in sensor.estimated["gpu_memory_tree"]


def test_in_a_container_whose_numbers_do_match_nothing_is_called_an_estimate(clock: Clock) -> None:
    sensor = memory(gpu_with({"pid": MINE, "bytes": 3e9, "after": 0.05}), numbers_match=False)
    clock.sleep(0.1)
    assert values(sensor.read()) == {"gpu_memory_tree": 3e9}
    assert sensor.estimated == {}


def test_where_no_process_is_listed_the_rise_is_taken() -> None:
    sensor = memory(fake_library(), numbers_match=False)
    found = values(sensor.read())["gpu_memory_tree"]
    assert found is not None and 0 <= found < 1e9
    assert "less what was in use before" in sensor.estimated["gpu_memory_tree"]


@pytest.mark.parametrize("sensor", [ProcessesSensor, OthersSensor])
def test_in_a_container_nothing_is_claimed_of_what_ran_before(
    sensor: type[ProcessesSensor] | type[OthersSensor],
) -> None:
    library = gpu_with({"pid": FOREIGN, "bytes": 5e9, "sm": 50})
    made = make(sensor, library, numbers_match=False, ran_before=True)
    assert made.read() == []
    assert "container" in made.missing[made.metrics[0]]


def test_memory_that_the_driver_does_not_tell_is_missing() -> None:
    sensor = memory(gpu_with({"pid": MINE, "bytes": None}), numbers_match=True)
    assert sensor.read() == []
    assert "single processes" in sensor.missing["gpu_memory_tree"]


def test_time_of_others_is_that_of_all_processes_that_are_not_ours() -> None:
    library = gpu_with(
        {"pid": MINE, "bytes": 3e9, "sm": 60},
        {"pid": FOREIGN, "bytes": 5e9, "sm": 25},
        {"pid": LATE, "bytes": 1e9, "sm": 10, "after": -0.9},
    )
    sensor = others(library, numbers_match=True)
    assert values(sensor.read()) == {"gpu_others": pytest.approx(0.35)}
    assert sensor.estimated == sensor.missing == {}


def test_in_a_container_those_that_were_there_before_are_the_others(clock: Clock) -> None:
    library = gpu_with(
        {"pid": FOREIGN, "bytes": 5e9, "sm": 25},
        {"pid": LATE, "bytes": 3e9, "sm": 60, "after": 0.1},
    )
    sensor = others(library, numbers_match=False)
    assert values(sensor.read()) == {"gpu_others": pytest.approx(0.25)}
    assert sensor.estimated == {}
    clock.sleep(OthersSensor.SAMPLED_WITHIN_S)
    assert values(sensor.read()) == {"gpu_others": pytest.approx(0.25)}
    assert "container" in sensor.estimated["gpu_others"]


@pytest.mark.parametrize("numbers_match", [True, False])
def test_a_gpu_on_which_nobody_ran_has_no_others(numbers_match: bool) -> None:
    sensor = others(gpu_with({"pid": FOREIGN, "bytes": 5e9}), numbers_match=numbers_match)
    assert values(sensor.read()) == {"gpu_others": 0.0}
    assert sensor.missing == {}


def test_a_gpu_all_ours_has_no_others() -> None:
    sensor = others(gpu_with({"pid": MINE, "bytes": 5e9, "sm": 100}), numbers_match=True)
    assert values(sensor.read()) == {"gpu_others": 0.0}


def test_more_than_all_of_the_time_is_not_believed() -> None:
    library = gpu_with(
        {"pid": FOREIGN, "bytes": 5e9, "sm": 4_000_000}, {"pid": LATE, "bytes": 5e9, "sm": 70}
    )
    assert values(others(library, numbers_match=True).read()) == {"gpu_others": 1.0}


def test_a_reading_that_comes_too_soon_is_left_for_the_next(clock: Clock) -> None:
    sensor = others(gpu_with({"pid": FOREIGN, "bytes": 5e9, "sm": 25}), numbers_match=True)
    assert sensor.read()
    assert sensor.read() == []
    clock.sleep(OthersSensor.SAMPLED_WITHIN_S)
    assert values(sensor.read()) == {"gpu_others": pytest.approx(0.25)}


def test_every_sample_is_taken_once(clock: Clock) -> None:
    (gpu,) = gpu_with({"pid": FOREIGN, "bytes": 5e9, "sm": 25}).gpus
    first = gpu.process_samples(clock.time_ns() // 1000 - 10 * SAMPLE_US)
    clock.sleep(2.5 * SAMPLE_US / 1e6)
    second = gpu.process_samples(max(sample.at_us for sample in first))
    assert len(first) >= 9 and len(second) >= 2
    assert {sample.at_us for sample in first}.isdisjoint(sample.at_us for sample in second)


def test_processes_that_run_and_are_never_listed_cannot_be_told_apart() -> None:
    errors = {"nvmlDeviceGetComputeRunningProcesses": {"code": NOT_FOUND}}
    library = gpu_with({"pid": LATE, "bytes": 1e9, "sm": 90}, errors=errors)
    sensor = others(library, numbers_match=False)
    assert sensor.read() == []
    assert sensor.missing["gpu_others"]
    assert sensor.estimated == {}


def test_time_that_may_not_be_told_is_missing() -> None:
    errors = {"nvmlDeviceGetProcessUtilization": {"code": NO_PERMISSION}}
    sensor = others(gpu_with(errors=errors), numbers_match=True)
    assert sensor.read() == []
    assert "permission" in sensor.missing["gpu_others"]
