"""What `run.json` tells of a run: written by the monitor, read by everybody else.

Everything has a default: what an older version did not write, or could not find out, is None or
empty. `Run.json` has the file as it is, with what a newer version has added.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from stepscope.records import Gpu
from stepscope.records.trial import LimitFacts, TrialFacts


@dataclass(frozen=True)
class Clock:
    """When the run began, on both clocks."""

    monotonic_ns: int
    wall_ns: int | None = None


@dataclass(frozen=True)
class ProcessIdentity:
    """What tells one process from any other, on this machine and later."""

    pid: int = -1
    started_ticks: int | None = None
    boot_id: str | None = None
    host: str | None = None
    pid_namespace: str | None = None
    """Within which `pid` is that process: a container has its own. None in older folders."""


@dataclass(frozen=True)
class EndingFacts:
    """The ending as it is stored; `runs.facts.ending_of` also knows whether the monitor lives."""

    outcome: str = "running"
    reason: str = ""
    exit_code: int | None = None
    signal: str | None = None
    evidence: dict[str, Any] = field(default_factory=dict)
    monotonic_ns: int | None = None


@dataclass(frozen=True)
class CpuFacts:
    model: str | None = None
    logical: int | None = None  # CPUs of the machine
    physical: int | None = None
    sockets: int | None = None
    numa_nodes: int | None = None
    affinity: int | None = None
    quota: float | None = None  # cores' worth of time, by its cgroup
    allowed: float | None = None  # CPUs that the run may use: by affinity and quota
    governor: str | None = None


@dataclass(frozen=True)
class MemoryFacts:
    total_bytes: int | None = None
    swap_total_bytes: int | None = None


@dataclass(frozen=True)
class CgroupFacts:
    version: str = "none"
    paths: dict[str, str] = field(default_factory=dict)
    memory_limit_bytes: int | None = None
    cpu_quota_cores: float | None = None
    oom_kills: int | None = None


@dataclass(frozen=True)
class ResourceLimit:
    """A limit of the shell, as `ulimit` shows it."""

    soft: int | str = "unlimited"
    hard: int | str = "unlimited"


@dataclass(frozen=True)
class Environment:
    """The machine, the software and the settings of a run. What is `Any` is only shown."""

    hostname: Any = None
    os: Any = None
    cpu: CpuFacts = CpuFacts()
    memory: MemoryFacts = MemoryFacts()
    storage: Any = None
    shm: Any = None
    cgroup: CgroupFacts = CgroupFacts()
    limits: dict[str, ResourceLimit] = field(default_factory=dict)
    python: Any = None
    versions: Any = None
    versions_of: Any = None
    git: Any = None
    gpus: tuple[Gpu, ...] = ()
    driver: Any = None
    variables: dict[str, str] = field(default_factory=dict)
    """Environment variables that matter for training."""
    unreadable: Any = None
    """Sections that could not be read, with the reason."""


@dataclass(frozen=True)
class SensorCost:
    """CPU seconds per reading, and how often it was read: as asked, and once slowed down."""

    cpu_s: float
    period_s: float
    slowed_to_s: float


@dataclass(frozen=True)
class SensorFacts:
    missing: dict[str, str] = field(default_factory=dict)
    """Metrics that could not be read, with the reason."""
    hints: dict[str, str] = field(default_factory=dict)  # what would make them readable
    unset: tuple[str, ...] = ()  # those that are missing because nothing is set: no loss
    estimated: dict[str, str] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()
    costs: dict[str, SensorCost] = field(default_factory=dict)
    rows_dropped: int = 0


@dataclass(frozen=True)
class HookFacts:
    message: str = ""
    enabled: bool = False
    attached: tuple[str, ...] = ()
    frameworks: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class RunFacts:
    format: int = 1
    name: str = ""
    command: tuple[str, ...] = ()
    cwd: str | None = None
    interval_s: float | None = None
    clock: Clock = Clock(0)
    watcher: ProcessIdentity = ProcessIdentity()
    ending: EndingFacts = EndingFacts()
    environment: Environment = Environment()
    workload: Mapping[str, Any] | None = None
    """All settings of a trial's workload; None where the run is not a trial."""
    limits: LimitFacts = field(default_factory=LimitFacts)
    trial: TrialFacts = field(default_factory=TrialFacts)
    root: ProcessIdentity | None = None
    hook: HookFacts = HookFacts()
    sensors: SensorFacts = SensorFacts()
    troubles: dict[str, int] = field(default_factory=dict)
    """What went wrong with monitoring, and how often."""
    survivors: tuple[str, ...] | None = None
    """Processes that outlived the command."""
