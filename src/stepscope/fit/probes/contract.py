"""The interface between a search and its probes: forks on a GPU, trials on the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from stepscope.analysis.memory.caching_allocator import AllocationTrace
from stepscope.workloads.probing import ProbeRequest, ProbeResult, Subject


@dataclass(frozen=True)
class HostFacts:
    """What a probe on the host reports about its processes."""

    before_bytes: int = 0
    """Memory before the first step: framework, dataset and model."""
    data_bytes: int = 0
    """Size of the dataset, if it is in memory."""
    enforced_by: str = ""
    """What enforced the memory limit: "cgroup v1", "soft"."""
    last_phase: str = ""
    """The phase in which it ended."""


@dataclass(frozen=True)
class ProbeOutcome:
    """The results of one probe, one per batch in order; the last one may be a failure."""

    request: ProbeRequest
    results: tuple[ProbeResult, ...]
    trace: AllocationTrace | None = None
    host: HostFacts = HostFacts()

    @property
    def last(self) -> ProbeResult:
        return self.results[-1]


@dataclass(frozen=True)
class StartProbe:
    """Message from the client of forked probes to the server."""

    number: int
    probe: ProbeRequest
    group: tuple[int, ...]
    """Numbers of the probes that are started together."""


@dataclass(frozen=True)
class KillProbe:
    number: int


class Probes(Protocol):
    """Runs probes in disposable processes."""

    subject: Subject

    def run(self, requests: Sequence[ProbeRequest]) -> list[ProbeOutcome]:
        """Run probes, in parallel if possible, and return their outcomes in order."""
        ...
