"""The chosen GPU, its free memory and other processes, with a fake driver."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from gpus import NO_PERMISSION, fake_library
from stepscope.errors import TrialError
from stepscope.fit import memory_budget
from stepscope.fit.memory_budget import budget_for, choose_gpu
from stepscope.fit.request import FitRequest
from stepscope.fit.result import ChosenGpu, MemoryBudget, OtherProcess
from stepscope.report.fit.messages import other_process_text
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
    """Install the fake driver of a scenario: `driver(TWO)`."""

    def install(scenario: dict[str, Any] | None) -> None:
        def opened() -> Any:
            if scenario is None:
                raise NvmlUnavailable("no driver")
            return fake_library(scenario)

        monkeypatch.setattr(memory_budget, "open_nvml", opened)

    return install


def chosen(names: tuple[str, ...] | None = None, **environment: str) -> ChosenGpu:
    found = choose_gpu(names, environment)
    assert found is not None
    return found


def test_the_first_gpu_is_chosen_with_its_free_memory(driver: Any) -> None:
    driver(TWO)
    found = chosen()
    assert (found.uuid, found.name, found.driver) == ("GPU-aaaa", "NVIDIA A", "550.1")
    assert found.total_bytes == 80 * GiB and 0 < found.free_bytes < found.total_bytes
    assert found.other_processes == ()


@pytest.mark.parametrize("name", ["1", "GPU-bbbb", "GPU-bb"])
def test_a_gpu_is_selected_by_index_or_uuid(driver: Any, name: str) -> None:
    driver(TWO)
    assert chosen((name,)).uuid == "GPU-bbbb"
    assert chosen((name, "0")).uuid == "GPU-bbbb"


def test_the_environment_hides_gpus(driver: Any) -> None:
    driver(TWO)
    assert chosen(CUDA_VISIBLE_DEVICES="1").uuid == "GPU-bbbb"
    assert choose_gpu(None, {"CUDA_VISIBLE_DEVICES": ""}) is None
    with pytest.raises(TrialError, match="Unknown GPU '0'") as refused:
        choose_gpu(("0",), {"CUDA_VISIBLE_DEVICES": "1"})
    assert refused.value.hint.startswith("Available to this process: ")


def test_an_unknown_gpu_is_rejected(driver: Any) -> None:
    driver(TWO)
    with pytest.raises(TrialError, match="Unknown GPU '7'"):
        choose_gpu(("7",), {})
    assert choose_gpu((), {}) is None


def test_without_a_driver_a_named_gpu_is_rejected(driver: Any) -> None:
    driver(None)
    assert choose_gpu(None, {}) is None
    with pytest.raises(TrialError, match="`--gpus 0,1` is not available: no NVIDIA driver"):
        choose_gpu(("0", "1"), {})


def test_other_processes_are_named(driver: Any) -> None:
    own = Path("/proc/self/comm").read_text().strip()
    processes = [
        {"pid": os.getpid(), "bytes": 3 * GiB},
        {"pid": 1 << 30, "bytes": None},
    ]
    driver({"gpus": [{"memory": 80 * GiB, "processes": processes}]})
    assert [other_process_text(each) for each in chosen().other_processes] == [
        f"{own} (PID {os.getpid()}) uses 3 GiB",
        f"a process (PID {1 << 30})",
    ]


def test_unreadable_processes_are_ignored(driver: Any) -> None:
    errors = {"nvmlDeviceGetComputeRunningProcesses": {"code": NO_PERMISSION}}
    driver({"gpus": [{"memory": 80 * GiB, "errors": errors}]})
    assert chosen().other_processes == () and chosen().total_bytes == 80 * GiB


GPU = ChosenGpu("GPU-aaaa", "NVIDIA A", 80 * GiB, 70 * GiB, (OtherProcess(3, "python", 10 * GiB),))


def gpu_budget(gpu: ChosenGpu, requested: int | None, headroom: int) -> MemoryBudget:
    request = FitRequest(Workload("cnn"), Limits(gpu_memory=requested), headroom)
    return budget_for(request, gpu)


def host_budget(requested: int | None, headroom: int) -> MemoryBudget:
    return budget_for(FitRequest(Workload("cnn"), Limits(memory=requested), headroom), None)


def test_the_limit_is_the_free_memory_less_the_headroom() -> None:
    found = gpu_budget(GPU, None, 2 * GiB)
    assert (found.limit_bytes, found.free_bytes, found.total_bytes) == (
        68 * GiB,
        70 * GiB,
        80 * GiB,
    )
    assert (found.requested_bytes, found.headroom_bytes, found.other_processes) == (
        None,
        2 * GiB,
        GPU.other_processes,
    )


def test_a_requested_limit_is_capped_by_the_free_memory() -> None:
    assert gpu_budget(GPU, 15 * GiB, 0).limit_bytes == 15 * GiB
    assert gpu_budget(GPU, 15 * GiB, GiB).limit_bytes == 14 * GiB
    assert gpu_budget(GPU, 75 * GiB, 0).limit_bytes == 70 * GiB


def test_more_than_the_gpu_has_is_rejected() -> None:
    with pytest.raises(
        TrialError, match=r"`--gpu-memory 96 GiB` is more than the GPU has \(80 GiB\)"
    ):
        gpu_budget(GPU, 96 * GiB, 0)
    with pytest.raises(TrialError, match="`--headroom 16 GiB` leaves none of the 15 GiB"):
        gpu_budget(GPU, 15 * GiB, 16 * GiB)
    with pytest.raises(TrialError, match="leaves none of the 70 GiB"):
        gpu_budget(GPU, None, 70 * GiB)


def test_the_budget_of_the_host() -> None:
    budget = host_budget(2 << 30, 256 << 20)
    assert (budget.limit_bytes, budget.requested_bytes, budget.headroom_bytes) == (
        1792 << 20,
        2 << 30,
        256 << 20,
    )
    assert 0 < host_budget(None, 0).limit_bytes < budget.total_bytes
    with pytest.raises(TrialError, match="leaves none of the 1 GiB"):
        host_budget(1 << 30, 1 << 30)
