"""What `fit` answers, as records: two batches with their proof, and what they follow from."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

from stepscope.analysis.memory_model import Line
from stepscope.workloads.probing import Layer, Parts, Subject, Told

Verdict = Literal["fits", "does not fit", "no limit", "cannot tell"]
Device = Literal["gpu", "host"]


@dataclass(frozen=True)
class Room:
    """The memory that there is to fit into."""

    device: Device
    limit: int
    """Bytes that batches may take: on a GPU by the framework's allocator, without its context."""
    total: int
    """Of the whole device."""
    free: int
    """When it was looked at."""
    asked: int | None = None
    """What the user limited it to."""
    headroom: int = 0
    tenants: tuple[str, ...] = ()
    """Others on the GPU, each in words: "python (pid 812) holds 3.2 GiB"."""


@dataclass(frozen=True)
class Batch:
    """One of the two answers, with its certificate."""

    size: int
    leaves: int
    """Bytes that it leaves free, of the room."""
    passed: int
    """In how many fresh processes it went through the whole cycle."""
    samples_per_second: float | None
    thrashes: bool
    """Whether the allocator had to retry: it fits, but not well."""
    above: int | None = None
    """The smallest batch above it that was tried and failed."""
    misses: int | None = None
    """Bytes that this one would have needed more."""
    why_above: str = ""
    """Where it failed, in words, where that is known: "in step 1"."""
    retries: int = 0
    """Of the allocator, in the longest cycle."""


@dataclass(frozen=True)
class Point:
    """One batch of the curve between small and too large."""

    batch: int
    passed: bool
    thrashes: bool
    samples_per_second: float | None
    reserved: int
    """Bytes held at most."""
    retries: int = 0
    """Of the allocator, in a whole cycle."""


@dataclass(frozen=True)
class Card:
    """Both batches on a card of another size, predicted from the same probes."""

    size: int
    """Bytes of the card."""
    limit: int
    """What of it is for batches: without context and headroom."""
    largest: int
    fast: int


@dataclass(frozen=True)
class WhatIf:
    """An estimate of what a change would give: nothing of it was run."""

    change: str
    """In the user's terms: "--precision bf16"."""
    largest: int
    why: str


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
    """Equation 4.1 with the sizes of all layers in the place of two measurements."""
    note: str = ""


@dataclass(frozen=True)
class HostRoom:
    """What the loader's batches take on the host, and the largest batch that it bears."""

    workers: int
    prefetch: int
    pinned: bool
    sample_bytes: int
    in_flight: int
    """Batches that exist on the host at once."""
    memory_free: int
    shm_free: int | None
    largest: int
    """What host memory and /dev/shm bear; at least 0."""
    bound_by: str
    """"host memory" or "/dev/shm"."""
    by_2019: int | None = None
    """Equation 4.10, without prefetch and copies."""


@dataclass(frozen=True)
class Composition:
    """What memory is made of at the recommended batch, and which of it grows with the batch."""

    batch: int
    parts: Parts
    workspace: int
    """Scratch memory of kernels at the peak."""
    fragmentation: int
    """Held by the allocator beyond what was in use at once."""
    fixed: int
    per_sample: float
    attack: str
    """Which part to attack, and how, in a sentence."""


@dataclass(frozen=True)
class Effort:
    """What the answer cost."""

    seconds: float
    probes: int
    ooms: int
    """Probes that ran out of memory, each in a process that was thrown away."""


@dataclass(frozen=True)
class Fit:
    """The whole answer."""

    verdict: Verdict
    says: str
    """The answer in a sentence or two."""
    model: str
    knobs: dict[str, Any]
    method: str
    room: Room
    subject: Subject | None
    effort: Effort
    largest: Batch | None = None
    fast: Batch | None = None
    curve: tuple[Point, ...] = ()
    holes: tuple[tuple[int, int], ...] = ()
    """(156, 162): 156 fails although 162 fits."""
    composition: Composition | None = None
    need: Line | None = None
    """Bytes that a batch needs where memory is short."""
    ease: Line | None = None
    """Bytes that a batch takes where memory is not short."""
    cards: tuple[Card, ...] = ()
    what_if: tuple[WhatIf, ...] = ()
    host: HostRoom | None = None
    linear: Linear2019 | None = None
    proof: tuple[Told, ...] = ()
    """The fresh processes of --prove."""
    notes: tuple[str, ...] = ()
    cached: str | None = None
    """When it was found, where it is from the cache."""
    made: str = ""
    environment: dict[str, Any] = field(default_factory=dict)

    @property
    def batch_size(self) -> int | None:
        """The one to use."""
        return self.fast.size if self.fast else self.largest.size if self.largest else None

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)
