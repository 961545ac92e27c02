"""The GPU tasks of the self-test, with PyTorch or else JAX. Imported only by the load process."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

from stepscope.doctor import tasks
from stepscope.sensors.gpu.nvml import NvmlUnavailable, Unreadable, open_nvml
from stepscope.sensors.gpu.selection import select_gpus

_MIB = 1 << 20
_MAX_MEMORY = 2048 * _MIB
_STAGE = 256 * _MIB
_INSIDE = 512 * _MIB
_MATRIX = 4096
"""Rows of a matrix product: enough to fill the tensor cores, but few enough that operands are read
mostly from the L2 cache instead of memory."""
_PRODUCTS = 100
"""Products per synchronization: about 20 ms of work, so that its cost is negligible."""

Act = Callable[[], object]


class GpuUntestable(Exception):
    """No GPU or no framework that can use it. The text is the reason."""


class TorchWork:
    DEVICE: ClassVar[str] = "cuda"

    def __init__(self) -> None:
        import torch

        if not torch.cuda.is_available():
            raise GpuUntestable("the installed PyTorch cannot use the GPU")
        self._torch = torch

    def allocate(self, size: int) -> object:
        return self._synchronized(lambda: self._bytes(size).fill_(1))()

    def copy_in(self, size: int) -> Act:
        place, stage = self._bytes(size), self._pinned(size)
        return self._synchronized(lambda: place.copy_(stage, non_blocking=True))

    def copy_out(self, size: int) -> Act:
        place, stage = self._bytes(size), self._pinned(size)
        return self._synchronized(lambda: stage.copy_(place, non_blocking=True))

    def copy_inside(self, size: int) -> Act:
        source, sink = self._bytes(size), self._bytes(size)
        return self._synchronized(lambda: sink.copy_(source))

    def multiply(self, rows: int, times: int) -> Act:
        torch = self._torch
        matrix = torch.randn(rows, rows, device=self.DEVICE, dtype=torch.bfloat16)
        product = torch.empty_like(matrix)
        return self._synchronized(
            lambda: [torch.mm(matrix, matrix, out=product) for _ in range(times)]
        )

    def launch(self) -> Act:
        number = self._bytes(1)
        return self._synchronized(lambda: number.add_(1))

    def release(self) -> None:
        self._torch.cuda.empty_cache()

    def _bytes(self, size: int) -> Any:
        return self._torch.empty(size, dtype=self._torch.uint8, device=self.DEVICE)

    def _pinned(self, size: int) -> Any:
        return self._torch.empty(size, dtype=self._torch.uint8).pin_memory()

    def _synchronized(self, act: Act) -> Act:
        def run() -> object:
            result = act()
            self._torch.cuda.synchronize()
            return result

        return run


class JaxWork:
    PLATFORM: ClassVar[str] = "gpu"

    def __init__(self) -> None:
        # Otherwise JAX allocates most of the memory at the start and keeps freed memory.
        os.environ["XLA_PYTHON_CLIENT_ALLOCATOR"] = "platform"
        import jax

        if jax.default_backend() != self.PLATFORM:
            raise GpuUntestable("the installed JAX cannot use the GPU")
        self._jax = jax
        self._add = jax.jit(lambda array: array + 1)
        self._square = jax.jit(lambda matrix: matrix @ matrix)

    def allocate(self, size: int) -> object:
        return self._ones(size)

    def copy_in(self, size: int) -> Act:
        import numpy as np

        stage = np.ones(size, np.uint8)
        return lambda: self._jax.device_put(stage).block_until_ready()

    def copy_out(self, size: int) -> Act:
        import numpy as np

        place = self._ones(size)
        # A new array each time: JAX caches the host copy of an array.
        return lambda: np.asarray(self._add(place))

    def copy_inside(self, size: int) -> Act:
        place = self._ones(size)
        return lambda: self._add(place).block_until_ready()

    def multiply(self, rows: int, times: int) -> Act:
        jax = self._jax
        matrix = jax.random.normal(jax.random.PRNGKey(0), (rows, rows), jax.numpy.bfloat16)
        square = self._square
        return lambda: jax.block_until_ready([square(matrix) for _ in range(times)][-1])

    def launch(self) -> Act:
        return self.copy_inside(1)

    def release(self) -> None:
        """Nothing to do: nothing is cached."""

    def _ones(self, size: int) -> Any:
        return self._jax.numpy.ones(size, self._jax.numpy.uint8).block_until_ready()


GpuWork = TorchWork | JaxWork
"""Operations on the first GPU. Each one has completed on the GPU when it returns."""


class GpuLoad:
    """The tasks of the self-test, on the first GPU that this process may use."""

    def __init__(self, seconds: float) -> None:
        """Raises GpuUntestable if there is no GPU or no framework that can use it."""
        self._seconds = seconds
        self.uuid, free_bytes = _first_gpu()
        self._held_bytes = min(_MAX_MEMORY, free_bytes // 2 // _MIB * _MIB)
        # By UUID, because CUDA may use a different order than the driver.
        os.environ["CUDA_VISIBLE_DEVICES"] = self.uuid
        self._work = work = _installed_framework()
        self._repeated: dict[str, tuple[Callable[[], Act], int]] = {
            tasks.GPU_COPY_IN: (lambda: work.copy_in(_STAGE), _STAGE),
            tasks.GPU_COPY_OUT: (lambda: work.copy_out(_STAGE), _STAGE),
            tasks.GPU_COPY_INSIDE: (lambda: work.copy_inside(_INSIDE), _INSIDE),
            tasks.GPU_MATRIX: (lambda: work.multiply(_MATRIX, _PRODUCTS), 1),
            tasks.GPU_TINY: (work.launch, 1),
        }
        """Task to the factory of its operation, which allocates memory, and the amount per call."""
        # Warm up: at first use, kernels are loaded, compiled for each size and tuned, and
        # workspaces are allocated.
        work.allocate(1)
        makers: list[Callable[[], Act]] = [lambda: partial(work.allocate, self._held_bytes)]
        for make in makers + [make for make, _ in self._repeated.values()]:
            with contextlib.suppress(RuntimeError):  # out of memory: the task will report it
                make()()
            work.release()

    def tasks(self) -> dict[str, Callable[[], float]]:
        """Return the tasks. Each returns the bytes moved or held, or the number of calls."""

        def idle() -> float:
            time.sleep(self._seconds)
            return 0

        def hold() -> float:
            held = self._work.allocate(self._held_bytes)
            time.sleep(self._seconds)
            del held
            self._work.release()
            return self._held_bytes

        def repeat(make: Callable[[], Act], amount: int) -> float:
            act, calls = make(), 0
            end = time.monotonic() + self._seconds
            while time.monotonic() < end:
                act()
                calls += 1
            return amount * calls

        repeated = {name: partial(repeat, *each) for name, each in self._repeated.items()}
        return {tasks.GPU_IDLE: idle, tasks.GPU_MEMORY: hold, **repeated}


def _first_gpu() -> tuple[str, int]:
    """Return the UUID and free bytes of the first GPU or, if it has MIG slices, of a slice."""
    try:
        with open_nvml() as nvml:
            gpus = select_gpus(nvml.gpus, os.environ).gpus
            with_slices = {gpu.facts.mig_of for gpu in gpus}
            for gpu in gpus:
                if gpu.facts.uuid not in with_slices:
                    free = (gpu.facts.memory_bytes or 0) - gpu.memory_used()
                    return gpu.facts.uuid, int(free)
    except (NvmlUnavailable, Unreadable) as error:
        raise GpuUntestable(str(error)) from None
    raise GpuUntestable("the driver reports no GPU (is CUDA_VISIBLE_DEVICES empty?)")


def _installed_framework() -> GpuWork:
    reason = "requires torch or jax"
    for name, work in (("torch", TorchWork), ("jax", JaxWork)):
        if importlib.util.find_spec(name) is not None:
            try:
                return work()
            except Exception as error:  # including broken installations
                reason = str(error)
    raise GpuUntestable(reason)
