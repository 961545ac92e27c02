"""What `run.json` tells of a run, as far as stepscope itself goes by it.

Everything has a default: what an older version did not write, or could not find out, is None or
empty. `Run.json` has all of the file.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


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
    allowed: float | None = None  # CPUs that the run may use: by affinity and quota
    affinity: int | None = None
    quota: float | None = None  # cores' worth of time, by its cgroup


@dataclass(frozen=True)
class MemoryFacts:
    total_bytes: int | None = None


@dataclass(frozen=True)
class CgroupFacts:
    memory_limit_bytes: int | None = None


@dataclass(frozen=True)
class ResourceLimit:
    """A limit of the shell, as `ulimit` shows it."""

    soft: int | str = "unlimited"


@dataclass(frozen=True)
class RecordedGpuFacts:
    """A GPU as it is stored; the first version told its model and UUID alone."""

    uuid: str = ""
    label: str = ""
    model: str = ""
    index: int | None = None
    memory_bytes: float | None = None
    power_limit_watts: float | None = None
    mig_of: str | None = None


@dataclass(frozen=True)
class Environment:
    """The part of the recorded environment that analyses and the doctor use."""

    cpu: CpuFacts = CpuFacts()
    memory: MemoryFacts = MemoryFacts()
    gpus: tuple[RecordedGpuFacts, ...] = ()
    cgroup: CgroupFacts = CgroupFacts()
    limits: dict[str, ResourceLimit] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)
    """Environment variables that matter for training."""


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
    frameworks: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class RunFacts:
    format: int = 1
    name: str = ""
    command: tuple[str, ...] = ()
    clock: Clock = Clock(0)
    watcher: ProcessIdentity = ProcessIdentity()
    ending: EndingFacts = EndingFacts()
    environment: Environment = Environment()
    sensors: SensorFacts = SensorFacts()
    hook: HookFacts = HookFacts()
    troubles: dict[str, int] = field(default_factory=dict)
    """What went wrong with monitoring, and how often."""
    workload: dict[str, Any] | None = None
    """The settings of a trial's workload; None where the run is not a trial."""
