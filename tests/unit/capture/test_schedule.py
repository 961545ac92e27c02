"""The cost of a sensor determines how often it is read."""

from __future__ import annotations

import time

from stepscope.capture.schedule import Rates, ScheduledSensor
from stepscope.metrics import Scope
from stepscope.records import Entity, Reading
from stepscope.sensors.contract import Sensor


class Burning(Sensor):
    """Uses a configurable amount of CPU time."""

    name = "burning"
    scope: Scope = "host"
    metrics = ("host_memory",)
    period = 0.3
    share = 0.002

    def __init__(self) -> None:
        super().__init__()
        self.cost_s = 0.0003
        self.fails = False

    def read(self) -> list[Reading]:
        end = time.thread_time() + self.cost_s
        while time.thread_time() < end:
            pass
        if self.fails:
            raise RuntimeError("broken")
        return [Reading(Entity("host"), {"host_memory": 1.0})]


def scheduled(sensor: Sensor, problems: list[str] | None = None) -> ScheduledSensor:
    report_problem = (problems if problems is not None else []).append
    return ScheduledSensor(sensor, Rates(sensor.metrics), 0.1, report_problem)


def delay_s(slot: ScheduledSensor) -> float:
    """The time between the last reading and the next one."""
    return (slot.due_ns - slot.read_ns) / 1e9


def test_inexpensive_sensor_is_read_at_its_period() -> None:
    slot = scheduled(Burning())
    for _ in range(5):
        slot.take()
    assert 0.2 < delay_s(slot) < 0.31
    assert slot.slowest_period_s == 0


def test_single_expensive_reading_hardly_delays_the_next() -> None:
    sensor = Burning()
    slot = scheduled(sensor)
    for _ in range(5):
        slot.take()
    sensor.cost_s = (
        0.1  # a hundred times its share: as an average, the delay would be fifty seconds
    )
    slot.take()
    assert delay_s(slot) < 1.0
    sensor.cost_s = 0.0003
    for _ in range(10):
        slot.take()
    assert delay_s(slot) < 0.4


def test_expensive_sensor_is_read_less_often() -> None:
    sensor = Burning()
    slot = scheduled(sensor)
    slot.take()
    sensor.cost_s = 0.02
    for _ in range(12):
        slot.take()
    assert delay_s(slot) > 5
    assert slot.slowest_period_s > 5


def test_failing_sensor_is_disabled_and_reported_once() -> None:
    problems: list[str] = []
    sensor = Burning()
    slot = scheduled(sensor, problems)
    sensor.fails = True
    for _ in range(8):
        if slot.is_due(time.monotonic_ns() + 2 * 10**9):
            assert slot.take() is None
    assert slot.failed and len(problems) == 1 and "burning" in problems[0]
