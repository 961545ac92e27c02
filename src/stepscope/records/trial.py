"""The records of a trial: its part of `run.json`, and the file of each rank.

Every field has a default: the files of a trial that was killed are incomplete.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class CpuLimit:
    """The CPU limit of a trial."""

    requested: float  # requested number of CPUs
    enforced_by: str = ""  # how it is enforced: `affinity` or `quota`
    cpus: tuple[int, ...] = ()  # numbers of the CPUs that the trial is bound to
    note: str = ""  # note for the report
    threads: int | None = None  # threads that the framework uses in each rank
    masks_checked: int | None = None  # affinity masks that were checked during the trial
    escaped: tuple[dict[str, Any], ...] | None = None
    """Processes that changed their affinity to other CPUs, and were bound again."""
    replaced: dict[str, str] = field(default_factory=dict)
    """Environment variables of the user that the limit replaces."""
    oversubscribed: str = ""  # note for the report if there are more processes than CPUs


@dataclass(frozen=True)
class MemoryLimit:
    """The host memory limit of a trial."""

    requested: int  # requested limit, in bytes
    enforced_by: str = ""  # `cgroup v1`, `cgroup v2`, or `soft` for the watchdog of stepscope
    reason: str = ""  # why no cgroup enforces it
    note: str = ""  # note for the report
    peak: int | None = None  # peak memory counted by the cgroup with page cache, in bytes

    @property
    def is_soft(self) -> bool:
        return self.enforced_by == "soft"


@dataclass(frozen=True)
class GpuMemoryLimit:
    """The GPU memory limit of a trial."""

    requested: int  # requested limit, in bytes
    enforced_by: str = ""  # how it is enforced: `framework`


@dataclass(frozen=True)
class GpuLimit:
    """The GPUs of a trial."""

    requested: tuple[str, ...]  # requested GPUs, as indices or UUIDs
    enforced_by: str = ""  # how it is enforced: `CUDA_VISIBLE_DEVICES`
    uuids: tuple[str, ...] | None = None  # UUIDs of the GPUs that the trial may use


@dataclass(frozen=True)
class TimeLimits:
    """The time limits of a trial."""

    timeout_s: float | None = None  # maximum duration, in seconds
    stall_timeout_s: float | None = None  # longest time without progress, in seconds


@dataclass(frozen=True)
class LimitFacts:
    """The limits of a trial: what was requested, how it is enforced and how much was used."""

    cpus: CpuLimit | None = None  # CPUs
    memory: MemoryLimit | None = None  # host memory
    gpu_memory: GpuMemoryLimit | None = None  # GPU memory
    gpus: GpuLimit | None = None  # GPUs
    time: TimeLimits | None = None  # time


NoiseSource = Literal["learned", "other_workloads", "assumed"]


@dataclass(frozen=True)
class ProcessNoise:
    """The noise between processes: the variation of the throughput of identical trials."""

    cv: float  # coefficient of variation
    dof: float  # degrees of freedom of `cv`
    source: NoiseSource = "assumed"
    """`learned` from repeats of this workload, `other_workloads` for repeats of other workloads on
    this machine, or `assumed`."""
    trials: int = 0  # number of trials it is learned from
    assumed: float | None = None
    """The assumed coefficient of variation, if it is combined with that of a few trials."""


InterferenceKind = Literal["cpu", "hypervisor", "gpu", "heat", "other"]


@dataclass(frozen=True)
class InterferenceReason:
    """Why the measurement of a trial has interference, as stored in the ledger of a study."""

    kind: InterferenceKind  # `cpu`, `hypervisor`, `gpu`, `heat` (thermal throttling) or `other`
    value: float | None = None
    """Cores that other processes used (`cpu`, `hypervisor`), or the share of time (`gpu`,
    `heat`)."""
    cores: float | None = None  # cores of the machine
    text: str = ""  # description of kind `other`, which older ledgers contain


@dataclass(frozen=True)
class StudyPlace:
    """The study and the configuration that a trial belongs to."""

    name: str = ""  # name of the study
    key: str = ""  # key of the configuration
    role: str = ""  # `trial` or `reference`
    settings: dict[str, str | int | float | bool | None] = field(default_factory=dict)
    """Level of each factor."""
    attempt: int = 0  # number of the attempt
    block: int = 0  # number of the block
    machine: str = ""  # name of the machine, in a study on several machines


@dataclass(frozen=True)
class TrialFacts:
    """The key `trial` of run.json. Times are on CLOCK_MONOTONIC, in nanoseconds."""

    started_ns: int | None = None  # when the runner started the trial, in nanoseconds
    spawned_ns: int | None = None  # when the training process was spawned, in nanoseconds
    ended_ns: int | None = None  # when the training process exited, in nanoseconds
    cleaned_ns: int | None = None  # when the cleanup was complete, in nanoseconds
    repeat: int | None = None  # number of this repeat, from 1
    repeats: int = 1  # number of repeats
    command: tuple[str, ...] = ()  # command line of the user, with credentials masked
    noise: ProcessNoise | None = None
    """The noise as known when the trial ran, so that its report does not change later."""
    leftovers: tuple[str, ...] = ()  # leftover processes, files and GPU memory that remain
    removed: tuple[str, ...] = ()  # leftover files that were removed
    unclaimed: tuple[str, ...] = ()
    """New files or processes that may belong to the trial or to another program; not removed."""
    study: StudyPlace | None = None  # study that the trial belongs to

    @property
    def seconds(self) -> float | None:
        """The duration from the start to the end of the cleanup."""
        if self.started_ns is None or self.cleaned_ns is None:
            return None
        return (self.cleaned_ns - self.started_ns) / 1e9


@dataclass(frozen=True)
class RankError:
    """The error that ended a rank."""

    kind: str = "error"  # `workload`, `gpu_oom`, `host_oom` or `error`
    type: str = "Error"  # class of the exception
    message: str = ""  # message of the exception
    summary: str = ""  # one line of the message
    hint: str = ""  # what to do
    where: str | None = None  # file and line in the user's code
    monotonic_ns: int = 0  # time of the error on CLOCK_MONOTONIC, in nanoseconds

    @property
    def text(self) -> str:
        """The whole message, or only the summary if the message is a traceback."""
        message = self.message.strip()
        if self.kind == "workload":
            return message
        first = next(iter(message.splitlines()), "").rstrip()
        if self.summary not in ("", f"{self.type}: {first}"):
            return self.summary
        return f"{self.type}: {message}"


@dataclass(frozen=True)
class ModelFacts:
    """The model of a trial."""

    name: str = ""  # name of the model
    parameters: int | None = None  # number of parameters


@dataclass(frozen=True)
class DataFacts:
    """The dataset of a trial."""

    name: str = ""  # name of the dataset
    samples: int | None = None  # samples that are used
    available_samples: int | None = None  # samples of the dataset, of which `samples` are used
    source: str = ""  # `generated`, `folder`, `memory` or `custom`
    bytes: int | None = None  # size, in bytes
    note: str = ""  # note for the report
    notes: tuple[str, ...] = ()  # further notes for the report
    cache: dict[str, Any] | None = None
    """State of its files in the page cache, and the share of them that was cached."""


@dataclass(frozen=True)
class DeviceMemoryFacts:
    """The memory of PyTorch's caching allocator on the device of a rank."""

    allocated_peak: float | None = None  # peak memory of tensors, in bytes
    reserved_peak: float | None = None  # peak memory reserved by the allocator, in bytes
    retries: int | None = None  # allocator retries
    cap: float | None = None  # memory limit of the framework, in bytes


@dataclass(frozen=True)
class RankFacts:
    """The file `rank*.json` of one training process."""

    rank: int = 0  # rank
    pid: int | None = None  # process ID
    phase: str = ""  # current or last phase
    phases: dict[str, float] = field(default_factory=dict)  # duration of each phase, in seconds
    error: RankError | None = None  # error that ended the rank
    done: bool = False  # whether training completed
    planned_steps: int | None = None  # number of steps to train
    device: str | None = None  # device of PyTorch, such as `cuda:0`
    device_name: str | None = None  # model of the device
    versions: dict[str, str | None] = field(default_factory=dict)
    """Versions of the framework and its libraries."""
    model: ModelFacts = ModelFacts()  # model
    data: DataFacts = DataFacts()  # dataset
    settings: dict[str, Any] = field(default_factory=dict)
    """All settings of the workload, with the defaults that the trial chose."""
    batch: dict[str, int] = field(default_factory=dict)
    """Samples `per_rank`, steps that `accumulate`, number of `ranks`, and the `global` batch."""
    steps_per_epoch: float | None = None  # optimizer steps per epoch
    samples_per_epoch: float | None = None  # samples per epoch, over all ranks
    device_memory: DeviceMemoryFacts = DeviceMemoryFacts()  # memory of the device


@dataclass(frozen=True)
class TrialSettings:
    """The settings of a workload that the analysis of a trial uses."""

    model: str = ""  # name of the model, or `FILE.py:FUNCTION`
    data: str = ""  # name of the dataset
    device: str = ""  # `cpu` or `cuda`
    precision: str = ""  # precision of the computation
    optimizer: str = ""  # optimizer
    lr: float | None = None  # learning rate
    batch_size: int | None = None  # samples per rank in each batch
    accumulate: int | None = None  # batches per optimizer step
    ranks: int = 1  # number of ranks
    workers: int = 0  # loader workers per rank
    steps: int | None = None  # maximum number of steps
    epochs: float | None = None  # maximum number of epochs
    seconds: float | None = None  # maximum duration of training, in seconds
