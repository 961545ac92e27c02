"""Records are converted to JSON and back."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepscope.records import CodeLocation, Evidence, Finding, Outcome, Recommendation
from stepscope.records.codec import dumps, from_json, loads, to_json


@dataclass(frozen=True)
class Part:
    name: str
    share: float | None = None


@dataclass(frozen=True)
class Whole:
    outcome: Outcome
    parts: tuple[Part, ...]
    folder: Path | None = None
    by_rank: dict[int, Part] = field(default_factory=dict)
    value: float | int | str | bool | None = None
    note: str = ""


WHOLE = Whole(Outcome.GPU_OOM, (Part("a", 0.5), Part("b")), Path("/x"), {0: Part("c")}, 3)


def test_record_round_trip() -> None:
    assert loads(Whole, dumps(WHOLE)) == WHOLE
    assert from_json(Whole, to_json(WHOLE)) == WHOLE
    assert isinstance(from_json(Part, {"name": "a", "share": 1}).share, float)


def test_finding_round_trip() -> None:
    finding = Finding(
        cause="input.workers",
        confidence="high",
        speedup_bound=1.5,
        values={"workers": 8, "share": 0.4},
        evidence=(Evidence("data_wait", 0.4, "share"),),
        recommendations=(Recommendation("more", "workers", 8, CodeLocation("train.py:41")),),
    )
    assert loads(Finding, dumps(finding)) == finding


def test_types_that_json_lacks_are_converted() -> None:
    odd = {
        "nan": math.nan,
        "infinity": np.float64("inf"),
        "number": np.int64(3),
        "array": np.array([1.0, math.nan]),
        "flag": np.bool_(True),
        "path": Path("/x"),
        "set": {"b", "a"},
        Outcome.OK: Outcome.OK,
        3: (1, 2),
    }
    assert json.loads(dumps(odd)) == {
        "nan": None,
        "infinity": None,
        "number": 3,
        "array": [1.0, None],
        "flag": True,
        "path": "/x",
        "set": ["a", "b"],
        "ok": "ok",
        "3": [1, 2],
    }


def test_unknown_keys_are_ignored() -> None:
    assert from_json(Part, {"name": "a", "color": "red"}) == Part("a")


def test_error_names_the_invalid_field() -> None:
    with pytest.raises(ValueError, match=r"\$\.parts\[0\]\.share"):
        from_json(Whole, {"outcome": "ok", "parts": [{"name": "a", "share": "much"}]})
    with pytest.raises(ValueError, match="outcome"):
        from_json(Whole, {"parts": []})
    with pytest.raises(ValueError):
        loads(Whole, "{")


def test_omit_defaults() -> None:
    plain = to_json(Whole(Outcome.OK, (Part("a"),)), omit_defaults=True)
    assert plain == {"outcome": "ok", "parts": [{"name": "a"}]}
    assert from_json(Whole, plain) == Whole(Outcome.OK, (Part("a"),))


@given(st.text(alphabet=st.characters(exclude_categories=()), max_size=20))
def test_any_text_round_trips_including_surrogates(text: str) -> None:
    assert loads(Part, dumps(Part(text))) == Part(text)
