"""Each planted cause is found first, with the speed-up bound computed by hand, and is not found
just below its threshold."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from stepscope.analysis.bottleneck.case import Case
from stepscope.analysis.bottleneck.causes import CAUSES
from stepscope.analysis.bottleneck.explain import METRICS, explain
from stepscope.analysis.bottleneck.thresholds import limit
from stepscope.analysis.run.data import Floats, RunData
from stepscope.analysis.run.gpus import RecordedGpu
from stepscope.records import Diagnosis, Finding
from stepscope.report.bottleneck.view import diagnosis_view
from stepscope.report.kit.format import MISSING
from synthetic_cases import (
    BACKWARD,
    COMPUTES,
    COPY,
    FORWARD,
    HALF_IDLE,
    LOGGING,
    OTHER,
    SAVE,
    SLEEP,
    SYNC,
    Training,
    cores,
    growing,
    on_cpu,
    on_device,
    on_gpu,
    slowing,
    two_ranks,
    waits_for,
    without_steps,
)

WAITS = 0.04
"""Data wait in a step of 0.1 s: the speed-up bound is 1 / 0.6."""


@dataclass(frozen=True)
class Planted:
    """A run with one bottleneck, and one in which it is just below the threshold."""

    cause: str
    run: RunData
    below: RunData
    bound: float | None
    confidence: str = "high"
    first: bool = True


def below(key: str, times: float = 0.99) -> float:
    """Return a value slightly below a threshold."""
    return times * limit(key)


def too_few_cores(wait: float, throttled: float = 0.0) -> RunData:
    return on_cpu(
        more={**cores(1.95, wait=wait), ("cgroup_throttled", "cgroup"): throttled},
        allowed=2.0,
        cpus=8,
    )


def oversubscribed(threads: float) -> RunData:
    """Return a run with this many runnable threads per core; a batch takes 0.051 s of CPU time."""
    series = {**cores(3.9, main=0.5, wait=4 * threads - 3.9), ("processes", "worker"): 4.0}
    return on_cpu(Training(samples=(0.3, 0.05, 0.2)), series)


def clocks(seconds: Floats) -> Floats:
    """Return 1800 MHz for a moment, then 1500 MHz."""
    return np.where(seconds < 0.15, 1800.0, 1500.0)


def leaking(rate: float) -> RunData:
    free = growing(-rate, 10e9)
    return on_cpu(more={("memory", "tree"): growing(rate), ("host_available", "host"): free})


def starting(startup: float) -> RunData:
    """Return a run of ten epochs, nine of which start in the analyzed window."""
    return waits_for(0.02, steps=399, epoch=40, startup=startup)


def full_shm(used: float) -> RunData:
    return on_cpu(more={("shm_used", "shm"): used * 8e9, ("shm_size", "shm"): 8e9})


COPIES: dict[str, Any] = {**HALF_IDLE, "gpu_pcie_received": 5e9}
PREPARES = {"samples": (0.35, 0.34, 0.0)}
READS = (0.4, 0.05, 0.0)
ALLOCATOR_METRICS = {"gpu_allocated", "gpu_reserved", "gpu_alloc_retries"}
"""Reported by events instead of samples: always loaded."""

PLANTED = (
    Planted(
        "input.workers",
        waits_for(WAITS, workers=1, samples=(0.1, 0.095, 0.0)),
        waits_for(0.1 * below("data_wait"), workers=1, samples=(0.1, 0.095, 0.0)),
        1 / 0.6,
    ),
    Planted(
        "input.preparation",
        waits_for(WAITS, cores(3.9, main=0.5), **PREPARES),
        waits_for(0.1 * below("data_wait"), cores(3.9, main=0.5), **PREPARES),
        1 / 0.6,
    ),
    Planted(
        "input.fetch",
        waits_for(WAITS, {**cores(1.0, main=0.8), ("read", "tree"): 50e6}, samples=READS),
        waits_for(WAITS, cores(1.0, main=0.8), samples=(0.4, 0.21, 0.0)),
        1 / 0.6,
    ),
    Planted(
        "input.collation",
        waits_for(WAITS, samples=(0.05, 0.05, 0.0), collation=(0.3, 0.3, 0.0)),
        waits_for(WAITS, samples=(0.18, 0.18, 0.0), collation=(0.17, 0.17, 0.0)),
        1 / 0.6,
    ),
    Planted(
        "input.ipc",
        waits_for(WAITS, samples=(0.19, 0.18, 0.0)),
        waits_for(WAITS, samples=(0.2, 0.19, 0.0)),
        1 / 0.6,
        "medium",
    ),
    Planted(
        "input.worker_startup", starting(0.95), starting(0.85), (39.9 + 9 * 0.95) / 39.9, "medium"
    ),
    Planted(
        "cpu.quota",
        too_few_cores(1.0, 0.5),
        too_few_cores(1.0, below("quota_throttled")),
        2.95 / 1.95,
    ),
    Planted("cpu.cores", too_few_cores(1.0), too_few_cores(0.19), 2.95 / 1.95),
    Planted(
        "cpu.threads",
        oversubscribed(below("oversubscribed", 1.2)),
        oversubscribed(below("oversubscribed")),
        0.85 * 4 / (0.51 + 0.5),
    ),
    Planted(
        "cpu.serial",
        on_cpu(Training(settings={"threads": 1}), cores(1.0), allowed=8.0, cpus=8),
        on_cpu(Training(settings={"threads": 1}), cores(7.25), allowed=8.0, cpus=8),
        8.0,
        "low",
    ),
    Planted(
        "gpu.transfer",
        on_device({COPY: 0.4, FORWARD: 0.6}, **COPIES),
        on_device({COPY: 0.19, FORWARD: 0.81}, **COPIES),
        1 / 0.6,
    ),
    Planted(
        "gpu.sync",
        on_device({SYNC: 0.4, FORWARD: 0.6}, **HALF_IDLE),
        on_device({SYNC: 0.19, FORWARD: 0.81}, **HALF_IDLE),
        1 / 0.6,
    ),
    Planted(
        "gpu.launch",
        on_device(gpu_active=0.3, gpu_sm=0.25),
        on_device(gpu_active=0.77, gpu_sm=0.7),
        1 / (0.1 + 0.3 - 0.05),
    ),
    Planted(
        "loop.logging",
        on_cpu(Training(stacks={LOGGING: 0.3, OTHER: 0.7})),
        on_cpu(Training(stacks={LOGGING: below("logging_share"), OTHER: 0.9})),
        1 / 0.7,
    ),
    Planted(
        "batch.small",
        on_cpu(Training(step=0.01, steps=400, batch=1)),
        on_cpu(Training(step=0.01, steps=400, batch=3)),
        limit("batch_growth_cpu"),
    ),
    Planted(
        "gpu.precision",
        on_device(gpu_fp32=0.6, gpu_tensor=0.01),
        on_device(gpu_fp32=below("fp32_busy"), gpu_tensor=0.01),
        1 / (1 - 0.6 / 0.78 * 6 / 7),
    ),
    Planted("gpu.underutilized", on_device(gpu_sm=0.19), on_device(gpu_sm=0.48), 5.0, "medium"),
    Planted(
        "gpu.compute",
        on_device(),
        on_device(gpu_active=below("gpu_busy"), ahead=below("host_ahead")),
        None,
    ),
    Planted(
        "gpu.bandwidth", on_device(gpu_dram=0.6), on_device(gpu_dram=below("bandwidth_bound")), None
    ),
    Planted("cpu.compute", on_cpu(), on_cpu(more=cores(4 * below("compute_share"))), None),
    Planted(
        "ranks.straggler",
        two_ranks(COMPUTES, {SLEEP: 0.3, FORWARD: 0.6, BACKWARD: 0.1}),
        two_ranks(COMPUTES, {SLEEP: 0.09, FORWARD: 0.6, BACKWARD: 0.31}),
        1 / 0.7,
    ),
    Planted(
        "ranks.communication",
        two_ranks(*[{FORWARD: 0.2, BACKWARD: 0.75, OTHER: 0.05}] * 2),
        two_ranks(*[{FORWARD: 0.2, BACKWARD: 0.54, OTHER: 0.26}] * 2),
        1 / 0.65,
    ),
    Planted(
        "loop.checkpoint",
        on_cpu(Training(stacks={SAVE: 0.2, FORWARD: 0.8})),
        on_cpu(Training(stacks={SAVE: below("loop_share"), FORWARD: 0.91})),
        1 / 0.8,
    ),
    Planted(
        "loop.evaluation",
        on_cpu(Training(evaluates=(40, 2.0))),
        on_cpu(Training(evaluates=(40, 0.4))),
        30 / 20,
    ),
    Planted(
        "loop.sleep",
        on_cpu(Training(stacks={SLEEP: 0.3, FORWARD: 0.7})),
        on_cpu(Training(stacks={SLEEP: below("loop_share"), FORWARD: 0.91})),
        1 / 0.7,
    ),
    Planted(
        "memory.gpu",
        on_device(gpu_alloc_retries=np.floor, **HALF_IDLE),
        on_device(gpu_alloc_retries=lambda s: np.floor(s * 0.4), **HALF_IDLE),
        1 / 0.5,
    ),
    Planted(
        "memory.host",
        on_cpu(more={("pressure_memory", "host"): 0.3}),
        on_cpu(more={("pressure_memory", "host"): below("loop_share")}),
        1 / 0.7,
    ),
    Planted(
        "memory.shm",
        full_shm(0.96),
        full_shm(below("memory_full")),
        1.0,
        "medium",
        first=False,
    ),
    Planted("leak.host", leaking(10e6), leaking(2e6), 1.0),
    Planted(
        "leak.gpu",
        on_device(gpu_allocated=growing(10e6)),
        on_device(gpu_allocated=growing(2e6)),
        1.0,
    ),
    Planted("loop.slowdown", slowing(2.0), slowing(0.12), 1.525 / 0.2425),
    Planted(
        "throttle.power",
        on_device(gpu_throttled_power=0.5, gpu_sm_clock=clocks),
        on_device(gpu_throttled_power=below("clock_throttled"), gpu_sm_clock=clocks),
        1.2,
        "medium",
        first=False,
    ),
    Planted(
        "throttle.thermal",
        on_device(gpu_throttled_thermal=0.5, gpu_sm_clock=clocks),
        on_device(gpu_throttled_thermal=below("clock_throttled"), gpu_sm_clock=clocks),
        1.2,
    ),
    Planted(
        "interference.cpu",
        on_cpu(more=cores(1.5, wait=1.5, host=3.5)),
        on_cpu(more=cores(1.5, wait=1.5, host=1.74)),
        2.0,
    ),
    Planted(
        "interference.gpu",
        on_device(gpu_other_processes=0.2),
        on_device(gpu_other_processes=below("other_gpu_use")),
        1 / 0.8,
    ),
    Planted(
        "io.wait",
        without_steps(more={("pressure_io", "host"): 0.3}),
        without_steps(more={("pressure_io", "host"): below("data_wait_high")}),
        1 / 0.7,
        "low",
    ),
    Planted(
        "gpu.idle",
        without_steps(on_gpu(**HALF_IDLE)),
        without_steps(on_gpu(gpu_active=0.86)),
        2.0,
        "low",
    ),
    Planted(
        "too_short",
        on_cpu(Training(steps=19, step=0.2)),
        on_cpu(Training(steps=20, step=0.2)),
        None,
    ),
    Planted("unknown", on_cpu(more=cores(4 * below("compute_share"))), on_cpu(), None, "low"),
)


def finding_of(diagnosis: Diagnosis, cause: str) -> Finding | None:
    return next((found for found in diagnosis.findings if found.cause == cause), None)


@pytest.mark.parametrize("planted", PLANTED, ids=lambda planted: planted.cause)
def test_planted_cause_is_found(planted: Planted) -> None:
    diagnosis = explain(planted.run)
    found = finding_of(diagnosis, planted.cause)
    assert found is not None, diagnosis.findings
    assert found is diagnosis.first or not planted.first, diagnosis.first
    assert found.confidence == planted.confidence
    if planted.bound is None:
        assert found.speedup_bound is None
    else:
        assert found.speedup_bound == pytest.approx(planted.bound, rel=0.02)


@pytest.mark.parametrize("planted", PLANTED, ids=lambda planted: planted.cause)
def test_cause_below_the_threshold_is_not_found(planted: Planted) -> None:
    diagnosis = explain(planted.below)
    assert finding_of(diagnosis, planted.cause) is None, diagnosis.findings
    assert diagnosis.findings


@pytest.mark.parametrize("planted", PLANTED, ids=lambda planted: planted.cause)
def test_no_other_finding_has_high_confidence(planted: Planted) -> None:
    others = [found for found in explain(planted.run).findings if found.cause != planted.cause]
    assert [
        found.cause for found in others if found.confidence == "high" and not found.healthy
    ] == []


def test_waiting_threads_are_a_count() -> None:
    (row,) = (
        row
        for row in diagnosis_view(explain(too_few_cores(1.0))).first.evidence
        if row.name == "Threads waiting for a core"
    )
    assert (row.unit, row.cells[1]) == ("count", "1.0")


def test_every_cause_is_planted() -> None:
    assert {planted.cause for planted in PLANTED} == set(CAUSES)


def test_loaded_metrics_are_those_that_causes_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """`stepscope explain` only loads METRICS: any other metric would be empty."""
    read: set[str] = set()

    def record(owner: type, name: str) -> None:
        method = getattr(owner, name)

        def recorded(self: Any, *names: str) -> Any:
            read.update(names if name == "highest_mean" else names[:1])
            return method(self, *names)

        monkeypatch.setattr(owner, name, recorded)

    record(RunData, "of")
    record(RecordedGpu, "of")
    record(Case, "highest_mean")
    for planted in PLANTED:
        for run in (planted.run, planted.below):
            explain(replace(run))  # a copy, because of cached properties
    assert read - ALLOCATOR_METRICS == METRICS


@pytest.mark.parametrize("planted", PLANTED, ids=lambda planted: planted.cause)
def test_loaded_metrics_are_sufficient(planted: Planted) -> None:
    loaded = METRICS | ALLOCATOR_METRICS
    series = {key: values for key, values in planted.run.series.items() if key[0] in loaded}
    assert explain(replace(planted.run, series=series)) == explain(planted.run)


@pytest.mark.parametrize("planted", PLANTED, ids=lambda planted: planted.cause)
def test_texts_are_complete(planted: Planted) -> None:
    diagnosis = explain(planted.run)
    assert diagnosis.first.recommendations and diagnosis.first.evidence
    for for_trial in (False, True):
        view = diagnosis_view(diagnosis, for_trial=for_trial)
        assert view.first.summary and view.first.recommendations[0].change
        for finding in view.findings:
            texts = [finding.summary, finding.reason, *(row.name for row in finding.evidence)]
            texts += [f"{each.change} {each.reason}" for each in finding.recommendations]
            assert not [text for text in texts if MISSING in text]
