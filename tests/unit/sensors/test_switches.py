"""Per-thread counters, on real processes that compete for one CPU."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from stepscope.sensors import procfs
from stepscope.sensors.process import SwitchesSensor, UsageSensor
from stepscope.sensors.tree import MAIN, TREE, ProcessTree

COMPETE = """
import os
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
os.fork()
while True:
    pass
"""
"""Two processes that are always runnable, on one CPU."""


@pytest.fixture
def competitors() -> Iterator[ProcessTree]:
    with subprocess.Popen([sys.executable, "-c", COMPETE], start_new_session=True) as process:
        tree = ProcessTree(process.pid)
        while len(tree.processes) < 2:
            tree.refresh(thorough=True)
        time.sleep(0.1)
        yield tree
        tree.close()
        os.killpg(process.pid, 9)


@pytest.fixture
def sleeper() -> Iterator[ProcessTree]:
    with subprocess.Popen(["sleep", "60"]) as process:
        while (stat := procfs.stat(process.pid)) is None or (stat.name, stat.state) != (
            "sleep",
            "S",
        ):
            time.sleep(0.01)
        tree = ProcessTree(process.pid)
        yield tree
        tree.close()
        process.kill()


def of_tree(sensor: SwitchesSensor | UsageSensor, role: str = TREE) -> dict[str, float | None]:
    (found,) = [r.values for r in sensor.read() if r.entity.name == role]
    return found


def number(value: float | None) -> float:
    assert value is not None
    return value


def test_runnable_time_is_cpu_time_plus_wait(competitors: ProcessTree) -> None:
    usage, switches = UsageSensor(competitors), SwitchesSensor(competitors)
    used, waited, at = of_tree(usage)["cpu"], of_tree(switches)["cpu_wait"], time.monotonic()
    time.sleep(1.0)
    seconds = time.monotonic() - at
    waits = number(of_tree(switches)["cpu_wait"]) - number(waited)
    runs = number(of_tree(usage)["cpu"]) - number(used)
    assert waits + runs == pytest.approx(2 * seconds, rel=0.15)
    assert waits > 0.8 * seconds


def test_roles_add_up_to_the_tree(competitors: ProcessTree) -> None:
    readings = {r.entity.name: r.values for r in SwitchesSensor(competitors).read()}
    whole = readings.pop(TREE)
    assert MAIN in readings
    for metric in SwitchesSensor.metrics:
        assert whole[metric] == pytest.approx(sum(number(v[metric]) for v in readings.values()))


def test_counts_before_monitoring_are_excluded(competitors: ProcessTree) -> None:
    time.sleep(0.5)
    started, attached = SwitchesSensor(competitors), SwitchesSensor(competitors, started_here=False)
    assert number(of_tree(attached)["cpu_wait"]) < 0.5 * number(of_tree(started)["cpu_wait"])


def test_sleeping_process_does_not_wait_for_a_cpu(sleeper: ProcessTree) -> None:
    sensor = SwitchesSensor(sleeper, started_here=False)
    time.sleep(0.3)
    assert number(of_tree(sensor)["cpu_wait"]) < 0.05


def test_kernel_without_schedstat_still_counts_switches(
    sleeper: ProcessTree, tmp_path: Path
) -> None:
    thread = tmp_path / f"{sleeper.root}" / "task" / f"{sleeper.root}"
    thread.mkdir(parents=True)
    shutil.copy("/proc/self/status", thread / "status")
    sensor = SwitchesSensor(sleeper, proc=str(tmp_path))
    values = of_tree(sensor)
    assert number(values["switches_voluntary"]) > 0
    assert values["cpu_wait"] is None
    assert "schedstat" in sensor.missing["cpu_wait"]
    assert sensor.missing.keys() == {"cpu_wait"}


def test_kernel_without_delay_accounting_has_a_reason(sleeper: ProcessTree, tmp_path: Path) -> None:
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "schedstat").write_text("0 0 0\n")
    sensor = SwitchesSensor(sleeper, proc=str(tmp_path))
    assert of_tree(sensor)["cpu_wait"] is None
    assert "does not count" in sensor.missing["cpu_wait"]
