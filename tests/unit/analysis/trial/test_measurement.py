"""Measurements of a trial, from planted records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from stepscope.analysis.run.data import RunData
from stepscope.analysis.run.series import Series
from stepscope.analysis.trial.measurement import (
    Measurement,
    MissingRate,
    Part,
    RankRecord,
    Steps,
    TrialRecord,
    measure,
)
from stepscope.records import Gpu
from stepscope.records.codec import salvage, to_json
from stepscope.records.facts import CpuFacts, Environment, RunFacts
from stepscope.records.trial import (
    LimitFacts,
    ProcessNoise,
    RankFacts,
    TrialFacts,
    TrialSettings,
)
from stepscope.steplog import FIELDS, UNKNOWN

S = 1_000_000_000
NOISE = ProcessNoise(0.05, 10, "learned", 12)
STEP = np.dtype([(field, "<i8") for field in FIELDS])
WORKLOAD = {"model": "cnn", "batch_size": 32, "accumulate": 2, "ranks": 1, "workers": 0}
RANK_FACTS: dict[str, Any] = {
    "batch": {"global": 64},
    "phases": {"import": 2.0, "data": 0.5, "build": 0.25, "first_step": 1.0, "closing": 0.125},
    "steps_per_epoch": 1000,
    "samples_per_epoch": 64_000,
}


def steps_of(lengths: Sequence[float], begin_s: float = 100.0, **parts: float) -> Steps:
    """Return a first step and steps of these lengths; parts that are not given are unknown."""
    ends = begin_s + np.concatenate([[0.0], np.cumsum(lengths)])
    steps = np.full(len(ends), UNKNOWN, STEP)
    steps["end_ns"], steps["step"] = np.round(ends * S), np.arange(len(ends))
    for name, share in parts.items():
        steps[f"{name}_ns"] = np.round(np.array([1.0, *lengths]) * share * S)
    return steps


def planted(
    ranks: Sequence[tuple[dict[str, Any], Steps]],
    workload: dict[str, Any],
    trial: dict[str, Any] | None = None,
) -> TrialRecord:
    """Return a record as read from a run folder; a rank with facts also has a PID."""
    return TrialRecord(
        workload,
        salvage(TrialSettings, workload),
        LimitFacts(),
        salvage(TrialFacts, {"noise": to_json(NOISE), **(trial or {})}),
        tuple(
            RankRecord(number, salvage(RankFacts, facts and {"pid": 7, **facts}), steps)
            for number, (facts, steps) in enumerate(ranks)
        ),
    )


def record_of(
    *ranks: Steps,
    facts: dict[str, Any] | None = None,
    trial: dict[str, Any] | None = None,
    **settings: Any,
) -> TrialRecord:
    workload = {**WORKLOAD, "ranks": len(ranks), **settings}
    common = RANK_FACTS if facts is None else facts
    rank_facts = {**common, "batch": {"global": 64 * len(ranks)}} if common else {}
    return planted([(rank_facts, steps) for steps in ranks], workload, trial)


def measured(record: TrialRecord, data: RunData | None = None) -> Measurement:
    return measure(record, data or recorded())


def test_plain_trial() -> None:
    result = measured(record_of(steps_of([0.1] * 50, wait=0.25, copy=0.05, compute=0.7, stall=0.2)))
    assert result.rate is not None and result.rate.per_second == pytest.approx(640)
    assert result.interval is not None
    assert result.interval.low == pytest.approx(640 * (1 - 1.8125 * 0.05), rel=1e-3)
    assert (result.steps, result.steady_steps, result.samples) == (51, 50, 51 * 64)
    assert result.steady.steady and result.missing_rate is None
    assert result.step == Part(pytest.approx(0.1), pytest.approx(0.1))
    assert result.wait == Part(pytest.approx(0.025), pytest.approx(0.025))
    assert result.copy is not None and result.copy.median == pytest.approx(0.005)
    assert result.compute is not None and result.compute.p95 == pytest.approx(0.07)
    assert result.data_wait_share == pytest.approx(0.2)
    assert result.imbalance is None


def test_warmup_is_excluded() -> None:
    steps = steps_of([1.0] * 10 + [0.1] * 90, wait=0.5, stall=0.5)
    steps["stall_ns"][11:] //= 5
    result = measured(record_of(steps))
    assert result.steady.warmup == 10 and result.steady_steps == 90
    assert result.rate is not None and result.rate.per_second == pytest.approx(640)
    assert result.data_wait_share == pytest.approx(0.1)
    assert result.overhead.warmup == pytest.approx(10)


def test_unknown_values_are_none() -> None:
    result = measured(record_of(steps_of([0.1] * 20), facts={}))
    assert (
        result.wait
        is result.copy
        is result.compute
        is result.data_wait_share
        is result.epoch_seconds
        is None
    )
    assert (
        result.overhead.imports
        is result.overhead.total
        is result.host_memory_peak
        is result.joules
        is None
    )
    assert (
        result.device_memory.allocated
        is result.device_memory.device
        is result.device_memory.retries
        is None
    )
    assert result.rate is not None, "the batch size is in the workload"


def test_steps_with_unknown_stall_do_not_count() -> None:
    steps = steps_of([0.1] * 40, stall=0.3)
    steps["stall_ns"][::2] = UNKNOWN
    assert measured(record_of(steps)).data_wait_share == pytest.approx(0.3)


def test_step_ends_on_the_slowest_rank() -> None:
    fast = steps_of([0.1] * 30)
    slow = steps_of([0.2] * 25, begin_s=100.5)
    result = measured(record_of(fast, slow))
    assert result.steps == 26, "completed by both ranks"
    assert result.rate is not None and result.rate.per_second == pytest.approx(2 * 64 / 0.2)
    assert result.imbalance == pytest.approx(2)


@pytest.mark.parametrize(
    ("ranks", "reason"),
    [
        ([steps_of([])[:0]], MissingRate("few_steps", 0)),
        ([steps_of([])], MissingRate("few_steps", 1)),
        ([steps_of([0.1, 0.1])], MissingRate("few_steps", 3)),
        ([steps_of([0.1] * 20), steps_of([])[:0]], MissingRate("idle_rank", 1)),
        ([], MissingRate("few_steps", 0)),
    ],
)
def test_reason_for_a_missing_rate(ranks: list[Steps], reason: MissingRate) -> None:
    result = measured(record_of(*ranks))
    assert result.rate is result.interval is result.joules is None
    assert result.missing_rate == reason
    assert not result.steady.steady


def test_unknown_batch_size() -> None:
    result = measured(planted([({}, steps_of([0.1] * 9))], {}))
    assert result.rate is result.samples is None and result.missing_rate == MissingRate(
        "unknown_batch"
    )
    assert result.step is not None


def test_samples_per_step() -> None:
    assert record_of(steps_of([]), facts={}, ranks=3).samples_per_step == 32 * 2 * 3
    assert record_of(steps_of([])).samples_per_step == 64


def test_no_interval_without_noise() -> None:
    result = measured(record_of(steps_of([0.1] * 20), trial={"noise": None}))
    assert result.rate is not None and result.interval is None


def test_epoch_is_estimated_unless_one_was_measured_after_the_warmup() -> None:
    def epoch(lengths: Sequence[float], facts: dict[str, Any]) -> tuple[float | None, bool]:
        result = measured(record_of(steps_of(lengths), facts=facts))
        return result.epoch_seconds, result.epoch_measured

    facts = {**RANK_FACTS, "steps_per_epoch": 20, "samples_per_epoch": 1280}
    assert epoch([0.1] * 50, RANK_FACTS) == (pytest.approx(100), False)
    assert epoch([0.1] * 30, facts) == (pytest.approx(2.0), False), (
        "the first epoch includes the first step"
    )
    slow_ends = [0.5 if index % 20 == 19 else 0.1 for index in range(70)]
    assert epoch(slow_ends, facts) == (pytest.approx(2.4), True)
    slow_start = [1.0] * 22 + [0.1] * 36
    assert epoch(slow_start, facts) == (pytest.approx(2.0), False)
    assert epoch([*slow_start, 0.1], facts) == (pytest.approx(2.0), True)


def test_overhead_excludes_the_steady_steps() -> None:
    times = {"started_ns": 90 * S, "spawned_ns": 91 * S, "ended_ns": 111 * S, "cleaned_ns": 113 * S}
    result = measured(record_of(steps_of([0.1] * 100), trial=times)).overhead
    assert (result.start, result.cleanup, result.warmup) == (1, 2, 0)
    assert (result.imports, result.data, result.build, result.first_step, result.closing) == (
        2,
        0.5,
        0.25,
        1,
        0.125,
    )
    assert result.other == pytest.approx(20 - 10 - 3.875)
    assert result.total == pytest.approx(23 - 10)


def test_longest_phase_of_the_ranks_counts() -> None:
    ranks = [({"phases": {"import": seconds}}, steps_of([0.1] * 10)) for seconds in (1.0, 3.0)]
    assert measured(planted(ranks, WORKLOAD)).overhead.imports == 3


def recorded(**metrics: tuple[str, list[float]]) -> RunData:
    """Return series from second 95 on, ten readings per second."""
    table = {}
    for metric, (entity, values) in metrics.items():
        times = (95 * S + np.arange(1, len(values) + 1) * S // 10).astype(np.int64)
        table[metric, entity] = Series(times, np.full(len(values), 0.1), np.array(values, float))
    return RunData(table, [], 95 * S, 105 * S, gpus=(Gpu("GPU-1", "GPU 0"),))


def test_memory_and_energy_from_the_monitor() -> None:
    data = recorded(
        memory=("tree", [1e9, 3e9, 2e9]),
        gpu_power=("GPU-1", [500.0] * 100),
        gpu_memory_run=("GPU-1", [4e9] * 99 + [5e9]),
    )
    cuda = {"allocated_peak": 2e9, "reserved_peak": 2.5e9, "retries": 3}
    record = record_of(steps_of([0.1] * 40), facts={**RANK_FACTS, "device_memory": cuda})
    result = measured(record, data)
    assert result.host_memory_peak == 3e9
    memory = result.device_memory
    assert (memory.allocated, memory.reserved, memory.device) == (2e9, 2.5e9, 5e9)
    assert memory.retries == 3
    assert result.joules == pytest.approx(4 * 500, rel=0.01), "of the steady steps only"
    assert result.samples_per_joule == pytest.approx(40 * 64 / 2000, rel=0.01)


@pytest.mark.parametrize(
    ("host", "own", "cpus", "other", "interferes"),
    [
        (2.0, 0.4, 2, 1.5, True),
        (2.0, 1.7, 2, 0.2, False),
        (2.0, 0.4, None, 1.5, True),
        (2.0, 0.4, 64, 1.5, False),
        (1.0, 1.2, 2, 0.0, False),
    ],
)
def test_other_processes_interfere_on_a_busy_machine(
    host: float, own: float, cpus: int | None, other: float, interferes: bool
) -> None:
    """Only the steady steps count."""
    during = [0.0] * 50 + [1.0] * 40 + [0.0] * 10
    data = recorded(
        host_cpu=("host", [2 - value * (2 - host) for value in during]),
        cpu=("tree", [own * value for value in during]),
        monitor_cpu=("monitor", [0.1] * 100),
    )
    facts = RunFacts(environment=Environment(cpu=CpuFacts(logical=cpus, allowed=2.0)))
    result = measured(record_of(steps_of([0.1] * 40)), replace(data, facts=facts))
    assert result.interference.other_cores == pytest.approx(other, abs=0.01)
    assert result.has_interference == interferes


def test_unknown_cpu_usage() -> None:
    for data in (None, recorded(cpu=("tree", [1.0] * 100)), recorded(host_cpu=("host", [2.0]))):
        result = measured(record_of(steps_of([0.1] * 40)), data)
        assert result.interference.other_cores is None and not result.has_interference


JUNK = st.recursive(
    st.none() | st.booleans() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=4,
)


@settings(max_examples=100)
@given(
    st.fixed_dictionaries({}, optional=dict.fromkeys((*RANK_FACTS, "device_memory"), JUNK)),
    st.fixed_dictionaries({}, optional=dict.fromkeys(WORKLOAD, JUNK)),
    st.integers(0, 12),
)
def test_invalid_facts_are_unknown(
    facts: dict[str, Any], workload: dict[str, Any], steps: int
) -> None:
    result = measured(planted([(facts, steps_of([0.1] * steps))], workload, {"started_ns": "now"}))
    assert result.rate is result.samples is result.overhead.total is None
