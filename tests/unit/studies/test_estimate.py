"""Estimates of the remaining time: from similar trials, or from the design."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepscope.records import Outcome
from stepscope.studies.estimate import TrialDurations
from stepscope.studies.results import Result
from stepscope.studies.trial_spec import TrialSpec, make_spec


def spec(model: str = "cnn", **settings: Any) -> TrialSpec:
    return make_spec({"model": model, **settings})


def took(spec: TrialSpec, seconds: float, **others: Any) -> Result:
    fields = {"outcome": Outcome.OK, **others}
    return Result(spec.key, spec.settings, "trial", 1, 1, 1, seconds=seconds, **fields)


def test_without_measurements_the_design_decides() -> None:
    durations = TrialDurations()
    assert not durations.is_measured
    short, longer = durations.of(spec(seconds=3)), durations.of(spec(seconds=30))
    assert short is not None and longer is not None
    assert 3 < short < 30 and longer - short == pytest.approx(27)
    assert durations.of(spec(steps=10)) is None and durations.of(spec(epochs=1)) is None
    assert durations.total([]) == 0.0
    assert durations.total([spec(steps=10)]) is None


def test_the_most_similar_trials_decide() -> None:
    small, large, other = spec(batch_size=8), spec(batch_size=64), spec("mlp")
    durations = TrialDurations([took(small, 10.0), took(small, 20.0), took(other, 60.0)])
    assert durations.is_measured
    assert durations.of(small) == 15.0
    assert durations.of(large) == 15.0, "the same model"
    assert durations.of(other) == 60.0
    assert durations.of(spec("resnet18")) == 30.0, "all trials"


@pytest.mark.parametrize(
    "others",
    [{"outcome": Outcome.LOST}, {"outcome": Outcome.INTERRUPTED}, {"infrastructure": True}],
)
def test_incomplete_trials_do_not_count(others: dict[str, Any]) -> None:
    assert not TrialDurations([took(spec(), 100.0, **others)]).is_measured


def test_unknown_durations_use_the_mean_of_the_known_ones() -> None:
    assert TrialDurations().total([spec(seconds=2), spec(steps=9)]) == 2 * (
        TrialDurations().of(spec(seconds=2)) or 0
    )


@given(st.lists(st.tuples(st.sampled_from([8, 16, 32]), st.floats(0.1, 1e4)), min_size=1))
def test_the_total_is_within_the_measured_range(seen: list[tuple[int, float]]) -> None:
    durations = TrialDurations(took(spec(batch_size=batch), seconds) for batch, seconds in seen)
    specs = [spec(batch_size=batch) for batch in (8, 16, 32, 64)]
    total = durations.total(specs)
    times = [seconds for _, seconds in seen]
    assert total is not None
    assert 4 * min(times) * 0.999 <= total <= 4 * max(times) * 1.001
