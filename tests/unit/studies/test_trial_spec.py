"""Configurations of trials: valid levels, and the keys that identify them."""

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
    level_text,
    levels_text,
    make_spec,
    resolved,
    with_setting_names,
)
from stepscope.trials.limits.spec import Limits
from stepscope.workloads.spec import DATA, PARTS, SETTINGS, Workload


@pytest.mark.parametrize("data", [*DATA, *PARTS, *(f"{p}:{d}" for p in PARTS for d in DATA)])
def test_every_data_set_is_a_level(data: str) -> None:
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
        ("page_cache", "cold", "cold"),
        ("data_path", "photos", "photos"),
        ("pin", None, None),
        ("model", "train.py:workload", "train.py:workload"),
    ],
)
def test_levels_have_the_type_of_their_setting(name: str, value: Any, level: Any) -> None:
    checked = checked_level(name, value)
    assert checked == level and type(checked) is type(level)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("memory", "8XiB", "8XiB"),
        ("memory", True, "Invalid value True for `memory`. Use a size such as 8GiB"),
        ("memory", 1.5, "Invalid value 1.5 for `memory`"),
        ("memory", "1MiB", "64 MiB"),
        ("memory", 10**40, "TiB"),
        ("gpu_memory", -1, "-1"),
        ("cpus", 0, "Invalid value 0 for `cpus`"),
        ("cpus", 0.001, "--cpus"),
        ("cpus", math.inf, "Invalid value inf for `cpus`"),
        ("cpus", math.nan, "Invalid value nan for `cpus`"),
        ("cpus", 10**400, "Invalid value 1000"),
        ("gpus", -1, "Invalid value -1 for `gpus`"),
        ("gpus", 10**9, "Invalid value 1000000000 for `gpus`"),
        ("gpus", "0,x", "--gpus"),
        ("gpus", " ", "Invalid value ' ' for `gpus`"),
        ("timeout", "10 min", "Invalid value '10 min' for `timeout`. Use a number of sec"),
        ("lr", 10**400, "`lr` is too large"),
        ("batch_size", "32", "--batch-size"),
        ("data", "resident:jepg", "Did you mean '?jpeg"),
        ("model", None, "`model` is missing"),
        ("model", 5, "Invalid model 5"),
        ("batchsize", 5, "Did you mean '?batch_size"),
    ],
)
def test_invalid_levels(name: str, value: Any, expected: str) -> None:
    with pytest.raises(StepscopeError, match=expected):
        checked_level(name, value)


def test_the_key_is_a_hash_of_what_differs_from_the_defaults() -> None:
    plain = make_spec({"model": "cnn"})
    assert plain.settings == {"model": "cnn"} and len(plain.key) == 12
    defaults = {"batch_size": 32, "memory": None, "stall_timeout": 300, "workers": 0}
    same = make_spec({"model": "cnn", **defaults})
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
def test_a_spec_can_be_made_from_its_settings(settings: dict[str, Any]) -> None:
    spec = make_spec(settings)
    again = make_spec(spec.settings)
    assert again == spec and again.key == spec.key
    assert all(spec.get(name) == value for name, value in settings.items())


def test_defaults_are_those_of_a_spec() -> None:
    assert {*DEFAULTS, "model"} == {*NAMES} == {"model", *SETTINGS, *LIMITS}
    settings = {name: value for name, value in DEFAULTS.items() if value is not None}
    assert make_spec({"model": "cnn", **settings}).settings == {"model": "cnn"}


def test_paths_are_relative_to_the_folder_of_the_design(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("def workload(): ...\n")
    (tmp_path / "photos").mkdir()
    custom = resolved(Workload("train.py:workload"), tmp_path)
    assert custom.model == f"{(tmp_path / 'train.py').resolve()}:workload"
    photos = resolved(Workload("cnn", data="jpeg", data_path="photos"), tmp_path)
    assert photos.data_path == str((tmp_path / "photos").resolve())
    for unchanged in (
        Workload("cnn"),
        Workload("other.py:f"),
        Workload("cnn", data_path="/nowhere"),
    ):
        assert resolved(unchanged, tmp_path) == unchanged


def test_the_command_runs_the_same_trial() -> None:
    spec = make_spec({"model": "cnn", "gpus": 2, "stall_timeout": 60, "compile": True})
    assert spec.command()[:3] == ["stepscope", "trial", "cnn"]
    words = " ".join(spec.command())
    assert "--gpus 0,1" in words and "--stall-timeout 60" in words and "--compile" in words


def test_texts() -> None:
    assert level_text("memory", 3 << 29) == "1.5 GiB"
    assert levels_text({"model": "cnn", "cpus": 2.0, "compile": True, "memory": None}) == (
        "cnn, cpus 2, compile yes, memory –"
    )
    assert with_setting_names("--batch-size 0 and --epochs, not --quiet") == (
        "batch_size 0 and epochs, not --quiet"
    )
