"""What is counted thread by thread: on real processes that fight for one CPU."""

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

FIGHT = """
import os
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
os.fork()
while True:
    pass
"""
"""Two processes that never wait, on one CPU."""


@pytest.fixture
def fighters() -> Iterator[ProcessTree]:
    with subprocess.Popen([sys.executable, "-c", FIGHT], start_new_session=True) as process:
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


def test_who_never_sleeps_has_a_cpu_or_waits_for_one(fighters: ProcessTree) -> None:
    usage, switches = UsageSensor(fighters), SwitchesSensor(fighters)
    used, waited, at = of_tree(usage)["cpu"], of_tree(switches)["cpu_wait"], time.monotonic()
    time.sleep(1.0)
    seconds = time.monotonic() - at
    waits = number(of_tree(switches)["cpu_wait"]) - number(waited)
    runs = number(of_tree(usage)["cpu"]) - number(used)
    assert waits + runs == pytest.approx(2 * seconds, rel=0.15)
    assert waits > 0.8 * seconds


def test_roles_add_up_to_the_tree(fighters: ProcessTree) -> None:
    readings = {r.entity.name: r.values for r in SwitchesSensor(fighters).read()}
    whole = readings.pop(TREE)
    assert MAIN in readings
    for metric in SwitchesSensor.metrics:
        assert whole[metric] == pytest.approx(sum(number(v[metric]) for v in readings.values()))


def test_what_was_before_the_watching_does_not_count(fighters: ProcessTree) -> None:
    time.sleep(0.5)
    born_here, found_here = SwitchesSensor(fighters), SwitchesSensor(fighters, born_here=False)
    assert number(of_tree(found_here)["cpu_wait"]) < 0.5 * number(of_tree(born_here)["cpu_wait"])


def test_who_sleeps_does_not_wait_for_a_cpu(sleeper: ProcessTree) -> None:
    sensor = SwitchesSensor(sleeper, born_here=False)
    time.sleep(0.3)
    assert number(of_tree(sensor)["cpu_wait"]) < 0.05


def test_a_kernel_without_the_file_still_tells_switches(
    sleeper: ProcessTree, tmp_path: Path
) -> None:
    thread = tmp_path / f"{sleeper.root}" / "task" / f"{sleeper.root}"
    thread.mkdir(parents=True)
    shutil.copy("/proc/self/status", thread / "status")
    sensor = SwitchesSensor(sleeper, proc=str(tmp_path))
    found = of_tree(sensor)
    assert number(found["switches_voluntary"]) > 0
    assert found["cpu_wait"] is None
    assert "schedstat" in sensor.missing["cpu_wait"]
    assert sensor.missing.keys() == {"cpu_wait"}


def test_a_kernel_that_does_not_count_says_so(sleeper: ProcessTree, tmp_path: Path) -> None:
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "schedstat").write_text("0 0 0\n")
    sensor = SwitchesSensor(sleeper, proc=str(tmp_path))
    assert of_tree(sensor)["cpu_wait"] is None
    assert "does not count" in sensor.missing["cpu_wait"]
