"""GPUs: as busy as they should be or not, also where they do not tell what their units do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from stepscope.analysis.bottleneck.explain import explain
from stepscope.analysis.run.data import StackLocation
from stepscope.records import CodeLocation, Diagnosis
from synthetic_cases import (
    BACKWARD,
    COPY,
    FORWARD,
    LOADING,
    SYNC,
    Training,
    cores,
    observed,
    on_gpu,
)

COUNTERS = ("gpu_active", "gpu_sm", "gpu_tensor", "gpu_fp32", "gpu_dram")
COMPUTES = {FORWARD: 0.6, BACKWARD: 0.4}


def judged(
    looks: Mapping[StackLocation, float] = COMPUTES,
    device: Any = (0.09, 0.05, 0.0),
    batch: int = 64,
    wait: float = 0.0,
    counters: bool = True,
    main: float = 1.0,
    **gpu: Any,
) -> Diagnosis:
    told = on_gpu(**gpu)
    if not counters:
        told = {metric: value for metric, value in told.items() if metric not in COUNTERS}
    training = Training(looks=looks, device=device, batch=batch, wait=wait)
    return explain(observed(training, series=cores(1.0, main=main), gpu=told))


@pytest.mark.parametrize(("ahead", "confidence"), [(0.0, "medium"), (0.9, "medium")])
def test_without_counters_a_busy_gpu_is_the_limit_but_less_surely(
    ahead: float, confidence: str
) -> None:
    diagnosis = judged(device=(0.09, 0.05, ahead), counters=False, gpu_utilization=0.97)
    assert (diagnosis.first.cause, diagnosis.first.confidence) == ("gpu.compute", confidence)
    assert diagnosis.first.variant == "no_counters"


def test_without_counters_and_without_timed_steps_it_is_a_guess() -> None:
    diagnosis = judged(device=None, counters=False, gpu_utilization=0.97)
    assert (diagnosis.first.cause, diagnosis.first.confidence) == ("gpu.compute", "low")


def test_without_counters_the_wait_for_launches_is_still_seen() -> None:
    diagnosis = judged(counters=False, gpu_utilization=0.3)
    assert diagnosis.first.cause == "launch"


def test_a_gpu_that_tells_nothing_is_not_judged() -> None:
    training = Training(looks=COMPUTES)
    run = observed(training, series=cores(1.0), gpu={"gpu_memory_tree": 10e9})
    assert explain(run).first.cause == "unclear"


def test_a_host_that_is_ahead_makes_it_the_gpus_turn() -> None:
    """Kernels run 80 % of the time, but every step was queued before the device began it."""
    assert judged(device=(0.1, 0.02, 1.0), gpu_active=0.8, gpu_sm=0.75).first.cause == "gpu.compute"
    assert judged(device=(0.1, 0.1, 0.4), gpu_active=0.7).first.cause == "launch"


@settings(max_examples=40)
@given(st.floats(0.02, 0.7), st.floats(0.02, 0.7))
def test_the_idler_the_more_there_is_to_gain_by_launching_faster(one: float, other: float) -> None:
    less, more = sorted((one, other))
    idler, busier = (judged(gpu_active=busy, gpu_sm=busy).first for busy in (less, more))
    assert idler.cause == busier.cause == "launch"
    assert idler.speedup_bound is not None and busier.speedup_bound is not None
    assert idler.speedup_bound >= busier.speedup_bound * (1 - 1e-9)


def test_a_launch_is_a_guess_where_the_thread_does_something_else() -> None:
    diagnosis = judged({LOADING: 0.6, FORWARD: 0.4}, gpu_active=0.3, gpu_sm=0.2)
    assert (diagnosis.first.cause, diagnosis.first.confidence) == ("launch", "low")


@pytest.mark.parametrize(("sm", "times"), [(0.05, 16.0), (0.12, 8.0), (0.2, 4.0), (0.29, 2.0)])
def test_a_small_batch_may_grow_into_the_room_that_there_is(sm: float, times: float) -> None:
    diagnosis = judged(batch=4, gpu_active=0.3, gpu_sm=sm)
    assert (diagnosis.first.cause, diagnosis.first.speedup_bound) == ("batch.small", times)
    (change,) = diagnosis.first.recommendations
    assert (change.setting, change.value) == ("batch_size", 4 * times)


@pytest.mark.parametrize("received", [0.4e9, None])
def test_a_copy_that_moves_little_is_not_what_takes_long(received: float | None) -> None:
    gpu: dict[str, Any] = {"gpu_active": 0.5, "gpu_sm": 0.4, "gpu_pcie_received": received or 0.0}
    causes = [each.cause for each in judged({COPY: 0.4, FORWARD: 0.6}, **gpu).findings]
    assert "transfer" not in causes


def test_the_line_that_reads_results_back_is_told() -> None:
    diagnosis = judged({SYNC: 0.4, FORWARD: 0.6}, gpu_active=0.5, gpu_sm=0.4)
    (change,) = diagnosis.first.recommendations
    assert change.location == CodeLocation(SYNC.where, SYNC.code)


def test_pinned_memory_is_advised_only_where_it_is_not_used() -> None:
    diagnosis = judged({COPY: 0.4, FORWARD: 0.6}, gpu_active=0.5, gpu_pcie_received=5e9)
    change = diagnosis.first.recommendations[0]
    assert (change.setting, change.value) == ("pin", True)
    assert change.location is not None and change.location.where == "train.py:41"


@pytest.mark.parametrize(("others", "ceiling"), [(0.1, 1 / 0.9), (0.29, 1 / 0.71), (0.5, 2.2)])
def test_two_that_always_have_work_take_turns(others: float, ceiling: float) -> None:
    first = judged(gpu_others=others).first
    assert first.cause == "interference.gpu"
    assert first.speedup_bound == pytest.approx(ceiling)
