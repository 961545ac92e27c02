"""Settings of a workload: validation and error messages."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepscope.errors import WorkloadError
from stepscope.records.codec import to_json
from stepscope.workloads.frameworks.torch import model_names
from stepscope.workloads.spec import (
    DATA,
    PARTS,
    SETTINGS,
    Workload,
    close_names,
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
    ("settings", "message"),
    [
        ({"batch_size": 0}, "`--batch-size` must be at least 1, got 0"),
        ({"batch_size": 1.5}, "`--batch-size` must be an integer, got 1.5"),
        ({"batch_size": True}, "`--batch-size` must be an integer, got True"),
        ({"workers": -1}, "`--workers` must be at least 0, got -1"),
        ({"lr": 0.0}, "`--lr` must be greater than 0, got 0.0"),
        ({"lr": float("nan")}, "`--lr` must be finite, got nan"),
        ({"fraction": 1.5}, "`--fraction` must be at most 1, got 1.5"),
        ({"precision": "bf61"}, "Unknown precision 'bf61'. Valid values: bf16, fp16, fp32, tf32"),
        ({"device": "gpu"}, "Unknown device 'gpu'. Did you mean 'cuda'?"),
        ({"optimizer": "adan"}, "Unknown optimizer 'adan'. Valid values: adam, adamw, sgd"),
        ({"page_cache": "hot"}, "Unknown page cache 'hot'. Valid values: as-is, cold, warm"),
        ({"data": "jepg"}, "Unknown dataset 'jepg'. Did you mean 'jpeg'?"),
        ({"data": "loader-only:jepg"}, "Unknown dataset 'jepg'. Did you mean 'jpeg'?"),
        ({"data": "custom"}, "`--data custom` needs a custom workload, and cnn is not one"),
        ({"bacth_size": 3}, "Unknown setting 'bacth_size'. Did you mean 'batch_size'?"),
        ({"steps": 3, "epochs": 1}, "`--epochs` and `--steps` are mutually exclusive"),
        ({"data": "resident", "page_cache": "cold"}, "A resident batch is not read from files"),
        ({"compile": 1}, "`--compile` must be true or false, got 1"),
    ],
)
def test_invalid_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(WorkloadError) as error:
        make_workload("cnn", settings)
    assert str(error.value).startswith(message) and error.value.exit_code == 4


DATA_NAMES = "cifar100, custom, jpeg, random, text, video (or resident:…, loader-only:…)"
OWN_VIDEOS = "To read your own videos from class folders, use --data video with --data-path DIR"
OWN_IMAGES = "To read your own images from class folders, use --data jpeg with --data-path DIR"


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("imagenet", OWN_IMAGES),
        ("ImageNet-1k", OWN_IMAGES),
        ("coco", OWN_IMAGES),
        ("cifar10", f"Did you mean 'cifar100'? {OWN_IMAGES}"),
        ("ucf101", OWN_VIDEOS),
        ("squad", f"Valid values: {DATA_NAMES}"),
    ],
)
def test_unknown_data(name: str, hint: str) -> None:
    with pytest.raises(WorkloadError) as error:
        make_workload("cnn", {"data": name})
    assert error.value.message == f"Unknown dataset {name!r}"
    assert error.value.hint == hint


@pytest.mark.parametrize(
    ("model", "hint"),
    [
        ("resnet5O", "Did you mean 'resnet50'?"),
        ("VGG16", "Did you mean 'vgg16' or 'vgg16_bn'?"),
        ("mobilenet", "Did you mean 'mobilenet_v2', 'mobilenet_v3_large' or 'mobilenet_v3_small'?"),
        ("gpt2", "Use cnn, lstm, a torchvision model"),
        ("mymodel.build", "To use a function in a module, write 'mymodel:build'"),
        ("train.build", "To use a function in a module, write 'train:build'"),
        ("package.train.build", "To use a function in a module, write 'package.train:build'"),
        ("train.py.build", "To use a function in a file, write 'train.py:build'"),
    ],
)
def test_unknown_models(model: str, hint: str) -> None:
    with pytest.raises(WorkloadError) as error:
        make_workload(model, {})
    assert error.value.message == f"Unknown model {model!r}" and error.value.exit_code == 4
    assert error.value.hint.startswith(hint)


def test_a_model_name_is_checked_without_importing_the_framework() -> None:
    program = (
        "import sys; from stepscope.errors import WorkloadError;"
        "from stepscope.workloads.spec import make_workload\n"
        "try: make_workload('resnet5O', {})\n"
        "except WorkloadError as error: print(error)\n"
        "print([name for name in ('torch', 'torchvision', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    unknown, imported = done.stdout.splitlines()
    assert unknown == "Unknown model 'resnet5O'. Did you mean 'resnet50'?"
    assert imported == "[]"


@pytest.mark.parametrize(
    ("version", "is_accepted"),
    [(model_names.TORCHVISION_VERSION, False), ("99.0.1+cu999", True), (None, False)],
)
def test_other_versions_of_torchvision_may_have_other_models(
    monkeypatch: pytest.MonkeyPatch, version: str | None, is_accepted: bool
) -> None:
    def installed(package: str) -> str:
        if version is None:
            raise model_names.metadata.PackageNotFoundError(package)
        return version

    monkeypatch.setattr(model_names.metadata, "version", installed)
    if is_accepted:
        assert make_workload("resnet9000", {}).model == "resnet9000"
    else:
        with pytest.raises(WorkloadError, match="Unknown model 'resnet9000'"):
            make_workload("resnet9000", {})
    with pytest.raises(WorkloadError, match="write 'mymodel:build'"):
        make_workload("mymodel.build", {})


def test_model_names_of_other_frameworks_and_of_records_are_not_checked() -> None:
    assert make_workload("mlp", {"framework": "adapter.py:ADAPTER"}).model == "mlp"
    assert make_workload("mlp", {}, allow_unknown_model=True).model == "mlp"


@pytest.mark.parametrize("model", ["", ":f", "train.py:", "train.py:no-name"])
def test_incomplete_models(model: str) -> None:
    with pytest.raises(WorkloadError):
        make_workload(model, {})


def test_a_custom_workload_has_its_own_data() -> None:
    assert make_workload("a.py:f", {"data": "resident"}).part == "resident"
    for settings in ({"data": "jpeg"}, {"page_cache": "warm"}):
        with pytest.raises(WorkloadError):
            make_workload("a.py:f", settings)


@given(st.sampled_from(["", *DATA[:-1]]), st.sampled_from(["", *PARTS]))
def test_parts(name: str, part: str) -> None:
    data = f"{part}:{name}" if part and name else part or name
    workload = make_workload("cnn", {"data": data})
    assert workload.part == part and workload.data_name == name


@given(st.text(), st.lists(st.text(min_size=1), min_size=1))
def test_hints_always_contain_a_valid_name(name: str, known: list[str]) -> None:
    hint = nearest(name, known)
    assert any(each in hint or repr(each) in hint for each in known)


def test_only_similar_names_are_suggested() -> None:
    assert close_names("imagenet", [*DATA, *PARTS]) == []
    assert close_names("resnet51", ["resnet50", "resnet101", "vgg16"]) == ["resnet50"]
    assert close_names("res", ["resnet50", "resnet101", "vgg16"]) == ["resnet101", "resnet50"]
    assert close_names("", DATA) == []


def test_short_names() -> None:
    assert Workload("resnet18").short_name == "resnet18"
    assert Workload("some/where/train.py:workload").short_name == "train.workload"


def test_trial_command() -> None:
    settings = {"batch_size": 8, "lr": 0.123456789, "momentum": 0.0, "pin": False, "compile": True}
    words = "--batch-size 8 --lr 0.123456789 --momentum 0 --no-pin --compile"
    assert trial_command("cnn", settings) == ["stepscope", "trial", "cnn", *words.split()]
    assert {"--no-pin", "--compile"} < switches()
    assert "--lr" not in switches()
