"""What can be had on a machine, and how that is said where it cannot."""

from __future__ import annotations

import os
from typing import Any

import pytest

from stepscope.studies.machine import MachineInfo
from stepscope.studies.trial_spec import make_spec
from stepscope.trials.limits.spec import MachineResources

GIB = 1 << 30
BARE = MachineInfo(MachineResources(2.0, 8 * GIB))
ONE = MachineInfo(MachineResources(2.0, 8 * GIB), ("GPU-a",), 16 * GIB)
FOUR = MachineInfo(
    MachineResources(64.0, 512 * GIB), ("GPU-a", "GPU-b", "GPU-c", "GPU-d"), 80 * GIB
)


def lacks(here: MachineInfo, **settings: Any) -> str:
    return here.lacks(make_spec({"model": "cnn", **settings}))


@pytest.mark.parametrize(
    ("here", "settings", "said"),
    [
        (BARE, {"cpus": 4}, "4 CPUs cannot be had here: there are 2"),
        (BARE, {"memory": "16GiB"}, "16 GiB of memory cannot be had here: there are 8 GiB"),
        (BARE, {"gpus": 4}, "4 GPUs cannot be had here: there is none"),
        (BARE, {"gpus": 1}, "1 GPU cannot be had here: there is none"),
        (BARE, {"device": "cuda"}, "device cuda cannot be had here: there is none"),
        (ONE, {"gpus": 2}, "2 GPUs cannot be had here: there is one"),
        (FOUR, {"gpus": 8}, "8 GPUs cannot be had here: there are 4"),
        (
            ONE,
            {"gpu_memory": "24GiB"},
            "24 GiB of GPU memory cannot be had here: the GPU has 16 GiB",
        ),
        (BARE, {"gpu_memory": "1GiB"}, "1 GiB of GPU memory cannot be had here: there is none"),
    ],
)
def test_what_cannot_be_had(here: MachineInfo, settings: dict[str, Any], said: str) -> None:
    assert lacks(here, **settings) == said


@pytest.mark.parametrize(
    ("here", "settings"),
    [
        (BARE, {}),
        (BARE, {"cpus": 2, "memory": "8GiB", "gpus": 0}),
        (BARE, {"cpus": 0.5}),
        (ONE, {"gpus": 1, "gpu_memory": "16GiB", "device": "cuda"}),
        (FOUR, {"gpus": 4, "cpus": 64}),
    ],
)
def test_what_can(here: MachineInfo, settings: dict[str, Any]) -> None:
    assert lacks(here, **settings) == ""


def test_so_many_gpus_are_the_first_ones_by_their_names() -> None:
    spec = make_spec({"model": "cnn", "gpus": 2, "cpus": 3})
    limits = FOUR.limits(spec.limits, 2)
    assert (limits.gpus, limits.cpus) == (("GPU-a", "GPU-b"), 3)
    named = make_spec({"model": "cnn", "gpus": "2,3"})
    assert FOUR.limits(named.limits, None).gpus == ("2", "3")
    assert FOUR.limits(make_spec({"model": "cnn"}).limits, None).gpus is None
    assert FOUR.limits(make_spec({"model": "cnn", "gpus": 0}).limits, 0).gpus == ()


def test_this_machine_has_a_name_and_room() -> None:
    here = MachineInfo.look()
    assert here == MachineInfo.look()
    assert f"{os.cpu_count()} × " in here.machine
    assert lacks(here, cpus=here.resources.cpus, memory=here.resources.memory) == ""
    assert lacks(here, cpus=here.resources.cpus + 1)
