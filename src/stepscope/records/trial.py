"""What a trial leaves beside its samples: facts in `run.json`, and a file of each rank.

Everything has a default: a trial that was killed leaves what was known until then.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class CpuLimit:
    asked: float
    by: str = ""  # what enforces it: "affinity" or "quota"
    cpus: tuple[int, ...] = ()  # that the trial is bound to
    note: str = ""
    threads: int | None = None  # that the framework was told to use, in each rank
    masks_checked: int | None = None
    escaped: tuple[dict[str, Any], ...] | None = None
    """Processes that were seen on other CPUs. They were put back."""
    replaced: dict[str, str] = field(default_factory=dict)
    """Variables of the user's environment that the limit overrides."""
    crowded: str = ""


@dataclass(frozen=True)
class MemoryLimit:
    asked: int
    by: str = ""
    """What enforces it: "cgroup v1", "cgroup v2", or "soft" for our own watchdog."""
    why: str = ""  # why it is not the control group
    note: str = ""
    peak: int | None = None  # as the control group counted it, page cache included

    @property
    def is_soft(self) -> bool:
        return self.by == "soft"


@dataclass(frozen=True)
class GpuMemoryLimit:
    asked: int
    by: str = ""


@dataclass(frozen=True)
class GpuLimit:
    asked: tuple[str, ...]
    by: str = ""
    uuids: tuple[str, ...] | None = None


@dataclass(frozen=True)
class TimeLimits:
    timeout_s: float | None = None
    hang_s: float | None = None


@dataclass(frozen=True)
class LimitFacts:
    """The limits that were asked for, by what they were enforced, and how far they were used."""

    cpus: CpuLimit | None = None
    memory: MemoryLimit | None = None
    gpu_memory: GpuMemoryLimit | None = None
    gpus: GpuLimit | None = None
    time: TimeLimits | None = None


NoiseSource = Literal["learnt", "others", "assumed"]


@dataclass(frozen=True)
class ProcessNoise:
    """The noise between processes: how much the throughputs of identical trials differ."""

    cv: float  # coefficient of variation
    dof: float
    source: NoiseSource = "assumed"
    """From repeats of the same workload, of others on the same machine, or from none."""
    trials: int = 0  # that it was learnt from
    assumed: float | None = None
    """What was assumed, where that is part of it and it was learnt from a few trials too."""


InterferenceKind = Literal["cpu", "hypervisor", "gpu", "heat", "other"]


@dataclass(frozen=True)
class InterferenceReason:
    """What changed the measurement of a trial from outside, as a study's ledger has it."""

    kind: InterferenceKind
    value: float | None = None  # cores that others used, or a share of the time
    cores: float | None = None  # of the machine
    text: str = ""  # of kind `other`: in words, as older ledgers have it


@dataclass(frozen=True)
class StudyPlace:
    """Which trial of which study a run is."""

    name: str = ""  # of the study
    key: str = ""  # of its spec
    role: str = ""
    settings: dict[str, str | int | float | bool | None] = field(default_factory=dict)
    attempt: int = 0
    block: int = 0
    machine: str = ""


@dataclass(frozen=True)
class TrialFacts:
    """Under `trial` in run.json. Times in monotonic ns."""

    started_ns: int | None = None  # when the runner began with it
    spawned_ns: int | None = None
    ended_ns: int | None = None
    cleaned_ns: int | None = None
    repeat: int | None = None
    repeats: int = 1
    command: tuple[str, ...] = ()  # what the user typed
    spread: ProcessNoise | None = None
    """As it was known when the trial ran, so that what is reported of it does not change as more is
    learnt."""
    left: tuple[str, ...] = ()  # what could not be cleaned up
    removed: tuple[str, ...] = ()
    unclaimed: tuple[str, ...] = ()  # new, and perhaps somebody else's
    study: StudyPlace | None = None

    @property
    def seconds(self) -> float | None:
        """From its start until it was cleaned up after."""
        if self.started_ns is None or self.cleaned_ns is None:
            return None
        return (self.cleaned_ns - self.started_ns) / 1e9


@dataclass(frozen=True)
class RankError:
    kind: str = "error"  # `workload`, `gpu_oom`, `host_oom` or `error`
    type: str = "Error"
    message: str = ""
    summary: str = ""  # one line of it
    hint: str = ""
    where: str | None = None  # in the user's file
    monotonic_ns: int = 0

    @property
    def text(self) -> str:
        """The whole message, unless it is a traceback: then the summary is another line of it."""
        message = self.message.strip()
        if self.kind == "workload":
            return message
        first = next(iter(message.splitlines()), "").rstrip()
        if self.summary not in ("", f"{self.type}: {first}"):
            return self.summary
        return f"{self.type}: {message}"


@dataclass(frozen=True)
class ModelFacts:
    name: str = ""
    parameters: int | None = None


@dataclass(frozen=True)
class DataFacts:
    name: str = ""
    samples: int | None = None
    of: int | None = None
    source: str = ""  # `generated`, `folder`, `memory` or "the user's"
    bytes: int | None = None
    note: str = ""
    notes: tuple[str, ...] = ()
    cache: dict[str, Any] | None = None


@dataclass(frozen=True)
class DeviceMemoryFacts:
    allocated_peak: float | None = None
    reserved_peak: float | None = None
    retries: int | None = None
    cap: float | None = None


@dataclass(frozen=True)
class RankFacts:
    """What one process of the training says of itself in its `rank*.json`."""

    rank: int = 0
    pid: int | None = None
    phase: str = ""
    phases: dict[str, float] = field(default_factory=dict)  # seconds
    error: RankError | None = None
    done: bool = False
    planned_steps: int | None = None
    device: str | None = None
    device_name: str | None = None
    versions: dict[str, str | None] = field(default_factory=dict)
    model: ModelFacts = ModelFacts()
    data: DataFacts = DataFacts()
    knobs: dict[str, Any] = field(default_factory=dict)
    """All settings, those that were left open as the trial resolved them."""
    batch: dict[str, int] = field(default_factory=dict)
    """`per_rank`, `accumulate`, `ranks` and `global`."""
    steps_per_epoch: float | None = None
    samples_per_epoch: float | None = None
    device_memory: DeviceMemoryFacts = DeviceMemoryFacts()


@dataclass(frozen=True)
class TrialSettings:
    """The settings of a workload that the analysis of a trial goes by."""

    model: str = ""
    data: str = ""
    device: str = ""
    precision: str = ""
    optimizer: str = ""
    lr: float | None = None
    batch_size: int | None = None
    accumulate: int | None = None
    ranks: int = 1
    workers: int = 0
    steps: int | None = None
    epochs: float | None = None
    seconds: float | None = None
