"""What a trial measured, from records that were planted."""

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
NOISE = ProcessNoise(0.05, 10, "learnt", 12)
STEP = np.dtype([(field, "<i8") for field in FIELDS])
WORKLOAD = {"model": "cnn", "batch_size": 32, "accumulate": 2, "ranks": 1, "workers": 0}
TOLD: dict[str, Any] = {
    "batch": {"global": 64},
    "phases": {"import": 2.0, "data": 0.5, "build": 0.25, "first_step": 1.0, "closing": 0.125},
    "steps_per_epoch": 1000,
    "samples_per_epoch": 64_000,
}


def steps_of(lengths: Sequence[float], begin_s: float = 100.0, **parts: float) -> Steps:
    """Steps of such lengths after a first one, with parts of them; what is not given is unknown."""
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
    """As if read from a run folder; a rank that says anything also says who it is."""
    return TrialRecord(
        workload,
        salvage(TrialSettings, workload),
        LimitFacts(),
        salvage(TrialFacts, {"spread": to_json(NOISE), **(trial or {})}),
        tuple(
            RankRecord(number, salvage(RankFacts, told and {"pid": 7, **told}), steps)
            for number, (told, steps) in enumerate(ranks)
        ),
    )


def record_of(
    *ranks: Steps,
    told: dict[str, Any] | None = None,
    trial: dict[str, Any] | None = None,
    **facts: Any,
) -> TrialRecord:
    workload = {**WORKLOAD, "ranks": len(ranks), **facts}
    rest = TOLD if told is None else told
    told_by_rank = {**rest, "batch": {"global": 64 * len(ranks)}} if rest else {}
    return planted([(told_by_rank, steps) for steps in ranks], workload, trial)


def found(record: TrialRecord, data: RunData | None = None) -> Measurement:
    return measure(record, data or recorded())


def test_a_plain_trial() -> None:
    it = found(record_of(steps_of([0.1] * 50, wait=0.25, copy=0.05, compute=0.7, stall=0.2)))
    assert it.rate is not None and it.rate.per_second == pytest.approx(640)
    assert it.interval is not None
    assert it.interval.low == pytest.approx(640 * (1 - 1.8125 * 0.05), rel=1e-3)
    assert (it.steps, it.steady_steps, it.samples) == (51, 50, 51 * 64)
    assert it.steady.steady and it.missing_rate is None
    assert it.step == Part(pytest.approx(0.1), pytest.approx(0.1))
    assert it.wait == Part(pytest.approx(0.025), pytest.approx(0.025))
    assert it.copy is not None and it.copy.median == pytest.approx(0.005)
    assert it.compute is not None and it.compute.p95 == pytest.approx(0.07)
    assert it.data_wait_share == pytest.approx(0.2)
    assert it.imbalance is None


def test_the_warm_up_is_in_no_figure() -> None:
    warm = steps_of([1.0] * 10 + [0.1] * 90, wait=0.5, stall=0.5)
    warm["stall_ns"][11:] //= 5
    it = found(record_of(warm))
    assert it.steady.warmup == 10 and it.steady_steps == 90
    assert it.rate is not None and it.rate.per_second == pytest.approx(640)
    assert it.data_wait_share == pytest.approx(0.1)
    assert it.overhead.warmup == pytest.approx(10)


def test_what_is_not_known_is_none() -> None:
    it = found(record_of(steps_of([0.1] * 20), told={}))
    assert it.wait is it.copy is it.compute is it.data_wait_share is it.epoch_seconds is None
    assert it.overhead.imports is it.overhead.total is it.host_memory_peak is it.joules is None
    assert it.device_memory.allocated is it.device_memory.device is it.device_memory.retries is None
    assert it.rate is not None, "the batch is in the workload"


def test_steps_of_which_the_stall_is_unknown_count_in_neither_sum() -> None:
    steps = steps_of([0.1] * 40, stall=0.3)
    steps["stall_ns"][::2] = UNKNOWN
    assert found(record_of(steps)).data_wait_share == pytest.approx(0.3)


def test_a_step_is_over_when_it_is_on_the_slowest_rank() -> None:
    fast = steps_of([0.1] * 30)
    slow = steps_of([0.2] * 25, begin_s=100.5)
    it = found(record_of(fast, slow))
    assert it.steps == 26, "those that both took"
    assert it.rate is not None and it.rate.per_second == pytest.approx(2 * 64 / 0.2)
    assert it.imbalance == pytest.approx(2)


@pytest.mark.parametrize(
    ("ranks", "why"),
    [
        ([steps_of([])[:0]], MissingRate("few_steps", 0)),
        ([steps_of([])], MissingRate("few_steps", 1)),
        ([steps_of([0.1, 0.1])], MissingRate("few_steps", 3)),
        ([steps_of([0.1] * 20), steps_of([])[:0]], MissingRate("idle_rank", 1)),
        ([], MissingRate("few_steps", 0)),
    ],
)
def test_why_there_is_no_rate(ranks: list[Steps], why: MissingRate) -> None:
    it = found(record_of(*ranks))
    assert it.rate is it.interval is it.joules is None
    assert it.missing_rate == why
    assert not it.steady.steady


def test_a_batch_that_nobody_told() -> None:
    it = found(planted([({}, steps_of([0.1] * 9))], {}))
    assert it.rate is it.samples is None and it.missing_rate == MissingRate("unknown_batch")
    assert it.step is not None


def test_samples_of_a_step() -> None:
    assert record_of(steps_of([]), told={}, ranks=3).samples_per_step == 32 * 2 * 3
    assert record_of(steps_of([])).samples_per_step == 64


def test_without_a_spread_there_is_no_interval() -> None:
    it = found(record_of(steps_of([0.1] * 20), trial={"spread": None}))
    assert it.rate is not None and it.interval is None


def test_an_epoch_is_projected_unless_a_whole_one_followed_the_warm_up() -> None:
    def epoch(lengths: Sequence[float], told: dict[str, Any]) -> tuple[float | None, bool]:
        it = found(record_of(steps_of(lengths), told=told))
        return it.epoch_seconds, it.epoch_measured

    told = {**TOLD, "steps_per_epoch": 20, "samples_per_epoch": 1280}
    assert epoch([0.1] * 50, TOLD) == (pytest.approx(100), False)
    assert epoch([0.1] * 30, told) == (pytest.approx(2.0), False), "the first has the first step"
    border = [0.5 if place % 20 == 19 else 0.1 for place in range(70)]
    assert epoch(border, told) == (pytest.approx(2.4), True)
    slow_until_the_second = [1.0] * 22 + [0.1] * 36
    assert epoch(slow_until_the_second, told) == (pytest.approx(2.0), False)
    assert epoch([*slow_until_the_second, 0.1], told) == (pytest.approx(2.0), True)


def test_overhead_is_all_but_the_steady_steps() -> None:
    times = {"started_ns": 90 * S, "spawned_ns": 91 * S, "ended_ns": 111 * S, "cleaned_ns": 113 * S}
    it = found(record_of(steps_of([0.1] * 100), trial=times)).overhead
    assert (it.start, it.cleanup, it.warmup) == (1, 2, 0)
    assert (it.imports, it.data, it.build, it.first_step, it.closing) == (2, 0.5, 0.25, 1, 0.125)
    assert it.other == pytest.approx(20 - 10 - 3.875)
    assert it.total == pytest.approx(23 - 10)


def test_ranks_go_through_phases_at_the_same_time() -> None:
    ranks = [({"phases": {"import": seconds}}, steps_of([0.1] * 10)) for seconds in (1.0, 3.0)]
    assert found(planted(ranks, WORKLOAD)).overhead.imports == 3


def recorded(**of: tuple[str, list[float]]) -> RunData:
    """Series from second 95 on, ten a second."""
    table = {}
    for metric, (entity, values) in of.items():
        times = (95 * S + np.arange(1, len(values) + 1) * S // 10).astype(np.int64)
        table[metric, entity] = Series(times, np.full(len(values), 0.1), np.array(values, float))
    return RunData(table, [], 95 * S, 105 * S, gpus=(Gpu("GPU-1", "GPU 0"),))


def test_memory_and_energy_are_the_watchers() -> None:
    seen = recorded(
        memory=("tree", [1e9, 3e9, 2e9]),
        gpu_power=("GPU-1", [500.0] * 100),
        gpu_memory_tree=("GPU-1", [4e9] * 99 + [5e9]),
    )
    cuda = {"allocated_peak": 2e9, "reserved_peak": 2.5e9, "retries": 3}
    record = record_of(steps_of([0.1] * 40), told={**TOLD, "device_memory": cuda})
    it = found(record, seen)
    assert it.host_memory_peak == 3e9
    memory = it.device_memory
    assert (memory.allocated, memory.reserved, memory.device) == (2e9, 2.5e9, 5e9)
    assert memory.retries == 3
    assert it.joules == pytest.approx(4 * 500, rel=0.01), "of the steady steps alone"
    assert it.samples_per_joule == pytest.approx(40 * 64 / 2000, rel=0.01)


@pytest.mark.parametrize(
    ("host", "own", "cpus", "others", "disturbed"),
    [
        (2.0, 0.4, 2, 1.5, True),
        (2.0, 1.7, 2, 0.2, False),
        (2.0, 0.4, None, 1.5, True),
        (2.0, 0.4, 64, 1.5, False),
        (1.0, 1.2, 2, 0.0, False),
    ],
)
def test_others_disturb_where_they_leave_too_little(
    host: float, own: float, cpus: int | None, others: float, disturbed: bool
) -> None:
    """Only over the steady steps: before and after them others may do what they like."""
    during = [0.0] * 50 + [1.0] * 40 + [0.0] * 10
    seen = recorded(
        host_cpu=("host", [2 - value * (2 - host) for value in during]),
        cpu=("tree", [own * value for value in during]),
        watcher_cpu=("watcher", [0.1] * 100),
    )
    facts = RunFacts(environment=Environment(cpu=CpuFacts(logical=cpus, allowed=2.0)))
    it = found(record_of(steps_of([0.1] * 40)), replace(seen, facts=facts))
    assert it.interference.other_cores == pytest.approx(others, abs=0.01)
    assert it.is_disturbed == disturbed


def test_others_that_nobody_counted() -> None:
    for seen in (None, recorded(cpu=("tree", [1.0] * 100)), recorded(host_cpu=("host", [2.0]))):
        it = found(record_of(steps_of([0.1] * 40)), seen)
        assert it.interference.other_cores is None and not it.is_disturbed


JUNK = st.recursive(
    st.none() | st.booleans() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=4,
)


@settings(max_examples=100)
@given(
    st.fixed_dictionaries({}, optional=dict.fromkeys((*TOLD, "device_memory"), JUNK)),
    st.fixed_dictionaries({}, optional=dict.fromkeys(WORKLOAD, JUNK)),
    st.integers(0, 12),
)
def test_nonsense_in_the_facts_is_unknown(
    told: dict[str, Any], workload: dict[str, Any], steps: int
) -> None:
    it = found(planted([(told, steps_of([0.1] * steps))], workload, {"started_ns": "now"}))
    assert it.rate is it.samples is it.overhead.total is None
