"""Each cause is named first where it was planted, with the ceiling that a person would work out,
and not where it is just too small."""

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
"""Of a step of 0.1 s: without it, it would be 1/0.6 times as fast."""


@dataclass(frozen=True)
class Planted:
    """A run with one thing wrong, and one in which it is just too small to be named."""

    cause: str
    run: RunData
    nearly: RunData
    ceiling: float | None
    confidence: str = "high"
    first: bool = True


def below(key: str, times: float = 0.99) -> float:
    """A threshold, and a little less."""
    return times * limit(key)


def too_few_cores(wait: float, throttled: float = 0.0) -> RunData:
    return on_cpu(
        more={**cores(1.95, wait=wait), ("cgroup_throttled", "cgroup"): throttled},
        allowed=2.0,
        cpus=8,
    )


def fighting(crowd: float) -> RunData:
    """Of so many threads per core that want to run; 0.051 s of CPU prepare a batch."""
    series = {**cores(3.9, main=0.5, wait=4 * crowd - 3.9), ("processes", "worker"): 4.0}
    return on_cpu(Training(samples=(0.3, 0.05, 0.2)), series)


def clocks(seconds: Floats) -> Floats:
    """1800 MHz for a moment, then 1500."""
    return np.where(seconds < 0.15, 1800.0, 1500.0)


def leaking(rate: float) -> RunData:
    left = growing(-rate, 10e9)
    return on_cpu(more={("memory", "tree"): growing(rate), ("host_available", "host"): left})


def starting(startup: float) -> RunData:
    """Ten epochs, nine of which begin in the stretch that is judged."""
    return waits_for(0.02, steps=399, epoch=40, startup=startup)


def edge_of_shm(used: float) -> RunData:
    return on_cpu(more={("shm_used", "shm"): used * 8e9, ("shm_size", "shm"): 8e9})


COPIES: dict[str, Any] = {**HALF_IDLE, "gpu_pcie_received": 5e9}
PREPARES = {"samples": (0.35, 0.34, 0.0)}
READS = (0.4, 0.05, 0.0)
ALLOCATOR_METRICS = {"gpu_allocated", "gpu_reserved", "gpu_alloc_retries"}
"""Told by events, not sampled: they are always loaded."""

PLANTED = (
    Planted(
        "input.workers",
        waits_for(WAITS, workers=1, samples=(0.1, 0.095, 0.0)),
        waits_for(0.1 * below("input_wait"), workers=1, samples=(0.1, 0.095, 0.0)),
        1 / 0.6,
    ),
    Planted(
        "input.preparation",
        waits_for(WAITS, cores(3.9, main=0.5), **PREPARES),
        waits_for(0.1 * below("input_wait"), cores(3.9, main=0.5), **PREPARES),
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
        "input.handover",
        waits_for(WAITS, samples=(0.19, 0.18, 0.0)),
        waits_for(WAITS, samples=(0.2, 0.19, 0.0)),
        1 / 0.6,
        "medium",
    ),
    Planted("input.startup", starting(0.95), starting(0.85), (39.9 + 9 * 0.95) / 39.9, "medium"),
    Planted(
        "cpu.quota", too_few_cores(1.0, 0.5), too_few_cores(1.0, below("throttled")), 2.95 / 1.95
    ),
    Planted("cpu.cores", too_few_cores(1.0), too_few_cores(0.19), 2.95 / 1.95),
    Planted(
        "cpu.threads",
        fighting(below("oversubscribed", 1.2)),
        fighting(below("oversubscribed")),
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
        "transfer",
        on_device({COPY: 0.4, FORWARD: 0.6}, **COPIES),
        on_device({COPY: 0.19, FORWARD: 0.81}, **COPIES),
        1 / 0.6,
    ),
    Planted(
        "sync",
        on_device({SYNC: 0.4, FORWARD: 0.6}, **HALF_IDLE),
        on_device({SYNC: 0.19, FORWARD: 0.81}, **HALF_IDLE),
        1 / 0.6,
    ),
    Planted(
        "launch",
        on_device(gpu_active=0.3, gpu_sm=0.25),
        on_device(gpu_active=0.77, gpu_sm=0.7),
        1 / (0.1 + 0.3 - 0.05),
    ),
    Planted(
        "sync.logging",
        on_cpu(Training(looks={LOGGING: 0.3, OTHER: 0.7})),
        on_cpu(Training(looks={LOGGING: below("logging_share"), OTHER: 0.9})),
        1 / 0.7,
    ),
    Planted(
        "batch.small",
        on_cpu(Training(step=0.01, steps=400, batch=1)),
        on_cpu(Training(step=0.01, steps=400, batch=3)),
        limit("safe_growth_cpu"),
    ),
    Planted(
        "gpu.precision",
        on_device(gpu_fp32=0.6, gpu_tensor=0.01),
        on_device(gpu_fp32=below("fp32_busy"), gpu_tensor=0.01),
        1 / (1 - 0.6 / 0.78 * 6 / 7),
    ),
    Planted("gpu.underfilled", on_device(gpu_sm=0.19), on_device(gpu_sm=0.48), 5.0, "medium"),
    Planted(
        "gpu.compute",
        on_device(),
        on_device(gpu_active=below("gpu_busy"), ahead=below("host_ahead")),
        None,
    ),
    Planted(
        "gpu.bandwidth", on_device(gpu_dram=0.6), on_device(gpu_dram=below("dram_bound")), None
    ),
    Planted("cpu.compute", on_cpu(), on_cpu(more=cores(4 * below("computing"))), None),
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
        "outside.checkpoint",
        on_cpu(Training(looks={SAVE: 0.2, FORWARD: 0.8})),
        on_cpu(Training(looks={SAVE: below("outside_share"), FORWARD: 0.91})),
        1 / 0.8,
    ),
    Planted(
        "outside.evaluation",
        on_cpu(Training(evaluates=(40, 2.0))),
        on_cpu(Training(evaluates=(40, 0.4))),
        30 / 20,
    ),
    Planted(
        "outside.other",
        on_cpu(Training(looks={SLEEP: 0.3, FORWARD: 0.7})),
        on_cpu(Training(looks={SLEEP: below("outside_share"), FORWARD: 0.91})),
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
        on_cpu(more={("pressure_memory", "host"): below("outside_share")}),
        1 / 0.7,
    ),
    Planted(
        "memory.shm",
        edge_of_shm(0.96),
        edge_of_shm(below("memory_full")),
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
    Planted("drift.steps", slowing(2.0), slowing(0.12), 1.525 / 0.2425),
    Planted(
        "throttle.power",
        on_device(gpu_slowed_power=0.5, gpu_sm_clock=clocks),
        on_device(gpu_slowed_power=below("slowed"), gpu_sm_clock=clocks),
        1.2,
        "medium",
        first=False,
    ),
    Planted(
        "throttle.heat",
        on_device(gpu_slowed_heat=0.5, gpu_sm_clock=clocks),
        on_device(gpu_slowed_heat=below("slowed"), gpu_sm_clock=clocks),
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
        on_device(gpu_others=0.2),
        on_device(gpu_others=below("others_gpu")),
        1 / 0.8,
    ),
    Planted(
        "io.bound",
        without_steps(more={("pressure_io", "host"): 0.3}),
        without_steps(more={("pressure_io", "host"): below("input_wait_sure")}),
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
        "short", on_cpu(Training(steps=19, step=0.2)), on_cpu(Training(steps=20, step=0.2)), None
    ),
    Planted("unclear", on_cpu(more=cores(4 * below("computing"))), on_cpu(), None, "low"),
)


def finding_of(diagnosis: Diagnosis, cause: str) -> Finding | None:
    return next((found for found in diagnosis.findings if found.cause == cause), None)


@pytest.mark.parametrize("planted", PLANTED, ids=lambda planted: planted.cause)
def test_a_planted_cause_is_named(planted: Planted) -> None:
    diagnosis = explain(planted.run)
    found = finding_of(diagnosis, planted.cause)
    assert found is not None, diagnosis.findings
    assert found is diagnosis.first or not planted.first, diagnosis.first
    assert found.confidence == planted.confidence
    if planted.ceiling is None:
        assert found.speedup_bound is None
    else:
        assert found.speedup_bound == pytest.approx(planted.ceiling, rel=0.02)


@pytest.mark.parametrize("planted", PLANTED, ids=lambda planted: planted.cause)
def test_it_is_not_named_where_it_is_too_small(planted: Planted) -> None:
    diagnosis = explain(planted.nearly)
    assert finding_of(diagnosis, planted.cause) is None, diagnosis.findings
    assert diagnosis.findings


@pytest.mark.parametrize("planted", PLANTED, ids=lambda planted: planted.cause)
def test_nothing_else_is_named_with_high_confidence(planted: Planted) -> None:
    others = [found for found in explain(planted.run).findings if found.cause != planted.cause]
    assert [
        found.cause for found in others if found.confidence == "high" and not found.healthy
    ] == []


def test_every_cause_was_planted() -> None:
    assert {planted.cause for planted in PLANTED} == set(CAUSES)


def test_the_metrics_that_are_loaded_are_those_that_causes_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`stepscope explain` loads METRICS alone: any other that a cause asks for would be empty."""
    read: set[str] = set()

    def record(owner: type, name: str) -> None:
        reading = getattr(owner, name)

        def recorded(self: Any, *names: str) -> Any:
            read.update(names if name == "highest_mean" else names[:1])
            return reading(self, *names)

        monkeypatch.setattr(owner, name, recorded)

    record(RunData, "of")
    record(RecordedGpu, "of")
    record(Case, "highest_mean")
    for planted in PLANTED:
        for run in (planted.run, planted.nearly):
            explain(replace(run))  # a copy: what was computed once is not read again
    assert read - ALLOCATOR_METRICS == METRICS


@pytest.mark.parametrize("planted", PLANTED, ids=lambda planted: planted.cause)
def test_the_metrics_that_are_loaded_are_enough(planted: Planted) -> None:
    loaded = METRICS | ALLOCATOR_METRICS
    series = {key: values for key, values in planted.run.series.items() if key[0] in loaded}
    assert explain(replace(planted.run, series=series)) == explain(planted.run)


@pytest.mark.parametrize("planted", PLANTED, ids=lambda planted: planted.cause)
def test_advice_is_given_and_evidence_carries_the_table(planted: Planted) -> None:
    diagnosis = explain(planted.run)
    assert diagnosis.first.recommendations and diagnosis.first.evidence
    worded = [diagnosis_view(diagnosis, for_trial=trial).first for trial in (False, True)]
    assert all(each.summary and each.recommendations[0].change for each in worded)
