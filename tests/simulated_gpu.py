"""A simulated GPU: it answers probes by replaying synthetic trainings through the allocator model.

The result of `fit` can then be compared with a brute-force search over all batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from stepscope.analysis.memory.caching_allocator import AllocationTrace, replay, workspaces
from stepscope.analysis.memory.model import Parts
from stepscope.fit.probes.contract import ProbeOutcome
from stepscope.workloads.probing import ProbeRequest, ProbeResult, Subject

MiB = 1 << 20
GiB = 1 << 30


@dataclass
class Net:
    """A chain of layers: weights, and activations and kernel workspace per sample."""

    weights: Sequence[int] = (8 * MiB, 20 * MiB, 64 * MiB, 16 * MiB)
    activations: Sequence[int] = (3 * MiB, 5 * MiB, 2 * MiB, 1 * MiB)
    workspaces: Sequence[int] = (0, 2 * MiB, 1 * MiB, 0)
    leaks: int = 0
    inputs: int = 600_000
    """Bytes of a sample."""
    steps: int = 3

    def trace(self, batch: int, steps: int | None = None) -> AllocationTrace:
        events: list[int] = []
        count = 0

        def alloc(size: int) -> int:
            nonlocal count
            events.append(size)
            count += 1
            return count - 1

        for size in self.weights:
            alloc(size)
        for step in range(steps or self.steps):
            inputs = alloc(self.inputs * batch)
            kept, gradients = [], []
            for size, work in zip(self.activations, self.workspaces, strict=True):
                kept.append(alloc(size * batch))
                if work:
                    events.append(~alloc(work * batch))
            flowing = alloc(self.activations[-1] * batch)
            for n in reversed(range(len(self.activations))):
                if self.workspaces[n]:
                    events.append(~alloc(self.workspaces[n] * batch))
                gradients.append(alloc(self.weights[n]))
                before = alloc(self.activations[max(0, n - 1)] * batch)
                events += [~flowing, ~kept[n]]
                flowing = before
            events += [~flowing, ~inputs]
            if step == 0:
                for size in self.weights:
                    alloc(size)
            if self.leaks:
                alloc(self.leaks)
            events += [~each for each in gradients]
        return AllocationTrace(tuple(events))


@dataclass
class SimulatedGpu:
    """Runs probes like `ForkedProbes` and records the requests."""

    net: Net
    total: int = 80 * GiB
    samples: int | None = None
    rate: Callable[[int], float] = lambda batch: 1000.0
    error_at: int | None = None
    """Batch from which on a step fails for a reason other than memory."""
    flaky: dict[int, list[bool]] = field(default_factory=dict)
    """Scripted results of a batch, one per probe."""
    kills: dict[int, int] = field(default_factory=dict)
    """Number of probes of a batch that are still to be killed."""
    requests: list[ProbeRequest] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.subject = Subject("cuda", "simulated GPU", 1, self.net.inputs, self.samples)

    def run(self, requests: Sequence[ProbeRequest]) -> list[ProbeOutcome]:
        self.requests += requests
        return [self._outcome(request) for request in requests]

    def passes(self, batch: int, cap: int) -> bool:
        trace = self.net.trace(batch)
        return replay(trace, cap, workspaces(trace)).fits

    def is_retry_free(self, batch: int, cap: int) -> bool:
        return replay(self.net.trace(batch), cap).reserved_peak <= cap and (
            replay(self.net.trace(batch), cap).retries == 0
        )

    def _outcome(self, request: ProbeRequest) -> ProbeOutcome:
        results: list[ProbeResult] = []
        for batch in request.batches:
            results.append(self._result(batch, request))
            if not results[-1].is_ok:
                break
        is_traced = request.trace and results[-1].is_ok
        trace = self.net.trace(request.batches[-1]) if is_traced else None
        return ProbeOutcome(request, tuple(results), trace)

    def _result(self, batch: int, request: ProbeRequest) -> ProbeResult:
        if self.error_at is not None and batch >= self.error_at:
            return ProbeResult(batch, "error", "step 1", message="shapes do not match")
        if self.kills.get(batch):
            self.kills[batch] -= 1
            return ProbeResult(batch, "killed", message="the process was killed")
        trace = self.net.trace(batch)
        cap = min(request.cap or self.total, self.total)
        replayed = replay(trace, cap, workspaces(trace))
        fits = self.flaky[batch].pop(0) if self.flaky.get(batch) else replayed.fits
        steps = request.steps + (request.steps_after if request.cycle else 0)
        if not fits:
            return ProbeResult(
                batch,
                "gpu_oom",
                "step 1",
                replayed.allocated_peak,
                replayed.reserved_peak,
                replayed.retries,
                1,
                shortfall_bytes=replayed.shortfall,
            )
        slowdown = 0.6 if replayed.skipped else 1.0
        weights = sum(self.net.weights)
        return ProbeResult(
            batch,
            "ok",
            "",
            replayed.allocated_peak,
            replayed.reserved_peak,
            replayed.retries,
            0,
            (batch / self.rate(batch) / slowdown,) * steps,
            tuple(weights * 2 + self.net.leaks * n for n in range(steps)),
            (replayed.reserved_peak,) * steps,
            parts=Parts(
                weights,
                weights,
                weights,
                self.net.inputs * batch,
                sum(self.net.activations) * batch,
                500 * MiB,
            ),
        )
