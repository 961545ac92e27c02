"""The result of a fit: two batch sizes, the evidence for each, and what they follow from.

`report/fit` turns it into text.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal

from stepscope.analysis.memory.model import MemoryLine, Parts
from stepscope.workloads.probing import Layer, ProbeResult, Subject

Device = Literal["gpu", "host"]
Change = Literal["precision", "checkpointing", "optimizer"]


class Verdict(str, Enum):
    FITS = "fits"
    DOES_NOT_FIT = "does_not_fit"  # not even a batch of 1
    NO_LIMIT = "no_limit"  # memory does not limit the batch size
    UNKNOWN = "unknown"  # memory leaks, or linear2019 has no answer

    __str__ = str.__str__


@dataclass(frozen=True)
class OtherProcess:
    """Another process on the same GPU."""

    pid: int  # process ID
    name: str | None = None  # command name; null if the process is not visible
    memory_bytes: int | None = None  # GPU memory that it uses; null if unknown


@dataclass(frozen=True)
class ChosenGpu:
    """The GPU that probes run on."""

    uuid: str  # GPU UUID, as reported by the driver
    name: str  # product name
    total_bytes: int  # memory of the GPU
    free_bytes: int  # free memory before the first probe
    other_processes: tuple[OtherProcess, ...] = ()  # processes that use the GPU
    driver: str | None = None  # driver version


@dataclass(frozen=True)
class MemoryBudget:
    """The memory that `fit` may use."""

    device: Device  # `gpu` or `host`
    limit_bytes: int  # memory for batches; on a GPU for the allocator, excluding the CUDA context
    total_bytes: int  # memory of the GPU or of the host
    free_bytes: int  # free memory before the first probe
    requested_bytes: int | None = None  # `--gpu-memory` or `--memory`; null if not set
    headroom_bytes: int = 0  # `--headroom`; not part of the limit
    other_processes: tuple[OtherProcess, ...] = ()  # processes that use the same GPU

    @property
    def available_bytes(self) -> int | None:
        """The available part of the requested memory; other processes may use the rest."""
        if self.requested_bytes is None:
            return None
        return min(self.requested_bytes, self.limit_bytes + self.headroom_bytes)


@dataclass(frozen=True)
class Batch:
    """One of the two answers, with the evidence for it."""

    size: int  # batch size
    free_bytes: int = 0  # memory that remains free at this batch size
    passes: int = 0  # fresh processes that passed a full training cycle; 0: predicted, not run
    samples_per_second: float | None = None  # throughput; null if not measured
    retried: bool = False  # whether the allocator had to retry
    retries: int = 0  # allocator retries
    failure_above: ProbeResult | None = None  # the smallest larger batch that failed
    attempts_above: tuple[int, int] = (1, 1)  # failures and attempts of that batch


@dataclass(frozen=True)
class ProbedBatch:
    """One point of the curve."""

    batch: int  # batch size
    passed: bool  # whether every probe passed
    retried: bool  # whether the allocator had to retry
    samples_per_second: float | None  # throughput; null if not measured
    reserved_peak_bytes: int  # peak bytes held
    retries: int = 0  # allocator retries


@dataclass(frozen=True)
class GpuPrediction:
    """Both batch sizes on a GPU with another memory size, predicted from the same probes."""

    memory_bytes: int  # memory of the GPU, or a size of `--predict-for`
    limit_bytes: int  # memory for batches: excluding CUDA context and headroom
    max_batch: int  # predicted max batch size; 0: does not fit
    recommended_batch: int  # predicted recommended batch size; 0: does not fit


@dataclass(frozen=True)
class WhatIf:
    """An estimate of the max batch size after a change. It was not run."""

    change: Change  # what changes
    settings: dict[str, str | float]  # settings that make the change
    max_batch: int  # estimated max batch size


@dataclass(frozen=True)
class Linear2019:
    """The estimate of Tripathi 2019 and its inputs."""

    small_batch: int  # the smaller batch size that was run
    large_batch: int  # the larger batch size that was run
    small_batch_bytes: float  # mean memory held with the smaller batch
    large_batch_bytes: float  # mean memory held with the larger batch
    per_sample_bytes: float  # slope of the line
    fixed_bytes: float  # intercept of the line
    max_batch_by_reserve: tuple[tuple[int, int], ...]  # pairs: bytes in reserve, max batch size
    gpus: int = 1  # number of GPUs, one per rank
    layers: tuple[Layer, ...] = ()  # layers of the model in execution order
    max_batch_by_layers: int | None = None  # equation 4.1 with the sizes of all layers


@dataclass(frozen=True)
class LoaderMemory:
    """Host memory that the data loader needs for its batches."""

    workers: int  # setting `workers`
    prefetch: int  # setting `prefetch`
    pinned: bool  # whether batches are pinned
    sample_bytes: int  # one sample of a batch
    batches_in_flight: int  # maximum number of batches on the host at once
    memory_free_bytes: int  # free host memory
    shm_free_bytes: int | None  # free memory in /dev/shm; null if it is not mounted
    max_batch: int  # max batch size for the loader
    limited_by: str  # `host memory` or `/dev/shm`
    max_batch_2019: int | None = None  # equation 4.10 of Tripathi 2019: no prefetch, no copies


@dataclass(frozen=True)
class MemoryBreakdown:
    """What the memory of a batch consists of, and how it grows with the batch size."""

    batch: int  # batch size
    parts: Parts  # memory by part
    fixed_bytes: int  # memory that does not depend on the batch
    per_sample_bytes: float  # memory for each sample
    dominant: Literal["state", "workspace", "activations", "data"]
    """What to reduce first. State: weights, gradients and optimizer state."""
    workspace_bytes: int = 0  # temporary memory of kernels at the peak
    fragmentation_bytes: int = 0  # held by the allocator but not in use at the peak
    allocated_peak_bytes: int = 0  # peak bytes in use
    data_bytes: int = 0  # dataset in host memory


@dataclass(frozen=True)
class Leak:
    """Memory that stays allocated after every step."""

    batch: int
    bytes_per_step: float
    steps_left: int
    """Steps until the budget is used up."""


@dataclass(frozen=True)
class FitFailure:
    """Why not even the smallest batch fits."""

    smallest: ProbeResult | None
    """The last probe of the smallest batch."""
    shortfall_bytes: int = 0
    """Lower bound of the missing memory; 0: unknown."""
    larger_limit_bytes: int = 0
    """On the host: a larger limit that was also tried."""
    larger_limit_result: ProbeResult | None = None
    before_bytes: int = 0
    """Memory held there before the first step."""
    data_bytes: int = 0
    """Dataset in host memory."""


class NoteKind(str, Enum):
    REPORTED = "reported"  # a remark of a probe
    BATCH_FAILED = "batch_failed"  # for a reason other than memory
    EDGE_UNSTABLE = "edge_unstable"
    SOFT_LIMIT = "soft_limit"
    PEAKS_DIFFER = "peaks_differ"


@dataclass(frozen=True)
class Note:
    """A note as data; `report/fit` turns it into text."""

    kind: NoteKind
    text: str = ""
    batch: int = 0
    low_bytes: int = 0
    high_bytes: int = 0


@dataclass(frozen=True)
class SearchCost:
    """What the search cost."""

    seconds: float  # duration of the search
    probes: int  # probes that were run
    ooms: int  # probes that ran out of memory


@dataclass(frozen=True)
class FitResult:
    """The result of `stepscope fit`."""

    verdict: Verdict  # `fits`, `does_not_fit`, `no_limit` or `unknown`
    model: str  # model name or `FILE.py:FUNCTION`
    settings: dict[str, Any]  # settings of the workload
    method: str  # `auto` or `linear2019`
    budget: MemoryBudget  # the memory that `fit` may use
    subject: Subject | None  # the workload that was probed; null if no probe passed
    cost: SearchCost  # what the search cost
    max_batch: Batch | None = None  # the largest batch that trains reliably
    recommended_batch: Batch | None = None
    """The largest batch without retries and within 2% of the best throughput."""
    curve: tuple[ProbedBatch, ...] = ()  # all batch sizes that were tried
    failures_below_max: tuple[tuple[int, int], ...] = ()
    """Pairs of a failing batch size and a larger one that fits, such as [156, 162]."""
    memory_breakdown: MemoryBreakdown | None = None  # what the memory consists of
    minimum_memory: MemoryLine | None = None  # minimum memory for a batch
    retry_free_memory: MemoryLine | None = None  # memory for a batch without retries
    predictions: tuple[GpuPrediction, ...] = ()  # predictions for other GPU memory sizes
    what_ifs: tuple[WhatIf, ...] = ()  # estimates for other settings; not run
    loader: LoaderMemory | None = None  # host memory of the data loader
    linear2019: Linear2019 | None = None  # the estimate of `--method linear2019`
    leak: Leak | None = None
    failure: FitFailure | None = None
    data_set_limit: int | None = None
    """The largest batch that the dataset has samples for."""
    verification: tuple[ProbeResult, ...] = ()  # results of the processes of `--verify`
    notes: tuple[Note, ...] = ()  # remarks, as text
    summary: str = ""  # the result in one or two sentences
    from_cache: bool = False  # whether the result comes from the cache
    created: str = ""  # time of the search, ISO 8601
    gpu: ChosenGpu | None = None

    @property
    def batch_size(self) -> int | None:
        """The batch size to use: the recommended one, if there is one."""
        answer = self.recommended_batch or self.max_batch
        return answer.size if answer else None
