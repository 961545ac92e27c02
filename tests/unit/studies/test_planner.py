"""The grid planner proposes each trial once, repeats far apart, and doubtful trials last."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from stepscope.analysis.study.records import Factor
from stepscope.records import Outcome
from stepscope.records.trial import InterferenceReason
from stepscope.studies.design.records import Design
from stepscope.studies.planner import GridPlanner
from stepscope.studies.results import Result, Results
from stepscope.studies.trial_spec import TrialSpec, make_spec

BATCHES, CPUS = (8, 16, 32), (1.0, 2.0)
INTERFERENCE = (InterferenceReason("cpu", 1.5, 2.0),)


def design(**others: Any) -> Design:
    factors = (Factor("batch_size", BATCHES), Factor("cpus", CPUS))
    return Design("some", {"model": "cnn"}, factors, **{"repeats": 2, **others})


def points(count: int = 99) -> list[TrialSpec]:
    every = [make_spec({"model": "cnn", "batch_size": b, "cpus": c}) for b in BATCHES for c in CPUS]
    return every[:count]


def proposed(grid: GridPlanner, results: Results) -> list[tuple[str, int]]:
    return [(each.spec.key, each.repeat) for each in grid.next(results)]


def result(spec: TrialSpec, repeat: int = 1, **others: Any) -> Result:
    fields = {"attempt": 1, "block": 1, "outcome": Outcome.OK, **others}
    return Result(spec.key, spec.settings, "trial", repeat, **fields)


@given(st.integers(1, 6), st.integers(1, 5), st.integers())
def test_every_trial_once_and_all_before_any_repeat(count: int, repeats: int, seed: int) -> None:
    specs = points(count)
    grid = GridPlanner(design(repeats=repeats, seed=seed), specs)
    order = proposed(grid, Results())
    assert sorted(order) == sorted((s.key, r) for s in specs for r in range(1, repeats + 1))
    assert [repeat for _, repeat in order] == sorted(repeat for _, repeat in order)
    assert grid.planned == len(order)
    assert order == proposed(GridPlanner(design(repeats=repeats, seed=seed), specs), Results())


def test_every_seed_and_every_repeat_has_its_own_order() -> None:
    orders = {
        tuple(proposed(GridPlanner(design(seed=seed), points()), Results())) for seed in range(20)
    }
    assert len(orders) == 20
    keys = [key for key, _ in orders.pop()]
    assert keys[:6] != keys[6:]


@given(st.data())
def test_answered_trials_are_not_proposed_and_the_rest_keeps_its_order(data: Any) -> None:
    grid = GridPlanner(design(skip_dominated=False), points())
    every = proposed(grid, Results())
    answered = data.draw(st.sets(st.sampled_from(every)))
    results = Results()
    specs = {spec.key: spec for spec in points()}
    for key, repeat in sorted(answered):
        results.add(result(specs[key], repeat))
    assert proposed(grid, results) == [trial for trial in every if trial not in answered]


def test_doubtful_trials_come_last() -> None:
    grid = GridPlanner(design(), points())
    every = proposed(grid, Results())
    specs = {spec.key: spec for spec in points()}
    flagged, failed, lost_once, lost_often = every[:4]
    results = Results()
    results.add(result(specs[flagged[0]], interference=INTERFERENCE))
    results.add(result(specs[failed[0]], block=2, outcome=Outcome.CRASHED, infrastructure=True))
    results.add(result(specs[lost_once[0]], block=0, outcome=Outcome.LOST))
    for attempt in (1, 2):
        results.add(result(specs[lost_often[0]], attempt=attempt, block=0, outcome=Outcome.LOST))
    assert proposed(grid, results) == [lost_once, *every[4:], flagged, failed, lost_often]


def test_unavailable_trials_are_skipped_with_a_reason() -> None:
    def unavailable_reason(spec: TrialSpec) -> str:
        return "there is one CPU" if spec.limits.cpus == 2 else ""

    grid = GridPlanner(design(), points(), unavailable_reason)
    assert grid.planned == 6
    assert {spec.limits.cpus for spec, _ in grid.order} == {1}
    skipped = grid.skipped(Results())
    assert [dict(each.levels) for each in skipped] == [
        {"batch_size": b, "cpus": 2.0} for b in BATCHES
    ]
    assert {each.why for each in skipped} == {"there is one CPU"}


def test_claimed_and_refused_trials_are_not_proposed() -> None:
    grid = GridPlanner(design(), points())
    every = proposed(grid, Results())
    results = Results()
    results.claimed_by_others.add(every[0])
    results.refused[every[1][0]] = "invalid"
    assert proposed(grid, results) == [t for t in every[1:] if t[0] != every[1][0]]
    assert [each.why for each in grid.skipped(results)] == ["invalid"]


def test_dominated_trials_are_skipped_with_a_reason() -> None:
    grid = GridPlanner(design(tested_share=0.0), points())
    small = next(s for s in points() if s.workload.batch_size == 16 and s.limits.cpus == 1)
    large = next(s for s in points() if s.workload.batch_size == 32 and s.limits.cpus == 1)
    results = Results()
    results.add(result(small, outcome=Outcome.HOST_OOM))
    assert not [t for t in proposed(grid, results) if t[0] == large.key]
    assert [trial for trial in proposed(grid, results) if trial[0] == small.key] == [(small.key, 2)]
    (skipped,) = grid.skipped(results)
    assert skipped.levels == {"batch_size": 32, "cpus": 1.0}
    assert skipped.why == "already failed (host_oom) with batch_size 16"
    without = GridPlanner(design(skip_dominated=False), points())
    assert [t for t in proposed(without, results) if t[0] == large.key]
    assert without.skipped(results) == []


def test_a_dominated_trial_that_trained_ends_the_skipping() -> None:
    grid = GridPlanner(design(tested_share=0.0), points())
    by_batch = {s.workload.batch_size: s for s in points() if s.limits.cpus == 1}
    results = Results()
    results.add(result(by_batch[8], outcome=Outcome.HOST_OOM))
    assert len(grid.skipped(results)) == 2
    results.add(result(by_batch[32], 1))
    assert grid.skipped(results) == []
    assert (by_batch[16].key, 1) in proposed(grid, results)
