"""What probes offer to a search: forks on a GPU, trials on the host, models in tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from stepscope.analysis.memory.caching_allocator import AllocationTrace
from stepscope.workloads.probing import ProbeRequest, ProbeResult, Subject


@dataclass(frozen=True)
class HostFacts:
    """What the processes of a host probe know of themselves."""

    before: int = 0
    """Bytes held before the first step: framework, data set and model."""
    data_bytes: int = 0
    """Bytes of a data set that is held in memory."""
    enforced_by: str = ""
    """What kept the limit: "cgroup v1", "soft"."""
    reached: str = ""
    """The phase in which it ended."""


@dataclass(frozen=True)
class ProbeOutcome:
    """The results of one probe, one for each batch in their order; the last may be a failure."""

    request: ProbeRequest
    results: tuple[ProbeResult, ...]
    trace: AllocationTrace | None = None
    host: HostFacts = HostFacts()

    @property
    def last(self) -> ProbeResult:
        return self.results[-1]


@dataclass(frozen=True)
class StartProbe:
    """From the client of forked probes to the process that holds the workload."""

    number: int
    probe: ProbeRequest
    beside: tuple[int, ...]
    """The numbers of those that are started together."""


@dataclass(frozen=True)
class KillProbe:
    number: int


class Probes(Protocol):
    """Runs probes in disposable processes."""

    subject: Subject

    def run(self, requests: Sequence[ProbeRequest]) -> list[ProbeOutcome]:
        """All of them at once where that is possible; the outcomes in their order."""
        ...
