"""The GPU tasks of the self-test, through PyTorch.

Imported by the load alone, in its own process.
"""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Callable
from typing import Any

from stepscope.doctor import tasks
from stepscope.sensors.gpu.nvml import NvmlUnavailable, Unreadable, open_nvml
from stepscope.sensors.gpu.selection import select_gpus

_DEVICE = "cuda"
_MIB = 1 << 20
_MOST_MEMORY = 2048 * _MIB
_STAGE = 256 * _MIB
_INSIDE = 512 * _MIB
_MATRIX = 4096
"""Rows of a matrix product: enough to fill the tensor cores, little enough for its operands to be
read from the L2 cache more often than from memory."""
_PRODUCTS = 100
"""Queued at once: some 20 ms of work, so that waiting for the end costs nothing."""

Act = Callable[[], object]


class GpuUntestable(Exception):
    """There is no GPU to work on, or nothing that can make it work; the text says why."""


class GpuLoad:
    """The tasks of the self-test on the first GPU that this process may use."""

    def __init__(self, seconds: float) -> None:
        """GpuUntestable where there is none, or no PyTorch that can use it."""
        self._seconds = seconds
        self.uuid, self._free_bytes = _first_gpu()
        # By what cannot be mistaken: CUDA may count GPUs in another order than the driver.
        os.environ["CUDA_VISIBLE_DEVICES"] = self.uuid
        if importlib.util.find_spec("torch") is None:
            raise GpuUntestable("not tested: needs torch")
        try:
            import torch

            is_available = torch.cuda.is_available()
        except Exception as error:  # one that is installed badly
            raise GpuUntestable(str(error)) from None
        if not is_available:
            raise GpuUntestable("the installed PyTorch cannot use the GPU")
        self._torch = torch
        # What takes time or memory once: kernels are loaded, and workspaces made, at first use.
        self._act(lambda: self._bytes(1).fill_(1))
        copies = (self._copy(1, "in"), self._copy(1, "out"), self._copy(_MIB, "inside"))
        for act in (*copies, self._launch(), self._multiply(1)):
            self._act(act)
        torch.cuda.empty_cache()

    def tasks(self) -> dict[str, Callable[[], float]]:
        """Each task with what it does; returns bytes moved or held, or how often."""

        def rest() -> float:
            time.sleep(self._seconds)
            return 0

        def hold() -> float:
            size = min(_MOST_MEMORY, self._free_bytes // 2 // _MIB * _MIB)
            held = self._act(lambda: self._bytes(size).fill_(1))
            time.sleep(self._seconds)
            del held
            self._torch.cuda.empty_cache()
            return size

        def repeat(act: Act) -> int:
            until = time.monotonic() + self._seconds
            times = 0
            while time.monotonic() < until:
                self._act(act)
                times += 1
            return times

        return {
            tasks.GPU_IDLE: rest,
            tasks.GPU_MEMORY: hold,
            tasks.GPU_COPY_IN: lambda: _STAGE * repeat(self._copy(_STAGE, "in")),
            tasks.GPU_COPY_OUT: lambda: _STAGE * repeat(self._copy(_STAGE, "out")),
            tasks.GPU_COPY_INSIDE: lambda: _INSIDE * repeat(self._copy(_INSIDE, "inside")),
            tasks.GPU_MATRIX: lambda: repeat(self._multiply(_PRODUCTS)),
            tasks.GPU_TINY: lambda: repeat(self._launch()),
        }

    def _act(self, act: Act) -> object:
        """Do it, until it is over on the GPU."""
        result = act()
        self._torch.cuda.synchronize()
        return result

    def _bytes(self, size: int) -> Any:
        return self._torch.empty(size, dtype=self._torch.uint8, device=_DEVICE)

    def _copy(self, size: int, way: str) -> Act:
        source = sink = self._bytes(size)
        if way == "inside":
            sink = self._bytes(size)
            return lambda: sink.copy_(source)
        pinned = self._torch.empty(size, dtype=self._torch.uint8).pin_memory()
        source, sink = (pinned, sink) if way == "in" else (source, pinned)
        return lambda: sink.copy_(source, non_blocking=True)

    def _multiply(self, times: int) -> Act:
        torch = self._torch
        matrix = torch.randn(_MATRIX, _MATRIX, device=_DEVICE, dtype=torch.bfloat16)
        product = torch.empty_like(matrix)
        return lambda: [torch.mm(matrix, matrix, out=product) for _ in range(times)]

    def _launch(self) -> Act:
        number = self._bytes(1)
        return lambda: number.add_(1)


def _first_gpu() -> tuple[str, int]:
    """UUID, and bytes that are free; of a GPU that is divided, its first slice."""
    try:
        with open_nvml() as nvml:
            gpus = select_gpus(nvml.gpus, os.environ).gpus
            divided = {gpu.facts.mig_of for gpu in gpus}
            for gpu in gpus:
                if gpu.facts.uuid not in divided:
                    free = (gpu.facts.memory_bytes or 0) - gpu.memory_used()
                    return gpu.facts.uuid, int(free)
    except (NvmlUnavailable, Unreadable) as error:
        raise GpuUntestable(str(error)) from None
    raise GpuUntestable("the driver shows no GPU (is CUDA_VISIBLE_DEVICES empty?)")
