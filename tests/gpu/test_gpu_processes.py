"""GPU sensors while a process of the run, or another process, multiplies matrices."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager

import pytest

from stepscope.sensors.gpu.nvml import Nvml, open_nvml
from stepscope.sensors.gpu.registry import gpu_sensors
from stepscope.sensors.gpu.sensors import GpuSensor, MonitoredProcesses

pytestmark = pytest.mark.gpu

MULTIPLY = """
import torch
a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
torch.cuda.synchronize()
print("ready", flush=True)
while True:
    for _ in range(20):
        a @ a
    torch.cuda.synchronize()
"""
MEASURED_S = 3.0


@pytest.fixture(scope="module")
def library() -> Iterator[Nvml]:
    opened = open_nvml()
    yield opened
    opened.close()


@contextmanager
def multiplying() -> Iterator[int]:
    """A process that multiplies matrices without pauses."""
    process = subprocess.Popen([sys.executable, "-c", MULTIPLY], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        yield process.pid
    finally:
        process.kill()
        process.wait()


def sensor(library: Nvml, name: str, run_pids: Collection[int] = ()) -> GpuSensor:
    sensors = gpu_sensors(library.gpus, MonitoredProcesses(lambda: run_pids))
    return next(each for each in sensors if each.name == name)


def maximum(sensor: GpuSensor, metric: str) -> float:
    """Return the value of the busiest GPU."""
    values = [reading.values[metric] for reading in sensor.read()]
    assert values, sensor.missing
    return max(value for value in values if value is not None)


def test_busy_gpu_is_active(library: Nvml) -> None:
    with multiplying():
        activity = sensor(library, "gpu activity")
        first, at = maximum(activity, "gpu_active"), time.monotonic()
        time.sleep(MEASURED_S)
        last, seconds = maximum(activity, "gpu_active"), time.monotonic() - at
    activity.close()
    assert (last - first) / seconds > 0.9


def test_idle_gpu_is_not_active(library: Nvml) -> None:
    time.sleep(1.0)
    activity = sensor(library, "gpu activity")
    first = maximum(activity, "gpu_active")
    time.sleep(1.0)
    assert maximum(activity, "gpu_active") - first < 0.02
    activity.close()


def test_earlier_process_counts_as_other(library: Nvml) -> None:
    with multiplying():
        others = sensor(library, "gpu other processes")
        others.read()
        time.sleep(MEASURED_S)
        assert maximum(others, "gpu_other_processes") > 0.3


def test_process_of_the_run_does_not_count_as_other(library: Nvml) -> None:
    run_pids: list[int] = []
    others = sensor(library, "gpu other processes", run_pids)
    with multiplying() as pid:
        run_pids.append(pid)
        others.read()
        time.sleep(MEASURED_S)
        assert maximum(others, "gpu_other_processes") < 0.05


def test_other_process_is_measured_next_to_the_run(library: Nvml) -> None:
    run_pids: list[int] = []
    with multiplying():
        others = sensor(library, "gpu other processes", run_pids)
        with multiplying() as pid:
            run_pids.append(pid)
            others.read()
            time.sleep(MEASURED_S)
            assert 0.2 < maximum(others, "gpu_other_processes") < 0.8
