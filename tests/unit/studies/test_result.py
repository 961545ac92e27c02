"""Ledger lines are read as they were written."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from stepscope.records import Outcome
from stepscope.records.codec import dumps, from_json, loads
from stepscope.records.trial import InterferenceReason
from stepscope.studies.results import RESULTS, Attempt, Result

_NUMBERS = st.floats(allow_nan=False, allow_infinity=False)
_LEVELS = st.none() | st.booleans() | st.integers() | _NUMBERS | st.text()
_REASONS = st.builds(InterferenceReason, st.sampled_from(["cpu", "heat"]), _NUMBERS)
RESULT = st.builds(
    Result,
    key=st.text("0123456789abcdef", min_size=12, max_size=12),
    settings=st.dictionaries(st.text(), _LEVELS),
    role=st.sampled_from(["trial", "reference"]),
    repeat=st.integers(1),
    attempt=st.integers(1),
    block=st.integers(0),
    outcome=st.sampled_from(Outcome),
    reason=st.text(),
    infrastructure=st.booleans(),
    started=_NUMBERS,
    seconds=_NUMBERS,
    values=st.dictionaries(st.text(), _NUMBERS),
    low=st.none() | _NUMBERS,
    high=st.none() | _NUMBERS,
    steady=st.booleans(),
    interference=st.lists(_REASONS).map(tuple),
    cause=st.text(),
    machine=st.text(),
)


@given(RESULT)
@example(Result("0" * 12, {}, "trial", 1, 1, 1, Outcome.OK, low=0.0, high=0.0))
def test_round_trip(result: Result) -> None:
    line = dumps(result, omit_defaults=True)
    assert "\n" not in line
    back = loads(Result, line)
    assert back == result
    assert {k: type(v) for k, v in back.settings.items()} == {
        k: type(v) for k, v in result.settings.items()
    }


@given(st.recursive(_LEVELS, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)))
def test_other_json_is_a_value_error(plain: Any) -> None:
    with pytest.raises(ValueError):
        from_json(Result, plain)


def test_failures_of_the_infrastructure_are_not_results() -> None:
    for outcome in Outcome:
        blank = Result("0" * 12, {}, "trial", 1, 1, 1, outcome)
        assert blank.is_result == (outcome in RESULTS)
        external = Result("0" * 12, {}, "trial", 1, 1, 1, outcome, infrastructure=True)
        assert not external.is_result


def test_places_of_attempts() -> None:
    assert Attempt("ab", "trial", 2, 1).place == "ab/r2a1"
    assert Attempt("ab", "reference", 2, 11).place == "ab/s2a11"
