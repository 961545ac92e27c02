"""What a sensor costs decides how often it is read."""

from __future__ import annotations

import time

from stepscope.capture.schedule import Rates, ScheduledSensor
from stepscope.metrics import Scope
from stepscope.records import Entity, Reading
from stepscope.sensors.contract import Sensor


class Burning(Sensor):
    """Costs as much CPU time as it is told to."""

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


def slot_of(sensor: Sensor, told: list[str] | None = None) -> ScheduledSensor:
    trouble = (told if told is not None else []).append
    return ScheduledSensor(sensor, Rates(sensor.metrics), 0.1, trouble)


def put_off_s(slot: ScheduledSensor) -> float:
    """How long it is left alone after its last reading."""
    return (slot.due_ns - slot.read_ns) / 1e9


def test_what_is_cheap_is_read_at_its_period() -> None:
    slot = slot_of(Burning())
    for _ in range(5):
        slot.take()
    assert 0.2 < put_off_s(slot) < 0.31
    assert slot.slowest_period_s == 0


def test_one_dear_reading_does_not_put_off_the_next_for_long() -> None:
    sensor = Burning()
    slot = slot_of(sensor)
    for _ in range(5):
        slot.take()
    sensor.cost_s = 0.1  # a hundred times its share: fifty seconds, if it were the rule
    slot.take()
    assert put_off_s(slot) < 1.0
    sensor.cost_s = 0.0003
    for _ in range(10):
        slot.take()
    assert put_off_s(slot) < 0.4


def test_what_is_dear_as_a_rule_is_read_less_and_less_often() -> None:
    sensor = Burning()
    slot = slot_of(sensor)
    slot.take()
    sensor.cost_s = 0.02
    for _ in range(12):
        slot.take()
    assert put_off_s(slot) > 5
    assert slot.slowest_period_s > 5


def test_one_that_keeps_failing_is_switched_off_and_told_once() -> None:
    told: list[str] = []
    sensor = Burning()
    slot = slot_of(sensor, told)
    sensor.fails = True
    for _ in range(8):
        if slot.is_due(time.monotonic_ns() + 2 * 10**9):
            assert slot.take() is None
    assert slot.failed and len(told) == 1 and "burning" in told[0]
