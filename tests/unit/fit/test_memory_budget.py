"""Which GPU is fitted into, what is free of it, and who is there, by a driver that is not there."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from gpus import NO_PERMISSION, fake_library
from stepscope.errors import CannotTry
from stepscope.fit import memory_budget
from stepscope.fit.answer import ChosenGpu, MemoryBudget, OtherProcess
from stepscope.fit.memory_budget import budget_for, choose_gpu
from stepscope.fit.request import FitRequest
from stepscope.report.fit.sentences import other_process_text
from stepscope.sensors.gpu.nvml import NvmlUnavailable
from stepscope.trials.limits.spec import Limits
from stepscope.workloads.spec import Workload

GiB = 1 << 30
TWO = {
    "gpus": [
        {"uuid": "GPU-aaaa", "name": "NVIDIA A", "memory": 80 * GiB, "load": "idle"},
        {"uuid": "GPU-bbbb", "name": "NVIDIA A", "memory": 40 * GiB, "load": "matmul"},
    ],
    "driver": "550.1",
}


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The driver of a scenario: `driver(TWO)`."""

    def install(scenario: dict[str, Any] | None) -> None:
        def opened() -> Any:
            if scenario is None:
                raise NvmlUnavailable("no driver")
            return fake_library(scenario)

        monkeypatch.setattr(memory_budget, "open_nvml", opened)

    return install


def here(names: tuple[str, ...] | None = None, **environment: str) -> ChosenGpu:
    found = choose_gpu(names, environment)
    assert found is not None
    return found


def test_the_first_gpu_is_fitted_into_and_what_is_free_of_it_is_told(driver: Any) -> None:
    driver(TWO)
    found = here()
    assert (found.uuid, found.name, found.driver) == ("GPU-aaaa", "NVIDIA A", "550.1")
    assert found.total == 80 * GiB and 0 < found.free < found.total and found.other_processes == ()


@pytest.mark.parametrize("name", ["1", "GPU-bbbb", "GPU-bb"])
def test_another_is_named_by_number_or_identity(driver: Any, name: str) -> None:
    driver(TWO)
    assert here((name,)).uuid == "GPU-bbbb"
    assert here((name, "0")).uuid == "GPU-bbbb"


def test_the_environment_hides_gpus(driver: Any) -> None:
    driver(TWO)
    assert here(CUDA_VISIBLE_DEVICES="1").uuid == "GPU-bbbb"
    assert choose_gpu(None, {"CUDA_VISIBLE_DEVICES": ""}) is None
    with pytest.raises(CannotTry, match="There is no GPU 0 for this process") as refused:
        choose_gpu(("0",), {"CUDA_VISIBLE_DEVICES": "1"})
    assert refused.value.hint.startswith("There is: ")


def test_one_that_is_not_there_is_refused_with_those_that_are(driver: Any) -> None:
    driver(TWO)
    with pytest.raises(CannotTry, match="There is no GPU 7"):
        choose_gpu(("7",), {})
    assert choose_gpu((), {}) is None


def test_without_a_driver_there_is_none_unless_one_was_named(driver: Any) -> None:
    driver(None)
    assert choose_gpu(None, {}) is None
    with pytest.raises(CannotTry, match="--gpus 0,1 cannot be had: no driver"):
        choose_gpu(("0", "1"), {})


def test_who_is_there_is_named(driver: Any) -> None:
    own = Path("/proc/self/comm").read_text().strip()
    processes = [
        {"pid": os.getpid(), "bytes": 3 * GiB},
        {"pid": 1 << 30, "bytes": None},
    ]
    driver({"gpus": [{"memory": 80 * GiB, "processes": processes}]})
    assert [other_process_text(each) for each in here().other_processes] == [
        f"{own} (pid {os.getpid()}) holds 3 GiB",
        f"a process (pid {1 << 30})",
    ]


def test_a_gpu_that_does_not_say_who_is_there_is_fitted_into_all_the_same(driver: Any) -> None:
    errors = {"nvmlDeviceGetComputeRunningProcesses": {"code": NO_PERMISSION}}
    driver({"gpus": [{"memory": 80 * GiB, "errors": errors}]})
    assert here().other_processes == () and here().total == 80 * GiB


GPU = ChosenGpu("GPU-aaaa", "NVIDIA A", 80 * GiB, 70 * GiB, (OtherProcess(3, "python", 10 * GiB),))


def gpu_budget(gpu: ChosenGpu, requested: int | None, headroom: int) -> MemoryBudget:
    request = FitRequest(Workload("cnn"), Limits(gpu_memory=requested), headroom)
    return budget_for(request, gpu)


def host_budget(requested: int | None, headroom: int) -> MemoryBudget:
    return budget_for(FitRequest(Workload("cnn"), Limits(memory=requested), headroom), None)


def test_the_room_is_what_is_free_less_the_headroom() -> None:
    found = gpu_budget(GPU, None, 2 * GiB)
    assert (found.limit, found.free, found.total) == (68 * GiB, 70 * GiB, 80 * GiB)
    assert (found.requested, found.headroom, found.other_processes) == (
        None,
        2 * GiB,
        GPU.other_processes,
    )


def test_a_limit_is_within_what_is_free() -> None:
    assert gpu_budget(GPU, 15 * GiB, 0).limit == 15 * GiB
    assert gpu_budget(GPU, 15 * GiB, GiB).limit == 14 * GiB
    assert gpu_budget(GPU, 75 * GiB, 0).limit == 70 * GiB


def test_more_than_there_is_is_refused() -> None:
    with pytest.raises(CannotTry, match="asks for 96 GiB of a GPU that has 80 GiB"):
        gpu_budget(GPU, 96 * GiB, 0)
    with pytest.raises(CannotTry, match="--headroom 16 GiB leaves nothing of 15 GiB"):
        gpu_budget(GPU, 15 * GiB, 16 * GiB)
    with pytest.raises(CannotTry, match="leaves nothing of 70 GiB"):
        gpu_budget(GPU, None, 70 * GiB)


def test_the_budget_of_the_host() -> None:
    budget = host_budget(2 << 30, 256 << 20)
    assert (budget.limit, budget.requested, budget.headroom) == (1792 << 20, 2 << 30, 256 << 20)
    assert 0 < host_budget(None, 0).limit < budget.total
    with pytest.raises(CannotTry, match="leaves nothing"):
        host_budget(1 << 30, 1 << 30)
