"""The contents of `run.json`: written by the monitor, read by everything else.

Every field has a default: a value that an older version did not write, or that is unknown, is None
or empty. `Run.json` has the whole file, including the keys of newer versions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from stepscope.records import Gpu
from stepscope.records.trial import LimitFacts, TrialFacts


@dataclass(frozen=True)
class Clock:
    """The start of the run on two clocks."""

    monotonic_ns: int  # start of the run on CLOCK_MONOTONIC, in nanoseconds
    wall_ns: int | None = None  # start of the run in nanoseconds since the Unix epoch


@dataclass(frozen=True)
class ProcessIdentity:
    """Identifies a process uniquely, across machines, containers and reboots."""

    pid: int = -1  # process ID
    started_ticks: int | None = None  # start time in clock ticks since boot
    boot_id: str | None = None  # boot ID of the machine
    host: str | None = None  # host name of the machine
    pid_namespace: str | None = None
    """PID namespace of `pid`, for example that of a container. None in older run folders."""


@dataclass(frozen=True)
class StoredExitStatus:
    """The exit status as stored. `runs.facts.exit_status_of` also checks that the monitor of a
    running command is still running."""

    outcome: str = "running"  # `ok`, `gpu_oom`, `host_oom`, `shm_full`, `crashed`, `running`, ...
    reason: str = ""  # the reason, as text
    exit_code: int | None = None  # exit code of the command; null if a signal killed it
    signal: str | None = None  # name of the signal that killed the command
    evidence: dict[str, Any] = field(default_factory=dict)
    """Measurements that support the outcome, such as OOM kills before and after."""
    monotonic_ns: int | None = None  # end of the command on CLOCK_MONOTONIC, in nanoseconds


@dataclass(frozen=True)
class CpuFacts:
    """The CPUs of the machine and those that the run may use."""

    model: str | None = None  # model name of the CPU
    logical: int | None = None  # logical CPUs of the machine
    physical: int | None = None  # physical cores of the machine
    sockets: int | None = None  # CPU sockets of the machine
    numa_nodes: int | None = None  # NUMA nodes of the machine
    affinity: int | None = None  # CPUs in the affinity mask of the process
    quota: float | None = None  # CPU quota of the cgroup, in cores
    allowed: float | None = None  # CPUs that the run may use: the smaller of affinity and quota
    governor: str | None = None  # CPU frequency governor


@dataclass(frozen=True)
class MemoryFacts:
    """The host memory of the machine."""

    total_bytes: int | None = None  # installed memory, in bytes
    swap_total_bytes: int | None = None  # swap space, in bytes


@dataclass(frozen=True)
class CgroupFacts:
    """The cgroup of the process."""

    version: str = "none"  # `v1`, `v2`, `hybrid` or `none`
    paths: dict[str, str] = field(default_factory=dict)  # folder of each controller
    memory_limit_bytes: int | None = None  # memory limit, in bytes
    cpu_quota_cores: float | None = None  # CPU quota, in cores
    oom_kills: int | None = None  # OOM kills counted before the run


@dataclass(frozen=True)
class ResourceLimit:
    """A resource limit, as `ulimit` shows it."""

    soft: int | str = "unlimited"  # soft limit, or `unlimited`
    hard: int | str = "unlimited"  # hard limit, or `unlimited`


@dataclass(frozen=True)
class Environment:
    """The machine, the software and the settings of a run. Fields of type `Any` are only shown."""

    hostname: Any = None  # host name
    os: Any = None  # operating system, kernel, distribution, container and machine type
    cpu: CpuFacts = CpuFacts()  # CPUs
    memory: MemoryFacts = MemoryFacts()  # host memory
    storage: Any = None  # file system of the working directory, with its size in bytes
    shm: Any = None  # size of /dev/shm, in bytes
    cgroup: CgroupFacts = CgroupFacts()  # cgroup
    limits: dict[str, ResourceLimit] = field(default_factory=dict)
    """Resource limits (`ulimit`) by name."""
    python: Any = None  # Python interpreter of the monitor
    versions: Any = None  # versions of the packages that affect training
    versions_of: Any = None  # whose packages: `command` or `monitor`
    git: Any = None  # commit, branch, remote, and whether there are uncommitted changes
    gpus: tuple[Gpu, ...] = ()  # GPUs that the run may use
    driver: Any = None  # version of the NVIDIA driver
    variables: dict[str, str] = field(default_factory=dict)
    """Environment variables that affect training."""
    unreadable: Any = None
    """Sections of this record that could not be read, with the reason."""


@dataclass(frozen=True)
class SensorCost:
    """The cost of a sensor."""

    cpu_s: float  # CPU time per reading, in seconds
    period_s: float  # intended time between readings, in seconds
    backoff_period_s: float
    """Longest time between readings to which an expensive sensor was slowed down, in seconds; 0 if
    it was not."""


@dataclass(frozen=True)
class SensorFacts:
    """The state of the sensors."""

    missing: dict[str, str] = field(default_factory=dict)
    """Metrics that could not be read, with the reason."""
    hints: dict[str, str] = field(default_factory=dict)
    """What makes a missing metric readable, by metric."""
    not_configured: tuple[str, ...] = ()
    """Missing metrics that do not exist on this machine, such as a memory limit that is not set."""
    estimated: dict[str, str] = field(default_factory=dict)
    """Metrics that are estimated, with the method."""
    notes: tuple[str, ...] = ()  # notes for the report, such as a GPU that was lost
    costs: dict[str, SensorCost] = field(default_factory=dict)  # cost of each sensor by name
    rows_dropped: int = 0  # samples that were lost because they could not be written


@dataclass(frozen=True)
class HookFacts:
    """The state of the import hook. `runs.tracking` words it."""

    enabled: bool = False  # whether the hook is injected into Python processes
    attached: tuple[str, ...] = ()
    """What the hook is attached to: `DataLoader`, `optimizer`, `Keras fit`."""
    frameworks: dict[str, str] = field(default_factory=dict)  # imported frameworks, with versions
    reason: str = ""
    """Why nothing is attached: `disabled`, `already_running`, `no_python`, `ignores_environment`,
    `no_site`, `not_loaded`, `other_user`, `no_framework`, `unsupported_framework`, or `reported`:
    by marks."""
    other_run: str = ""  # run folder of another monitor that the process already reports to


@dataclass(frozen=True)
class RunFacts:
    """The contents of `run.json`."""

    format: int = 1  # version of the format
    name: str = ""  # name of the run
    command: tuple[str, ...] = ()  # command line, with credentials masked
    cwd: str | None = None  # working directory of the command
    interval_s: float | None = None  # time between samples, in seconds
    clock: Clock = Clock(0)  # start of the run
    monitor: ProcessIdentity = ProcessIdentity()  # the monitor process
    exit_status: StoredExitStatus = StoredExitStatus()  # outcome of the command
    environment: Environment = Environment()  # machine, software and settings
    workload: Mapping[str, Any] | None = None
    """All settings of the workload; only in a trial."""
    limits: LimitFacts = field(default_factory=LimitFacts)  # limits of a trial
    trial: TrialFacts = field(default_factory=TrialFacts)  # times, repeats and cleanup of a trial
    root: ProcessIdentity | None = None  # the root of the monitored process tree
    hook: HookFacts = HookFacts()  # the import hook
    sensors: SensorFacts = SensorFacts()  # the sensors
    problems: dict[str, int] = field(default_factory=dict)
    """Problems with monitoring, with the number of occurrences."""
    survivors: tuple[str, ...] | None = None
    """Processes that were still running after the command exited."""
