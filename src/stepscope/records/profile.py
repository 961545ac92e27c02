"""What the PyTorch profiler saw in some steps of a trial, as each rank stores it: totals over all
of these steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class ProfiledOperator:
    """An operator, or a call of the host into CUDA (`runtime`)."""

    name: str
    kind: Literal["operator", "runtime"]
    calls: int
    self_cpu_us: float
    """Of the operator itself, without those that it calls: these add up over all rows."""
    cpu_us: float
    self_cuda_us: float | None = None
    """Of the kernels and copies that it started itself. None where no device was seen."""
    cuda_us: float | None = None


@dataclass(frozen=True)
class ProfiledKernel:
    name: str
    calls: int
    us: float


@dataclass(frozen=True)
class ProfiledCopies:
    calls: int
    us: float
    pageable_us: float | None = None
    """Part of the time: from or to host memory that is not pinned. The host waits for those."""


@dataclass(frozen=True)
class ProfiledSums:
    """All operators, calls, kernels and copies together. None where no device was seen."""

    operator_cpu_us: float
    runtime_cpu_us: float | None = None
    synchronize_cpu_us: float | None = None
    kernels: int | None = None
    kernel_us: float | None = None
    launches: int | None = None
    memcpy_us: float | None = None
    memset_us: float | None = None


@dataclass(frozen=True)
class PeakMemory:
    """Most that was held at once; of the host, beyond what was held when the profiling began."""

    allocated: int
    reserved: int | None  # by the allocator; the host has none that reserves


@dataclass(frozen=True)
class TraceFile:
    file: str
    bytes: int
    unzipped_bytes: int


@dataclass(frozen=True)
class RankProfile:
    device: str
    steps: int
    step_us: tuple[float, ...]  # how long the host took for each step, slowed by the profiler
    operators: tuple[ProfiledOperator, ...]  # the longest first, like the kernels
    kernels: tuple[ProfiledKernel, ...]
    sums: ProfiledSums
    copies: Mapping[str, ProfiledCopies] | None
    """By direction. None where no device was seen."""
    memory: Mapping[str, PeakMemory]  # by device
    missing: str  # why nothing is known of a device that was used
    trace: TraceFile

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError("it has no steps")


@dataclass(frozen=True)
class Profile:
    """What the profiler saw, by rank, and why nothing of some ranks."""

    ranks: Mapping[int, RankProfile]
    failed: Mapping[int, str]
