"""Known work for a GPU through the driver alone: no framework, no CUDA toolkit, no compiler.

    python -m stepscope.doctor.cuda [SECONDS]    do each kind of work once, a JSON line for each

`libcuda.so.1` comes with the NVIDIA driver. Every call's return code is checked, and becomes a
sentence.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from stepscope.doctor.kernels import PROGRAM

LIBRARY = "libcuda.so.1"

_Handle = ctypes.c_void_p
_Address = ctypes.c_uint64
_OUT = ctypes.c_void_p
"""Where a call puts its answer: given with byref()."""

_CALLS: dict[str, tuple[Any, ...]] = {
    "cuInit": (ctypes.c_uint,),
    "cuGetErrorName": (ctypes.c_int, _OUT),
    "cuGetErrorString": (ctypes.c_int, _OUT),
    "cuDeviceGetCount": (_OUT,),
    "cuDeviceGet": (_OUT, ctypes.c_int),
    "cuDeviceGetName": (ctypes.c_char_p, ctypes.c_int, ctypes.c_int),
    "cuDeviceGetUuid": (_OUT, ctypes.c_int),
    "cuDeviceGetUuid_v2": (_OUT, ctypes.c_int),
    "cuDeviceGetAttribute": (_OUT, ctypes.c_int, ctypes.c_int),
    "cuDevicePrimaryCtxRetain": (_OUT, ctypes.c_int),
    "cuDevicePrimaryCtxRelease_v2": (ctypes.c_int,),
    "cuCtxSetCurrent": (_Handle,),
    "cuCtxSynchronize": (),
    "cuMemGetInfo_v2": (_OUT, _OUT),
    "cuMemAlloc_v2": (_OUT, ctypes.c_size_t),
    "cuMemFree_v2": (_Address,),
    "cuMemHostAlloc": (_OUT, ctypes.c_size_t, ctypes.c_uint),
    "cuMemFreeHost": (ctypes.c_void_p,),
    "cuMemsetD8_v2": (_Address, ctypes.c_ubyte, ctypes.c_size_t),
    "cuMemcpyHtoD_v2": (_Address, ctypes.c_void_p, ctypes.c_size_t),
    "cuMemcpyDtoH_v2": (ctypes.c_void_p, _Address, ctypes.c_size_t),
    "cuMemcpyDtoD_v2": (_Address, _Address, ctypes.c_size_t),
    "cuModuleLoadDataEx": (_OUT, ctypes.c_char_p, ctypes.c_uint, _OUT, _OUT),
    "cuModuleGetFunction": (_OUT, _Handle, ctypes.c_char_p),
    "cuLaunchKernel": (_Handle, *[ctypes.c_uint] * 7, _Handle, _OUT, _OUT),
}
"""What is used of the driver, with the types of the arguments; all return a code."""

_MULTIPROCESSORS, _CAPABILITY_MAJOR, _CAPABILITY_MINOR = 16, 75, 76
_ERROR_LOG, _ERROR_LOG_BYTES = 5, 6
_OLDEST = (8, 0)
"""Ampere: the first with tensor cores for bf16, which the kernels are written for."""

_MIB = 1 << 20
_MOST_MEMORY = 2048 * _MIB
_STAGE = 256 * _MIB
_INSIDE = 512 * _MIB
_LAUNCH_S = 0.05
"""How long one launch of the matrix kernel shall take: long for a launch, short for a wait."""


class CudaUnavailable(Exception):
    """There is no GPU to work on; the text says why."""


class CudaFailed(Exception):
    """A call to the driver failed; the text says which and why."""


@dataclass(frozen=True)
class Done:
    """What was done: bytes moved or held, or launches, and in how long."""

    amount: float
    seconds: float


class Gpu:
    """The first GPU that CUDA shows, with a context of its own until `close`."""

    def __init__(self, library: Any = None) -> None:
        """`library` stands for the driver's, where that is not the one of this machine."""
        self._driver = _Driver(library)
        self._device = self._first_device()
        self.name = self._name()
        self.uuid = self._uuid()
        self.capability = (
            self._attribute(_CAPABILITY_MAJOR), self._attribute(_CAPABILITY_MINOR)
        )  # fmt: skip
        self.multiprocessors = self._attribute(_MULTIPROCESSORS)
        context = _Handle()
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), self._device)
        self._call("cuCtxSetCurrent", context)
        self._functions: dict[str, Any] = {}

    def close(self) -> None:
        self._call("cuDevicePrimaryCtxRelease_v2", self._device)

    def prepare(self) -> None:
        """What takes time once: compile the kernels, and run them once."""
        if self.capability < _OLDEST:
            return
        self._load()
        self._matrix_rounds(1)
        self._launch("nothing", 1, 1)
        self.wait()

    def free_bytes(self) -> int:
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self._call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value

    def rest(self, seconds: float) -> Done:
        """Do nothing, with everything prepared: what the rest is compared with."""
        time.sleep(seconds)
        return Done(0, seconds)

    def hold(self, seconds: float) -> Done:
        """Allocate up to 2 GiB, write it all, keep it for a while and give it back."""
        size = min(_MOST_MEMORY, self.free_bytes() // 2 // _MIB * _MIB)
        with self._memory(size) as place:
            began = time.monotonic()
            self._call("cuMemsetD8_v2", place, 1, size)
            self.wait()
            time.sleep(seconds)
            return Done(size, time.monotonic() - began)

    def copy_in(self, seconds: float) -> Done:
        """Copy pinned memory to the device again and again."""
        with self._memory(_STAGE) as place, self._pinned(_STAGE) as stage:
            return self._repeat(seconds, _STAGE, "cuMemcpyHtoD_v2", place, stage, _STAGE)

    def copy_out(self, seconds: float) -> Done:
        """Copy memory of the device to pinned memory again and again."""
        with self._memory(_STAGE) as place, self._pinned(_STAGE) as stage:
            return self._repeat(seconds, _STAGE, "cuMemcpyDtoH_v2", stage, place, _STAGE)

    def copy_inside(self, seconds: float) -> Done:
        """Copy from one half of an allocation to the other: each byte is read and written."""
        with self._memory(2 * _INSIDE) as place:
            self._call("cuMemsetD8_v2", place, 1, 2 * _INSIDE)
            half = place.value + _INSIDE
            return self._repeat(seconds, _INSIDE, "cuMemcpyDtoD_v2", half, place, _INSIDE)

    def multiply(self, seconds: float) -> Done:
        """Multiply matrices in registers on all multiprocessors."""
        took = self._matrix_rounds(2000)
        rounds = max(1, min(1 << 30, int(2000 * _LAUNCH_S / max(took, 1e-6))))
        return _repeated(seconds, 1, lambda: self._matrix_rounds(rounds))

    def tick_over(self, seconds: float) -> Done:
        """Launch a kernel that does nothing, and wait for it, as fast as Python can."""

        def once() -> None:
            self._launch("nothing", 1, 1)
            self.wait()

        return _repeated(seconds, 1, once)

    def wait(self) -> None:
        self._call("cuCtxSynchronize")

    def _call(self, name: str, *arguments: Any) -> None:
        self._driver.call(name, *arguments)

    def _first_device(self) -> int:
        count, device = ctypes.c_int(), ctypes.c_int()
        self._call("cuDeviceGetCount", ctypes.byref(count))
        if not count.value:
            raise CudaUnavailable("the driver shows no GPU (is CUDA_VISIBLE_DEVICES empty?)")
        self._call("cuDeviceGet", ctypes.byref(device), 0)
        return device.value

    def _name(self) -> str:
        text = ctypes.create_string_buffer(256)
        self._call("cuDeviceGetName", text, len(text), self._device)
        return text.value.decode("utf-8", "replace")

    def _uuid(self) -> str:
        """The UUID as NVML writes it, without what stands before it (GPU-, MIG-)."""
        data = (ctypes.c_ubyte * 16)()
        newer = "cuDeviceGetUuid_v2"  # tells a MIG slice from the GPU that it is cut from
        name = newer if self._driver.has(newer) else "cuDeviceGetUuid"
        self._call(name, ctypes.byref(data), self._device)
        digits = bytes(data).hex()
        return "-".join(digits[a:b] for a, b in ((0, 8), (8, 12), (12, 16), (16, 20), (20, 32)))

    def _attribute(self, number: int) -> int:
        value = ctypes.c_int()
        self._call("cuDeviceGetAttribute", ctypes.byref(value), number, self._device)
        return value.value

    @contextmanager
    def _memory(self, size: int) -> Iterator[ctypes.c_uint64]:
        place = _Address()
        self._call("cuMemAlloc_v2", ctypes.byref(place), size)
        try:
            yield place
        finally:
            self._call("cuMemFree_v2", place)

    @contextmanager
    def _pinned(self, size: int) -> Iterator[ctypes.c_void_p]:
        place = ctypes.c_void_p()
        self._call("cuMemHostAlloc", ctypes.byref(place), size, 0)
        try:
            yield place
        finally:
            self._call("cuMemFreeHost", place)

    def _repeat(self, seconds: float, size: int, copy: str, *arguments: Any) -> Done:
        def once() -> None:
            self._call(copy, *arguments)
            self.wait()

        return _repeated(seconds, size, once)

    def _matrix_rounds(self, rounds: int) -> float:
        """Launch the matrix kernel on every multiprocessor and wait; the seconds it took."""
        began = time.monotonic()
        where, count = _Address(0), ctypes.c_uint(rounds)  # never written to: see the kernel
        self._launch("matrix_product", 4 * self.multiprocessors, 256, where, count)
        self.wait()
        return time.monotonic() - began

    def _launch(self, function: str, blocks: int, threads: int, *parameters: Any) -> None:
        if function not in self._functions:
            raise CudaUnavailable(f"{self.name} is older than Ampere: the kernels do not run on it")
        pointers = (ctypes.c_void_p * max(1, len(parameters)))(
            *(ctypes.addressof(parameter) for parameter in parameters)
        )
        self._call(
            "cuLaunchKernel", self._functions[function],
            blocks, 1, 1, threads, 1, 1, 0, None, ctypes.byref(pointers), None,
        )  # fmt: skip

    def _load(self) -> None:
        """Have the driver compile the kernels; its complaint, if it has one, is in the error."""
        log = ctypes.create_string_buffer(4096)
        options = (ctypes.c_int * 2)(_ERROR_LOG, _ERROR_LOG_BYTES)
        values = (ctypes.c_void_p * 2)(ctypes.addressof(log), len(log))
        module = _Handle()
        try:
            self._call(
                "cuModuleLoadDataEx", ctypes.byref(module), PROGRAM.encode(), 2,
                ctypes.byref(options), ctypes.byref(values),
            )  # fmt: skip
        except CudaFailed as error:
            said = " ".join(log.value.decode("utf-8", "replace").split())
            raise CudaFailed(f"{error}: {said}" if said else str(error)) from None
        for name in ("nothing", "matrix_product"):
            function = _Handle()
            self._call("cuModuleGetFunction", ctypes.byref(function), module, name.encode())
            self._functions[name] = function


class _Driver:
    """The library, opened and initialised, with every return code turned into an error."""

    def __init__(self, library: Any = None) -> None:
        try:
            self._library = library or ctypes.CDLL(LIBRARY)
        except OSError:
            raise CudaUnavailable(f"no NVIDIA driver ({LIBRARY} is not there)") from None
        for name, types in _CALLS.items():
            if self.has(name):
                function = getattr(self._library, name)
                function.argtypes, function.restype = types, ctypes.c_int
        try:
            self.call("cuInit", 0)
        except CudaFailed as error:
            raise CudaUnavailable(str(error)) from None

    def has(self, name: str) -> bool:
        return hasattr(self._library, name)

    def call(self, name: str, *arguments: Any) -> None:
        code = int(getattr(self._library, name)(*arguments))
        if code:
            raise CudaFailed(f"{name} failed: {self._in_words(code)}")

    def _in_words(self, code: int) -> str:
        words = [f"error {code}"]
        for ask in ("cuGetErrorName", "cuGetErrorString"):
            text = ctypes.c_char_p()
            if not getattr(self._library, ask)(code, ctypes.byref(text)) and text.value:
                words.append(text.value.decode("utf-8", "replace"))
        return ", ".join(words)


def _repeated(seconds: float, each: float, act: Callable[[], object]) -> Done:
    """Do something again and again for a while; `each` is what one time amounts to."""
    began = time.monotonic()
    times = 0
    while (now := time.monotonic()) < began + seconds:
        act()
        times += 1
    return Done(times * each, now - began)


def main(seconds: float = 1.0) -> int:
    """Do each kind of work once, and say what was done."""

    def tell(**facts: Any) -> None:
        sys.stdout.write(json.dumps(facts) + "\n")
        sys.stdout.flush()

    try:
        gpu = Gpu()
    except (CudaUnavailable, CudaFailed) as error:
        tell(work="open", error=str(error))
        return 1
    tell(work="open", gpu=gpu.name, uuid=gpu.uuid, capability=gpu.capability,
         multiprocessors=gpu.multiprocessors, free_bytes=gpu.free_bytes())  # fmt: skip
    failed = False
    work: dict[str, Callable[[], Done | None]] = {
        "prepare": gpu.prepare,
        "hold": lambda: gpu.hold(seconds),
        "copy_in": lambda: gpu.copy_in(seconds),
        "copy_out": lambda: gpu.copy_out(seconds),
        "copy_inside": lambda: gpu.copy_inside(seconds),
        "multiply": lambda: gpu.multiply(seconds),
        "tick_over": lambda: gpu.tick_over(seconds),
    }
    for name, act in work.items():
        began = time.monotonic()
        try:
            done = act()
        except (CudaUnavailable, CudaFailed) as error:
            failed = True
            tell(work=name, error=str(error))
            continue
        took = time.monotonic() - began
        if done is None:
            tell(work=name, seconds=round(took, 3))
        else:
            tell(work=name, seconds=round(done.seconds, 3), amount=done.amount,
                 per_second=done.amount / done.seconds)  # fmt: skip
    gpu.close()
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(*map(float, sys.argv[1:2])))
