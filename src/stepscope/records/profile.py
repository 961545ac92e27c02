"""The profile of a rank: totals of the PyTorch profiler over the profiled steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class ProfiledOperator:
    """An operator, or a CUDA runtime call of the host (`runtime`)."""

    name: str  # name of the operator
    kind: Literal["operator", "runtime"]  # `operator` or `runtime`
    calls: int  # number of calls
    self_cpu_us: float
    """CPU time excluding the operators that it calls, in microseconds. Sums to the total over all
    rows."""
    cpu_us: float  # CPU time including the operators that it calls, in microseconds
    self_cuda_us: float | None = None
    """Time of the kernels and copies that it launched itself, in microseconds. Null without a
    device."""
    cuda_us: float | None = None
    """Time of the kernels and copies that it and the operators that it calls launched, in
    microseconds."""


@dataclass(frozen=True)
class ProfiledKernel:
    """A GPU kernel."""

    name: str  # name of the kernel
    calls: int  # number of launches
    us: float  # time on the GPU, in microseconds


@dataclass(frozen=True)
class ProfiledCopies:
    """The memory copies in one direction."""

    calls: int  # number of copies
    us: float  # time of all copies, in microseconds
    pageable_us: float | None = None
    """Time of copies from or to memory that is not pinned, for which the host waits, in
    microseconds."""


@dataclass(frozen=True)
class ProfiledSums:
    """Sums over all operators, calls, kernels and copies. Null without a device."""

    operator_cpu_us: float  # CPU time of all operators, in microseconds
    runtime_cpu_us: float | None = None  # CPU time of CUDA runtime calls, in microseconds
    synchronize_cpu_us: float | None = None  # CPU time of synchronization, in microseconds
    kernels: int | None = None  # number of kernels
    kernel_us: float | None = None  # GPU time of kernels, in microseconds
    launches: int | None = None  # number of kernel launches
    memcpy_us: float | None = None  # time of memory copies, in microseconds
    memset_us: float | None = None  # time of memset operations, in microseconds


@dataclass(frozen=True)
class PeakMemory:
    """The peak memory of a device; of the host, the increase since profiling started."""

    allocated: int  # allocated memory, in bytes
    reserved: int | None  # memory reserved by the allocator, in bytes; null on the host


@dataclass(frozen=True)
class TraceFile:
    """The trace of the profiler."""

    file: str  # name of the file
    bytes: int  # compressed size, in bytes
    unzipped_bytes: int  # uncompressed size, in bytes


@dataclass(frozen=True)
class RankProfile:
    """The file `profile*.json` of a rank."""

    device: str  # device of the rank
    steps: int  # number of profiled steps
    step_us: tuple[float, ...]  # host time of each step under the profiler, in microseconds
    operators: tuple[ProfiledOperator, ...]  # operators, longest time first
    kernels: tuple[ProfiledKernel, ...]  # GPU kernels, longest time first
    sums: ProfiledSums  # sums over all steps
    copies: Mapping[str, ProfiledCopies] | None  # memory copies by direction
    memory: Mapping[str, PeakMemory]  # peak memory by device
    missing: str  # why the device of the rank was not profiled
    trace: TraceFile  # trace file

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError("the profile has no steps")


@dataclass(frozen=True)
class Profile:
    """The profiles of a trial."""

    ranks: Mapping[int, RankProfile]  # profile of each rank
    failed: Mapping[int, str]  # why a rank has no profile
