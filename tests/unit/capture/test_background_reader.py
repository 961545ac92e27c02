"""Sensors that may block are read aside: in order, to the end, and without holding anybody up."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from stepscope.capture.schedule import BackgroundReader
from stepscope.metrics import Scope
from stepscope.records import Entity, Reading
from stepscope.sensors.contract import Sensor

GPU = Entity("GPU-1")


class Counting(Sensor):
    """Joules that grow by one with every reading."""

    name = "counting"
    scope: Scope = "gpu"
    metrics = ("gpu_energy",)
    period = 0.05
    share = 0.05

    def __init__(self) -> None:
        super().__init__()
        self.readings = 0
        self.closed = False

    def read(self) -> list[Reading]:
        self.readings += 1
        return [Reading(GPU, {"gpu_energy": float(self.readings)})]

    def close(self) -> None:
        self.closed = True


class Hanging(Counting):
    """Answers a few times, and then only when it is let go."""

    name = "hanging"

    def __init__(self, answers: int) -> None:
        super().__init__()
        self._answers = answers
        self.hangs, self.let_go = threading.Event(), threading.Event()

    def read(self) -> list[Reading]:
        if self.readings >= self._answers:
            self.hangs.set()
            self.let_go.wait()
        return super().read()


class Broken(Counting):
    name = "broken"

    def read(self) -> list[Reading]:
        raise ValueError("no")


@pytest.fixture
def hanging() -> Iterator[Hanging]:
    sensor = Hanging(answers=3)
    yield sensor
    sensor.let_go.set()


def wait_for_readings(sensor: Counting, count: int) -> None:
    end = time.monotonic() + 20
    while sensor.readings < count:
        assert time.monotonic() < end, "it is not read"
        time.sleep(0.01)


def started(*sensors: Sensor) -> BackgroundReader:
    aside = BackgroundReader("the driver", lambda: sensors, print)
    aside.wait_until_open(20)
    aside.begin(0.05)
    return aside


def test_readings_come_in_order_and_the_last_is_not_missed() -> None:
    sensor = Counting()
    aside = started(sensor)
    wait_for_readings(sensor, 6)
    seen = list(aside.collect())
    before_end = sensor.readings
    assert aside.finish()
    seen += aside.collect()
    times = [taken.t_ns for taken in seen]
    assert times == sorted(times) and len(times) >= 4
    assert sensor.readings > before_end and sensor.closed
    total = sum((w or 0) * (r.values["gpu_energy"] or 0) for t in seen for w, r in t.rows if w)
    assert total == pytest.approx(sensor.readings - 2)  # the first two: warming up, the baseline
    assert aside.remarks() == []


def test_nothing_is_read_before_it_begins() -> None:
    aside = BackgroundReader("the driver", lambda: [Counting()], print)
    aside.wait_until_open(20)
    time.sleep(0.15)
    assert list(aside.collect()) == []
    aside.finish()


def test_a_driver_that_hangs_is_left_behind(hanging: Hanging) -> None:
    aside = started(hanging)
    assert hanging.hangs.wait(20)
    assert not aside.finish()
    assert len(list(aside.collect())) == 2
    assert any("at the end" in remark for remark in aside.remarks())


def test_a_driver_that_never_opens_is_not_waited_for() -> None:
    never = threading.Event()

    def make() -> list[Sensor]:
        never.wait()
        return []

    aside = BackgroundReader("the driver", make, print)
    aside.begin(0.05)
    begun = time.monotonic()
    aside.finish()
    assert time.monotonic() - begun < 1.5, "it waits so long for one that has opened"
    assert not aside.wait_until_open(0)
    assert aside.remarks() == []
    never.set()


def test_one_that_fails_does_not_stop_the_others() -> None:
    sensor = Counting()
    aside = started(Broken(), sensor)
    wait_for_readings(sensor, 4)
    assert aside.finish()
    assert {taken.sensor.name for taken in aside.collect()} == {"counting"}


def test_without_sensors_the_thread_ends() -> None:
    aside = BackgroundReader("the driver", list, print)
    aside.wait_until_open(20)
    aside.join(20)
    assert not aside.is_alive() and aside.finish()
