"""The batch that memory allows: never one that a replay shows not to fit, and exact where the
allocator loses nothing."""

from __future__ import annotations

import math
import random

import hypothesis.strategies as st
import pytest
from hypothesis import assume, example, given

from simulated_gpu import Net, SimulatedGpu
from stepscope.analysis.memory.caching_allocator import (
    AllocationTrace,
    Growth,
    KiB,
    MiB,
    allocated_peak,
    growth,
    replay,
    scratch,
)
from stepscope.analysis.memory.model import (
    NO_LIMIT,
    MemoryLine,
    Parts,
    batches_by_replay,
    batches_on_lines,
    comfortable_bytes,
    host_batches_in_flight,
    largest_host_batch,
    largest_host_batch_2019,
    layers_2019,
    leak,
    linear_2019,
    minimum_bytes,
    what_bf16,
    what_checkpointing,
    what_optimizer,
)
from synthetic_traces import traces

GiB = 1024 * MiB

BYTES = st.integers(0, 200 * GiB)
LINES = st.builds(MemoryLine, st.floats(0, 1e11), st.floats(1, 1e10))
ANY_LINES = st.builds(MemoryLine, st.floats(0, 1e11), st.one_of(st.just(0.0), st.floats(1, 1e10)))
PARTS = st.builds(Parts, BYTES, BYTES, BYTES, BYTES, BYTES)


# Lines


@given(LINES, BYTES)
@example(MemoryLine(0.0, 0.1), 3)
def test_the_largest_batch_is_within_the_limit_and_the_next_is_not(
    line: MemoryLine, limit: int
) -> None:
    largest = line.largest(limit)
    assert largest is not None
    assert line.at(largest + 1) > limit
    assert largest == 0 or line.at(largest) <= limit


@given(LINES, BYTES, BYTES)
def test_more_memory_never_means_a_smaller_batch(line: MemoryLine, one: int, other: int) -> None:
    small, large = line.largest(min(one, other)), line.largest(max(one, other))
    assert small is not None and large is not None
    assert small <= large


def test_a_line_that_does_not_grow_has_no_largest_batch_unless_nothing_fits() -> None:
    assert MemoryLine(10.0, 0.0).largest(10) is None
    assert MemoryLine(10.0, -1.0).largest(100) is None
    assert MemoryLine(10.0, 1e-300).largest(100) is None
    assert MemoryLine(10.0, 0.0).largest(9) == 0
    assert MemoryLine(10.0, 5.0).largest(14) == 0


@given(st.integers(0, 10**11), st.integers(0, 10**9), st.sets(st.integers(1, 999), min_size=2))
def test_points_of_a_line_give_the_line(fixed: int, slope: int, batches: set[int]) -> None:
    line = MemoryLine.through([(batch, fixed + slope * batch) for batch in sorted(batches)])
    for batch in (0, 1, 1000):
        exact = fixed + slope * batch
        assert math.isclose(line.at(batch), exact, rel_tol=1e-6, abs_tol=1e-6 * (fixed + slope))


POINTS = st.lists(st.tuples(st.integers(0, 500), st.floats(0, 1e11)), min_size=1, max_size=6)


@given(POINTS, st.one_of(st.none(), st.floats(-1e9, 1e11)))
def test_a_line_never_begins_below_nothing_and_never_falls(
    points: list[tuple[int, float]], fixed: float | None
) -> None:
    line = MemoryLine.through(points, fixed)
    assert line.fixed >= 0 and line.per_sample >= 0


def test_one_batch_and_what_is_needed_without_any_give_a_line() -> None:
    assert MemoryLine.through([(10, 150.0)], fixed=50) == MemoryLine(50, 10)
    assert MemoryLine.through([(10, 150.0)]) == MemoryLine(0, 15)
    assert MemoryLine.through([(10, 140.0), (10, 160.0)], fixed=50) == MemoryLine(50, 10)
    assert MemoryLine.through([(0, 70.0)], fixed=50) == MemoryLine(70, 0)


def test_a_line_that_would_begin_below_nothing_begins_at_what_is_known() -> None:
    """(1, 10), (2, 30) lie on 20·batch − 10."""
    assert MemoryLine.through([(1, 10.0), (2, 30.0)]) == MemoryLine(0, 14)
    assert MemoryLine.through([(1, 10.0), (2, 30.0)], fixed=5) == MemoryLine(5, 11)


def test_less_memory_for_a_larger_batch_is_no_growth() -> None:
    assert MemoryLine.through([(10, 100.0), (20, 90.0)]) == MemoryLine(100, 0)


def test_more_than_two_points_are_fitted_by_least_squares() -> None:
    line = MemoryLine.through([(1, 13.0), (2, 13.0), (3, 16.0)])
    assert math.isclose(line.per_sample, 1.5) and math.isclose(line.fixed, 11)


# Predictions


@given(ANY_LINES, ANY_LINES, BYTES, BYTES)
def test_predictions_grow_with_memory_and_the_fast_batch_is_never_above_the_largest(
    needs: MemoryLine, eases: MemoryLine, one: int, other: int
) -> None:
    below = batches_on_lines(needs, eases, min(one, other))
    above = batches_on_lines(needs, eases, max(one, other))
    assert below[0] <= above[0] and below[1] <= above[1]
    assert below[1] <= below[0] and above[1] <= above[0]


def test_a_line_that_does_not_grow_does_not_bound() -> None:
    flat, grows = MemoryLine(10, 0), MemoryLine(10, 1)
    assert batches_on_lines(grows, flat, 50) == (40, 40)
    assert batches_on_lines(flat, grows, 50) == (NO_LIMIT, 40)
    assert batches_on_lines(flat, flat, 50) == (NO_LIMIT, NO_LIMIT)


# Needs of traces


@given(traces(), st.booleans())
def test_a_trace_fits_into_what_it_needs(trace: AllocationTrace, without_scratch: bool) -> None:
    optional = scratch(trace) if without_scratch else frozenset[int]()
    needs = minimum_bytes(trace, optional)
    assert replay(trace, needs, optional).fits
    assert allocated_peak(trace, optional) <= needs <= comfortable_bytes(trace)


@given(traces())
def test_with_ease_there_is_no_retry_and_with_less_there_is(trace: AllocationTrace) -> None:
    eases = comfortable_bytes(trace)
    assume(eases)
    assert replay(trace, eases).retries == 0
    assert replay(trace, eases - 1).retries > 0


def test_need_is_between_use_and_ease_where_fragments_cost_memory() -> None:
    """20 of 32 MiB are cached in one block when 12 of it are taken: 20 more do not fit beside."""
    trace = AllocationTrace((20 * MiB, ~0, 12 * MiB, 20 * MiB))
    assert minimum_bytes(trace) == 40 * MiB == comfortable_bytes(trace)


def test_need_is_less_than_ease_where_giving_back_helps() -> None:
    trace = AllocationTrace((20 * MiB, ~0, 30 * MiB))
    assert (minimum_bytes(trace), comfortable_bytes(trace)) == (30 * MiB, 50 * MiB)


def test_without_workspace_less_is_needed() -> None:
    trace = AllocationTrace((20 * MiB, 30 * MiB, ~1))
    assert minimum_bytes(trace) == 50 * MiB
    assert minimum_bytes(trace, scratch(trace)) == 20 * MiB


def test_nothing_needs_nothing() -> None:
    assert minimum_bytes(AllocationTrace(())) == comfortable_bytes(AllocationTrace(())) == 0


def test_memory_that_fits_below_memory_that_does_not_is_not_what_is_needed() -> None:
    """With less than 50 MiB the first block is given back when 26 are wanted, and 14 + 32 fit in
    the end. With 50 it is kept, 14 are cut from it, and the end needs 24 + 32."""
    trace = AllocationTrace((24 * MiB, ~0, 26 * MiB, 14 * MiB, ~1, 32 * MiB))
    fitting = [cap for cap in range(40, 84, 2) if replay(trace, cap * MiB).fits]
    assert fitting == [46, 48, *range(56, 84, 2)]
    assert minimum_bytes(trace) == 56 * MiB


# Exact where the allocator loses nothing

PAGE = 2 * MiB
LAYERS = st.lists(st.integers(0, 6), min_size=1, max_size=8).filter(any)


def training(layers: list[int], batch: int, weights: int, steps: int = 3) -> AllocationTrace:
    """Steps that keep a tensor per layer and release them backwards, each of at least 10 MiB and of
    whole pages, so that each has a segment of its own, which the next step finds again."""
    events = [weights * PAGE]
    for _ in range(steps):
        first = sum(event >= 0 for event in events)
        events += [(5 + pages * batch) * PAGE for pages in layers]
        events += [~number for number in reversed(range(first, first + len(layers)))]
    return AllocationTrace(tuple(events))


@given(LAYERS, st.integers(1, 40), st.integers(5, 20))
def test_stacks_of_whole_pages_need_just_what_they_use(
    layers: list[int], batch: int, weights: int
) -> None:
    trace = training(layers, batch, weights)
    used = (weights + sum(5 + pages * batch for pages in layers)) * PAGE
    assert minimum_bytes(trace) == allocated_peak(trace) == comfortable_bytes(trace) == used


@given(LAYERS, st.integers(5, 20), st.integers(0, 2 * GiB))
def test_the_largest_batch_from_two_small_ones_is_that_of_a_search_by_replay(
    layers: list[int], weights: int, limit: int
) -> None:
    line = MemoryLine.through(
        [(b, float(minimum_bytes(training(layers, b, weights)))) for b in (1, 4)]
    )
    largest, fast = batches_on_lines(line, line, limit)
    searched = 0
    while replay(training(layers, searched + 1, weights), limit).fits:
        searched += 1
    assert largest == fast == searched


@given(traces(), st.integers(1, 64), st.integers(0, 4 * GiB))
def test_a_batch_fits_into_what_two_small_ones_say_that_it_needs(
    sample: AllocationTrace, batch: int, more: int
) -> None:
    small, large, real = (
        AllocationTrace(tuple(event if event < 0 else times * event for event in sample))
        for times in (2, 6, batch)
    )
    grows = growth(small, 2, large, 6)
    assert grows is not None
    foretold = grows.at(batch)
    assert replay(real, minimum_bytes(foretold)).fits
    assert replay(real, comfortable_bytes(foretold) + more).retries == 0


# Both batches, by replays


def random_net(seed: int) -> Net:
    dice = random.Random(seed)
    layers = range(dice.randint(2, 6))
    return Net(
        [dice.randint(1, 60) * MiB // 2 for _ in layers],
        [int(dice.uniform(0.3, 6) * MiB) for _ in layers],
        [int(dice.choice([0, 0, 1, 3]) * dice.uniform(0.1, 3) * MiB) for _ in layers],
    )


def growth_of(net: Net, small: int, large: int) -> Growth:
    grows = growth(net.trace(small), small, net.trace(large), large)
    assert grows is not None
    return grows


@pytest.mark.parametrize("seed", range(12))
def test_what_is_foreseen_is_what_trying_every_batch_finds(seed: int) -> None:
    net = random_net(seed)
    limit = (3 + seed % 4) * GiB
    middle = limit // sum(net.activations)
    grows = growth_of(net, middle // 3, 2 * middle // 3)
    largest, smooth = batches_by_replay(grows, limit, (middle, middle))
    gpu = SimulatedGpu(net)
    trying = range(max(1, largest * 9 // 10), largest * 12 // 10)
    passing = max(batch for batch in trying if gpu.passes(batch, limit))
    smoothly = [b for b in range(max(1, smooth // 2), largest + 1) if gpu.is_smooth(b, limit)]
    assert gpu.passes(largest, limit) and gpu.is_smooth(smooth, limit)
    assert 0.99 * passing - 1 <= largest <= passing
    assert 0.99 * max(smoothly) - 1 <= smooth <= max(smoothly)


@pytest.mark.parametrize("seed", range(4))
def test_what_is_foreseen_hardly_ever_shrinks_with_more_memory(seed: int) -> None:
    """As memory grows, blocks are cut otherwise: of some batches, a little more fits a little
    less."""
    net = random_net(seed)
    grows = growth_of(net, 20, 60)
    best = 0
    for limit in range(2 * GiB, 4 * GiB, GiB // 8):
        largest, smooth = batches_by_replay(grows, limit, (limit / sum(net.activations),) * 2)
        assert smooth <= largest
        assert largest >= 0.98 * best
        best = max(best, largest)


def test_what_is_foreseen_is_found_from_a_guess_that_is_far_off() -> None:
    net = random_net(1)
    grows = growth_of(net, 20, 60)
    near = batches_by_replay(grows, 4 * GiB, (150, 150))
    for guess in (1, 2000):
        largest, smooth = batches_by_replay(grows, 4 * GiB, (guess, guess))
        assert abs(largest - near[0]) <= 0.01 * near[0] and abs(smooth - near[1]) <= 0.01 * near[1]


def test_nothing_above_the_most_is_foreseen_and_nothing_where_none_fits() -> None:
    grows = growth_of(random_net(1), 20, 60)
    assert batches_by_replay(grows, 4 * GiB, (40, 40), most=40) == (40, 40)
    assert batches_by_replay(grows, 4 * GiB, (500, 500), most=40) == (40, 40)
    assert batches_by_replay(grows, 10 * MiB, (5, 5)) == (0, 0)


# Tripathi 2019


def test_the_line_through_two_batches_is_the_thesis_own() -> None:
    """10 take 3 GiB, 50 take 7: 0.1 GiB each and 2 beside, so that 16 GiB hold 140."""
    per_sample, fixed, batch = linear_2019(10, 3 * GiB, 50, 7 * GiB, 16 * GiB)
    assert math.isclose(per_sample, 0.1 * GiB) and math.isclose(fixed, 2 * GiB)
    assert batch in (139, 140)
    assert linear_2019(10, 3 * GiB, 50, 7 * GiB, 16.05 * GiB, GiB)[2] == 130
    assert linear_2019(10, 3 * GiB, 50, 7 * GiB, GiB)[2] == 0


def test_without_growth_the_thesis_has_no_batch() -> None:
    assert linear_2019(10, 100, 50, 100, 1000) == (0, 100, None)
    assert linear_2019(10, 100, 50, 60, 1000)[2] is None


@given(st.integers(1, 10**9), st.integers(0, 10**10), st.integers(0, 10**11), BYTES)
def test_the_thesis_batch_is_exact_on_a_line(
    slope: int, fixed: int, limit: int, reserve: int
) -> None:
    small, large = fixed + 10 * slope, fixed + 50 * slope
    expected = max(0, (limit - reserve - fixed) // slope)
    assert linear_2019(10, small, 50, large, limit, reserve) == (slope, fixed, expected)


def test_layers_count_parameters_once_and_outputs_twice() -> None:
    """B·3 + B·1 + (100 + 2·B·10) + (50 + 2·B·8) = 150 + 40·B."""
    layers = [(100, 10), (50, 8)]
    assert layers_2019(layers, 3, 1, 150 + 40 * 7) == 7
    assert layers_2019(layers, 3, 1, 150 + 40 * 7 - 1) == 6
    assert layers_2019(layers, 3, 1, 100) == 0


# The host


@pytest.mark.parametrize(
    ("workers", "prefetch", "pinned", "in_flight"),
    [(0, 2, False, 3), (0, 2, True, 3), (2, 2, False, 7), (1, 3, False, 5), (4, 2, True, 14)],
)
def test_batches_in_flight(workers: int, prefetch: int, pinned: bool, in_flight: int) -> None:
    """The first, third and fourth were seen: samples of a DataLoader took 3.1, 7.5 and 5.2."""
    assert host_batches_in_flight(workers, prefetch, pinned) == in_flight


def test_host_memory_and_shm_each_bound_the_batch() -> None:
    sample = MiB
    assert largest_host_batch(sample, 2, 2, False, 700 * MiB, GiB) == (100, "host memory")
    assert largest_host_batch(sample, 2, 2, False, 7 * GiB, 64 * MiB) == (12, "/dev/shm")
    assert largest_host_batch(sample, 2, 2, True, 70 * GiB, 64 * MiB) == (16, "/dev/shm")
    assert largest_host_batch(sample, 2, 2, False, 700 * MiB, None) == (100, "host memory")
    assert largest_host_batch(sample, 0, 2, False, 300 * MiB, 0) == (100, "host memory")
    assert largest_host_batch(sample, 2, 2, False, 0, 0)[0] == 0
    assert largest_host_batch(0, 2, 2, False, GiB, GiB)[0] == NO_LIMIT


def test_pinned_batches_take_powers_of_two() -> None:
    """Of 8 in flight, 5 are or will be pinned: 64 samples take 8·64 MiB, 65 take 3·65 + 5·128."""
    assert largest_host_batch(MiB, 2, 2, True, 8 * 64 * MiB, None)[0] == 64
    assert largest_host_batch(MiB, 2, 2, True, (3 * 65 + 5 * 128) * MiB - 1, None)[0] == 64
    assert largest_host_batch(MiB, 2, 2, True, (3 * 65 + 5 * 128) * MiB, None)[0] == 65


@given(
    st.integers(1, GiB), st.integers(0, 16), st.integers(1, 8), st.booleans(), BYTES, BYTES, BYTES
)
def test_the_host_batch_fits_and_grows_with_memory(
    sample: int, workers: int, prefetch: int, pinned: bool, one: int, other: int, shm: int
) -> None:
    small, _ = largest_host_batch(sample, workers, prefetch, pinned, min(one, other), shm)
    large, _ = largest_host_batch(sample, workers, prefetch, pinned, max(one, other), shm)
    in_flight = host_batches_in_flight(workers, prefetch, pinned)
    assert small <= large
    assert small * sample * in_flight <= min(one, other)
    assert not workers or small * sample * workers * prefetch <= shm


def test_equation_4_10_is_strictly_below() -> None:
    assert largest_host_batch_2019(100, 2, 5) == 9
    assert largest_host_batch_2019(101, 2, 5) == 10
    assert largest_host_batch_2019(100, 0, 5) == 19
    assert largest_host_batch_2019(0, 1, 5) == 0


# Estimates


PRESENT = MemoryLine(400.0, 30.0)
MADE_OF = Parts(weights=100, gradients=80, optimizer=160, inputs=20, activations=240)
"""Of a batch of 10. By sample: 2 of inputs, 24 of activations, 4 of others."""


def test_bf16_shrinks_a_sample_and_adds_copies() -> None:
    line = what_bf16(PRESENT, MADE_OF, 10)
    assert line.fixed == 450
    assert math.isclose(line.per_sample, 3 + 0.55 * 28)


def test_checkpointing_shrinks_activations_by_the_root_of_the_layers() -> None:
    assert what_checkpointing(PRESENT, MADE_OF, 10, 16) == MemoryLine(400, 6 + 24 * 2 / 4)
    assert what_checkpointing(PRESENT, MADE_OF, 10, 4) == PRESENT
    assert what_checkpointing(PRESENT, MADE_OF, 10, 0) == PRESENT


def test_another_optimizer_has_another_state() -> None:
    assert what_optimizer(PRESENT, MADE_OF, "sgd") == MemoryLine(240, 30)
    assert what_optimizer(PRESENT, MADE_OF, "momentum") == MemoryLine(320, 30)
    assert what_optimizer(PRESENT, MADE_OF, "adamw") == PRESENT


@given(ANY_LINES, PARTS, st.integers(0, 1000), st.integers(0, 500))
def test_estimates_are_lines_that_can_be(
    line: MemoryLine, parts: Parts, batch: int, layers: int
) -> None:
    estimates = [
        what_bf16(line, parts, batch),
        what_checkpointing(line, parts, batch, layers),
        *(what_optimizer(line, parts, name) for name in ("sgd", "momentum", "adam", "adamw")),
    ]
    assert all(each.fixed >= 0 and each.per_sample >= 0 for each in estimates)
    assert estimates[1].per_sample <= line.per_sample


# Leaks


def test_memory_that_grows_evenly_after_every_step_leaks() -> None:
    step = 100 * KiB
    assert leak([9 * MiB, 9 * MiB + step, 9 * MiB + 2 * step]) == step
    assert leak([0, step, 2 * step + 512, 3 * step]) == step


@pytest.mark.parametrize(
    "kept",
    [
        [],
        [0, MiB],
        [0, 0, MiB, 2 * MiB],
        [0, 9 * MiB, 10 * MiB],
        [0, 5 * MiB, 5 * MiB, 5 * MiB, 5 * MiB],
        [0, 1 * MiB, 2 * MiB, 3 * MiB, 3 * MiB, 4 * MiB],
        [0, 32 * KiB, 64 * KiB, 96 * KiB],
        [0, MiB, 20 * MiB],
        [4 * MiB, 3 * MiB, 2 * MiB],
    ],
)
def test_what_settles_or_is_uneven_or_too_short_is_no_leak(kept: list[int]) -> None:
    assert leak(kept) is None
