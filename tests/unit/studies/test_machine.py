"""Which trials are available on a machine, and the reasons why others are not."""

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


def reason(machine: MachineInfo, **settings: Any) -> str:
    return machine.unavailable_reason(make_spec({"model": "cnn", **settings}))


@pytest.mark.parametrize(
    ("machine", "settings", "expected"),
    [
        (BARE, {"cpus": 4}, "4 CPUs requested, but only 2 are available"),
        (BARE, {"memory": "16GiB"}, "16 GiB of memory requested, but only 8 GiB is available"),
        (BARE, {"gpus": 4}, "4 GPUs requested, but none is available"),
        (BARE, {"gpus": 1}, "1 GPU requested, but none is available"),
        (
            BARE,
            {"device": "cuda"},
            "device cuda is not available on this machine: it has no GPU",
        ),
        (ONE, {"gpus": 2}, "2 GPUs requested, but only 1 is available"),
        (FOUR, {"gpus": 8}, "8 GPUs requested, but only 4 are available"),
        (
            ONE,
            {"gpu_memory": "24GiB"},
            "24 GiB of GPU memory requested, but the GPU has 16 GiB",
        ),
        (
            BARE,
            {"gpu_memory": "1GiB"},
            "1 GiB of GPU memory requested, but this machine has no GPU",
        ),
    ],
)
def test_unavailable_trials(machine: MachineInfo, settings: dict[str, Any], expected: str) -> None:
    assert reason(machine, **settings) == expected


@pytest.mark.parametrize(
    ("machine", "settings"),
    [
        (BARE, {}),
        (BARE, {"cpus": 2, "memory": "8GiB", "gpus": 0}),
        (BARE, {"cpus": 0.5}),
        (ONE, {"gpus": 1, "gpu_memory": "16GiB", "device": "cuda"}),
        (FOUR, {"gpus": 4, "cpus": 64}),
    ],
)
def test_available_trials(machine: MachineInfo, settings: dict[str, Any]) -> None:
    assert reason(machine, **settings) == ""


def test_a_number_of_gpus_selects_the_first_ones() -> None:
    spec = make_spec({"model": "cnn", "gpus": 2, "cpus": 3})
    limits = FOUR.limits(spec.limits, 2)
    assert (limits.gpus, limits.cpus) == (("GPU-a", "GPU-b"), 3)
    named = make_spec({"model": "cnn", "gpus": "2,3"})
    assert FOUR.limits(named.limits, None).gpus == ("2", "3")
    assert FOUR.limits(make_spec({"model": "cnn"}).limits, None).gpus is None
    assert FOUR.limits(make_spec({"model": "cnn", "gpus": 0}).limits, 0).gpus == ()


def test_this_machine() -> None:
    machine = MachineInfo.detect()
    assert machine == MachineInfo.detect()
    assert f"{os.cpu_count()} × " in machine.machine
    resources = machine.resources
    assert reason(machine, cpus=resources.cpus, memory=resources.memory) == ""
    assert reason(machine, cpus=resources.cpus + 1)
