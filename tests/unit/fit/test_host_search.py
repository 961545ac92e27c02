"""The host search, with a model of memory in place of trials."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from stepscope.analysis.memory.model import Parts
from stepscope.errors import TooFewSamples, TrialError, WorkloadError
from stepscope.fit import cache
from stepscope.fit.host_search import search_host
from stepscope.fit.probes.contract import HostFacts, ProbeOutcome
from stepscope.fit.request import FitListener, FitRequest
from stepscope.fit.result import FitResult, MemoryBudget
from stepscope.fit.search import build_result
from stepscope.fit.thresholds import HIDDEN_PEAK_BYTES, MAX_HOST_PROBES, REQUIRED_PASSES
from stepscope.report.fit.messages import (
    attempts_text,
    failure_text,
    notes,
    recommendation,
    summary,
    tried_text,
)
from stepscope.workloads.probing import Kind, ProbeRequest, ProbeResult, Subject
from stepscope.workloads.spec import Workload

MB = 10**6
BASE = 1_126 * MB
LIMIT = 2_147 * MB


@dataclass
class Machine:
    """Processes whose memory has a fixed part, a part per sample, and noise."""

    per_sample: float = 0.45 * MB
    base: int = BASE
    limit: int = LIMIT
    free: int = 4 * LIMIT
    noise: float = 0.0
    """Standard deviation at the limit, as a share of the memory of batches."""
    samples: int | None = None
    leaks: int = 0
    fails: Callable[[int], ProbeResult | None] = lambda batch: None
    rate: Callable[[int], float] = float
    """Samples per second; by default a step takes one second at any batch size."""
    seed: int = 0
    batches: list[int] = field(default_factory=list)
    limits: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self.subject = Subject("cpu", "CPU", 250_000, 12_288, self.samples)

    @property
    def edge(self) -> float:
        """Return the batch at which an average process reaches the limit."""
        return (self.limit - self.base) / self.per_sample

    def peak(self, batch: int) -> float:
        noise = self._random.gauss(0, self.noise) * min(1.0, batch / self.edge)
        return self.base + self.per_sample * batch + noise * (self.limit - self.base)

    def run(self, requests: Sequence[ProbeRequest]) -> list[ProbeOutcome]:
        (request,) = requests
        (batch,) = request.batches
        result, host = self._probe(batch, request.steps, request.cap or self.limit)
        return [ProbeOutcome(request, (result,), host=host)]

    def _probe(self, batch: int, steps: int, limit: int) -> tuple[ProbeResult, HostFacts]:
        self.batches.append(batch)
        self.limits.append(limit)
        if self.samples is not None and batch > self.samples:
            raise TooFewSamples(f"The data has {self.samples} samples")
        failed = self.fails(batch)
        if failed is not None:
            return failed, HostFacts(last_phase="training")
        peak = self.peak(batch)
        if self.base > limit:
            return ProbeResult(batch, "host_oom", "data"), HostFacts(last_phase="data")
        if peak > limit:
            return ProbeResult(batch, "host_oom", "step 1"), HostFacts(last_phase="first_step")
        allocated = tuple(self.base + self.leaks * step for step in range(1, steps + 3))
        known_peak = 0 if peak > limit - HIDDEN_PEAK_BYTES else int(peak)
        parts = Parts(MB, MB, MB, 12_288 * batch)
        result = ProbeResult(
            batch,
            "ok",
            reserved_peak_bytes=known_peak,
            step_s=(batch / self.rate(batch),) * steps,
            allocated_bytes=allocated,
            parts=parts,
        )
        return result, HostFacts(self.base, 0, "cgroup v1")


def fit(machine: Machine) -> FitResult:
    budget = MemoryBudget("host", machine.limit, 5 * LIMIT, machine.free, machine.limit)
    request = FitRequest(Workload("cnn"))
    return build_result(search_host(machine, budget, request, FitListener()), request)


@given(st.floats(0.01 * MB, 12 * MB), st.integers(0, 1000))
@example(0.45 * MB, 0)
def test_a_sharp_edge_is_found_to_a_few_percent(per_sample: float, seed: int) -> None:
    machine = Machine(per_sample, noise=0.001, seed=seed)
    found = fit(machine)
    assert found.verdict == "fits" and found.max_batch is not None
    assert 0.95 * int(0.998 * machine.edge) <= found.max_batch.size <= machine.edge
    assert found.max_batch.passes >= REQUIRED_PASSES
    above = found.max_batch.failure_above
    assert above is not None and above.batch > found.max_batch.size
    assert len(machine.batches) <= 10


def test_noise_leads_to_a_margin() -> None:
    """With 2% noise, the answer passes nearly always and is little below the edge."""
    shares = []
    for seed in range(60):
        machine = Machine(noise=0.02, seed=seed)
        found = fit(machine)
        assert found.max_batch is not None and found.max_batch.passes >= REQUIRED_PASSES
        assert len(machine.batches) <= MAX_HOST_PROBES
        shares.append(found.max_batch.size / machine.edge)
    shares.sort()
    assert 0.94 < shares[30] < 0.97
    assert shares[3] > 0.92 and shares[56] < 0.99


def test_all_failures_are_above_the_answer() -> None:
    for seed in range(30):
        found = fit(Machine(noise=0.03, seed=seed))
        assert found.max_batch is not None
        failed = [point.batch for point in found.curve if not point.passed]
        assert all(batch > found.max_batch.size for batch in failed)


def test_a_peak_at_the_limit_is_unknown() -> None:
    results: list[ProbeResult] = []
    budget = MemoryBudget("host", BASE + 2 * MB, LIMIT, LIMIT)
    machine = Machine(limit=budget.limit_bytes, per_sample=MB / 8)
    listener = FitListener(tried=results.append)
    search_host(machine, budget, FitRequest(Workload("cnn")), listener)
    assert tried_text(results[0]) == "batch size 8: peak at the limit"


def test_the_answer_has_evidence() -> None:
    found = fit(Machine())
    largest = found.max_batch
    assert largest is not None and found.budget.device == "host"
    assert largest.free_bytes == pytest.approx(LIMIT - BASE - 0.45 * MB * largest.size, abs=MB)
    above = largest.failure_above
    assert above and failure_text(above) == "out of memory in step 1" and above.shortfall_bytes
    text = summary(found)
    assert text.startswith(f"The max batch size in 2 GiB is {largest.size:,}: it passed in 3 of 3")
    assert re.search(rf"; {above.batch:,} needs at least [\d.]+ MiB more \(out of memory in", text)
    assert (
        found.memory_breakdown is not None and found.memory_breakdown.fixed_bytes == BASE + 2 * MB
    )
    assert recommendation(found.memory_breakdown, found.budget).startswith(
        "Of the parts that you can change, activations take the most: "
    )
    assert found.memory_breakdown.per_sample_bytes == pytest.approx(0.45 * MB, rel=0.01)
    assert (
        found.minimum_memory is not None
        and found.minimum_memory.per_sample_bytes == pytest.approx(0.45 * MB, rel=0.05)
    )
    assert found.cost.probes == sum(1 for _ in found.curve) + REQUIRED_PASSES - 1
    assert found.cost.ooms == 1


def test_a_batch_that_fails_sometimes() -> None:
    """A batch that passes twice and fails once is not the answer; its failures are counted."""
    attempts: Counter[int] = Counter()

    def once(batch: int) -> ProbeResult | None:
        attempts[batch] += 1
        is_last = attempts[batch] == REQUIRED_PASSES
        is_first = is_last and list(attempts.values()).count(REQUIRED_PASSES) == 1
        return ProbeResult(batch, "host_oom", "step 2") if is_first else None

    found = fit(Machine(fails=once))
    above = found.max_batch and found.max_batch.failure_above
    assert above and attempts[above.batch] == REQUIRED_PASSES
    assert found.max_batch and attempts_text(found.max_batch) == "failed in 1 of 3 processes"
    assert failure_text(above) == "out of memory in step 2"
    assert "failed in 1 of 3 processes (out of memory in step 2)" in summary(found)


def test_the_max_batch_is_recommended_at_full_speed() -> None:
    machine = Machine()
    found = fit(machine)
    assert found.recommended_batch == found.max_batch  # a step takes a second at any batch size


def test_faster_smaller_batches_are_recommended() -> None:
    found = fit(Machine(rate=lambda batch: 4_000 if batch < 1_500 else 3_000))
    assert found.recommended_batch is not None and found.max_batch is not None
    assert 1_000 < found.recommended_batch.size < 1_500 < found.max_batch.size
    assert f"batch size is {found.recommended_batch.size:,}, which is faster." in summary(found)


def test_one_fast_process_counts_as_noise() -> None:
    found = fit(Machine(rate=lambda batch: 4_354 if 500 < batch < 1_500 else 3_000))
    assert found.curve[1].samples_per_second == pytest.approx(4_354)
    assert found.recommended_batch == found.max_batch


@pytest.mark.parametrize("samples", [1, 5, 8, 300])
def test_the_data_set_limits_the_batch(samples: int) -> None:
    found = fit(Machine(samples=samples))
    assert found.verdict == "no_limit"
    assert found.max_batch is not None and found.max_batch.size == samples
    assert f"the dataset limits the batch to {samples} samples" in summary(found)


@pytest.mark.parametrize("share", [0.85, 0.98])
def test_a_data_set_that_ends_just_below_the_limit(share: float) -> None:
    """The answer needs the usual number of passes."""
    found = fit(Machine(samples=5_000, per_sample=(share * LIMIT - BASE) / 5_000))
    assert found.verdict == "fits" and found.max_batch is not None
    assert (found.max_batch.size, found.max_batch.passes) == (5_000, REQUIRED_PASSES)
    assert found.max_batch.failure_above is None
    assert "The dataset limits the batch to 5,000 samples" in notes(found)


def test_memory_that_does_not_grow() -> None:
    machine = Machine(per_sample=0.0, noise=0.0)
    machine.limit = 2 * BASE
    machine.peak = lambda batch: BASE + 5 * MB  # type: ignore[method-assign]
    found = fit(machine)
    assert found.verdict == "no_limit" and "hardly grows" in summary(found)
    assert len(machine.batches) <= 8


def test_a_leak_is_detected_by_the_first_probe() -> None:
    machine = Machine(leaks=20 * MB)
    found = fit(machine)
    assert found.verdict == "unknown" and machine.batches == [8]
    assert "19.07 MiB more stays in use after every step" in summary(found)
    assert f"after about {(LIMIT - BASE - 180 * MB) / (20 * MB):.0f} more steps" in summary(found)


def test_slow_growth_is_not_a_leak() -> None:
    assert fit(Machine(leaks=MB // 2)).verdict == "fits"


def test_a_limit_below_the_memory_before_the_first_step() -> None:
    machine = Machine(base=LIMIT + 100 * MB)
    found = fit(machine)
    assert found.verdict == "does_not_fit" and found.max_batch is None
    assert machine.batches == [8, 8] and machine.limits == [LIMIT, int(0.9 * 4 * LIMIT)]
    assert "batch size 8 needs" in summary(found) and "98.8 MiB more" in summary(found)
    assert found.subject is not None and (found.cost.probes, found.cost.ooms) == (2, 1)
    (point,) = found.curve
    assert not point.passed and point.samples_per_second is None and point.reserved_peak_bytes == 0


def test_the_shortfall_is_not_measured_without_more_memory() -> None:
    machine = Machine(base=LIMIT + 100 * MB, free=int(LIMIT / 0.95))
    found = fit(machine)
    assert found.verdict == "does_not_fit" and machine.batches == [8]
    assert "batch size 8 ran out of host memory while loading the dataset." in summary(found)


def test_all_free_memory_is_not_enough() -> None:
    machine = Machine(base=9 * LIMIT)
    found = fit(machine)
    assert found.verdict == "does_not_fit" and found.cost.ooms == 2
    assert "7.198 GiB is not enough either" in summary(found)


def test_a_limit_that_no_batch_fits() -> None:
    machine = Machine(per_sample=2_000 * MB)
    found = fit(machine)
    assert found.verdict == "does_not_fit"
    assert machine.batches == [8, 2, 1, 1]
    assert "needs" in summary(found)


def test_only_a_batch_of_one_fits() -> None:
    found = fit(Machine(per_sample=600 * MB))
    assert found.verdict == "fits" and found.max_batch is not None and found.max_batch.size == 1
    assert found.max_batch.failure_above and found.max_batch.failure_above.batch == 2


def test_a_step_that_fails_for_another_reason_raises() -> None:
    def fails(batch: int) -> ProbeResult:
        return ProbeResult(
            batch, "error", "step 1", message="ValueError: no (own.py:4)", hint="fix it"
        )

    machine = Machine(fails=fails)
    with pytest.raises(WorkloadError) as raised:
        fit(machine)
    assert "fails for a reason other than memory: ValueError: no (own.py:4)" in raised.value.message
    assert raised.value.hint == "fix it" and machine.batches == [8]


@pytest.mark.parametrize("kind", ["error", "timeout"])
def test_a_larger_batch_that_fails_for_another_reason_limits_the_answer(
    kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(batch: int) -> ProbeResult | None:
        message = "RuntimeError: too many"
        return ProbeResult(batch, kind, "step 1", message=message) if batch > 700 else None

    found = fit(Machine(fails=fails))
    assert found.verdict == "fits" and found.max_batch is not None
    assert 600 <= found.max_batch.size <= 700
    assert "RuntimeError: too many" in summary(found)
    assert "fails for a reason other than memory: RuntimeError: too many" in notes(found)[0]
    monkeypatch.setenv("STEPSCOPE_STATE", str(tmp_path))
    cache.store("abc", found)
    assert cache.load("abc") is None


def test_a_step_that_stalls() -> None:
    machine = Machine(
        fails=lambda batch: ProbeResult(batch, "timeout", message="no progress for 300 s")
    )
    with pytest.raises(TrialError, match="The probe at batch size 8 stalled: no progress"):
        fit(machine)
