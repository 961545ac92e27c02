"""The GPU tasks of the self-test with each framework, run on the CPU."""

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
    pytest.importorskip("jax")
    monkeypatch.setattr(JaxWork, "PLATFORM", "cpu")
    monkeypatch.setenv("XLA_PYTHON_CLIENT_ALLOCATOR", "")
    return JaxWork()


@pytest.fixture(params=["torch", "jax"])
def work(request: pytest.FixtureRequest) -> GpuWork:
    found: GpuWork = request.getfixturevalue(f"{request.param}_on_cpu")
    return found


def test_each_framework_runs_every_operation(work: GpuWork) -> None:
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
    work.release()


def test_framework_without_a_gpu_is_untestable() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(GpuUntestable, match="PyTorch cannot use the GPU"):
        TorchWork()


@pytest.fixture
def small_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in (("_MAX_MEMORY", 4), ("_STAGE", 1), ("_INSIDE", 2)):
        monkeypatch.setattr(gpu_load, name, size * SIZE)
    monkeypatch.setattr(gpu_load, "_MATRIX", 64)


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    scenario = {"gpus": [{"uuid": "GPU-a"}, {"uuid": "GPU-b"}]}
    monkeypatch.setattr(gpu_load, "open_nvml", lambda: Nvml(FakeNvml(scenario)))


def test_first_visible_gpu_runs_all_tasks(
    monkeypatch: pytest.MonkeyPatch, two_gpus: None, small_tasks: None, torch_on_cpu: GpuWork
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    load = GpuLoad(seconds=0.01)
    assert load.uuid == "GPU-b"
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "GPU-b"
    done = {name: act() for name, act in load.tasks().items()}
    assert tuple(done) == tasks.GPU_TASKS
    assert done[tasks.GPU_MEMORY] == 4 * SIZE
    assert done[tasks.GPU_COPY_IN] >= SIZE and done[tasks.GPU_COPY_IN] % SIZE == 0
    assert done[tasks.GPU_MATRIX] >= 1


def test_nothing_is_compiled_during_a_task(
    monkeypatch: pytest.MonkeyPatch, two_gpus: None, small_tasks: None, jax_on_cpu: GpuWork
) -> None:
    import jax

    compiled: list[str] = []

    def record(event: str, seconds: float, **_: object) -> None:
        if event.endswith("backend_compile_duration"):
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(record)
    monkeypatch.setattr(gpu_load, "_installed_framework", lambda: jax_on_cpu)
    try:
        load = GpuLoad(seconds=0.01)
        assert compiled
        compiled.clear()
        for act in load.tasks().values():
            act()
    finally:
        jax.monitoring.unregister_event_duration_listener(record)
    assert compiled == []


def test_out_of_memory_in_one_task_does_not_affect_other_tasks(
    monkeypatch: pytest.MonkeyPatch, two_gpus: None, small_tasks: None, torch_on_cpu: GpuWork
) -> None:
    def out_of_memory(size: int) -> gpu_load.Act:
        raise RuntimeError("CUDA out of memory")

    monkeypatch.setattr(torch_on_cpu, "copy_inside", out_of_memory)
    monkeypatch.setattr(gpu_load, "_installed_framework", lambda: torch_on_cpu)
    todo = GpuLoad(seconds=0.01).tasks()
    assert todo[tasks.GPU_COPY_IN]() > 0
    with pytest.raises(RuntimeError, match="out of memory"):
        todo[tasks.GPU_COPY_INSIDE]()


def test_without_a_framework_the_gpu_is_untestable(
    monkeypatch: pytest.MonkeyPatch, two_gpus: None
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(GpuUntestable, match="requires torch or jax"):
        GpuLoad(seconds=0.01)


def test_without_a_driver_or_gpu_there_is_a_reason(
    monkeypatch: pytest.MonkeyPatch, two_gpus: None
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(GpuUntestable, match="the driver reports no GPU"):
        GpuLoad(seconds=0.01)

    def no_driver() -> Nvml:
        raise NvmlUnavailable("no NVIDIA driver is installed")

    monkeypatch.setattr(gpu_load, "open_nvml", no_driver)
    with pytest.raises(GpuUntestable, match="no NVIDIA driver"):
        GpuLoad(seconds=0.01)
