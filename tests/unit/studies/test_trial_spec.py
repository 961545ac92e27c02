"""Settings of a trial: what they may be, and how a trial is told from another."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepscope.errors import StepscopeError
from stepscope.studies.trial_spec import (
    DEFAULTS,
    LIMITS,
    NAMES,
    checked_level,
    in_design_words,
    level_text,
    levels_text,
    make_spec,
    resolved,
)
from stepscope.trials.limits.spec import Limits
from stepscope.workloads.spec import DATA, PARTS, SETTINGS, Workload


@pytest.mark.parametrize("data", [*DATA, *PARTS, *(f"{p}:{d}" for p in PARTS for d in DATA)])
def test_every_data_is_a_level_by_itself(data: str) -> None:
    assert checked_level("data", data) == data


@pytest.mark.parametrize(
    ("name", "value", "level"),
    [
        ("batch_size", 32, 32),
        ("lr", 1, 1.0),
        ("memory", "8GiB", 8 << 30),
        ("memory", 8 << 30, 8 << 30),
        ("memory", None, None),
        ("gpus", 2, 2),
        ("gpus", "0, 2", "0,2"),
        ("cpus", 2, 2.0),
        ("cache", "cold", "cold"),
        ("data_path", "photos", "photos"),
        ("pin", None, None),
        ("model", "train.py:workload", "train.py:workload"),
    ],
)
def test_levels_have_the_type_of_their_knob(name: str, value: Any, level: Any) -> None:
    checked = checked_level(name, value)
    assert checked == level and type(checked) is type(level)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("memory", "8XiB", "no size"),
        ("memory", True, "cannot be"),
        ("memory", 1.5, "cannot be"),
        ("memory", "1MiB", "too small"),
        ("memory", 10**40, "more than there is"),
        ("gpu_memory", -1, "no size"),
        ("cpus", 0, "cannot be"),
        ("cpus", 0.001, "too small"),
        ("cpus", math.inf, "cannot be"),
        ("cpus", math.nan, "cannot be"),
        ("cpus", 10**400, "cannot be"),
        ("gpus", -1, "cannot be"),
        ("gpus", 10**9, "cannot be"),
        ("gpus", "0,x", "names no GPU"),
        ("gpus", " ", "cannot be"),
        ("timeout", "10 min", "cannot be"),
        ("lr", 10**400, "too large"),
        ("batch_size", "32", "no whole number"),
        ("data", "resident:jepg", "Did you mean jpeg"),
        ("model", None, "No model was named"),
        ("model", 5, "5 is no model"),
        ("batchsize", 5, "Did you mean batch_size"),
    ],
)
def test_what_is_no_level(name: str, value: Any, said: str) -> None:
    with pytest.raises(StepscopeError, match=said):
        checked_level(name, value)


def test_the_key_is_that_of_what_differs_from_the_usual() -> None:
    plain = make_spec({"model": "cnn"})
    assert plain.settings == {"model": "cnn"} and len(plain.key) == 12
    same = make_spec({"model": "cnn", "batch_size": 32, "memory": None, "hang": 300, "workers": 0})
    assert same.key == plain.key and same.limits == plain.limits == Limits()
    sizes = [
        make_spec({"model": "cnn", "memory": size}).key for size in ("1GiB", "1024MiB", 1 << 30)
    ]
    assert len(set(sizes)) == 1 and sizes[0] != plain.key
    assert (
        make_spec({"cpus": 2, "model": "cnn"}).key == make_spec({"model": "cnn", "cpus": 2.0}).key
    )


@given(
    st.fixed_dictionaries(
        {"model": st.sampled_from(["cnn", "lstm"])},
        optional={
            "batch_size": st.integers(1, 10_000),
            "workers": st.integers(0, 64),
            "precision": st.sampled_from(["fp32", "fp16"]),
            "lr": st.floats(1e-6, 10),
            "cpus": st.floats(0.5, 64),
            "memory": st.none() | st.integers(64 << 20, 1 << 40),
            "gpus": st.integers(0, 8) | st.just("0,2"),
            "pin": st.none() | st.booleans(),
        },
    )
)
def test_a_spec_survives_its_settings(settings: dict[str, Any]) -> None:
    spec = make_spec(settings)
    again = make_spec(spec.settings)
    assert again == spec and again.key == spec.key
    assert all(spec.get(name) == value for name, value in settings.items())


def test_defaults_are_those_of_a_spec() -> None:
    assert {*DEFAULTS, "model"} == {*NAMES} == {"model", *SETTINGS, *LIMITS}
    settings = {name: value for name, value in DEFAULTS.items() if value is not None}
    assert make_spec({"model": "cnn", **settings}).settings == {"model": "cnn"}


def test_files_are_seen_from_the_folder_of_the_design(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("def workload(): ...\n")
    (tmp_path / "photos").mkdir()
    own = resolved(Workload("train.py:workload"), tmp_path)
    assert own.model == f"{(tmp_path / 'train.py').resolve()}:workload"
    photos = resolved(Workload("cnn", data="jpeg", data_path="photos"), tmp_path)
    assert photos.data_path == str((tmp_path / "photos").resolve())
    for left in (Workload("cnn"), Workload("other.py:f"), Workload("cnn", data_path="/nowhere")):
        assert resolved(left, tmp_path) == left


def test_words() -> None:
    assert level_text("memory", 3 << 29) == "1.5 GiB"
    assert levels_text({"model": "cnn", "cpus": 2.0, "compile": True, "memory": None}) == (
        "cnn, cpus 2, compile yes, memory –"
    )
    assert in_design_words("--batch-size 0 and --epochs, not --quiet") == (
        "batch_size 0 and epochs, not --quiet"
    )
