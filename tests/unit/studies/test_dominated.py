"""Which trials are dominated by one that ran out of memory."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepscope.records import Outcome
from stepscope.studies.dominated import Dominance, find_dominance
from stepscope.studies.results import Result
from stepscope.studies.trial_spec import TrialSpec, make_spec

OOMS = (Outcome.GPU_OOM, Outcome.HOST_OOM, Outcome.SHM_FULL)
GIB = 1 << 30


def spec(**settings: Any) -> TrialSpec:
    return make_spec({"model": "cnn", **settings})


def result(spec: TrialSpec, outcome: Outcome = Outcome.OK) -> Result:
    return Result(spec.key, spec.settings, "trial", 1, 1, 1, outcome)


def dominance(
    ran_out: Iterable[TrialSpec],
    trained: Iterable[TrialSpec] = (),
    outcome: Outcome = Outcome.HOST_OOM,
    share: float = 0.0,
    seed: int = 0,
) -> Dominance:
    ran_out, trained = list(ran_out), list(trained)
    specs = {each.key: each for each in [*ran_out, *trained]}
    results = [result(each, outcome) for each in ran_out] + [result(each) for each in trained]
    return find_dominance(results, specs, share, seed)


def dominates(least: TrialSpec, other: TrialSpec, outcome: Outcome) -> bool:
    return bool(dominance([least], outcome=outcome).reason(other))


SPECS = st.builds(
    spec,
    batch_size=st.sampled_from([8, 16, 32]),
    workers=st.sampled_from([0, 1, 2]),
    memory=st.sampled_from([None, 1 * GIB, 2 * GIB]),
    gpu_memory=st.sampled_from([None, 4 * GIB]),
    cpus=st.sampled_from([None, 1.0]),
    lr=st.sampled_from([0.1, 0.2]),
)


@given(SPECS, SPECS, SPECS, st.sampled_from(OOMS))
def test_dominance_is_transitive_and_irreflexive(
    first: TrialSpec, second: TrialSpec, third: TrialSpec, outcome: Outcome
) -> None:
    assert not dominates(first, first, outcome)
    if dominates(first, second, outcome) and dominates(second, third, outcome):
        assert dominates(first, third, outcome) or first.key == third.key


@given(SPECS, SPECS, st.sampled_from(OOMS))
def test_smaller_trials_and_higher_limits_are_not_skipped(
    least: TrialSpec, other: TrialSpec, outcome: Outcome
) -> None:
    if not dominates(least, other, outcome):
        return
    assert other.workload.batch_size >= least.workload.batch_size
    assert other.limits.cpus == least.limits.cpus
    if outcome is Outcome.GPU_OOM:
        assert other.workload.workers == least.workload.workers
        assert other.limits.memory == least.limits.memory
    else:
        assert other.workload.workers >= least.workload.workers
    if outcome is Outcome.HOST_OOM:
        assert (other.limits.memory or 1 << 62) <= (least.limits.memory or 1 << 62)
    else:
        assert other.limits.memory == least.limits.memory


@given(st.lists(SPECS, max_size=8), SPECS, st.sampled_from(OOMS))
def test_many_results_dominate_what_each_of_them_dominates(
    ran_out: list[TrialSpec], other: TrialSpec, outcome: Outcome
) -> None:
    """Except for a trial that has its own result."""
    reason = dominance(ran_out, outcome=outcome).reason(other)
    each = any(dominates(least, other, outcome) for least in ran_out)
    assert bool(reason) == each or other.key in {one.key for one in ran_out}


@pytest.mark.parametrize(
    ("least", "other", "outcome", "expected"),
    [
        ({"batch_size": 8}, {"batch_size": 16}, Outcome.GPU_OOM, "batch_size 8"),
        ({"workers": 1}, {"workers": 4}, Outcome.SHM_FULL, "workers 1"),
        ({"memory": 2 * GIB}, {"memory": GIB}, Outcome.HOST_OOM, "memory 2 GiB"),
        ({}, {"memory": GIB}, Outcome.HOST_OOM, "memory –"),
        ({"frames": 8, "lr": 0.2}, {"frames": 16}, Outcome.GPU_OOM, "frames 8, lr 0.2"),
    ],
)
def test_the_reason_names_the_smaller_trial(
    least: dict[str, Any], other: dict[str, Any], outcome: Outcome, expected: str
) -> None:
    reason = dominance([spec(**least)], outcome=outcome).reason(spec(**other))
    assert reason == f"already failed ({outcome.value}) with {expected}"


@pytest.mark.parametrize(
    ("least", "other", "outcome"),
    [
        ({"memory": GIB}, {"memory": 2 * GIB}, Outcome.HOST_OOM),
        ({"memory": GIB}, {}, Outcome.HOST_OOM),
        ({"precision": "fp32"}, {"precision": "bf16", "batch_size": 999}, Outcome.GPU_OOM),
        ({"workers": 1}, {"workers": 4}, Outcome.GPU_OOM),
        ({"batch_size": 8}, {"batch_size": 16, "cpus": 1}, Outcome.HOST_OOM),
        ({"batch_size": 8, "model": "mlp"}, {"batch_size": 16}, Outcome.GPU_OOM),
    ],
)
def test_trials_that_are_not_dominated(
    least: dict[str, Any], other: dict[str, Any], outcome: Outcome
) -> None:
    assert not dominates(spec(**least), spec(**other), outcome)


def test_an_oom_of_the_infrastructure_does_not_count() -> None:
    least, other = spec(batch_size=8), spec(batch_size=16)
    external = Result(
        least.key, least.settings, "trial", 1, 1, 1, Outcome.HOST_OOM, infrastructure=True
    )
    specs = {least.key: least, other.key: other}
    assert find_dominance([external], specs, 0.0, 0).reason(other) == ""


@given(SPECS, st.floats(0, 1), st.integers())
def test_the_tested_share_is_deterministic(other: TrialSpec, share: float, seed: int) -> None:
    tested = [Dominance({}, share, seed).is_tested(other) for _ in range(2)]
    assert tested[0] == tested[1]
    assert not Dominance({}, 0.0, seed).is_tested(other)
    assert Dominance({}, 1.0, seed).is_tested(other)


@pytest.mark.parametrize("share", [0.1, 0.5])
def test_a_share_is_tested(share: float) -> None:
    found = dominance([spec(batch_size=1)], share=share)
    tested = [batch for batch in range(2, 1002) if not found.reason(spec(batch_size=batch))]
    assert len(tested) == pytest.approx(1000 * share, abs=40)


def test_a_dominated_trial_that_trained_ends_the_skipping() -> None:
    small, middle, large = (spec(batch_size=batch) for batch in (8, 16, 32))
    assert dominance([small]).reason(large)
    assert not dominance([small], [middle]).reason(large)
    assert dominance([middle], [small]).reason(large), (
        "a smaller trial that trained changes nothing"
    )


def test_thousands_of_results_are_fast() -> None:
    every = [spec(batch_size=b, workers=w) for b in range(1, 61) for w in range(50)]
    ran_out = [s for s in every if s.workload.batch_size * s.workload.workers > 400]
    trained = [s for s in every if s.workload.batch_size * s.workload.workers <= 400]

    def seconds() -> float:
        started = time.process_time()
        found = dominance(ran_out, trained)
        assert sum(bool(found.reason(each)) for each in every) > 1000
        return time.process_time() - started

    assert any(seconds() < 3 for _ in range(3)), "slower on a busy machine"
