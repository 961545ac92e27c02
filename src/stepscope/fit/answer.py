"""The answer of `fit` as records: two batch sizes, their certificates, what they follow from.

The sentences about it are in `report/fit`.
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
    DOES_NOT_FIT = "does not fit"
    NO_LIMIT = "no limit"
    CANNOT_TELL = "cannot tell"

    __str__ = str.__str__


@dataclass(frozen=True)
class OtherProcess:
    """A process of somebody else on the same GPU."""

    pid: int
    name: str | None = None
    """None where this process cannot see it."""
    held: int | None = None
    """Bytes of GPU memory, where the driver tells."""


@dataclass(frozen=True)
class ChosenGpu:
    """The GPU that probes run on, as its driver describes it now."""

    uuid: str
    name: str
    total: int
    free: int
    other_processes: tuple[OtherProcess, ...] = ()
    driver: str | None = None


@dataclass(frozen=True)
class MemoryBudget:
    """The memory that `fit` may use."""

    device: Device
    limit: int
    """Bytes for batches: on a GPU those of the framework's allocator, without the context."""
    total: int
    free: int
    requested: int | None = None
    """The limit that the user gave."""
    headroom: int = 0
    other_processes: tuple[OtherProcess, ...] = ()

    @property
    def available(self) -> int | None:
        """What can be had of the requested limit: on a GPU, others may hold some of it."""
        if self.requested is None:
            return None
        return min(self.requested, self.limit + self.headroom)


@dataclass(frozen=True)
class Batch:
    """One of the two answers, with its certificate."""

    size: int
    free_bytes: int = 0
    passed: int = 0
    """In how many fresh processes it went through the whole cycle; 0: a prediction."""
    samples_per_second: float | None = None
    retried: bool = False
    """Whether the allocator had to retry: it fits, but not well."""
    retries: int = 0
    failure_above: ProbeResult | None = None
    """The smallest batch above it that was tried and failed."""
    attempts_above: tuple[int, int] = (1, 1)
    """In how many processes that one failed, of how many: on the host, it may also pass."""


@dataclass(frozen=True)
class TriedBatch:
    """One point of the curve."""

    batch: int
    passed: bool
    retried: bool
    samples_per_second: float | None
    reserved: int
    """Bytes held at most."""
    retries: int = 0


@dataclass(frozen=True)
class CardPrediction:
    """Both batches on a card of another size, predicted from the same probes."""

    size: int
    limit: int
    """Bytes for batches: without context and headroom."""
    max_batch: int
    recommended_batch: int


@dataclass(frozen=True)
class WhatIf:
    """An estimate of the max batch after a change; nothing of it was run."""

    change: Change
    settings: dict[str, str | float]
    max_batch: int


@dataclass(frozen=True)
class Linear2019:
    """Tripathi's estimate, and what it was made of."""

    small: int
    large: int
    small_bytes: float
    large_bytes: float
    per_sample: float
    fixed: float
    by_reserve: tuple[tuple[int, int], ...]
    """Bytes kept in reserve, and the batch that is left."""
    gpus: int = 1
    layers: tuple[Layer, ...] = ()
    by_layers: int | None = None
    """Equation 4.1 with the sizes of all layers in place of two measurements."""


@dataclass(frozen=True)
class LoaderMemory:
    """What the loader's batches take on the host, and the largest batch that it bears."""

    workers: int
    prefetch: int
    pinned: bool
    sample_bytes: int
    in_flight: int
    """Batches that exist on the host at once."""
    memory_free: int
    shm_free: int | None
    max_batch: int
    bound_by: str
    """"host memory" or "/dev/shm"."""
    by_2019: int | None = None
    """Equation 4.10 of Tripathi 2019, without prefetch and copies."""


@dataclass(frozen=True)
class Composition:
    """What the memory of a batch is made of, and which of it grows with the batch."""

    batch: int
    parts: Parts
    fixed: int
    per_sample: float
    dominant: Literal["state", "workspace", "activations", "data"]
    """What to reduce first. State: weights, gradients and optimizer."""
    workspace: int = 0
    """Scratch memory of kernels at the peak."""
    fragmentation: int = 0
    """Held by the allocator beyond what was in use at once."""
    peak: int = 0
    """Bytes in use at once."""
    data_bytes: int = 0
    """Of a data set that is held in host memory."""


@dataclass(frozen=True)
class Leak:
    """Memory that stays in use after every step."""

    batch: int
    bytes_per_step: float
    steps_left: int
    """Until the budget is used up."""


@dataclass(frozen=True)
class Misfit:
    """Why not even the smallest batch fits."""

    smallest: ProbeResult | None
    """What it was tried with last."""
    shortfall: int = 0
    """Bytes that are missing, at least; 0 where that is unknown."""
    larger_limit: int = 0
    """On the host: another limit under which it was tried."""
    within_larger: ProbeResult | None = None
    before: int = 0
    """Bytes that it held there before the first step."""
    data_bytes: int = 0


class NoteKind(str, Enum):
    """What a user should know beside the numbers."""

    REPORTED = "reported"  # by a probe, in its own words
    BATCH_FAILED = "batch failed"  # for another reason than memory
    EDGE_UNSTABLE = "edge unstable"
    SOFT_LIMIT = "soft limit"
    PEAKS_DIFFER = "peaks differ"


@dataclass(frozen=True)
class Note:
    """A note as data; `report/fit` words it."""

    kind: NoteKind
    text: str = ""
    batch: int = 0
    low: int = 0
    high: int = 0


@dataclass(frozen=True)
class Effort:
    """What the answer cost."""

    seconds: float
    probes: int
    ooms: int


@dataclass(frozen=True)
class Fit:
    """The whole answer."""

    verdict: Verdict
    model: str
    settings: dict[str, Any]
    method: str
    budget: MemoryBudget
    subject: Subject | None
    effort: Effort
    max_batch: Batch | None = None
    recommended_batch: Batch | None = None
    curve: tuple[TriedBatch, ...] = ()
    holes: tuple[tuple[int, int], ...] = ()
    """(156, 162): 156 fails although 162 fits."""
    composition: Composition | None = None
    minimum: MemoryLine | None = None
    """Bytes that a batch needs where memory is short."""
    comfortable: MemoryLine | None = None
    """Bytes that a batch takes without an allocator retry."""
    cards: tuple[CardPrediction, ...] = ()
    what_ifs: tuple[WhatIf, ...] = ()
    loader: LoaderMemory | None = None
    linear: Linear2019 | None = None
    leak: Leak | None = None
    misfit: Misfit | None = None
    data_batch: int | None = None
    """The largest batch that the data set has samples for."""
    proof: tuple[ProbeResult, ...] = ()
    """The fresh processes of --prove."""
    notes: tuple[Note, ...] = ()
    summary: str = ""
    """The answer in a sentence or two, as `report/fit` words it."""
    cached: str | None = None
    """When it was found, where it is from the cache."""
    made: str = ""
    gpu: ChosenGpu | None = None

    @property
    def batch_size(self) -> int | None:
        """The one to use."""
        answer = self.recommended_batch or self.max_batch
        return answer.size if answer else None
