"""How long what is left will take: by what is most alike, and never by nothing at all."""

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


def took(it: TrialSpec, seconds: float, **others: Any) -> Result:
    told = {"outcome": Outcome.OK, **others}
    return Result(it.key, it.settings, "trial", 1, 1, 1, seconds=seconds, **told)


def test_before_anything_was_measured_it_is_what_the_design_says() -> None:
    pace = TrialDurations()
    assert not pace.is_measured
    short, longer = pace.of(spec(seconds=3)), pace.of(spec(seconds=30))
    assert short is not None and longer is not None
    assert 3 < short < 30 and longer - short == pytest.approx(27)
    assert pace.of(spec(steps=10)) is None and pace.of(spec(epochs=1)) is None
    assert pace.total([]) == 0.0
    assert pace.total([spec(steps=10)]) is None


def test_the_most_alike_tells_first() -> None:
    small, large, other = spec(batch_size=8), spec(batch_size=64), spec("mlp")
    pace = TrialDurations([took(small, 10.0), took(small, 20.0), took(other, 60.0)])
    assert pace.is_measured
    assert pace.of(small) == 15.0
    assert pace.of(large) == 15.0, "the same model"
    assert pace.of(other) == 60.0
    assert pace.of(spec("resnet18")) == 30.0, "any"


@pytest.mark.parametrize(
    "others",
    [{"outcome": Outcome.LOST}, {"outcome": Outcome.INTERRUPTED}, {"infrastructure": True}],
)
def test_what_was_cut_short_does_not_tell(others: dict[str, Any]) -> None:
    assert not TrialDurations([took(spec(), 100.0, **others)]).is_measured


def test_of_steps_nobody_knows_the_mean_of_the_others_stands() -> None:
    assert TrialDurations().total([spec(seconds=2), spec(steps=9)]) == 2 * (
        TrialDurations().of(spec(seconds=2)) or 0
    )


@given(st.lists(st.tuples(st.sampled_from([8, 16, 32]), st.floats(0.1, 1e4)), min_size=1))
def test_the_total_is_within_what_was_seen(seen: list[tuple[int, float]]) -> None:
    pace = TrialDurations(took(spec(batch_size=batch), seconds) for batch, seconds in seen)
    each = [spec(batch_size=batch) for batch in (8, 16, 32, 64)]
    total = pace.total(each)
    times = [seconds for _, seconds in seen]
    assert total is not None
    assert 4 * min(times) * 0.999 <= total <= 4 * max(times) * 1.001
