"""The decisions of `fit` on the host, with a model of memory in the place of trials."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from stepscope.analysis.memory.model import Parts
from stepscope.errors import BadWorkload, CannotTry, TooFewSamples
from stepscope.fit import cache
from stepscope.fit.answer import Fit, MemoryBudget
from stepscope.fit.host_search import search_host
from stepscope.fit.probes.contract import HostFacts, ProbeOutcome
from stepscope.fit.request import FitListener, FitRequest
from stepscope.fit.search import answer_of
from stepscope.fit.thresholds import MOST_TRIALS, PASSES, PRESSED
from stepscope.report.fit.sentences import (
    advice,
    failure_text,
    notes,
    often_text,
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
    """Processes that take so much for any batch, so much for each sample, and some at random."""

    per_sample: float = 0.45 * MB
    base: int = BASE
    limit: int = LIMIT
    free: int = 4 * LIMIT
    spread: float = 0.0
    """Standard deviation of a full process, as part of what batches take."""
    samples: int | None = None
    leaks: int = 0
    fails: Callable[[int], ProbeResult | None] = lambda batch: None
    rate: Callable[[int], float] = float
    """Samples per second; a step takes a second, whatever the batch, if it is not told."""
    seed: int = 0
    asked: list[int] = field(default_factory=list)
    within: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self.subject = Subject("cpu", "CPU", 250_000, 12_288, self.samples)

    @property
    def edge(self) -> float:
        """The batch at which an average process reaches the limit."""
        return (self.limit - self.base) / self.per_sample

    def peak(self, batch: int) -> float:
        noise = self._random.gauss(0, self.spread) * min(1.0, batch / self.edge)
        return self.base + self.per_sample * batch + noise * (self.limit - self.base)

    def run(self, requests: Sequence[ProbeRequest]) -> list[ProbeOutcome]:
        (request,) = requests
        (batch,) = request.batches
        result, host = self._probe(batch, request.steps, request.cap or self.limit)
        return [ProbeOutcome(request, (result,), host=host)]

    def _probe(self, batch: int, steps: int, limit: int) -> tuple[ProbeResult, HostFacts]:
        self.asked.append(batch)
        self.within.append(limit)
        if self.samples is not None and batch > self.samples:
            raise TooFewSamples(f"The data has {self.samples} samples")
        failed = self.fails(batch)
        if failed is not None:
            return failed, HostFacts(reached="training")
        peak = self.peak(batch)
        if self.base > limit:
            return ProbeResult(batch, "host_oom", "data"), HostFacts(reached="data")
        if peak > limit:
            return ProbeResult(batch, "host_oom", "step 1"), HostFacts(reached="first step")
        kept = tuple(self.base + self.leaks * step for step in range(1, steps + 3))
        seen = 0 if peak > limit - PRESSED else int(peak)
        parts = Parts(MB, MB, MB, 12_288 * batch)
        took = (batch / self.rate(batch),) * steps
        result = ProbeResult(batch, "ok", reserved_peak=seen, step_s=took, kept=kept, parts=parts)
        return result, HostFacts(self.base, 0, "cgroup v1")


def fit(machine: Machine) -> Fit:
    budget = MemoryBudget("host", machine.limit, 5 * LIMIT, machine.free, machine.limit)
    request = FitRequest(Workload("cnn"))
    return answer_of(search_host(machine, budget, request, FitListener()), request)


@given(st.floats(0.01 * MB, 12 * MB), st.integers(0, 1000))
@example(0.45 * MB, 0)
def test_a_sharp_edge_is_found_to_a_few_per_cent(per_sample: float, seed: int) -> None:
    machine = Machine(per_sample, spread=0.001, seed=seed)
    found = fit(machine)
    assert found.verdict == "fits" and found.max_batch is not None
    assert 0.95 * int(0.998 * machine.edge) <= found.max_batch.size <= machine.edge
    assert found.max_batch.passed >= PASSES
    above = found.max_batch.failure_above
    assert above is not None and above.batch > found.max_batch.size
    assert len(machine.asked) <= 10


def test_processes_that_differ_leave_a_margin() -> None:
    """Where they differ by 2 %, the answer passes nearly always, and is little below the rest."""
    shares = []
    for seed in range(60):
        machine = Machine(spread=0.02, seed=seed)
        found = fit(machine)
        assert found.max_batch is not None and found.max_batch.passed >= PASSES
        assert len(machine.asked) <= MOST_TRIALS
        shares.append(found.max_batch.size / machine.edge)
    shares.sort()
    assert 0.94 < shares[30] < 0.97
    assert shares[3] > 0.92 and shares[56] < 0.99


def test_what_failed_is_above_the_answer() -> None:
    for seed in range(30):
        found = fit(Machine(spread=0.03, seed=seed))
        assert found.max_batch is not None
        failed = [point.batch for point in found.curve if not point.passed]
        assert all(batch > found.max_batch.size for batch in failed)


def test_what_is_told_of_a_batch_whose_peak_the_limit_hides() -> None:
    results: list[ProbeResult] = []
    budget = MemoryBudget("host", BASE + 2 * MB, LIMIT, LIMIT)
    machine = Machine(limit=budget.limit, per_sample=MB / 8)
    listener = FitListener(tried=results.append)
    search_host(machine, budget, FitRequest(Workload("cnn")), listener)
    assert tried_text(results[0]) == "batch 8 just fits"


def test_the_certificate() -> None:
    found = fit(Machine())
    largest = found.max_batch
    assert largest is not None and found.budget.device == "host"
    assert largest.free_bytes == pytest.approx(LIMIT - BASE - 0.45 * MB * largest.size, abs=MB)
    above = largest.failure_above
    assert above and failure_text(above, "host") == "in step 1" and (above.missing or 0) > 0
    assert f"{largest.size:,} is the largest batch" in summary(found)
    assert "passed in 3 fresh processes of 3" in summary(found)
    assert f"{above.batch:,} ran out of host memory in step 1" in summary(found)
    assert found.composition is not None and found.composition.fixed == BASE + 2 * MB
    assert advice(found.composition, found.budget).startswith(
        "Of what you can change, what the forward pass"
    )
    assert found.composition.per_sample == pytest.approx(0.45 * MB, rel=0.01)
    assert found.minimum is not None and found.minimum.per_sample == pytest.approx(
        0.45 * MB, rel=0.05
    )
    assert found.effort.probes == sum(1 for _ in found.curve) + PASSES - 1
    assert found.effort.ooms == 1


def test_a_batch_that_fails_now_and_then() -> None:
    """It passes twice, then fails once: it is not the answer, but it is not said never to fit."""
    tries: Counter[int] = Counter()

    def once(batch: int) -> ProbeResult | None:
        tries[batch] += 1
        is_first = tries[batch] == PASSES and list(tries.values()).count(PASSES) == 1
        return ProbeResult(batch, "host_oom", "step 2") if is_first else None

    found = fit(Machine(fails=once))
    above = found.max_batch and found.max_batch.failure_above
    assert above and tries[above.batch] == PASSES
    assert found.max_batch and often_text(found.max_batch) == "failed in 1 of 3"
    assert failure_text(above, "host") == "in step 2"
    assert "failed in 1 of 3: it ran out of host memory in step 2" in summary(found)


def test_the_fast_one_is_the_largest_at_full_speed() -> None:
    machine = Machine()
    found = fit(machine)
    assert found.recommended_batch == found.max_batch  # a step takes a second, whatever the batch


def test_smaller_batches_that_are_faster() -> None:
    found = fit(Machine(rate=lambda batch: 4_000 if batch < 1_500 else 3_000))
    assert found.recommended_batch is not None and found.max_batch is not None
    assert 1_000 < found.recommended_batch.size < 1_500 < found.max_batch.size
    assert f"{found.recommended_batch.size:,} is faster" in summary(found)


def test_one_fast_process_is_noise() -> None:
    found = fit(Machine(rate=lambda batch: 4_354 if 500 < batch < 1_500 else 3_000))
    assert found.curve[1].samples_per_second == pytest.approx(4_354)
    assert found.recommended_batch == found.max_batch


@pytest.mark.parametrize("samples", [1, 5, 8, 300])
def test_the_data_set_bounds_the_batch(samples: int) -> None:
    found = fit(Machine(samples=samples))
    assert found.verdict == "no limit"
    assert found.max_batch is not None and found.max_batch.size == samples
    assert f"no more than {samples} samples" in summary(found)


@pytest.mark.parametrize("share", [0.85, 0.98])
def test_a_data_set_that_ends_little_below_the_limit(share: float) -> None:
    """That it fits has to be shown as always."""
    found = fit(Machine(samples=5_000, per_sample=(share * LIMIT - BASE) / 5_000))
    assert found.verdict == "fits" and found.max_batch is not None
    assert (found.max_batch.size, found.max_batch.passed) == (5_000, PASSES)
    assert found.max_batch.failure_above is None
    assert "the data set has no more than 5,000 samples" in notes(found)


def test_memory_that_does_not_grow() -> None:
    machine = Machine(per_sample=0.0, spread=0.0)
    machine.limit = 2 * BASE
    machine.peak = lambda batch: BASE + 5 * MB  # type: ignore[method-assign]
    found = fit(machine)
    assert found.verdict == "no limit" and "hardly grows" in summary(found)
    assert len(machine.asked) <= 8


def test_a_leak_is_told_after_one_probe() -> None:
    machine = Machine(leaks=20 * MB)
    found = fit(machine)
    assert found.verdict == "cannot tell" and machine.asked == [8]
    assert "19.07 MiB with every step" in summary(found)
    assert f"after about {(LIMIT - BASE - 180 * MB) / (20 * MB):.0f} more steps" in summary(found)


def test_a_small_drift_is_no_leak() -> None:
    assert fit(Machine(leaks=MB // 2)).verdict == "fits"


def test_a_limit_below_what_is_there_before_any_step() -> None:
    machine = Machine(base=LIMIT + 100 * MB)
    found = fit(machine)
    assert found.verdict == "does not fit" and found.max_batch is None
    assert machine.asked == [8, 8] and machine.within == [LIMIT, int(0.9 * 4 * LIMIT)]
    assert "batch 8 needs" in summary(found) and "98.8 MiB more" in summary(found)
    assert found.subject is not None and (found.effort.probes, found.effort.ooms) == (2, 1)
    (point,) = found.curve
    assert not point.passed and point.samples_per_second is None and point.reserved == 0


def test_what_is_missing_is_not_tried_where_there_is_no_more() -> None:
    machine = Machine(base=LIMIT + 100 * MB, free=int(LIMIT / 0.95))
    found = fit(machine)
    assert found.verdict == "does not fit" and machine.asked == [8]
    assert "batch 8 ran out of host memory while the data set was made." in summary(found)


def test_all_that_is_free_is_not_enough() -> None:
    machine = Machine(base=9 * LIMIT)
    found = fit(machine)
    assert found.verdict == "does not fit" and found.effort.ooms == 2
    assert "7.198 GiB are not enough either" in summary(found)


def test_a_limit_that_no_batch_fits_into() -> None:
    machine = Machine(per_sample=2_000 * MB)
    found = fit(machine)
    assert found.verdict == "does not fit"
    assert machine.asked == [8, 2, 1, 1]
    assert "needs" in summary(found)


def test_only_a_batch_of_one_fits() -> None:
    found = fit(Machine(per_sample=600 * MB))
    assert found.verdict == "fits" and found.max_batch is not None and found.max_batch.size == 1
    assert found.max_batch.failure_above and found.max_batch.failure_above.batch == 2


def test_a_step_that_fails_is_no_matter_of_memory() -> None:
    def fails(batch: int) -> ProbeResult:
        return ProbeResult(
            batch, "error", "step 1", message="ValueError: no (own.py:4)", hint="mend it"
        )

    machine = Machine(fails=fails)
    with pytest.raises(BadWorkload) as raised:
        fit(machine)
    assert "not for lack of memory: ValueError: no (own.py:4)" in raised.value.message
    assert raised.value.hint == "mend it" and machine.asked == [8]


@pytest.mark.parametrize("kind", ["error", "timeout"])
def test_a_larger_batch_that_fails_for_another_reason_bounds_it_too(
    kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(batch: int) -> ProbeResult | None:
        message = "RuntimeError: too many"
        return ProbeResult(batch, kind, "step 1", message=message) if batch > 700 else None

    found = fit(Machine(fails=fails))
    assert found.verdict == "fits" and found.max_batch is not None
    assert 600 <= found.max_batch.size <= 700
    assert "RuntimeError: too many" in summary(found)
    assert "fails for another reason than memory: RuntimeError: too many" in notes(found)[0]
    monkeypatch.setenv("STEPSCOPE_STATE", str(tmp_path))
    cache.remember("abc", found)
    assert cache.recall("abc") is None


def test_a_step_that_hangs() -> None:
    machine = Machine(
        fails=lambda batch: ProbeResult(batch, "timeout", message="nothing was heard of it")
    )
    with pytest.raises(CannotTry, match="nothing was heard"):
        fit(machine)
