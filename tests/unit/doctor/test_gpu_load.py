"""The GPU tasks of the self-test: each framework does them, here on a CPU that stands for a GPU."""

from __future__ import annotations

import importlib.util
import os

import pytest

from fake_nvml import FakeNvml
from stepscope.doctor import gpu_load, tasks
from stepscope.doctor.gpu_load import GpuLoad, GpuUntestable, GpuWork, JaxWork, TorchWork
from stepscope.sensors.gpu.nvml import Nvml, NvmlUnavailable

SIZE = 1 << 16


@pytest.fixture
def torch_on_cpu(monkeypatch: pytest.MonkeyPatch) -> GpuWork:
    import torch

    monkeypatch.setattr(TorchWork, "DEVICE", "cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    return TorchWork()


@pytest.fixture
def jax_on_cpu(monkeypatch: pytest.MonkeyPatch) -> GpuWork:
    monkeypatch.setattr(JaxWork, "PLATFORM", "cpu")
    monkeypatch.setenv("XLA_PYTHON_CLIENT_ALLOCATOR", "")
    return JaxWork()


@pytest.fixture(params=["torch", "jax"])
def work(request: pytest.FixtureRequest) -> GpuWork:
    pytest.importorskip(request.param)
    found: GpuWork = request.getfixturevalue(f"{request.param}_on_cpu")
    return found


def test_each_framework_does_every_piece_of_work(work: GpuWork) -> None:
    assert getattr(work.allocate(SIZE), "nbytes", None) == SIZE
    for act in (
        work.copy_in(SIZE),
        work.copy_out(SIZE),
        work.copy_inside(SIZE),
        work.multiply(64, 3),
        work.launch(),
    ):
        act()
        act()
    work.give_back()


def test_a_framework_without_a_gpu_says_so() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("here is one")
    with pytest.raises(GpuUntestable, match="PyTorch cannot use the GPU"):
        TorchWork()


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    scenario = {"gpus": [{"uuid": "GPU-a"}, {"uuid": "GPU-b"}]}
    monkeypatch.setattr(gpu_load, "open_nvml", lambda: Nvml(FakeNvml(scenario)))


def test_the_first_gpu_works_and_tells_how_much(
    monkeypatch: pytest.MonkeyPatch, two_gpus: None, torch_on_cpu: GpuWork
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    for name in ("_MOST_MEMORY", "_STAGE", "_INSIDE"):
        monkeypatch.setattr(gpu_load, name, SIZE)
    monkeypatch.setattr(gpu_load, "_MATRIX", 64)
    load = GpuLoad(seconds=0.01)
    assert load.uuid == "GPU-b"
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "GPU-b"
    done = {name: act() for name, act in load.tasks().items()}
    assert tuple(done) == tasks.GPU_TASKS
    assert done[tasks.GPU_MEMORY] == SIZE
    assert done[tasks.GPU_COPY_IN] >= SIZE and done[tasks.GPU_COPY_IN] % SIZE == 0
    assert done[tasks.GPU_MATRIX] >= 1


def test_without_a_framework_it_is_not_tested(
    monkeypatch: pytest.MonkeyPatch, two_gpus: None
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(GpuUntestable, match="not tested: needs torch or jax"):
        GpuLoad(seconds=0.01)


def test_without_a_driver_or_a_gpu_the_reason_is_told(
    monkeypatch: pytest.MonkeyPatch, two_gpus: None
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(GpuUntestable, match="the driver shows no GPU"):
        GpuLoad(seconds=0.01)

    def no_driver() -> Nvml:
        raise NvmlUnavailable("no NVIDIA driver is installed")

    monkeypatch.setattr(gpu_load, "open_nvml", no_driver)
    with pytest.raises(GpuUntestable, match="no NVIDIA driver"):
        GpuLoad(seconds=0.01)
