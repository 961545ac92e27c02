"""GPU causes, with and without the counters of the GPU's units."""

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


def diagnose(
    stacks: Mapping[StackLocation, float] = COMPUTES,
    device: Any = (0.09, 0.05, 0.0),
    batch: int = 64,
    wait: float = 0.0,
    counters: bool = True,
    main: float = 1.0,
    **gpu: Any,
) -> Diagnosis:
    metrics = on_gpu(**gpu)
    if not counters:
        metrics = {metric: value for metric, value in metrics.items() if metric not in COUNTERS}
    training = Training(stacks=stacks, device=device, batch=batch, wait=wait)
    return explain(observed(training, series=cores(1.0, main=main), gpu=metrics))


@pytest.mark.parametrize(("ahead", "confidence"), [(0.0, "medium"), (0.9, "medium")])
def test_busy_gpu_without_counters_has_medium_confidence(ahead: float, confidence: str) -> None:
    diagnosis = diagnose(device=(0.09, 0.05, ahead), counters=False, gpu_utilization=0.97)
    assert (diagnosis.first.cause, diagnosis.first.confidence) == ("gpu.compute", confidence)
    assert diagnosis.first.variant == "no_counters"


def test_busy_gpu_without_counters_and_timed_steps_has_low_confidence() -> None:
    diagnosis = diagnose(device=None, counters=False, gpu_utilization=0.97)
    assert (diagnosis.first.cause, diagnosis.first.confidence) == ("gpu.compute", "low")


def test_launch_overhead_is_found_without_counters() -> None:
    diagnosis = diagnose(counters=False, gpu_utilization=0.3)
    assert diagnosis.first.cause == "gpu.launch"


def test_gpu_without_any_metrics_is_unknown() -> None:
    training = Training(stacks=COMPUTES)
    run = observed(training, series=cores(1.0), gpu={"gpu_memory_run": 10e9})
    assert explain(run).first.cause == "unknown"


def test_gpu_is_the_limit_if_the_host_queues_ahead() -> None:
    """Kernels run 80% of the time, but every step is queued before the device starts it."""
    assert (
        diagnose(device=(0.1, 0.02, 1.0), gpu_active=0.8, gpu_sm=0.75).first.cause == "gpu.compute"
    )
    assert diagnose(device=(0.1, 0.1, 0.4), gpu_active=0.7).first.cause == "gpu.launch"


@settings(max_examples=40)
@given(st.floats(0.02, 0.7), st.floats(0.02, 0.7))
def test_launch_bound_grows_with_idle_time(one: float, other: float) -> None:
    less, more = sorted((one, other))
    idle, busy = (diagnose(gpu_active=share, gpu_sm=share).first for share in (less, more))
    assert idle.cause == busy.cause == "gpu.launch"
    assert idle.speedup_bound is not None and busy.speedup_bound is not None
    assert idle.speedup_bound >= busy.speedup_bound * (1 - 1e-9)


def test_launch_overhead_has_low_confidence_if_the_thread_does_other_work() -> None:
    diagnosis = diagnose({LOADING: 0.6, FORWARD: 0.4}, gpu_active=0.3, gpu_sm=0.2)
    assert (diagnosis.first.cause, diagnosis.first.confidence) == ("gpu.launch", "low")


@pytest.mark.parametrize(("sm", "times"), [(0.05, 16.0), (0.12, 8.0), (0.2, 4.0), (0.29, 2.0)])
def test_larger_batch_fills_the_idle_multiprocessors(sm: float, times: float) -> None:
    diagnosis = diagnose(batch=4, gpu_active=0.3, gpu_sm=sm)
    assert (diagnosis.first.cause, diagnosis.first.speedup_bound) == ("batch.small", times)
    (change,) = diagnosis.first.recommendations
    assert (change.setting, change.value) == ("batch_size", 4 * times)


@pytest.mark.parametrize("received", [0.4e9, None])
def test_small_copies_are_not_a_bottleneck(received: float | None) -> None:
    gpu: dict[str, Any] = {"gpu_active": 0.5, "gpu_sm": 0.4, "gpu_pcie_received": received or 0.0}
    causes = [each.cause for each in diagnose({COPY: 0.4, FORWARD: 0.6}, **gpu).findings]
    assert "gpu.transfer" not in causes


def test_sync_finding_has_the_line_of_code() -> None:
    diagnosis = diagnose({SYNC: 0.4, FORWARD: 0.6}, gpu_active=0.5, gpu_sm=0.4)
    (change,) = diagnosis.first.recommendations
    assert change.location == CodeLocation(SYNC.where, SYNC.code)


def test_pinned_memory_is_recommended_for_unpinned_copies() -> None:
    diagnosis = diagnose({COPY: 0.4, FORWARD: 0.6}, gpu_active=0.5, gpu_pcie_received=5e9)
    change = diagnosis.first.recommendations[0]
    assert (change.setting, change.value) == ("pin", True)
    assert change.location is not None and change.location.where == "train.py:41"


@pytest.mark.parametrize(("share", "bound"), [(0.1, 1 / 0.9), (0.29, 1 / 0.71), (0.5, 2.2)])
def test_two_busy_processes_share_the_gpu(share: float, bound: float) -> None:
    first = diagnose(gpu_other_processes=share).first
    assert first.cause == "interference.gpu"
    assert first.speedup_bound == pytest.approx(bound)
