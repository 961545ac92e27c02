"""The nouns of stepscope as frozen records. Imports nothing of ours."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal


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


@dataclass(frozen=True)
class Gpu:
    """A GPU, or a MIG slice of one, as run.json has it."""

    uuid: str
    label: str
    """What people call it: "GPU 0", "GPU 0 slice 2"."""
    name: str = ""
    memory_bytes: float | None = None
    power_limit_watts: float | None = None
    mig_of: str | None = None
    """The UUID of the GPU that this is a slice of."""


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


Confidence = Literal["high", "medium", "low"]


@dataclass(frozen=True)
class Evidence:
    """A number that a finding rests on."""

    what: str
    """In words: "waited for the next batch"."""
    value: float
    unit: str
    """"share", "s", "cores", "bytes", "bytes/s", "count", "1/s", "times", "W", "MHz"."""
    threshold: str | None = None
    """The name of the threshold that it was held against."""
    limit: float | None = None
    """That threshold, in the unit of the value."""
    source: str = ""
    """What measured it: "loader", "stack samples", "GPM", "/proc"."""


@dataclass(frozen=True)
class Advice:
    """What to change, in the user's own terms."""

    change: str
    """The new code, setting or command: "num_workers=8"."""
    why: str = ""
    where: str | None = None
    """"train.py:41", where it is known."""
    line: str | None = None
    """The code that is there now."""


@dataclass(frozen=True)
class Finding:
    """What holds a training back, or that nothing does."""

    cause: str
    """One of `analysis.causes.CAUSES`: "input.workers"."""
    title: str
    """A few words: "too few loader workers"."""
    says: str
    """One sentence with the numbers."""
    confidence: Confidence
    because: str
    """Why that sure."""
    ceiling: float | None
    """How many times as fast it could be at most without this; None where that is not known."""
    healthy: bool = False
    """Whether this is how it should be."""
    evidence: tuple[Evidence, ...] = ()
    advice: tuple[Advice, ...] = ()


@dataclass(frozen=True)
class Verdict:
    """All that holds a run back, what matters most first."""

    findings: tuple[Finding, ...]
    """At least one."""
    next: str | None
    """What would hold it back once the first is fixed, in a sentence."""
    basis: str
    """What was judged: which steps of which stretch, and what was not known."""
    begin_s: float
    """The stretch that was judged, on the clock of the run."""
    end_s: float
    weak: bool = False
    """Whether steps were not seen, so that all this is by the use of resources alone."""

    @property
    def first(self) -> Finding:
        return self.findings[0]
