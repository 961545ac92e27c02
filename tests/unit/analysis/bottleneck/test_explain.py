"""Findings are ranked, and every run gets a diagnosis, whatever was observed."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from stepscope.analysis.bottleneck.causes import CAUSES
from stepscope.analysis.bottleneck.explain import explain
from stepscope.analysis.bottleneck.thresholds import THRESHOLDS
from stepscope.analysis.run.data import RunData
from stepscope.records import Diagnosis, Finding
from stepscope.report.bottleneck.view import DiagnosisView, diagnosis_view
from synthetic_cases import (
    BACKWARD,
    COMPUTES,
    COPY,
    FORWARD,
    HALF_IDLE,
    LOADING,
    LOGGING,
    OTHER,
    SAVE,
    SLEEP,
    SYNC,
    Table,
    Training,
    cores,
    growing,
    observed,
    on_cpu,
    on_device,
    on_gpu,
    slowing,
    two_ranks,
    waits_for,
    without_steps,
)

MIN_SPEEDUP = 1.1
"""Below this bound, a finding is not a bottleneck."""

# Runs without steps or with few measurements


def test_diagnosis_without_steps_includes_the_reason() -> None:
    diagnosis = explain(without_steps(hook="disabled"))
    assert diagnosis.without_steps and diagnosis.first.cause == "unknown"
    assert diagnosis.basis.hook == "disabled"
    assert (diagnosis.begin_s, diagnosis.end_s) == (0.0, 20.0)


@pytest.mark.parametrize(
    ("run", "cause", "confidence"),
    [
        (without_steps(more=cores(3.8)), "cpu.compute", "medium"),
        (without_steps(on_gpu()), "gpu.compute", "medium"),
        (without_steps(on_gpu(gpu_dram=0.7)), "gpu.bandwidth", "medium"),
        (without_steps(on_gpu(**HALF_IDLE), more=cores(3.8)), "input.preparation", "low"),
        (without_steps(seconds=2.9), "too_short", "high"),
    ],
)
def test_runs_without_steps_are_diagnosed(run: RunData, cause: str, confidence: str) -> None:
    diagnosis = explain(run)
    assert diagnosis.without_steps
    assert (diagnosis.first.cause, diagnosis.first.confidence) == (cause, confidence)


def test_empty_run_is_too_short_or_unknown() -> None:
    assert explain(observed(allowed=None, cpus=None)).first.cause == "unknown"
    assert explain(observed(allowed=None, cpus=None, seconds=0.01)).first.cause == "too_short"


@pytest.mark.parametrize("training", [Training(steps=19, step=1.0), Training(steps=290, step=0.01)])
def test_few_steps_or_few_seconds_are_too_short(training: Training) -> None:
    diagnosis = explain(on_cpu(training))
    assert [found.cause for found in diagnosis.findings] == ["too_short"]
    assert not diagnosis.without_steps and diagnosis.next is None


@pytest.mark.parametrize("source", ["marks", "loader"])
def test_steps_from_marks_or_from_the_loader(source: str) -> None:
    diagnosis = explain(waits_for(0.04, step_source=source, workers=1, samples=(0.1, 0.095, 0.0)))
    assert diagnosis.first.cause == "input.workers"
    assert diagnosis.first.speedup_bound == pytest.approx(1 / 0.6, rel=0.02)


def test_ranks_are_counted_in_the_basis() -> None:
    assert explain(two_ranks(COMPUTES, COMPUTES)).basis.ranks == 2
    assert explain(on_cpu()).basis.ranks <= 1


def test_window_is_on_the_clock_of_the_run() -> None:
    diagnosis = explain(on_cpu())
    assert (diagnosis.begin_s, diagnosis.end_s) == pytest.approx((0.1, 20.1))


# Order of findings


def test_consequences_of_a_cause_are_not_separate_findings() -> None:
    """A quota slows down the workers, so slow preparation is not a separate finding."""
    run = observed(
        Training(wait=0.04, samples=(0.35, 0.34, 0.0)),
        series={**cores(1.95, main=0.3, wait=1.0), ("cgroup_throttled", "cgroup"): 0.5},
        allowed=2.0,
        cpus=8,
    )
    causes = [found.cause for found in explain(run).findings]
    assert causes == ["cpu.quota"]


def test_larger_gain_comes_first_and_smaller_gain_is_next() -> None:
    run = on_cpu(Training(stacks={SLEEP: 0.2, LOGGING: 0.4, FORWARD: 0.4}))
    diagnosis = explain(run)
    assert [found.cause for found in diagnosis.findings] == ["loop.logging", "loop.sleep"]
    assert diagnosis.next is diagnosis.findings[1]
    view = diagnosis_view(diagnosis)
    assert view.next == "Sleep in the training loop (at most 1.2×)"


def test_leak_comes_before_bottlenecks() -> None:
    run = on_cpu(
        Training(stacks={LOGGING: 0.5, FORWARD: 0.5}),
        {("memory", "tree"): growing(10e6), ("host_available", "host"): growing(-10e6, 10e9)},
    )
    assert [found.cause for found in explain(run).findings] == ["leak.host", "loop.logging"]


def test_slow_leak_comes_last() -> None:
    run = on_cpu(
        Training(stacks={LOGGING: 0.5, FORWARD: 0.5}),
        {("memory", "tree"): growing(10e6), ("host_available", "host"): growing(-10e6, 1e14)},
    )
    first, leak = explain(run).findings
    assert (first.cause, leak.cause, leak.confidence) == ("loop.logging", "leak.host", "low")


def test_next_bottleneck_is_healthy() -> None:
    view = diagnosis_view(explain(on_device(gpu_other_processes=0.2)))
    assert view.next == "GPU compute-bound (healthy)"


def test_nearly_full_memory_comes_before_unknown() -> None:
    """ "No part of the machine is near its limit" would be wrong."""
    run = on_cpu(more={**cores(1.0), ("shm_used", "shm"): 7.7e9, ("shm_size", "shm"): 8e9})
    assert explain(run).first.cause == "memory.shm"


def test_doubled_step_time_is_a_slowdown() -> None:
    assert explain(slowing(0.2)).first.cause == "loop.slowdown"


# Any observations


def numbers(largest: float) -> st.SearchStrategy[float]:
    """Numbers from 0 to `largest` in steps of a thousandth, similar to real resolutions."""
    return st.integers(0, 1000).map(lambda part: largest * part / 1000)


shares = numbers(1.0)
locations = st.sampled_from((FORWARD, BACKWARD, COPY, SYNC, LOGGING, SAVE, SLEEP, LOADING, OTHER))
parts = st.tuples(shares, shares, shares)
trainings = st.builds(
    Training,
    steps=st.integers(2, 60),
    step=numbers(1.0).map(lambda seconds: seconds + 0.001),
    epoch=st.none() | st.integers(1, 30),
    startup=numbers(2.0),
    evaluates=st.none() | st.tuples(st.integers(1, 20), numbers(3.0)),
    batch=st.integers(1, 256),
    workers=st.integers(0, 8),
    samples=st.none() | parts,
    collation=parts,
    stacks=st.dictionaries(locations, shares),
    device=st.none() | parts,
    settings=st.sampled_from(({}, {"threads": 1}, {"threads": 2, "parameters": 10_000_000})),
    rank=st.none() | st.integers(0, 3),
    step_source=st.sampled_from(("optimizer", "marks", "loader")),
)
waiting = st.builds(
    lambda training, share: replace(training, wait=share * training.step), trainings, shares
)
gpus = st.fixed_dictionaries(
    {},
    optional={
        **dict.fromkeys(
            (
                "gpu_utilization",
                "gpu_active",
                "gpu_sm",
                "gpu_tensor",
                "gpu_fp32",
                "gpu_dram",
                "gpu_other_processes",
                "gpu_throttled_power",
                "gpu_throttled_thermal",
            ),
            shares,
        ),
        **dict.fromkeys(
            ("gpu_memory_run", "gpu_memory", "gpu_allocated", "gpu_reserved"), numbers(200e9)
        ),
        "gpu_pcie_received": numbers(60e9),
        "gpu_sm_clock": numbers(2000.0),
        "gpu_power": numbers(700.0),
        "gpu_alloc_retries": st.sampled_from((np.floor, lambda s: np.zeros(len(s)))),
    },
)
tables = st.fixed_dictionaries(
    {},
    optional={
        **dict.fromkeys(
            (
                ("cpu", "tree"),
                ("cpu", "main"),
                ("cpu", "rank0"),
                ("cpu", "worker"),
                ("cpu_wait", "tree"),
                ("cpu_wait", "main"),
                ("host_cpu", "host"),
                ("monitor_cpu", "monitor"),
                ("processes", "worker"),
            ),
            numbers(16.0),
        ),
        **dict.fromkeys(
            (("cgroup_throttled", "cgroup"), ("pressure_memory", "host"), ("pressure_io", "host")),
            shares,
        ),
        **dict.fromkeys(
            (
                ("host_available", "host"),
                ("cgroup_memory", "cgroup"),
                ("cgroup_memory_limit", "cgroup"),
                ("shm_used", "shm"),
                ("read", "tree"),
                ("net_received", "net:1"),
                ("loopback", "net:1"),
            ),
            numbers(64e9),
        ),
        ("shm_size", "shm"): st.sampled_from((0.0, 64e6, 8e9)),
        ("memory", "tree"): numbers(1e9).map(growing),
        ("memory", "worker"): numbers(1e9).map(growing),
    },
)


@settings(max_examples=200)
@given(
    st.lists(waiting, max_size=3),
    tables,
    st.none() | gpus,
    st.none() | numbers(16.0).map(lambda count: count + 0.5),
    st.none() | st.integers(1, 16),
    st.none() | numbers(1e12),
    numbers(30.0),
)
def test_any_observations_give_a_valid_diagnosis(
    processes: list[Training],
    table: Table,
    gpu: Any,
    allowed: Any,
    count: Any,
    memory: Any,
    seconds: float,
) -> None:
    check(
        explain(
            observed(
                *processes,
                series=table,
                gpu=gpu,
                allowed=allowed,
                cpus=count,
                memory_bytes=memory,
                seconds=seconds,
            )
        )
    )


def check(diagnosis: Diagnosis) -> None:
    """Check the invariants of every diagnosis."""
    assert diagnosis.findings and diagnosis.basis
    assert diagnosis.begin_s <= diagnosis.end_s
    for found in diagnosis.findings:
        assert found.cause in CAUSES
        assert found.confidence in ("high", "medium", "low")
        assert found.speedup_bound is None or 1 <= found.speedup_bound < math.inf, found
        for evidence in found.evidence:
            assert math.isfinite(evidence.value), evidence
            known = THRESHOLDS.get(evidence.threshold or "")
            assert evidence.limit == (known.value if known else None)
            assert known is None or known.unit == evidence.unit, evidence
    check_order(diagnosis.findings)
    for for_trial in (False, True):
        check_texts(diagnosis_view(diagnosis, for_trial=for_trial))


def check_texts(view: DiagnosisView) -> None:
    """Check that all placeholders are filled."""
    assert view.basis
    for found in view.findings:
        assert found.summary and found.reason
        assert "nan" not in found.summary and "inf " not in found.summary
        texts = [each.change + each.reason for each in found.recommendations]
        texts += [row.name for row in found.evidence]
        assert not any("{" in text or "None" in text for text in [*texts, found.summary])


def check_order(findings: tuple[Finding, ...]) -> None:
    """Check that a healthy state never comes before a bottleneck with high confidence."""
    healthy_before = False
    for found in findings:
        is_clear = found.confidence == "high" and (found.speedup_bound or 0.0) >= MIN_SPEEDUP
        assert not (healthy_before and is_clear and not found.healthy), findings
        healthy_before = healthy_before or found.healthy
