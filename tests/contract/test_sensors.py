"""The interface contract that every sensor must pass. Add a case for each new sensor."""

from __future__ import annotations

import atexit
import functools
import math
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from gpus import NAMES, NOT_SUPPORTED, fake_sensor, real_sensor, refusing
from stepscope.metrics import BY_KEY, is_counter
from stepscope.records import Reading
from stepscope.sensors.cgroup import CgroupSensor, find_cgroup
from stepscope.sensors.contract import Sensor
from stepscope.sensors.host import HostSensor, ShmSensor
from stepscope.sensors.network import NetworkSensor
from stepscope.sensors.process import (
    DetailSensor,
    IoSensor,
    SharedMemorySensor,
    SwitchesSensor,
    UsageSensor,
)
from stepscope.sensors.tree import ProcessTree


@dataclass(frozen=True)
class Case:
    """A sensor on this machine, and the same sensor without any of its sources."""

    name: str
    here: Callable[[], Sensor]
    nowhere: Callable[[Path], Sensor] | None
    max_ms: float = 5.0
    """Generous limit for the CPU time of one reading."""


def _own_namespace() -> dict[int, int]:
    return {os.stat("/proc/self/ns/net").st_ino: os.getpid()}


@functools.cache
def a_tree() -> ProcessTree:
    """A shell and its child, both sleeping."""
    shell = subprocess.Popen(["sh", "-c", "sleep 7200; true"], start_new_session=True)
    atexit.register(os.killpg, shell.pid, signal.SIGKILL)
    tree = ProcessTree(shell.pid)
    while len(tree.processes) < 2:
        tree.refresh(thorough=True)
    return tree


CASES = [
    Case("host", HostSensor, lambda root: HostSensor(str(root))),
    Case(
        "cgroup",
        lambda: CgroupSensor(find_cgroup(os.getpid())),
        lambda root: CgroupSensor(find_cgroup(os.getpid(), str(root))),
    ),
    Case(
        "network",
        lambda: NetworkSensor(_own_namespace),
        lambda root: NetworkSensor(_own_namespace, str(root)),
    ),
    Case("shm", ShmSensor, lambda root: ShmSensor(str(root / "shm"))),
    # An exited tree is not a missing source: the process tree reports it to the sampler.
    Case("process", lambda: UsageSensor(a_tree()), None),
    Case("process detail", lambda: DetailSensor(a_tree()), None),
    Case("process io", lambda: IoSensor(a_tree()), None),
    Case("context switches", lambda: SwitchesSensor(a_tree()), None),
    Case("pss", lambda: SharedMemorySensor(a_tree()), None),
]

GPU_SENSORS = (*NAMES, "gpu pcie", "gpu pcie, sampled")
FAKE_GPUS = [
    Case(
        f"{name}, fake",
        functools.partial(fake_sensor, name),
        lambda root, name=name: fake_sensor(name, refusing(NOT_SUPPORTED)),  # type: ignore[misc]
    )
    for name in GPU_SENSORS
]
REAL_GPUS = [
    pytest.param(
        Case(f"{name}, real", functools.partial(real_sensor, name), None, max_ms=20.0),
        marks=pytest.mark.gpu,
        id=f"{name}, real",
    )
    for name in GPU_SENSORS
]
CASES += FAKE_GPUS


@pytest.fixture(params=[*CASES, *REAL_GPUS], ids=lambda case: case.name)
def case(request: pytest.FixtureRequest) -> Case:
    chosen: Case = request.param
    return chosen


@pytest.fixture
def sensor(case: Case) -> Iterator[Sensor]:
    made = case.here()
    yield made
    made.close()


def totals(readings: list[Reading]) -> dict[tuple[str, int | None, str], float]:
    return {
        (reading.entity.name, reading.entity.pid, key): value
        for reading in readings
        for key, value in reading.values.items()
        if is_counter(key) and value is not None
    }


def spend() -> None:
    """Use some CPU time."""
    sum(index * index for index in range(20_000))


def test_name_period_and_metrics_are_valid(sensor: Sensor) -> None:
    assert sensor.name
    assert sensor.period >= 0
    assert 0 < sensor.share < 0.1
    assert len(set(sensor.metrics)) == len(sensor.metrics) > 0
    for key in sensor.metrics:
        assert BY_KEY[key].scope == sensor.scope


def test_values_belong_to_declared_metrics(sensor: Sensor) -> None:
    for reading in sensor.read():
        assert reading.entity.name
        assert reading.values.keys() <= set(sensor.metrics)


def test_values_are_finite_or_missing_with_a_reason(sensor: Sensor) -> None:
    for _ in range(3):
        for reading in sensor.read():
            for key, value in reading.values.items():
                if value is None:
                    assert sensor.missing[key].strip()
                else:
                    assert math.isfinite(value) and value >= 0


def test_entities_are_unique(sensor: Sensor) -> None:
    entities = [reading.entity for reading in sensor.read()]
    assert len(entities) == len(set(entities))


def test_counters_do_not_decrease(sensor: Sensor) -> None:
    before = totals(sensor.read())
    for _ in range(5):
        spend()
        after = totals(sensor.read())
        for key in before.keys() & after.keys():
            assert after[key] >= before[key], key
        before |= after


def test_every_metric_has_a_value_or_a_reason(sensor: Sensor) -> None:
    found = {
        key
        for reading in sensor.read()
        for key, value in reading.values.items()
        if value is not None
    }
    assert found | sensor.missing.keys() >= set(sensor.metrics)


@pytest.mark.parametrize("case", [c for c in CASES if c.nowhere], ids=lambda case: case.name)
def test_without_sources_all_metrics_have_reasons(case: Case, tmp_path: Path) -> None:
    assert case.nowhere is not None
    sensor = case.nowhere(tmp_path)
    for _ in range(2):
        for reading in sensor.read():
            assert set(reading.values.values()) <= {None}
    assert sensor.missing.keys() == set(sensor.metrics)
    assert all(reason.strip() for reason in sensor.missing.values())
    sensor.close()


def test_close_releases_descriptors(case: Case) -> None:
    a_tree()
    case.here().close()  # a library shared between sensors stays open
    before = set(os.listdir("/proc/self/fd"))
    sensor = case.here()
    sensor.read()
    sensor.close()
    assert set(os.listdir("/proc/self/fd")) == before


def test_reading_does_not_leak_descriptors(sensor: Sensor) -> None:
    sensor.read()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        sensor.read()
    assert len(os.listdir("/proc/self/fd")) == before


def test_reading_cost(case: Case, sensor: Sensor) -> None:
    sensor.read()
    times = []
    for _ in range(30):
        begin = time.thread_time_ns()
        sensor.read()
        times.append(time.thread_time_ns() - begin)
    cost = sorted(times)[len(times) // 2] / 1e6
    print(f"{case.name}: {cost:.3f} ms of CPU time per reading (median of {len(times)})")
    assert cost < case.max_ms
