"""The GPU search on simulated GPUs, compared with brute force."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest

from simulated_gpu import GiB, MiB, Net, SimulatedGpu
from stepscope.errors import TrialError, WorkloadError
from stepscope.fit.gpu_search import search_gpu
from stepscope.fit.probes.contract import ProbeOutcome
from stepscope.fit.request import FitListener, FitRequest
from stepscope.fit.result import FitResult, MemoryBudget, Note, NoteKind, Verdict
from stepscope.fit.search import SearchResult, build_result
from stepscope.workloads.probing import ProbeRequest, ProbeResult
from stepscope.workloads.spec import Workload

CONTEXT = 500 * MiB
"""Bytes of the CUDA context of every simulated process."""
MAX_PROBES = 20
WORKLOAD = Workload("cnn")


@dataclass
class LimitedGpu:
    """A simulated GPU with a memory limit: part of a larger GPU, or the whole GPU."""

    gpu: SimulatedGpu
    limit: int = 4 * GiB
    emulated: bool = True
    headroom: int = 0

    def __post_init__(self) -> None:
        if not self.emulated:
            self.gpu.total = self.limit + self.headroom

    @property
    def budget(self) -> MemoryBudget:
        if self.emulated:
            requested = self.limit + self.headroom
            return MemoryBudget("gpu", self.limit, 80 * GiB, 80 * GiB, requested, self.headroom)
        total = self.gpu.total + CONTEXT
        return MemoryBudget("gpu", total - self.headroom, total, total, None, self.headroom)

    def fit(self, **options: object) -> SearchResult:
        return search_gpu(self.gpu, self.budget, FitRequest(WORKLOAD, **options), FitListener())  # type: ignore[arg-type]

    def passes(self, batch: int) -> bool:
        return self.gpu.passes(batch, self.limit)

    def is_retry_free(self, batch: int) -> bool:
        return self.gpu.is_retry_free(batch, self.limit)


def both(net: Net, limit: int = 4 * GiB, **gpu: object) -> list[LimitedGpu]:
    """Return the same limit on a larger GPU, with parallel probes, and as a whole GPU."""
    return [
        LimitedGpu(SimulatedGpu(net, **gpu), limit, emulated)  # type: ignore[arg-type]
        for emulated in (True, False)
    ]


def random_net(seed: int) -> tuple[Net, int]:
    dice = random.Random(seed)
    layers = range(dice.randint(2, 8))
    net = Net(
        [dice.randint(1, 100) * MiB // 2 for _ in layers],
        [int(dice.uniform(0.1, 8) * MiB) for _ in layers],
        [dice.choice([0, 0, 1, 3]) * int(dice.uniform(0.1, 3) * MiB) for _ in layers],
    )
    return net, dice.choice([2, 4, 11]) * GiB


def found_by(passes: Callable[[int], bool], batches: range) -> tuple[int, bool]:
    """Return the largest of these that passes, and whether none fails below it."""
    passed = [batch for batch in batches if passes(batch)]
    largest = max(passed, default=0)
    return largest, len(passed) == max(0, largest - batches.start + 1)


# Comparison with brute force


@pytest.mark.parametrize("emulated", [True, False])
@pytest.mark.parametrize("seed", range(16))
def test_both_batches_match_brute_force(seed: int, emulated: bool) -> None:
    net, limit = random_net(seed)
    case = LimitedGpu(SimulatedGpu(net), limit, emulated)
    found = case.fit()
    largest, fast = found.max_batch, found.recommended_batch
    assert largest and fast and case.passes(largest) and case.is_retry_free(fast)
    edge, is_clean = found_by(case.passes, range(largest, int(1.05 * largest) + 2))
    assert largest >= (0.99 if is_clean else 0.95) * edge - 1
    edge, is_clean = found_by(case.is_retry_free, range(fast, largest + 1))
    assert fast >= (0.97 if is_clean else 0.9) * edge - 1
    assert len(case.gpu.requests) <= 20
    assert found.search.passes[largest] >= 1 and found.search.passes[fast] >= 1


@pytest.mark.parametrize(("seed", "emulated"), [(53, True), (61, False)])
def test_an_edge_beyond_failures_is_found(seed: int, emulated: bool) -> None:
    """Batches 231 to 240 retry but 241 to 248 do not; 115 to 118 fail but 124 passes."""
    net, limit = random_net(seed)
    case = LimitedGpu(SimulatedGpu(net), limit, emulated)
    found = case.fit()
    assert found.max_batch and found.recommended_batch
    edge, _ = found_by(case.passes, range(found.max_batch, int(1.1 * found.max_batch)))
    retry_free, _ = found_by(
        case.is_retry_free, range(found.recommended_batch, found.max_batch + 1)
    )
    assert found.max_batch >= 0.95 * edge and found.recommended_batch >= 0.97 * retry_free


def test_probes_run_in_parallel_where_memory_allows() -> None:
    net, _ = random_net(1)
    emulated, whole = (case.fit() for case in both(net))
    assert emulated.search.parallel_probes > 2 and whole.search.parallel_probes == 1
    assert (emulated.max_batch, emulated.recommended_batch) == (
        whole.max_batch,
        whole.recommended_batch,
    )


def test_only_probes_near_a_requested_limit_are_capped() -> None:
    emulated, whole = both(random_net(1)[0])
    emulated.fit()
    whole.fit()
    near = [request for request in emulated.gpu.requests if request.cycle and not request.trace]
    assert near and {request.cap for request in near} == {4 * GiB}
    assert {request.cap for request in whole.gpu.requests} == {None}


@pytest.mark.parametrize("emulated", [True, False])
def test_headroom_stays_free(emulated: bool) -> None:
    net, _ = random_net(2)
    case = LimitedGpu(SimulatedGpu(net), 3 * GiB, emulated, headroom=GiB)
    found = case.fit()
    assert found.search.cap == found.search.budget.limit_bytes == case.limit
    assert found.max_batch and case.passes(found.max_batch)
    assert (
        abs(found.max_batch - (LimitedGpu(SimulatedGpu(net), case.limit).fit().max_batch or 0)) <= 1
    )


def test_a_request_above_the_free_memory_uses_the_free_memory() -> None:
    gpu = SimulatedGpu(Net(), 6 * GiB)
    for requested, headroom, limit in ((15, 0, 6.0), (15, 1, 5.0), (6, 1, 5.0), (4, 1, 3.0)):
        begin = (min(requested, 6) - headroom) * GiB
        budget = MemoryBudget("gpu", begin, 80 * GiB, 6 * GiB, requested * GiB, headroom * GiB)
        found = search_gpu(gpu, budget, FitRequest(WORKLOAD, estimate=True), FitListener())
        context = CONTEXT if requested > 5 else 0
        assert found.search.budget.limit_bytes == int(limit * GiB) - context


def test_headroom_that_leaves_no_memory_is_rejected() -> None:
    budget = MemoryBudget("gpu", GiB, 80 * GiB, 2 * GiB, None, 8 * GiB // 5)
    with pytest.raises(TrialError, match="leaves no memory: 2 GiB is free"):
        search_gpu(SimulatedGpu(Net(), 2 * GiB), budget, FitRequest(WORKLOAD), FitListener())


def test_a_probe_that_stalls_ends_the_search() -> None:
    class Hanging(SimulatedGpu):
        def _result(self, batch: int, request: ProbeRequest) -> ProbeResult:
            result = super()._result(batch, request)
            return replace(result, kind="timeout") if batch > 100 else result

    with pytest.raises(TrialError, match=r"The probe at batch size [0-9,]+ stalled"):
        LimitedGpu(Hanging(Net())).fit()


def test_a_gpu_in_exclusive_mode_gets_one_probe_at_a_time() -> None:
    class Exclusive(SimulatedGpu):
        def run(self, requests: Sequence[ProbeRequest]) -> list[ProbeOutcome]:
            found = super().run(requests)
            return found[:1] + [
                replace(each, results=(ProbeResult(each.request.batches[0], "gpu_busy"),))
                for each in found[1:]
            ]

    found = LimitedGpu(Exclusive(Net())).fit()
    assert found.search.parallel_probes == 1
    assert (found.max_batch, found.recommended_batch) == (
        LimitedGpu(SimulatedGpu(Net())).fit().max_batch,
        found.recommended_batch,
    )


@pytest.mark.parametrize("seed", range(3))
def test_an_estimate_runs_only_small_and_traced_batches(seed: int) -> None:
    """The cap is wide on a larger GPU, and absent on a whole GPU."""
    net, limit = random_net(seed)
    for case in both(net, limit):
        found = case.fit(estimate=True)
        assert found.max_batch and (found.max_batch, found.recommended_batch) == found.predicted
        assert (
            found.search.wide_cap != found.search.cap
        ) == case.emulated and found.search.oom_count <= 1
        assert {request.cap for request in case.gpu.requests} == {
            3 * limit if case.emulated else None
        }
        assert all(request.trace or not request.cycle for request in case.gpu.requests)
        assert len(case.gpu.requests) <= 5
        edge, _ = found_by(case.passes, range(1, 2 * found.max_batch))
        assert abs(found.max_batch - edge) <= 0.02 * edge + 1


# Other GPU memory sizes


def test_predictions_grow_with_memory_and_match_the_answer() -> None:
    for case in both(random_net(4)[0], 11 * GiB):
        sizes = tuple(size * GiB for size in (2, 4, 8, 11, 16, 24))
        found = case.fit(predict_for=sizes)
        assert found.predictions and found.max_batch and found.recommended_batch
        predicted = [found.predictions[size] for size in sizes]
        assert predicted == sorted(predicted) and all(fast <= most for most, fast in predicted)
        same = found.predictions[11 * GiB]
        assert abs(same[0] - found.max_batch) <= 1 and abs(same[1] - found.recommended_batch) <= 1


@pytest.mark.parametrize("seed", [16, 63])
def test_predictions_look_beyond_failures(seed: int) -> None:
    net, limit = random_net(seed)
    found = LimitedGpu(SimulatedGpu(net), limit).fit(predict_for=(limit,))
    assert found.predictions and found.max_batch
    assert abs(found.predictions[limit][0] - found.max_batch) <= 0.03 * found.max_batch


@pytest.mark.parametrize("size", [4, 6, 16, 24])
def test_predictions_match_a_search_at_that_size(size: int) -> None:
    net, _ = random_net(5)
    found = LimitedGpu(SimulatedGpu(net), 11 * GiB).fit(predict_for=(size * GiB,))
    there = LimitedGpu(SimulatedGpu(net), size * GiB).fit()
    assert found.predictions and there.max_batch and there.recommended_batch
    largest, fast = found.predictions[size * GiB]
    assert abs(largest - there.max_batch) <= 0.03 * there.max_batch
    assert abs(fast - there.recommended_batch) <= 0.03 * there.recommended_batch


def test_common_gpu_sizes_exclude_the_context() -> None:
    found = LimitedGpu(SimulatedGpu(Net())).fit()
    assert found.predictions
    assert found.search.predicted_limits(()) == {
        s * GiB: s * GiB - CONTEXT for s in (11, 16, 24, 40, 80)
    }
    assert list(found.predictions) == list(found.search.predicted_limits(()))


# Problems of the workload


def test_a_leak_is_detected_before_large_batches_run() -> None:
    for case in both(Net(leaks=5 * MiB)):
        found = case.fit()
        assert found.verdict == Verdict.UNKNOWN
        assert found.leak and found.leak.bytes_per_step == 5 * MiB
        assert (
            found.max_batch is None and len(case.gpu.requests) <= 4 and found.search.oom_count <= 1
        )


def test_a_negligible_leak_is_ignored() -> None:
    assert not LimitedGpu(SimulatedGpu(Net(leaks=100 * 1024))).fit().leak


def test_memory_that_does_not_grow_sets_no_limit() -> None:
    still = Net((8 * MiB,) * 2, (0, 0), (0, 0), inputs=0)
    for case in both(still):
        found = case.fit()
        assert found.verdict == Verdict.NO_LIMIT and len(case.gpu.requests) <= 8
        assert found.max_batch and found.max_batch >= 1 << 20


def test_slow_growth_is_found_with_larger_batches() -> None:
    slow = Net((300 * MiB,), (2000,), (0,), inputs=100)
    for case in both(slow, 2 * GiB):
        found = case.fit()
        assert (
            found.max_batch
            and case.passes(found.max_batch)
            and len(case.gpu.requests) <= MAX_PROBES
        )
        edge, _ = found_by(case.passes, range(found.max_batch, int(1.03 * found.max_batch), 997))
        assert found.max_batch >= 0.99 * edge


def test_the_shortfall_is_exact_on_a_larger_gpu() -> None:
    larger, whole = both(Net(), 300 * MiB)
    found = larger.fit()
    peak = found.search.results[1][0].allocated_peak_bytes
    assert found.verdict == Verdict.DOES_NOT_FIT
    assert found.failure and found.failure.shortfall_bytes == peak - 300 * MiB
    found = whole.fit()
    assert found.verdict == Verdict.DOES_NOT_FIT
    assert found.failure and 0 < found.failure.shortfall_bytes < peak
    assert found.search.results[1][0].shortfall_bytes == found.failure.shortfall_bytes


def test_a_batch_of_one_is_found_if_two_do_not_fit() -> None:
    net = Net((8 * MiB,), (300 * MiB,), (0,))
    for case in both(net, 2 * GiB):
        assert case.passes(1) and not case.passes(2)
        found = case.fit()
        assert (found.max_batch, found.recommended_batch) == (1, 1)


def test_a_workload_that_fails_immediately_raises() -> None:
    for case in both(Net(), error_at=1):
        with pytest.raises(
            WorkloadError, match="Batch size 2 fails in step 1: shapes do not match"
        ):
            case.fit()
        assert len(case.gpu.requests) == 1


@pytest.mark.parametrize("first", [300, 120, 65, 30, 10, 3])
def test_an_error_from_some_batch_on_limits_the_answer(first: int) -> None:
    for case in both(Net(), 15 * GiB, error_at=first):
        found = case.fit()
        assert found.max_batch and 0.99 * (first - 1) - 1 <= found.max_batch < first
        assert found.recommended_batch and found.recommended_batch >= 0.97 * found.max_batch - 1
        assert len(case.gpu.requests) <= MAX_PROBES
        assert any(r.kind == "error" for results in found.search.results.values() for r in results)


@dataclass
class Failing(SimulatedGpu):
    """Fails for a reason other than memory if `fails` returns true."""

    fails: Callable[[int, ProbeRequest], bool] = lambda batch, request: False

    def _result(self, batch: int, request: ProbeRequest) -> ProbeResult:
        if self.fails(batch, request):
            return ProbeResult(
                batch, "error", "step 1", message="expected more than 1 value per channel"
            )
        return super()._result(batch, request)


@pytest.mark.parametrize("limit", [3, 4, 6, 10])
def test_a_model_that_rejects_a_single_sample_can_be_fitted(limit: int) -> None:
    """Batch normalization does, and here so few samples fit that a single one would be traced."""
    net = Net((8 * MiB,), (300 * MiB,), (0,))
    for emulated in (True, False):
        gpu = Failing(net, fails=lambda batch, request: batch == 1)
        case = LimitedGpu(gpu, limit * GiB, emulated)
        found = case.fit()
        assert found.max_batch == found_by(case.passes, range(1, 20))[0] > 1
        assert len(gpu.requests) <= 10


def test_a_cycle_that_always_fails_raises() -> None:
    for emulated in (True, False):
        case = LimitedGpu(
            Failing(Net(), fails=lambda batch, request: request.cycle), 4 * GiB, emulated
        )
        with pytest.raises(WorkloadError, match="expected more than 1 value per channel"):
            case.fit()
        assert len(case.gpu.requests) <= MAX_PROBES


@pytest.mark.parametrize("samples", [1, 2, 3, 40, 64, 100])
def test_no_batch_is_larger_than_the_data_set(samples: int) -> None:
    for case in both(Net(), samples=samples):
        found = case.fit()
        assert (found.max_batch, found.recommended_batch) == (samples, samples)
        assert found.verdict == Verdict.FITS
        assert max(b for request in case.gpu.requests for b in request.batches) <= samples


def test_a_data_set_just_below_and_just_above_the_edge() -> None:
    edge = LimitedGpu(SimulatedGpu(Net())).fit().max_batch
    assert edge
    assert LimitedGpu(SimulatedGpu(Net(), samples=edge - 3)).fit().max_batch == edge - 3
    assert LimitedGpu(SimulatedGpu(Net(), samples=edge + 30)).fit().max_batch == edge


# Killed probes


def result_of(case: LimitedGpu) -> FitResult:
    return build_result(case.fit(), FitRequest(WORKLOAD))


@pytest.mark.parametrize("share", [0.2, 0.5, 1.0])
def test_one_kill_does_not_change_the_answer(share: float) -> None:
    for case in both(Net()):
        expected = result_of(case)
        assert expected.max_batch
        tried = {batch for request in case.gpu.requests for batch in request.batches}
        target = max(batch for batch in tried if batch <= share * expected.max_batch.size)
        case.gpu.kills = {target: 1}
        found = result_of(case)
        assert case.gpu.kills == {target: 0}
        assert (found.max_batch, found.recommended_batch, found.notes, found.curve) == (
            expected.max_batch,
            expected.recommended_batch,
            (),
            expected.curve,
        )
        assert found.cost == replace(expected.cost, probes=expected.cost.probes + 1)


def test_a_batch_that_is_always_killed_limits_the_answer() -> None:
    for case in both(Net()):
        edge = case.fit().max_batch
        assert edge
        case.gpu.kills = {edge: 99}
        found = result_of(case)
        assert found.max_batch and 0.98 * edge <= found.max_batch.size < edge
        above = found.max_batch.failure_above
        assert above and (above.batch, above.kind) == (edge, "killed")
        assert found.notes == (Note(NoteKind.BATCH_FAILED, "the process was killed", edge),)


def test_a_workload_that_is_killed_immediately_raises() -> None:
    for case in both(Net(), kills={2: 99}):
        with pytest.raises(WorkloadError, match="Batch size 2 fails: the process was killed"):
            case.fit()
        assert len(case.gpu.requests) == 2


# Flaky and slow batches


def test_a_batch_that_passes_only_once_is_not_the_answer() -> None:
    for case in both(Net()):
        edge = case.fit().max_batch
        assert edge
        case.gpu.flaky = {edge: [True] + [False] * 9}
        case.gpu.requests.clear()
        found = case.fit()
        assert not case.gpu.flaky[edge][8:]  # it was probed at least twice
        assert found.max_batch and 0.98 * edge <= found.max_batch < edge
        assert found.search.passed[edge] is False
        assert found.search.passes[found.max_batch] >= 1


def search_with(rate: Callable[[int, int], float]) -> tuple[SearchResult, int]:
    """Search with a throughput that depends on the batch and the edge; return that edge too."""
    net, limit = random_net(3)
    edge = LimitedGpu(SimulatedGpu(net), limit).fit().recommended_batch
    assert edge
    return LimitedGpu(SimulatedGpu(net, rate=lambda batch: rate(batch, edge)), limit).fit(), edge


def test_a_faster_smaller_batch_is_recommended() -> None:
    found, edge = search_with(lambda batch, edge: 1000.0 if batch <= 0.8 * edge else 900.0)
    assert (
        found.recommended_batch and 0.8 * 0.97 * edge - 1 <= found.recommended_batch <= 0.8 * edge
    )
    assert found.max_batch and found.max_batch > found.recommended_batch


@pytest.mark.parametrize("seed", range(5))
def test_small_throughput_differences_are_ignored(seed: int) -> None:
    dice = random.Random(seed)
    found, edge = search_with(
        lambda batch, edge: dice.uniform(0.995, 1.005) * (1000 if batch < 0.9 * edge else 997)
    )
    assert found.recommended_batch == edge


def test_throughput_that_grows_with_the_batch_changes_nothing() -> None:
    found, edge = search_with(lambda batch, edge: 1000.0 * batch / (batch + 20))
    assert found.recommended_batch == edge


def test_only_exclusive_probes_are_timed() -> None:
    found = LimitedGpu(SimulatedGpu(Net())).fit()
    alone = {
        b for request in found.search.probes.requests if request.exclusive for b in request.batches
    }  # type: ignore[attr-defined]
    assert (
        set(found.search.throughput) <= alone
        and {found.max_batch, found.recommended_batch} <= alone
    )


# Failures below the max


@dataclass
class FailingRange(SimulatedGpu):
    """Some batches fail although larger ones pass."""

    failing: range = range(0)

    def _result(self, batch: int, request: ProbeRequest) -> ProbeResult:
        if batch in self.failing:
            return ProbeResult(batch, "gpu_oom", "step 1", shortfall_bytes=MiB)
        return super()._result(batch, request)


def test_the_search_continues_beyond_failures() -> None:
    edge = LimitedGpu(SimulatedGpu(Net(), 80 * GiB), 15 * GiB).fit().max_batch
    assert edge
    for emulated in (True, False):
        failing = range(int(0.99 * edge), int(0.995 * edge))
        found = LimitedGpu(FailingRange(Net(), failing=failing), 15 * GiB, emulated).fit()
        assert found.max_batch == edge
        tried_within = [batch for batch in found.search.passed if batch in failing]
        assert all(not found.search.passed[batch] for batch in tried_within)


# Verification


def test_verification_runs_each_answer_three_times_with_more_steps() -> None:
    for case in both(random_net(6)[0]):
        found = case.fit(verify=True)
        assert (
            found.max_batch
            and found.recommended_batch
            and found.max_batch != found.recommended_batch
        )
        assert sorted(result.batch for result in found.search.verification) == sorted(
            [found.recommended_batch] * 3 + [found.max_batch] * 3
        )
        assert all(r.is_ok and len(r.step_s) == 20 for r in found.search.verification)
        longer = [request for request in case.gpu.requests if request.steps > 3]
        assert len(longer) >= 6 and all(
            request.exclusive and request.cap == found.search.cap for request in longer
        )


def test_a_batch_that_is_both_answers_is_verified_three_times() -> None:
    found = LimitedGpu(SimulatedGpu(Net())).fit(verify=True)
    assert found.max_batch == found.recommended_batch and len(found.search.verification) == 3


@dataclass
class LongRunsFail(SimulatedGpu):
    """Large batches fail after more steps than a short probe has."""

    from_batch: int = 1 << 30

    def _result(self, batch: int, request: ProbeRequest) -> ProbeResult:
        if request.steps > 3 and batch >= self.from_batch:
            return ProbeResult(batch, "gpu_oom", "step 9", shortfall_bytes=MiB)
        return super()._result(batch, request)


def test_a_failed_verification_lowers_the_answer() -> None:
    net, limit = random_net(6)
    edge = LimitedGpu(SimulatedGpu(net), limit).fit()
    assert edge.max_batch and edge.recommended_batch
    case = LimitedGpu(LongRunsFail(net, from_batch=edge.max_batch - 2), limit)
    found = case.fit(verify=True)
    assert found.max_batch and 0.98 * edge.max_batch <= found.max_batch < edge.max_batch - 2
    assert (
        all(result.is_ok for result in found.search.verification)
        and len(found.search.verification) >= 3
    )
