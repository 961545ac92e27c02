"""The settings of a workload: what they may be, and what is said of what they may not."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepscope.errors import BadWorkload
from stepscope.records.codec import to_json
from stepscope.workloads.spec import (
    DATA,
    PARTS,
    SETTINGS,
    Workload,
    make_workload,
    nearest,
    setting_default,
    switches,
    trial_command,
)


def test_every_field_but_the_model_is_a_setting_with_help() -> None:
    fields = {field.name for field in dataclasses.fields(Workload)}
    assert fields == {"model", *SETTINGS}
    assert all(setting.help for setting in SETTINGS.values())


def test_defaults_are_valid_and_survive_json() -> None:
    workload = make_workload("cnn", {name: setting_default(name) for name in SETTINGS})
    assert workload == Workload("cnn") == Workload(**to_json(workload))


@given(batch=st.integers(1, 4096), parts=st.integers(1, 64), ranks=st.integers(1, 64))
def test_global_batch(batch: int, parts: int, ranks: int) -> None:
    workload = make_workload("cnn", {"batch_size": batch, "accumulate": parts, "ranks": ranks})
    assert workload.global_batch == batch * parts * ranks == workload.step_samples * ranks


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"batch_size": 0}, "--batch-size 0 is too small. At least 1"),
        ({"batch_size": 1.5}, "no whole number"),
        ({"batch_size": True}, "no whole number"),
        ({"workers": -1}, "--workers -1 is too small"),
        ({"lr": 0.0}, "More than 0"),
        ({"lr": float("nan")}, "not finite"),
        ({"fraction": 1.5}, "At most 1"),
        ({"precision": "bf61"}, "Did you mean bf16"),
        ({"optimizer": "adan"}, "adam"),
        ({"data": "jepg"}, "Did you mean jpeg"),
        ({"data": "loader-only:jepg"}, "Did you mean jpeg"),
        ({"data": "own"}, "has no data of its own"),
        ({"bacth_size": 3}, "Did you mean batch_size"),
        ({"steps": 3, "epochs": 1}, "--epochs and --steps were both given"),
        ({"data": "resident", "cache": "cold"}, "read from no file"),
        ({"compile": 1}, "no true or false"),
    ],
)
def test_what_may_not_be(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(BadWorkload) as error:
        make_workload("cnn", settings)
    assert said in str(error.value) and error.value.exit_code == 4


@pytest.mark.parametrize("model", ["", ":f", "train.py:", "train.py:no-name"])
def test_no_model(model: str) -> None:
    with pytest.raises(BadWorkload):
        make_workload(model, {})


def test_data_of_a_users_workload_is_its_own() -> None:
    assert make_workload("a.py:f", {"data": "resident"}).part == "resident"
    for settings in ({"data": "jpeg"}, {"cache": "warm"}):
        with pytest.raises(BadWorkload):
            make_workload("a.py:f", settings)


@given(st.sampled_from(["", *DATA[:-1]]), st.sampled_from(["", *PARTS]))
def test_parts(name: str, part: str) -> None:
    data = f"{part}:{name}" if part and name else part or name
    workload = make_workload("cnn", {"data": data})
    assert workload.part == part and workload.data_name == name


@given(st.text(), st.lists(st.text(min_size=1), min_size=1))
def test_nearest_always_names_something_valid(name: str, known: list[str]) -> None:
    assert any(each in nearest(name, known) for each in known)


def test_short_names() -> None:
    assert Workload("resnet18").short_name == "resnet18"
    assert Workload("some/where/train.py:workload").short_name == "train.workload"


def test_a_command_says_every_setting_as_an_option_exactly() -> None:
    settings = {"batch_size": 8, "lr": 0.123456789, "momentum": 0.0, "pin": False, "compile": True}
    words = "--batch-size 8 --lr 0.123456789 --momentum 0 --no-pin --compile"
    assert trial_command("cnn", settings) == ["stepscope", "trial", "cnn", *words.split()]
    assert {"--no-pin", "--compile"} < switches()
    assert "--lr" not in switches()
