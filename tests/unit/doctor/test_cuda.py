"""The calls to the driver, marshalled for real, answered by functions that check what they get."""

from __future__ import annotations

import ctypes
import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stepscope.doctor import cuda
from stepscope.doctor.cuda import CudaFailed, CudaUnavailable, Gpu
from stepscope.doctor.kernels import PROGRAM

NO_DEVICE, INVALID_PTX, OUT_OF_MEMORY, WRONG_CALL = 100, 218, 2, 1
WORDS = {NO_DEVICE: b"CUDA_ERROR_NO_DEVICE", INVALID_PTX: b"CUDA_ERROR_INVALID_PTX",
         OUT_OF_MEMORY: b"CUDA_ERROR_OUT_OF_MEMORY", WRONG_CALL: b"WRONG_CALL"}  # fmt: skip
DEVICE, PINNED = 0x7000_0000_0000, 0x5000_0000_0000
"""Where the addresses of the two kinds of memory begin: beyond 32 bits."""


class Driver:
    """A driver that keeps books: what is held, copied and launched. Each call is a C function."""

    def __init__(self, capability: tuple[int, int] = (9, 0), **codes: int) -> None:
        self.capability = capability
        self.codes = codes
        self.held: dict[int, int] = {}
        self.copied: list[tuple[str, str, int]] = []
        self.launched: list[tuple[str, int, int]] = []
        self._next = 0
        for name, types in cuda._CALLS.items():
            signature = ctypes.CFUNCTYPE(ctypes.c_int, *types)
            setattr(self, name, signature(self._answering(name)))

    def _answering(self, name: str) -> Callable[..., int]:
        answer = getattr(self, f"_{name.removesuffix('_v2')}", None)

        def call(*arguments: Any) -> int:
            code = self.codes.get(name, 0)
            if code == 0 and answer is not None:
                try:
                    answer(*arguments)
                except Exception:  # it would not get through a C function
                    return WRONG_CALL
            return code

        return answer if name.startswith("cuGetError") and answer else call

    def _cuGetErrorName(self, code: int, where: int) -> int:
        ctypes.c_char_p.from_address(where).value = WORDS[code]
        return 0

    def _cuGetErrorString(self, code: int, where: int) -> int:
        ctypes.c_char_p.from_address(where).value = b"in words"
        return 0

    def _cuDeviceGetCount(self, where: int) -> None:
        ctypes.c_int.from_address(where).value = 1

    def _cuDeviceGetName(self, text: Any, size: int, device: int) -> None:
        pass  # a `char *` arrives here as a copy

    def _cuDeviceGetUuid(self, where: int, device: int) -> None:
        ctypes.memmove(where, bytes(range(16)), 16)

    def _cuDeviceGetAttribute(self, where: int, number: int, device: int) -> None:
        answers = {16: 132, 75: self.capability[0], 76: self.capability[1]}
        ctypes.c_int.from_address(where).value = answers[number]

    def _cuMemGetInfo(self, free: int, total: int) -> None:
        ctypes.c_size_t.from_address(free).value = 100 << 30
        ctypes.c_size_t.from_address(total).value = 140 << 30

    def _cuMemAlloc(self, where: int, size: int) -> None:
        ctypes.c_uint64.from_address(where).value = self._hold(DEVICE, size)

    def _cuMemHostAlloc(self, where: int, size: int, flags: int) -> None:
        ctypes.c_uint64.from_address(where).value = self._hold(PINNED, size)

    def _cuMemFree(self, place: int) -> None:
        del self.held[place]

    def _cuMemFreeHost(self, place: int) -> None:
        del self.held[place]

    def _cuMemsetD8(self, place: int, value: int, size: int) -> None:
        assert self._kind(place, size) == "device"

    def _cuMemcpyHtoD(self, to: int, source: int, size: int) -> None:
        self.copied.append((self._kind(source, size), self._kind(to, size), size))

    _cuMemcpyDtoH = _cuMemcpyDtoD = _cuMemcpyHtoD

    def _cuModuleGetFunction(self, where: int, module: int, name: bytes) -> None:
        functions = {b"nothing": 0xA, b"matrix_product": 0xB}
        ctypes.c_uint64.from_address(where).value = functions[name]

    def _cuModuleLoadDataEx(
        self, where: int, program: bytes, count: int, options: int, values: int
    ) -> None:
        assert program.decode() == PROGRAM
        assert list((ctypes.c_int * count).from_address(options)) == [5, 6]

    def _cuLaunchKernel(self, function: int, *rest: int) -> None:
        x, y, z, _threads, ty, tz, shared, stream, parameters, extra = rest
        assert (y, z, ty, tz, shared, stream, extra) == (1, 1, 1, 1, 0, None, None)
        rounds = 0
        if function == 0xB:
            pointers = (ctypes.c_void_p * 2).from_address(parameters)
            rounds = ctypes.c_uint.from_address(pointers[1] or 0).value
        self.launched.append(({0xA: "nothing", 0xB: "matrix_product"}[function], x, rounds))

    def _hold(self, base: int, size: int) -> int:
        self._next += 1 << 40
        self.held[base + self._next] = size
        return base + self._next

    def _kind(self, place: int, size: int) -> str:
        """Which kind of memory a stretch of addresses lies in; it must lie in one that is held."""
        assert any(a <= place and place + size <= a + held for a, held in self.held.items())
        return "device" if place >= DEVICE else "host"


def test_all_work_is_done_and_everything_given_back() -> None:
    driver = Driver()
    gpu = Gpu(driver)
    gpu.prepare()
    assert gpu.uuid == "00010203-0405-0607-0809-0a0b0c0d0e0f"
    assert (gpu.capability, gpu.multiprocessors) == ((9, 0), 132)
    assert gpu.hold(0.0).amount == 2 << 30
    done = [gpu.copy_in(0.01), gpu.copy_out(0.01), gpu.copy_inside(0.01)]
    launches = gpu.multiply(0.01), gpu.tick_over(0.01)
    gpu.close()

    assert driver.held == {}
    for ways, work in zip([("host", "device"), ("device", "host"), ("device", "device")], done,
                          strict=True):  # fmt: skip
        moved = [size for source, to, size in driver.copied if (source, to) == ways]
        assert sum(moved) == work.amount > 0
    rounds = [rounds for name, blocks, rounds in driver.launched if name == "matrix_product"]
    assert len(rounds) == launches[0].amount + 2, "one to warm up, one to find the length"
    assert rounds[:2] == [1, 2000] and min(rounds[2:]) > 2000
    assert sum(name == "nothing" for name, *_ in driver.launched) == launches[1].amount + 1


def test_a_call_that_fails_says_which_and_why() -> None:
    with pytest.raises(CudaUnavailable, match="cuInit failed: error 100, CUDA_ERROR_NO_DEVICE"):
        Gpu(Driver(cuInit=NO_DEVICE))
    gpu = Gpu(Driver(cuMemAlloc_v2=OUT_OF_MEMORY))
    with pytest.raises(CudaFailed, match="cuMemAlloc_v2 failed: error 2, CUDA_ERROR_OUT_OF_MEMORY"):
        gpu.copy_in(0.01)


def test_memory_is_given_back_after_a_failure() -> None:
    driver = Driver(cuMemcpyHtoD_v2=OUT_OF_MEMORY)
    with pytest.raises(CudaFailed):
        Gpu(driver).copy_in(0.01)
    assert driver.held == {}


def test_what_the_compiler_says_is_told() -> None:
    class Complains(Driver):
        def _answering(self, name: str) -> Callable[..., int]:
            if name != "cuModuleLoadDataEx":
                return super()._answering(name)

            def call(where: int, program: bytes, count: int, options: int, values: int) -> int:
                log, size = (ctypes.c_void_p * 2).from_address(values)
                text = b"line 7: unknown instruction\n\0"
                assert size == 4096
                ctypes.memmove(log or 0, text, len(text))
                return INVALID_PTX

            return call

    with pytest.raises(CudaFailed, match=r"INVALID_PTX, in words: line 7: unknown instruction$"):
        Gpu(Complains()).prepare()


def test_an_old_gpu_copies_but_does_not_multiply() -> None:
    driver = Driver(capability=(7, 0))
    gpu = Gpu(driver)
    gpu.prepare()
    assert gpu.copy_in(0.01).amount > 0
    for work in (gpu.multiply, gpu.tick_over):
        with pytest.raises(CudaUnavailable, match="older than Ampere"):
            work(0.01)


def test_the_self_check_without_a_driver_says_so() -> None:
    if Path("/proc/driver/nvidia").exists():
        pytest.skip("there is a driver here")
    done = subprocess.run(
        [sys.executable, "-m", "stepscope.doctor.cuda", "0.01"], capture_output=True, text=True
    )
    assert done.returncode == 1
    assert json.loads(done.stdout) == {
        "work": "open",
        "error": "no NVIDIA driver (libcuda.so.1 is not there)",
    }


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
def test_the_kernels_compile(architecture: str, tmp_path: Path) -> None:
    """With the assembler that comes with Triton, which comes with PyTorch."""
    found = importlib.util.find_spec("triton")
    assembler = (
        Path(found.origin or "").parent / "backends/nvidia/bin/ptxas" if found else Path("absent")
    )
    if not assembler.exists():
        pytest.skip("there is no ptxas here")
    program = tmp_path / "program.ptx"
    program.write_text(PROGRAM)
    done = subprocess.run(
        [assembler, "-v", f"-arch={architecture}", program, "-o", tmp_path / "program.cubin"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("0 bytes spill stores, 0 bytes spill loads") == 2
