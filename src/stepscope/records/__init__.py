"""The records that packages exchange: frozen dataclasses without other imports of stepscope.

Findings are data: causes, metrics and actions are keys. `report.bottleneck` words them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal

Confidence = Literal["high", "medium", "low"]
FindingValue = float | int | str | None


class Outcome(str, Enum):
    """The outcome of a run. Out of memory is a result, not an error."""

    OK = "ok"
    GPU_OOM = "gpu_oom"
    HOST_OOM = "host_oom"
    SHM_FULL = "shm_full"
    TIMEOUT = "timeout"
    CRASHED = "crashed"
    INTERRUPTED = "interrupted"
    LOST = "lost"
    RUNNING = "running"
    SKIPPED = "skipped"


@dataclass(frozen=True)
class ExitStatus:
    """The outcome of a run with its reason and evidence."""

    outcome: Outcome  # outcome, such as `ok` or `gpu_oom`
    reason: str  # reason for the outcome, as text
    exit_code: int | None = None  # exit code of the command; null if a signal killed it
    signal: str | None = None  # name of the signal that killed the command
    evidence: dict[str, Any] = field(default_factory=dict)
    """Measurements that support the outcome, such as OOM kills before and after."""


NATIVE_CRASH_SIGNALS = ("SIGSEGV", "SIGBUS", "SIGABRT", "SIGFPE", "SIGILL")


@dataclass(frozen=True)
class Entity:
    """The subject of a sample: a role, a process, a cgroup, a network namespace or a GPU."""

    name: str
    pid: int | None = None


@dataclass(frozen=True)
class Reading:
    """The values that a sensor read for one entity. Counters are cumulative; None is missing."""

    entity: Entity
    values: dict[str, float | None]


_LANE_BYTES_PER_S = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.97e9, 5: 3.94e9, 6: 7.56e9}
"""Bandwidth of one PCIe lane in each direction, by generation."""


@dataclass(frozen=True)
class Gpu:
    """The constant properties of a GPU or a MIG slice. Without NVML only `model`, `uuid` and `bus`
    are known."""

    uuid: str = ""  # UUID of the GPU or MIG slice
    label: str = ""  # short name, such as `GPU 0` or `GPU 0 slice 2`
    model: str = ""  # model name
    memory_bytes: float | None = None  # memory, in bytes
    power_limit_watts: float | None = None  # power limit, in watts
    mig_of: str | None = None  # UUID of the GPU that a MIG slice belongs to
    index: int | None = None  # index of the NVIDIA driver
    bus: str | None = None  # PCI bus ID
    pcie_generation: int | None = None  # PCIe generation of the link
    pcie_width: int | None = None  # number of PCIe lanes of the link

    @property
    def link_bytes_per_s(self) -> float | None:
        """The bandwidth of the PCIe link in each direction."""
        lane = _LANE_BYTES_PER_S.get(self.pcie_generation or 0)
        return lane * self.pcie_width if lane and self.pcie_width else None


@dataclass(frozen=True)
class Span:
    """A named time span: an epoch, an evaluation or a phase. Times are in monotonic ns."""

    name: str
    begin_ns: int
    end_ns: int
    index: int | None = None
    pid: int | None = None
    source: str = ""
    complete: bool = True

    @property
    def seconds(self) -> float:
        return (self.end_ns - self.begin_ns) / 1e9


@dataclass(frozen=True)
class Statistic:
    """Mean, 95th percentile and maximum of a metric of an entity over the run."""

    metric: str  # key of the metric
    entity: str  # role, process, cgroup, network namespace or GPU
    mean: float  # time-weighted mean, in the unit of the metric
    p95: float  # 95th percentile, in the unit of the metric
    max: float  # maximum, in the unit of the metric
    count: int  # number of samples


@dataclass(frozen=True)
class EpochRow:
    """The consumption of one epoch. Unknown values are null."""

    index: int  # number of the epoch
    begin_s: float  # start, in seconds since the start of the run
    seconds: float  # duration, in seconds
    steps: int | None  # optimizer steps
    samples: int | None  # samples trained
    samples_per_second: float | None  # throughput, in samples per second
    data_wait_share: float | None  # share of the time that the training loop waits for data, 0 to 1
    core_seconds: float | None  # CPU time, in core-seconds
    cores: float | None  # mean number of busy cores
    read_bytes: float | None  # bytes read from storage
    written_bytes: float | None  # bytes written to storage
    memory_peak_bytes: float | None  # peak host memory, in bytes
    complete: bool = True  # whether the epoch ended before the run ended
    gpu_sm: float | None = None  # SM activity, 0 to 1; mean over the GPUs of the run
    gpu_tensor: float | None = None  # tensor core activity, 0 to 1; mean over the GPUs of the run
    gpu_dram: float | None = None  # memory bandwidth use, 0 to 1; mean over the GPUs of the run
    gpu_utilization: float | None = None  # utilization, 0 to 1; mean over the GPUs of the run
    gpu_memory_peak_bytes: float | None = None  # largest peak memory of a GPU of the run, in bytes
    pcie_to_gpu_bytes: float | None = None  # PCIe traffic to all GPUs of the run, in bytes
    pcie_from_gpu_bytes: float | None = None  # PCIe traffic from all GPUs of the run, in bytes
    joules: float | None = None  # energy of all GPUs of the run, in joules
    samples_per_joule: float | None = None  # samples per joule of GPU energy


@dataclass(frozen=True)
class Summary:
    """The consumption of a whole run."""

    seconds: float  # duration, in seconds
    cpu_allowed: float | None  # CPUs that the run may use
    core_seconds: float | None  # CPU time of the process tree, in core-seconds
    steps: int  # optimizer steps
    samples: int | None  # samples trained
    epochs: tuple[EpochRow, ...]  # one object per epoch
    epoch_source: str | None  # source of the epochs: `marks`, `pattern`, `fit` (Keras) or `loader`
    phases: tuple[tuple[str, int, float], ...]  # name, count and total seconds of each phase
    statistics: tuple[Statistic, ...]  # one object per metric and entity
    roles: tuple[str, ...]  # roles of the processes
    monitor: dict[str, float]
    """Overhead of the monitor: `cores`, `rss_bytes`, and `longest_gap_s` between samples."""
    totals: dict[str, float]  # sum of each counter over the run, such as bytes read


@dataclass(frozen=True)
class CodeLocation:
    """A line of the user's code."""

    where: str  # file and line, such as `train.py:41`
    code: str = ""  # source code of the line


@dataclass(frozen=True)
class Evidence:
    """A measurement that a finding rests on."""

    metric: str  # key of the measurement, such as `data_wait`
    value: float  # measured value
    unit: str  # `share`, `s`, `cores`, `bytes`, `bytes/s`, `count`, `1/s`, `times`, `W` or `MHz`
    threshold: str | None = None  # key of the threshold that it was compared with
    limit: float | None = None  # value of the threshold, in the same unit
    source: str = ""  # what measured it: `loader`, `stack samples`, `GPM`, `/proc`, ...


@dataclass(frozen=True)
class Recommendation:
    """A change to make: a setting with its new value, or another action."""

    action: str  # key of the action, such as `enough_workers` or `save_less_often`
    setting: str | None = None  # setting of the workload, such as `workers`
    value: int | str | bool | None = None  # new value of the setting
    location: CodeLocation | None = None  # where to make the change


@dataclass(frozen=True)
class Finding:
    """A bottleneck, or the statement that there is none."""

    cause: str  # key of the cause, such as `input.workers`
    confidence: Confidence  # `high`, `medium` or `low`
    speedup_bound: float | None
    """How many times as fast the run can be at most without this; null if unknown."""
    values: Mapping[str, FindingValue] = field(default_factory=dict)
    """Further values that its text mentions."""
    variant: str = ""  # which text of the cause applies, if it has several
    reasons: tuple[str, ...] = ()  # keys of the reasons for the confidence
    healthy: bool = False  # whether the hardware is the limit and nothing needs to be fixed
    evidence: tuple[Evidence, ...] = ()  # measurements that support the finding
    recommendations: tuple[Recommendation, ...] = ()  # changes to make


@dataclass(frozen=True)
class Basis:
    """The part of a run that was analyzed."""

    seconds: float  # analyzed time, in seconds
    steps: int | None  # analyzed steps; null if no steps were reported
    warmup: int = 0  # warm-up steps that were skipped
    ranks: int = 1  # number of ranks
    hook: str = ""  # why no steps were reported: a key of `HookFacts.reason`


@dataclass(frozen=True)
class Diagnosis:
    """All findings of a run, the most important first."""

    findings: tuple[Finding, ...]  # at least one finding
    next: Finding | None  # the bottleneck after the first is fixed, if known
    basis: Basis  # the part of the run that was analyzed
    begin_s: float  # start of the analyzed time, in seconds since the start of the run
    end_s: float  # end of the analyzed time, in seconds since the start of the run

    @property
    def first(self) -> Finding:
        return self.findings[0]

    @property
    def without_steps(self) -> bool:
        """Whether no steps were reported, so that only resource usage was analyzed."""
        return self.basis.steps is None
