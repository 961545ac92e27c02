"""The story of `fit` on GPUs that are not there, held against every batch tried one by one."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest

from simulated_gpu import GiB, MiB, Net, SimulatedGpu
from stepscope.errors import BadWorkload, CannotTry
from stepscope.fit.answer import Fit, MemoryBudget, Note, NoteKind, Verdict
from stepscope.fit.gpu_search import search_gpu
from stepscope.fit.probes.contract import ProbeOutcome
from stepscope.fit.request import FitListener, FitRequest
from stepscope.fit.search import SearchResult, answer_of
from stepscope.workloads.probing import ProbeRequest, ProbeResult
from stepscope.workloads.spec import Workload

CONTEXT = 500 * MiB
"""Of every simulated process."""
MOST_PROBES = 20
WORKLOAD = Workload("cnn")


@dataclass
class Card:
    """A simulated GPU with its limit: emulated on a larger one, or all that a real one has."""

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
            asked = self.limit + self.headroom
            return MemoryBudget("gpu", self.limit, 80 * GiB, 80 * GiB, asked, self.headroom)
        total = self.gpu.total + CONTEXT
        return MemoryBudget("gpu", total - self.headroom, total, total, None, self.headroom)

    def fit(self, **options: object) -> SearchResult:
        return search_gpu(self.gpu, self.budget, FitRequest(WORKLOAD, **options), FitListener())  # type: ignore[arg-type]

    def passes(self, batch: int) -> bool:
        return self.gpu.passes(batch, self.limit)

    def is_smooth(self, batch: int) -> bool:
        return self.gpu.is_smooth(batch, self.limit)


def both(net: Net, limit: int = 4 * GiB, **gpu: object) -> list[Card]:
    """The same on an emulated card, with several lanes, and on a real one that is full."""
    return [
        Card(SimulatedGpu(net, **gpu), limit, emulated)  # type: ignore[arg-type]
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
    """The largest of these that passes, and whether none fails below it."""
    passed = [batch for batch in batches if passes(batch)]
    largest = max(passed, default=0)
    return largest, len(passed) == max(0, largest - batches.start + 1)


# Right, by brute force


@pytest.mark.parametrize("emulated", [True, False])
@pytest.mark.parametrize("seed", range(16))
def test_both_batches_are_those_that_trying_all_of_them_finds(seed: int, emulated: bool) -> None:
    net, limit = random_net(seed)
    card = Card(SimulatedGpu(net), limit, emulated)
    found = card.fit()
    largest, fast = found.max_batch, found.recommended_batch
    assert largest and fast and card.passes(largest) and card.is_smooth(fast)
    edge, is_clean = found_by(card.passes, range(largest, int(1.05 * largest) + 2))
    assert largest >= (0.99 if is_clean else 0.95) * edge - 1
    edge, is_clean = found_by(card.is_smooth, range(fast, largest + 1))
    assert fast >= (0.97 if is_clean else 0.9) * edge - 1
    assert len(card.gpu.requests) <= 20
    assert found.search.passes[largest] >= 1 and found.search.passes[fast] >= 1


@pytest.mark.parametrize(("seed", "emulated"), [(53, True), (61, False)])
def test_an_edge_that_is_foreseen_beyond_a_hole_is_found(seed: int, emulated: bool) -> None:
    """Batches from 231 to 240 retry and 241 to 248 do not; 115 to 118 fail and 124 passes."""
    net, limit = random_net(seed)
    card = Card(SimulatedGpu(net), limit, emulated)
    found = card.fit()
    assert found.max_batch and found.recommended_batch
    edge, _ = found_by(card.passes, range(found.max_batch, int(1.1 * found.max_batch)))
    smooth, _ = found_by(card.is_smooth, range(found.recommended_batch, found.max_batch + 1))
    assert found.max_batch >= 0.95 * edge and found.recommended_batch >= 0.97 * smooth


def test_several_probes_are_asked_at_once_where_they_have_room() -> None:
    net, _ = random_net(1)
    emulated, full = (card.fit() for card in both(net))
    assert emulated.search.lanes > 2 and full.search.lanes == 1
    assert (emulated.max_batch, emulated.recommended_batch) == (
        full.max_batch,
        full.recommended_batch,
    )


def test_probes_of_a_full_card_have_no_cap_and_those_near_an_asked_limit_have() -> None:
    emulated, full = both(random_net(1)[0])
    emulated.fit()
    full.fit()
    near = [ask for ask in emulated.gpu.requests if ask.cycle and not ask.trace]
    assert near and {ask.cap for ask in near} == {4 * GiB}
    assert {ask.cap for ask in full.gpu.requests} == {None}


@pytest.mark.parametrize("emulated", [True, False])
def test_headroom_is_left_free(emulated: bool) -> None:
    net, _ = random_net(2)
    card = Card(SimulatedGpu(net), 3 * GiB, emulated, headroom=GiB)
    found = card.fit()
    assert found.search.cap == found.search.budget.limit == card.limit
    assert found.max_batch and card.passes(found.max_batch)
    assert abs(found.max_batch - (Card(SimulatedGpu(net), card.limit).fit().max_batch or 0)) <= 1


def test_asked_for_more_than_is_free_the_rest_is_what_is_fitted_into() -> None:
    gpu = SimulatedGpu(Net(), 6 * GiB)
    for asked, headroom, limit in ((15, 0, 6.0), (15, 1, 5.0), (6, 1, 5.0), (4, 1, 3.0)):
        begin = (min(asked, 6) - headroom) * GiB
        room = MemoryBudget("gpu", begin, 80 * GiB, 6 * GiB, asked * GiB, headroom * GiB)
        found = search_gpu(gpu, room, FitRequest(WORKLOAD, estimate=True), FitListener())
        context = CONTEXT if asked > 5 else 0
        assert found.search.budget.limit == int(limit * GiB) - context


def test_headroom_that_leaves_nothing_is_refused() -> None:
    room = MemoryBudget("gpu", GiB, 80 * GiB, 2 * GiB, None, 8 * GiB // 5)
    with pytest.raises(CannotTry, match="leaves nothing"):
        search_gpu(SimulatedGpu(Net(), 2 * GiB), room, FitRequest(WORKLOAD), FitListener())


def test_a_probe_that_hangs_is_no_answer() -> None:
    class Hanging(SimulatedGpu):
        def _result(self, batch: int, request: ProbeRequest) -> ProbeResult:
            told = super()._result(batch, request)
            return replace(told, kind="timeout") if batch > 100 else told

    with pytest.raises(CannotTry, match="hangs"):
        Card(Hanging(Net())).fit()


def test_a_gpu_that_takes_one_process_gets_one_at_a_time() -> None:
    class Exclusive(SimulatedGpu):
        def run(self, requests: Sequence[ProbeRequest]) -> list[ProbeOutcome]:
            found = super().run(requests)
            return found[:1] + [
                replace(each, results=(ProbeResult(each.request.batches[0], "gpu_busy"),))
                for each in found[1:]
            ]

    found = Card(Exclusive(Net())).fit()
    assert found.search.lanes == 1
    assert (found.max_batch, found.recommended_batch) == (
        Card(SimulatedGpu(Net())).fit().max_batch,
        found.recommended_batch,
    )


@pytest.mark.parametrize("seed", range(3))
def test_an_estimate_only_climbs_and_traces(seed: int) -> None:
    """Without a cap only where there is more than the limit, or nothing but it."""
    net, limit = random_net(seed)
    for card in both(net, limit):
        found = card.fit(estimate=True)
        assert found.max_batch and (found.max_batch, found.recommended_batch) == found.predicted
        assert (found.search.wide != found.search.cap) == card.emulated and found.search.ooms <= 1
        assert {ask.cap for ask in card.gpu.requests} == {3 * limit if card.emulated else None}
        assert all(ask.trace or not ask.cycle for ask in card.gpu.requests)
        assert len(card.gpu.requests) <= 5
        edge, _ = found_by(card.passes, range(1, 2 * found.max_batch))
        assert abs(found.max_batch - edge) <= 0.02 * edge + 1


# Other cards


def test_cards_grow_with_their_size_and_the_own_one_is_what_was_found() -> None:
    for card in both(random_net(4)[0], 11 * GiB):
        sizes = tuple(size * GiB for size in (2, 4, 8, 11, 16, 24))
        found = card.fit(cards=sizes)
        assert found.cards and found.max_batch and found.recommended_batch
        foreseen = [found.cards[size] for size in sizes]
        assert foreseen == sorted(foreseen) and all(fast <= most for most, fast in foreseen)
        own = found.cards[11 * GiB]
        assert abs(own[0] - found.max_batch) <= 1 and abs(own[1] - found.recommended_batch) <= 1


@pytest.mark.parametrize("seed", [16, 63])
def test_a_card_is_foreseen_beyond_holes(seed: int) -> None:
    net, limit = random_net(seed)
    found = Card(SimulatedGpu(net), limit).fit(cards=(limit,))
    assert found.cards and found.max_batch
    assert abs(found.cards[limit][0] - found.max_batch) <= 0.03 * found.max_batch


@pytest.mark.parametrize("size", [4, 6, 16, 24])
def test_other_cards_hold_what_is_foreseen_for_them(size: int) -> None:
    net, _ = random_net(5)
    found = Card(SimulatedGpu(net), 11 * GiB).fit(cards=(size * GiB,))
    there = Card(SimulatedGpu(net), size * GiB).fit()
    assert found.cards and there.max_batch and there.recommended_batch
    largest, fast = found.cards[size * GiB]
    assert abs(largest - there.max_batch) <= 0.03 * there.max_batch
    assert abs(fast - there.recommended_batch) <= 0.03 * there.recommended_batch


def test_the_usual_cards_are_without_the_context() -> None:
    found = Card(SimulatedGpu(Net())).fit()
    assert found.cards
    assert found.search.card_limits(()) == {
        s * GiB: s * GiB - CONTEXT for s in (11, 16, 24, 40, 80)
    }
    assert list(found.cards) == list(found.search.card_limits(()))


# What is wrong with a workload


def test_a_leak_is_told_before_anything_large_runs() -> None:
    for card in both(Net(leaks=5 * MiB)):
        found = card.fit()
        assert found.verdict == Verdict.CANNOT_TELL
        assert found.leak and found.leak.bytes_per_step == 5 * MiB
        assert found.max_batch is None and len(card.gpu.requests) <= 4 and found.search.ooms <= 1


def test_a_leak_that_does_not_matter_is_none() -> None:
    assert not Card(SimulatedGpu(Net(leaks=100 * 1024))).fit().leak


def test_where_memory_does_not_grow_there_is_no_limit() -> None:
    still = Net((8 * MiB,) * 2, (0, 0), (0, 0), inputs=0)
    for card in both(still):
        found = card.fit()
        assert found.verdict == Verdict.NO_LIMIT and len(card.gpu.requests) <= 8
        assert found.max_batch and found.max_batch >= 1 << 20


def test_a_model_that_hardly_grows_is_climbed_further_and_found() -> None:
    slow = Net((300 * MiB,), (2000,), (0,), inputs=100)
    for card in both(slow, 2 * GiB):
        found = card.fit()
        assert (
            found.max_batch
            and card.passes(found.max_batch)
            and len(card.gpu.requests) <= MOST_PROBES
        )
        edge, _ = found_by(card.passes, range(found.max_batch, int(1.03 * found.max_batch), 997))
        assert found.max_batch >= 0.99 * edge


def test_too_large_by_as_much_as_a_roomy_card_shows() -> None:
    roomy, full = both(Net(), 300 * MiB)
    found = roomy.fit()
    peak = found.search.results[1][0].allocated_peak
    assert found.verdict == Verdict.DOES_NOT_FIT
    assert found.misfit and found.misfit.shortfall == peak - 300 * MiB
    found = full.fit()
    assert found.verdict == Verdict.DOES_NOT_FIT
    assert found.misfit and 0 < found.misfit.shortfall < peak
    assert found.search.results[1][0].missing == found.misfit.shortfall


def test_a_batch_of_one_is_found_where_two_do_not_fit() -> None:
    net = Net((8 * MiB,), (300 * MiB,), (0,))
    for card in both(net, 2 * GiB):
        assert card.passes(1) and not card.passes(2)
        found = card.fit()
        assert (found.max_batch, found.recommended_batch) == (1, 1)


def test_a_workload_that_fails_at_once_is_the_users_matter() -> None:
    for card in both(Net(), error_at=1):
        with pytest.raises(BadWorkload, match="batch of 2 failed in step 1: shapes do not match"):
            card.fit()
        assert len(card.gpu.requests) == 1


@pytest.mark.parametrize("first", [300, 120, 65, 30, 10, 3])
def test_an_error_from_some_batch_on_bounds_the_answer(first: int) -> None:
    for card in both(Net(), 15 * GiB, error_at=first):
        found = card.fit()
        assert found.max_batch and 0.99 * (first - 1) - 1 <= found.max_batch < first
        assert found.recommended_batch and found.recommended_batch >= 0.97 * found.max_batch - 1
        assert len(card.gpu.requests) <= MOST_PROBES
        assert any(told.kind == "error" for all_ in found.search.results.values() for told in all_)


@dataclass
class Refusing(SimulatedGpu):
    """Fails for another reason than memory, where it is told to."""

    refuses: Callable[[int, ProbeRequest], bool] = lambda batch, ask: False

    def _result(self, batch: int, request: ProbeRequest) -> ProbeResult:
        if self.refuses(batch, request):
            return ProbeResult(
                batch, "error", "step 1", message="expected more than 1 value per channel"
            )
        return super()._result(batch, request)


@pytest.mark.parametrize("limit", [3, 4, 6, 10])
def test_a_model_that_refuses_a_single_sample_is_fitted_all_the_same(limit: int) -> None:
    """Batch normalisation does, and so few fit that single ones would be traced."""
    net = Net((8 * MiB,), (300 * MiB,), (0,))
    for emulated in (True, False):
        gpu = Refusing(net, refuses=lambda batch, ask: batch == 1)
        card = Card(gpu, limit * GiB, emulated)
        found = card.fit()
        assert found.max_batch == found_by(card.passes, range(1, 20))[0] > 1
        assert len(gpu.requests) <= 10


def test_a_cycle_that_no_batch_goes_through_is_the_users_matter() -> None:
    for emulated in (True, False):
        card = Card(Refusing(Net(), refuses=lambda batch, ask: ask.cycle), 4 * GiB, emulated)
        with pytest.raises(BadWorkload, match="expected more than 1 value per channel"):
            card.fit()
        assert len(card.gpu.requests) <= MOST_PROBES


@pytest.mark.parametrize("samples", [1, 2, 3, 40, 64, 100])
def test_no_batch_has_more_samples_than_there_are(samples: int) -> None:
    for card in both(Net(), samples=samples):
        found = card.fit()
        assert (found.max_batch, found.recommended_batch) == (samples, samples)
        assert found.verdict == Verdict.FITS
        assert max(b for ask in card.gpu.requests for b in ask.batches) <= samples


def test_a_data_set_just_below_the_edge_and_just_above_it() -> None:
    edge = Card(SimulatedGpu(Net())).fit().max_batch
    assert edge
    assert Card(SimulatedGpu(Net(), samples=edge - 3)).fit().max_batch == edge - 3
    assert Card(SimulatedGpu(Net(), samples=edge + 30)).fit().max_batch == edge


# What is killed


def answered(card: Card) -> Fit:
    return answer_of(card.fit(), FitRequest(WORKLOAD))


@pytest.mark.parametrize("part", [0.2, 0.5, 1.0])
def test_one_kill_is_no_edge(part: float) -> None:
    for card in both(Net()):
        undisturbed = answered(card)
        assert undisturbed.max_batch
        tried = {batch for request in card.gpu.requests for batch in request.batches}
        target = max(batch for batch in tried if batch <= part * undisturbed.max_batch.size)
        card.gpu.kills = {target: 1}
        found = answered(card)
        assert card.gpu.kills == {target: 0}
        assert (found.max_batch, found.recommended_batch, found.notes, found.curve) == (
            undisturbed.max_batch,
            undisturbed.recommended_batch,
            (),
            undisturbed.curve,
        )
        assert found.effort == replace(undisturbed.effort, probes=undisturbed.effort.probes + 1)


def test_a_batch_that_is_always_killed_bounds_the_answer_and_not_by_memory() -> None:
    for card in both(Net()):
        edge = card.fit().max_batch
        assert edge
        card.gpu.kills = {edge: 99}
        found = answered(card)
        assert found.max_batch and 0.98 * edge <= found.max_batch.size < edge
        above = found.max_batch.failure_above
        assert above and (above.batch, above.kind) == (edge, "killed")
        assert found.notes == (Note(NoteKind.BATCH_FAILED, "it was killed", edge),)


def test_a_workload_that_is_killed_at_once_is_told_so() -> None:
    for card in both(Net(), kills={2: 99}):
        with pytest.raises(BadWorkload, match="batch of 2 failed in its process: it was killed"):
            card.fit()
        assert len(card.gpu.requests) == 2


# What passes once, and what is slow


def test_a_batch_that_passes_once_and_then_fails_is_no_answer() -> None:
    for card in both(Net()):
        edge = card.fit().max_batch
        assert edge
        card.gpu.flaky = {edge: [True] + [False] * 9}
        card.gpu.requests.clear()
        found = card.fit()
        assert not card.gpu.flaky[edge][8:]  # it was asked twice at least
        assert found.max_batch and 0.98 * edge <= found.max_batch < edge
        assert found.search.passed[edge] is False
        assert found.search.passes[found.max_batch] >= 1


def rated(rate: Callable[[int, int], float]) -> tuple[SearchResult, int]:
    """What is found where rates depend on the batch and the edge, and that edge."""
    net, limit = random_net(3)
    edge = Card(SimulatedGpu(net), limit).fit().recommended_batch
    assert edge
    return Card(SimulatedGpu(net, rate=lambda batch: rate(batch, edge)), limit).fit(), edge


def test_a_smaller_batch_that_is_faster_is_the_fast_one() -> None:
    found, edge = rated(lambda batch, edge: 1000.0 if batch <= 0.8 * edge else 900.0)
    assert (
        found.recommended_batch and 0.8 * 0.97 * edge - 1 <= found.recommended_batch <= 0.8 * edge
    )
    assert found.max_batch and found.max_batch > found.recommended_batch


@pytest.mark.parametrize("seed", range(5))
def test_rates_that_differ_by_little_do_not_matter(seed: int) -> None:
    dice = random.Random(seed)
    found, edge = rated(
        lambda batch, edge: dice.uniform(0.995, 1.005) * (1000 if batch < 0.9 * edge else 997)
    )
    assert found.recommended_batch == edge


def test_rates_that_grow_with_the_batch_make_no_difference() -> None:
    found, edge = rated(lambda batch, edge: 1000.0 * batch / (batch + 20))
    assert found.recommended_batch == edge


def test_only_batches_that_were_alone_are_rated() -> None:
    found = Card(SimulatedGpu(Net())).fit()
    alone = {b for ask in found.search.probes.requests if ask.turn for b in ask.batches}  # type: ignore[attr-defined]
    assert set(found.search.rates) <= alone and {found.max_batch, found.recommended_batch} <= alone


# Holes


@dataclass
class Holed(SimulatedGpu):
    """Some batches fail although larger ones pass."""

    fails: range = range(0)

    def _result(self, batch: int, request: ProbeRequest) -> ProbeResult:
        if batch in self.fails:
            return ProbeResult(batch, "gpu_oom", "step 1", missing=MiB)
        return super()._result(batch, request)


def test_beyond_a_hole_the_search_goes_on_and_the_hole_is_noted() -> None:
    edge = Card(SimulatedGpu(Net(), 80 * GiB), 15 * GiB).fit().max_batch
    assert edge
    for emulated in (True, False):
        hole = range(int(0.99 * edge), int(0.995 * edge))
        found = Card(Holed(Net(), fails=hole), 15 * GiB, emulated).fit()
        assert found.max_batch == edge
        tried_within = [batch for batch in found.search.passed if batch in hole]
        assert all(not found.search.passed[batch] for batch in tried_within)


# Proof


def test_a_proof_runs_each_answer_three_times_more_and_for_longer() -> None:
    for card in both(random_net(6)[0]):
        found = card.fit(prove=True)
        assert (
            found.max_batch
            and found.recommended_batch
            and found.max_batch != found.recommended_batch
        )
        assert sorted(told.batch for told in found.search.proof) == sorted(
            [found.recommended_batch] * 3 + [found.max_batch] * 3
        )
        assert all(told.is_ok and len(told.step_s) == 20 for told in found.search.proof)
        longer = [ask for ask in card.gpu.requests if ask.steps > 3]
        assert len(longer) >= 6 and all(ask.turn and ask.cap == found.search.cap for ask in longer)


def test_one_answer_that_is_both_is_proved_three_times() -> None:
    found = Card(SimulatedGpu(Net())).fit(prove=True)
    assert found.max_batch == found.recommended_batch and len(found.search.proof) == 3


@dataclass
class LongRunsFail(SimulatedGpu):
    """From some batch on, training fails after more steps than a probe takes."""

    from_batch: int = 1 << 30

    def _result(self, batch: int, request: ProbeRequest) -> ProbeResult:
        if request.steps > 3 and batch >= self.from_batch:
            return ProbeResult(batch, "gpu_oom", "step 9", missing=MiB)
        return super()._result(batch, request)


def test_a_proof_that_fails_lowers_the_answer() -> None:
    net, limit = random_net(6)
    edge = Card(SimulatedGpu(net), limit).fit()
    assert edge.max_batch and edge.recommended_batch
    card = Card(LongRunsFail(net, from_batch=edge.max_batch - 2), limit)
    found = card.fit(prove=True)
    assert found.max_batch and 0.98 * edge.max_batch <= found.max_batch < edge.max_batch - 2
    assert all(told.is_ok for told in found.search.proof) and len(found.search.proof) >= 3
