"""When a training ends, and that all ranks end it with the same step."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepscope.workloads.frameworks.torch import clock as duration
from stepscope.workloads.frameworks.torch.clock import Duration
from stepscope.workloads.spec import LEAST_STEPS, Workload


def taken(last: Duration, seconds_of: Callable[[int], float]) -> tuple[int, float]:
    """Steps until the end, and the time they took, on a clock of our own."""
    clock = [0.0]
    duration.time = type("Clock", (), {"monotonic": staticmethod(lambda: clock[0])})  # type: ignore
    steps = 0
    while last.goes_on():
        clock[0] += seconds_of(steps)
        steps += 1
    return steps, clock[0]


@pytest.fixture(autouse=True)
def _own_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(duration, "time", duration.time)


def test_steps_and_epochs() -> None:
    assert taken(Duration(Workload("cnn", steps=7), 100, int), lambda _: 1)[0] == 7
    assert taken(Duration(Workload("cnn", epochs=3), 100, int), lambda _: 1)[0] == 300


@pytest.mark.parametrize("step", [1e-5, 0.01, 0.3, 1.0])
def test_seconds(step: float) -> None:
    _, seconds = taken(Duration(Workload("cnn", seconds=12.0), None, int), lambda _: step)
    assert 0.9 * 12 <= seconds <= max(1.15 * 12, LEAST_STEPS * step)


def test_slow_steps_are_few_but_enough_to_judge() -> None:
    steps, _ = taken(Duration(Workload("cnn", seconds=5.0), None, int), lambda _: 60.0)
    assert steps == LEAST_STEPS


def test_slowing_down_does_not_make_it_endless() -> None:
    """Another process comes, and steps take ten times as long."""
    _, seconds = taken(
        Duration(Workload("cnn", seconds=20.0), None, int), lambda n: 0.1 if n > 1500 else 0.01
    )
    assert seconds < 35


def test_a_slow_first_step_does_not_end_it_early() -> None:
    steps, seconds = taken(
        Duration(Workload("cnn", seconds=20.0), None, int), lambda n: 0.01 if n else 300.0
    )
    assert seconds > 318 and steps > 1800


@given(st.floats(1e-4, 2.0), st.floats(1e-4, 2.0), st.floats(1.0, 60.0))
def test_ranks_of_different_speed_end_together(first: float, second: float, seconds: float) -> None:
    """The first says it, the others only hear it."""
    said: list[int] = []
    workload = Workload("cnn", seconds=seconds)
    leader = taken(Duration(workload, None, lambda n: said.append(n) or n), lambda _: first)
    heard = iter(said)
    follower = taken(Duration(workload, None, lambda _: next(heard)), lambda _: second)
    assert leader[0] == follower[0]
    assert next(heard, None) is None, "and both asked as often"
