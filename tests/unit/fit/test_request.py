"""What a request refuses, and what it says of options that do nothing on the host."""

from __future__ import annotations

from typing import Any

import pytest

from simulated_gpu import GiB
from stepscope.errors import CannotTry
from stepscope.fit.request import FitRequest
from stepscope.trials.limits.spec import Limits
from stepscope.workloads.spec import make_workload


def request(device: str = "auto", **options: Any) -> FitRequest:
    return FitRequest(make_workload("cnn", {"device": device}), **options)


def test_on_the_host_what_does_nothing_is_told() -> None:
    for options, words in (
        ({"prove": True}, ["--prove is for a GPU"]),
        ({"estimate": True}, ["--estimate is for a GPU"]),
        ({}, []),
    ):
        told = request(**options).check_without_gpu()
        assert [line.split(":")[0] for line in told] == words


@pytest.mark.parametrize(
    "options", [{"limits": Limits(gpu_memory=GiB)}, {"cards": (GiB,)}, {"method": "linear2019"}]
)
def test_a_gpu_that_is_left_out_is_not_said_to_be_missing(options: dict[str, Any]) -> None:
    for device, words in (("cpu", "--device cpu leaves it out"), ("auto", "there is none")):
        with pytest.raises(CannotTry, match=words):
            request(device, **options).check_without_gpu()
