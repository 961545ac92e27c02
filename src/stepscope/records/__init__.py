"""The records that modules hand to each other: frozen dataclasses that import nothing of ours.

What `explain` finds is data: causes, numbers and changes by their keys. The words are in
`report.bottleneck`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal

Confidence = Literal["high", "medium", "low"]
FindingValue = float | int | str | None


class Outcome(str, Enum):
    """How a run ended. An OOM is a result, not an error."""

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
class Ending:
    """The outcome of a run with its evidence, in words a person can act on."""

    outcome: Outcome
    reason: str
    exit_code: int | None = None
    signal: str | None = None
    evidence: dict[str, Any] = field(default_factory=dict)


NATIVE_CRASH_SIGNALS = ("SIGSEGV", "SIGBUS", "SIGABRT", "SIGFPE", "SIGILL")


@dataclass(frozen=True)
class Entity:
    """What a sample row is about: a role or a process, a cgroup, a network namespace, a GPU."""

    name: str
    pid: int | None = None


@dataclass(frozen=True)
class Reading:
    """What a sensor read of one entity. Counters are cumulative here; None means missing."""

    entity: Entity
    values: dict[str, float | None]


_LANE_BYTES_PER_S = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.97e9, 5: 3.94e9, 6: 7.56e9}
"""What one PCIe lane carries at most each way, by generation."""


@dataclass(frozen=True)
class Gpu:
    """What stays the same about a GPU, or about a MIG slice of one. Without NVML (and by the first
    version) only its model, UUID and bus are told."""

    uuid: str = ""
    label: str = ""
    """What people call it: "GPU 0", "GPU 0 slice 2"."""
    model: str = ""
    memory_bytes: float | None = None
    power_limit_watts: float | None = None
    mig_of: str | None = None
    """The UUID of the GPU that this is a slice of."""
    index: int | None = None
    bus: str | None = None
    pcie_generation: int | None = None
    pcie_width: int | None = None

    @property
    def link_bytes_per_s(self) -> float | None:
        """What the PCIe link carries at most each way."""
        lane = _LANE_BYTES_PER_S.get(self.pcie_generation or 0)
        return lane * self.pcie_width if lane and self.pcie_width else None


@dataclass(frozen=True)
class Span:
    """A stretch of time with a name: an epoch, an evaluation, a phase. Times in monotonic ns."""

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
    """Mean, 95th percentile and maximum of one metric of one entity over a run."""

    metric: str
    entity: str
    mean: float
    p95: float
    max: float
    count: int


@dataclass(frozen=True)
class EpochRow:
    """One line of the per-epoch ledger. None where it is not known."""

    index: int
    begin_s: float
    seconds: float
    steps: int | None
    samples: int | None
    samples_per_second: float | None
    data_wait_share: float | None
    core_seconds: float | None
    cores: float | None
    read_gb: float | None
    written_gb: float | None
    memory_peak_bytes: float | None
    complete: bool = True
    gpu_sm: float | None = None
    """Mean over the epoch and over the GPUs of the run, like the two that follow."""
    gpu_tensor: float | None = None
    gpu_dram: float | None = None
    gpu_utilization: float | None = None
    gpu_memory_peak_bytes: float | None = None
    """Of the GPU that used most."""
    pcie_to_gpu_gb: float | None = None
    """Over all GPUs of the run, like the three that follow."""
    pcie_from_gpu_gb: float | None = None
    joules: float | None = None
    samples_per_joule: float | None = None


@dataclass(frozen=True)
class Summary:
    """What a whole run consumed."""

    seconds: float
    cpu_allowed: float | None
    core_seconds: float | None
    steps: int
    samples: int | None
    epochs: tuple[EpochRow, ...]
    epoch_source: str | None
    phases: tuple[tuple[str, int, float], ...]
    """Name, how often, total seconds."""
    statistics: tuple[Statistic, ...]
    roles: tuple[str, ...]
    watcher: dict[str, float]
    totals: dict[str, float]


@dataclass(frozen=True)
class CodeLocation:
    """A line of the user's code."""

    where: str
    """"train.py:41"."""
    code: str = ""


@dataclass(frozen=True)
class Evidence:
    """A number that a finding rests on."""

    metric: str
    """A key of the table of evidence: "data_wait"."""
    value: float
    unit: str
    """"share", "s", "cores", "bytes", "bytes/s", "count", "1/s", "times", "W", "MHz"."""
    threshold: str | None = None
    """The key of the threshold that it was compared with."""
    limit: float | None = None
    """That threshold, in the unit of the value."""
    source: str = ""
    """What measured it: "loader", "stack samples", "GPM", "/proc"."""


@dataclass(frozen=True)
class Recommendation:
    """A change to make: a setting with its new value, or an action that is not a setting."""

    action: str
    """A key of the table of actions: "enough_workers", "save_less_often"."""
    setting: str | None = None
    """A setting of a workload: "workers"."""
    value: int | str | bool | None = None
    location: CodeLocation | None = None


@dataclass(frozen=True)
class Finding:
    """A bottleneck, or that there is none."""

    cause: str
    """A key of `analysis.bottleneck.causes.CAUSES`: "input.workers"."""
    confidence: Confidence
    speedup_bound: float | None
    """How many times as fast it could be at most without this; None where that is not known."""
    values: Mapping[str, FindingValue] = field(default_factory=dict)
    """What its sentences tell besides the evidence."""
    variant: str = ""
    """Which of the cause's sentences fits, where it has several."""
    reasons: tuple[str, ...] = ()
    """Keys of why the confidence is what it is; nothing where the cause has one reason."""
    healthy: bool = False
    """Whether this is how it should be."""
    evidence: tuple[Evidence, ...] = ()
    recommendations: tuple[Recommendation, ...] = ()


@dataclass(frozen=True)
class Basis:
    """What was judged."""

    seconds: float
    steps: int | None
    """None where no steps were seen."""
    warmup: int = 0
    ranks: int = 1
    hook: str = ""
    """Why no steps were seen, where the hook said so."""


@dataclass(frozen=True)
class Diagnosis:
    """All findings on a run, what matters most first."""

    findings: tuple[Finding, ...]
    """At least one."""
    next: Finding | None
    """What limits the run once the first is fixed; None where nothing else stands out."""
    basis: Basis
    begin_s: float
    """The stretch that was judged, on the clock of the run."""
    end_s: float

    @property
    def first(self) -> Finding:
        return self.findings[0]

    @property
    def weak(self) -> bool:
        """Whether steps were not seen, so that all this is by the use of resources alone."""
        return self.basis.steps is None
