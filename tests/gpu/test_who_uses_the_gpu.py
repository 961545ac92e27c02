"""Matrix products of a process of the run, or of another, and what the sensors say of them."""

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
WATCHED_S = 3.0


@pytest.fixture(scope="module")
def library() -> Iterator[Nvml]:
    opened = open_nvml()
    yield opened
    opened.close()


@contextmanager
def multiplying() -> Iterator[int]:
    """A process that multiplies matrices without a pause."""
    process = subprocess.Popen([sys.executable, "-c", MULTIPLY], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        yield process.pid
    finally:
        process.kill()
        process.wait()


def sensor(library: Nvml, name: str, ours: Collection[int] = ()) -> GpuSensor:
    sensors = gpu_sensors(library.gpus, MonitoredProcesses(lambda: ours))
    return next(each for each in sensors if each.name == name)


def most(sensor: GpuSensor, metric: str) -> float:
    """Of the busiest GPU."""
    found = [reading.values[metric] for reading in sensor.read()]
    assert found, sensor.missing
    return max(value for value in found if value is not None)


def test_a_gpu_that_multiplies_is_active(library: Nvml) -> None:
    with multiplying():
        activity = sensor(library, "gpu activity")
        first, at = most(activity, "gpu_active"), time.monotonic()
        time.sleep(WATCHED_S)
        last, seconds = most(activity, "gpu_active"), time.monotonic() - at
    activity.close()
    assert (last - first) / seconds > 0.9


def test_a_gpu_at_rest_is_not_active(library: Nvml) -> None:
    time.sleep(1.0)
    activity = sensor(library, "gpu activity")
    first = most(activity, "gpu_active")
    time.sleep(1.0)
    assert most(activity, "gpu_active") - first < 0.02
    activity.close()


def test_a_process_that_was_there_before_is_another(library: Nvml) -> None:
    with multiplying():
        others = sensor(library, "gpu others")
        others.read()
        time.sleep(WATCHED_S)
        assert most(others, "gpu_others") > 0.3


def test_a_process_of_the_run_is_no_other(library: Nvml) -> None:
    ours: list[int] = []
    others = sensor(library, "gpu others", ours)
    with multiplying() as pid:
        ours.append(pid)
        others.read()
        time.sleep(WATCHED_S)
        assert most(others, "gpu_others") < 0.05


def test_a_thief_is_seen_beside_the_run(library: Nvml) -> None:
    ours: list[int] = []
    with multiplying():
        others = sensor(library, "gpu others", ours)
        with multiplying() as pid:
            ours.append(pid)
            others.read()
            time.sleep(WATCHED_S)
            assert 0.2 < most(others, "gpu_others") < 0.8
