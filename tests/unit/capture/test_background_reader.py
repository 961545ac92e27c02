"""Sensors that may block are read in a thread: in order, to the end, and independently."""

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
    """An energy counter that grows by one joule with every reading."""

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


class Blocking(Counting):
    """Answers a few times, and then blocks until it is released."""

    name = "blocking"

    def __init__(self, answers: int) -> None:
        super().__init__()
        self._answers = answers
        self.is_blocked, self.released = threading.Event(), threading.Event()

    def read(self) -> list[Reading]:
        if self.readings >= self._answers:
            self.is_blocked.set()
            self.released.wait()
        return super().read()


class Broken(Counting):
    name = "broken"

    def read(self) -> list[Reading]:
        raise ValueError("no")


@pytest.fixture
def blocking() -> Iterator[Blocking]:
    sensor = Blocking(answers=3)
    yield sensor
    sensor.released.set()


def wait_for_readings(sensor: Counting, count: int) -> None:
    end = time.monotonic() + 20
    while sensor.readings < count:
        assert time.monotonic() < end, "the sensor is not read"
        time.sleep(0.01)


def started(*sensors: Sensor) -> BackgroundReader:
    reader = BackgroundReader("the driver", lambda: sensors, print)
    reader.wait_until_open(20)
    reader.begin(0.05)
    return reader


def test_readings_are_ordered_and_include_the_last() -> None:
    sensor = Counting()
    reader = started(sensor)
    wait_for_readings(sensor, 6)
    seen = list(reader.collect())
    before_end = sensor.readings
    assert reader.finish()
    seen += reader.collect()
    times = [taken.t_ns for taken in seen]
    assert times == sorted(times) and len(times) >= 4
    assert sensor.readings > before_end and sensor.closed
    total = sum((w or 0) * (r.values["gpu_energy"] or 0) for t in seen for w, r in t.rows if w)
    assert total == pytest.approx(
        sensor.readings - 2
    )  # without the first two: warm-up and baseline
    assert reader.notes() == []


def test_no_readings_before_begin() -> None:
    reader = BackgroundReader("the driver", lambda: [Counting()], print)
    reader.wait_until_open(20)
    time.sleep(0.15)
    assert list(reader.collect()) == []
    reader.finish()


def test_blocked_driver_is_abandoned(blocking: Blocking) -> None:
    reader = started(blocking)
    assert blocking.is_blocked.wait(20)
    assert not reader.finish()
    assert len(list(reader.collect())) == 2
    assert any("at the end" in note for note in reader.notes())


def test_finish_does_not_wait_for_a_driver_that_never_opens() -> None:
    never = threading.Event()

    def make() -> list[Sensor]:
        never.wait()
        return []

    reader = BackgroundReader("the driver", make, print)
    reader.begin(0.05)
    began = time.monotonic()
    reader.finish()
    assert time.monotonic() - began < 1.5, "only an opened driver is waited for that long"
    assert not reader.wait_until_open(0)
    assert reader.notes() == []
    never.set()


def test_failing_sensor_does_not_stop_other_sensors() -> None:
    sensor = Counting()
    reader = started(Broken(), sensor)
    wait_for_readings(sensor, 4)
    assert reader.finish()
    assert {taken.sensor.name for taken in reader.collect()} == {"counting"}


def test_thread_ends_without_sensors() -> None:
    reader = BackgroundReader("the driver", list, print)
    reader.wait_until_open(20)
    reader.join(20)
    assert not reader.is_alive() and reader.finish()
