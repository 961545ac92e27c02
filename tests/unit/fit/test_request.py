"""Invalid requests, and options without effect on the host."""

from __future__ import annotations

from typing import Any

import pytest

from simulated_gpu import GiB
from stepscope.errors import TrialError, WorkloadError
from stepscope.fit.request import FitRequest, fit_workload
from stepscope.trials.limits.spec import Limits
from stepscope.workloads.spec import make_workload


def request(device: str = "auto", **options: Any) -> FitRequest:
    return FitRequest(make_workload("cnn", {"device": device}), **options)


def test_options_without_effect_on_the_host_are_reported() -> None:
    for options, expected in (
        ({"verify": True}, ["`--verify` has no effect for host memory"]),
        ({"estimate": True}, ["`--estimate` has no effect for host memory"]),
        ({}, []),
    ):
        notices = request(**options).check_without_gpu()
        assert [notice.split(":")[0] for notice in notices] == expected


@pytest.mark.parametrize(
    "options",
    [{"limits": Limits(gpu_memory=GiB)}, {"predict_for": (GiB,)}, {"method": "linear2019"}],
)
def test_gpu_options_without_a_gpu_are_rejected_with_the_reason(options: dict[str, Any]) -> None:
    for device, reason in (
        ("cpu", "needs a GPU, but `--device cpu` is set"),
        ("auto", "needs a GPU, but no usable GPU was found"),
    ):
        with pytest.raises(TrialError, match=reason):
            request(device, **options).check_without_gpu()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"batch_size": 32},
            "`--batch-size` cannot be used with `fit`, which finds the batch size. Remove "
            "--batch-size, or use `stepscope trial` to train at a given batch size",
        ),
        (
            {"epochs": 2},
            "`--epochs` cannot be used with `fit`, which sets the length of each probe. "
            "Remove --epochs",
        ),
        (
            {"steps": 2},
            "`--steps` cannot be used with `fit`, which sets the length of each probe. "
            "Remove --steps",
        ),
        (
            {"seconds": 2.0},
            "`--seconds` cannot be used with `fit`, which sets the length of each probe. "
            "Remove --seconds",
        ),
    ],
)
def test_settings_that_fit_determines_are_rejected(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(WorkloadError) as raised:
        fit_workload("cnn", settings)
    assert str(raised.value) == message
