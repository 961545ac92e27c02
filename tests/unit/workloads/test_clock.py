"""The duration of a training, which all ranks end at the same step."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepscope.workloads.frameworks.torch import clock as clock_module
from stepscope.workloads.frameworks.torch.clock import Duration
from stepscope.workloads.spec import LEAST_STEPS, Workload


def run(duration: Duration, seconds_of: Callable[[int], float]) -> tuple[int, float]:
    """Number of steps and their duration on a fake clock."""
    clock = [0.0]
    clock_module.time = type("Clock", (), {"monotonic": staticmethod(lambda: clock[0])})  # type: ignore
    steps = 0
    while duration.take_step():
        clock[0] += seconds_of(steps)
        steps += 1
    return steps, clock[0]


@pytest.fixture(autouse=True)
def _restore_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock_module, "time", clock_module.time)


def test_steps_and_epochs() -> None:
    assert run(Duration(Workload("cnn", steps=7), 100, int), lambda _: 1)[0] == 7
    assert run(Duration(Workload("cnn", epochs=3), 100, int), lambda _: 1)[0] == 300


@pytest.mark.parametrize("step", [1e-5, 0.01, 0.3, 1.0])
def test_seconds(step: float) -> None:
    _, seconds = run(Duration(Workload("cnn", seconds=12.0), None, int), lambda _: step)
    assert 0.9 * 12 <= seconds <= max(1.15 * 12, LEAST_STEPS * step)


def test_slow_steps_reach_the_minimum_number() -> None:
    steps, _ = run(Duration(Workload("cnn", seconds=5.0), None, int), lambda _: 60.0)
    assert steps == LEAST_STEPS


def test_steps_that_slow_down_do_not_extend_the_duration_much() -> None:
    """Another process starts, and steps take ten times as long."""
    _, seconds = run(
        Duration(Workload("cnn", seconds=20.0), None, int), lambda n: 0.1 if n > 1500 else 0.01
    )
    assert seconds < 35


def test_a_slow_first_step_does_not_count() -> None:
    steps, seconds = run(
        Duration(Workload("cnn", seconds=20.0), None, int), lambda n: 0.01 if n else 300.0
    )
    assert seconds > 318 and steps > 1800


@given(st.floats(1e-4, 2.0), st.floats(1e-4, 2.0), st.floats(1.0, 60.0))
def test_ranks_of_different_speed_take_the_same_number_of_steps(
    first: float, second: float, seconds: float
) -> None:
    """Rank 0 broadcasts the last step, the other ranks receive it."""
    sent: list[int] = []
    workload = Workload("cnn", seconds=seconds)
    leader = run(Duration(workload, None, lambda n: sent.append(n) or n), lambda _: first)
    received = iter(sent)
    follower = run(Duration(workload, None, lambda _: next(received)), lambda _: second)
    assert leader[0] == follower[0]
    assert next(received, None) is None, "both call broadcast equally often"
