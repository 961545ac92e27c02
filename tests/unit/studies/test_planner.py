"""The grid wants each trial once, repeats far apart, and the doubtful ones last."""

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
NOISE = (InterferenceReason("cpu", 1.5, 2.0),)


def design(**others: Any) -> Design:
    factors = (Factor("batch_size", BATCHES), Factor("cpus", CPUS))
    return Design("some", {"model": "cnn"}, factors, **{"repeats": 2, **others})


def points(count: int = 99) -> list[TrialSpec]:
    every = [make_spec({"model": "cnn", "batch_size": b, "cpus": c}) for b in BATCHES for c in CPUS]
    return every[:count]


def wanted(grid: GridPlanner, known: Results) -> list[tuple[str, int]]:
    return [(each.spec.key, each.repeat) for each in grid.next(known)]


def over(spec: TrialSpec, repeat: int = 1, **others: Any) -> Result:
    told = {"attempt": 1, "block": 1, "outcome": Outcome.OK, **others}
    return Result(spec.key, spec.settings, "trial", repeat, **told)


@given(st.integers(1, 6), st.integers(1, 5), st.integers())
def test_each_once_and_all_before_any_again(count: int, repeats: int, seed: int) -> None:
    specs = points(count)
    grid = GridPlanner(design(repeats=repeats, seed=seed), specs)
    order = wanted(grid, Results())
    assert sorted(order) == sorted((s.key, r) for s in specs for r in range(1, repeats + 1))
    assert [repeat for _, repeat in order] == sorted(repeat for _, repeat in order)
    assert grid.planned == len(order)
    assert order == wanted(GridPlanner(design(repeats=repeats, seed=seed), specs), Results())


def test_another_seed_another_order_and_no_repeat_like_the_last() -> None:
    orders = {
        tuple(wanted(GridPlanner(design(seed=seed), points()), Results())) for seed in range(20)
    }
    assert len(orders) == 20
    keys = [key for key, _ in orders.pop()]
    assert keys[:6] != keys[6:]


@given(st.data())
def test_what_is_answered_is_not_wanted_again_and_the_rest_keeps_its_order(data: Any) -> None:
    grid = GridPlanner(design(skip_dominated=False), points())
    every = wanted(grid, Results())
    answered = data.draw(st.sets(st.sampled_from(every)))
    known = Results()
    specs = {spec.key: spec for spec in points()}
    for key, repeat in sorted(answered):
        known.add(over(specs[key], repeat))
    assert wanted(grid, known) == [trial for trial in every if trial not in answered]


def test_what_is_doubtful_comes_last() -> None:
    grid = GridPlanner(design(), points())
    every = wanted(grid, Results())
    specs = {spec.key: spec for spec in points()}
    disturbed, failed, lost_once, lost_often = every[:4]
    known = Results()
    known.add(over(specs[disturbed[0]], noise=NOISE))
    known.add(over(specs[failed[0]], block=2, outcome=Outcome.CRASHED, infrastructure=True))
    known.add(over(specs[lost_once[0]], block=0, outcome=Outcome.LOST))
    for attempt in (1, 2):
        known.add(over(specs[lost_often[0]], attempt=attempt, block=0, outcome=Outcome.LOST))
    assert wanted(grid, known) == [lost_once, *every[4:], disturbed, failed, lost_often]


def test_what_cannot_be_had_is_left_out_with_the_reason() -> None:
    def lacks(spec: TrialSpec) -> str:
        return "there is one CPU" if spec.limits.cpus == 2 else ""

    grid = GridPlanner(design(), points(), lacks)
    assert grid.planned == 6
    assert {spec.limits.cpus for spec, _ in grid.order} == {1}
    left = grid.skipped(Results())
    assert [dict(each.levels) for each in left] == [{"batch_size": b, "cpus": 2.0} for b in BATCHES]
    assert {each.why for each in left} == {"there is one CPU"}


def test_what_somebody_else_runs_or_what_is_no_workload_is_not_wanted() -> None:
    grid = GridPlanner(design(), points())
    every = wanted(grid, Results())
    known = Results()
    known.claimed_by_others.add(every[0])
    known.refused[every[1][0]] = "it is none"
    assert wanted(grid, known) == [t for t in every[1:] if t[0] != every[1][0]]
    assert [each.why for each in grid.skipped(known)] == ["it is none"]


def test_what_needs_more_than_what_ran_out_is_skipped_and_said_so() -> None:
    grid = GridPlanner(design(tested_share=0.0), points())
    small = next(s for s in points() if s.workload.batch_size == 16 and s.limits.cpus == 1)
    large = next(s for s in points() if s.workload.batch_size == 32 and s.limits.cpus == 1)
    known = Results()
    known.add(over(small, outcome=Outcome.HOST_OOM))
    assert not [t for t in wanted(grid, known) if t[0] == large.key]
    assert [trial for trial in wanted(grid, known) if trial[0] == small.key] == [(small.key, 2)]
    (left,) = grid.skipped(known)
    assert left.levels == {"batch_size": 32, "cpus": 1.0}
    assert left.why == "host_oom already with batch_size 16"
    without = GridPlanner(design(skip_dominated=False), points())
    assert [t for t in wanted(without, known) if t[0] == large.key]
    assert without.skipped(known) == []


def test_one_that_trained_although_it_needs_more_ends_the_skipping() -> None:
    grid = GridPlanner(design(tested_share=0.0), points())
    by_batch = {s.workload.batch_size: s for s in points() if s.limits.cpus == 1}
    known = Results()
    known.add(over(by_batch[8], outcome=Outcome.HOST_OOM))
    assert len(grid.skipped(known)) == 2
    known.add(over(by_batch[32], 1))
    assert grid.skipped(known) == []
    assert (by_batch[16].key, 1) in wanted(grid, known)
