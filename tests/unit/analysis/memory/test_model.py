"""The memory model: its batches pass a replay, and are exact without fragmentation."""

from __future__ import annotations

import math
import random

import hypothesis.strategies as st
import pytest
from hypothesis import assume, example, given

from simulated_gpu import Net, SimulatedGpu
from stepscope.analysis.memory.caching_allocator import (
    AllocationTrace,
    KiB,
    MiB,
    TraceGrowth,
    allocated_peak,
    replay,
    trace_growth,
    workspaces,
)
from stepscope.analysis.memory.model import (
    NO_LIMIT,
    MemoryLine,
    Parts,
    batches_by_lines,
    batches_by_replay,
    estimate_bf16,
    estimate_checkpointing,
    estimate_optimizer,
    host_batches_in_flight,
    layers_2019,
    leak_per_step,
    linear_2019,
    max_host_batch,
    max_host_batch_2019,
    minimum_bytes,
    retry_free_bytes,
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
def test_the_max_batch_of_a_line_fits_and_the_next_one_does_not(
    line: MemoryLine, limit: int
) -> None:
    largest = line.max_batch(limit)
    assert largest is not None
    assert line.at(largest + 1) > limit
    assert largest == 0 or line.at(largest) <= limit


@given(LINES, BYTES, BYTES)
def test_more_memory_never_means_a_smaller_batch(line: MemoryLine, one: int, other: int) -> None:
    small, large = line.max_batch(min(one, other)), line.max_batch(max(one, other))
    assert small is not None and large is not None
    assert small <= large


def test_a_constant_line_has_no_max_batch_unless_nothing_fits() -> None:
    assert MemoryLine(10.0, 0.0).max_batch(10) is None
    assert MemoryLine(10.0, -1.0).max_batch(100) is None
    assert MemoryLine(10.0, 1e-300).max_batch(100) is None
    assert MemoryLine(10.0, 0.0).max_batch(9) == 0
    assert MemoryLine(10.0, 5.0).max_batch(14) == 0


@given(st.integers(0, 10**11), st.integers(0, 10**9), st.sets(st.integers(1, 999), min_size=2))
def test_points_on_a_line_give_that_line(fixed: int, slope: int, batches: set[int]) -> None:
    line = MemoryLine.through([(batch, fixed + slope * batch) for batch in sorted(batches)])
    for batch in (0, 1, 1000):
        exact = fixed + slope * batch
        assert math.isclose(line.at(batch), exact, rel_tol=1e-6, abs_tol=1e-6 * (fixed + slope))


POINTS = st.lists(st.tuples(st.integers(0, 500), st.floats(0, 1e11)), min_size=1, max_size=6)


@given(POINTS, st.one_of(st.none(), st.floats(-1e9, 1e11)))
def test_a_line_never_starts_below_zero_and_never_falls(
    points: list[tuple[int, float]], fixed: float | None
) -> None:
    line = MemoryLine.through(points, fixed)
    assert line.fixed_bytes >= 0 and line.per_sample_bytes >= 0


def test_one_batch_and_the_fixed_memory_give_a_line() -> None:
    assert MemoryLine.through([(10, 150.0)], fixed=50) == MemoryLine(50, 10)
    assert MemoryLine.through([(10, 150.0)]) == MemoryLine(0, 15)
    assert MemoryLine.through([(10, 140.0), (10, 160.0)], fixed=50) == MemoryLine(50, 10)
    assert MemoryLine.through([(0, 70.0)], fixed=50) == MemoryLine(70, 0)


def test_a_line_that_would_start_below_zero_starts_at_the_fixed_memory() -> None:
    """(1, 10) and (2, 30) are on 20·batch − 10."""
    assert MemoryLine.through([(1, 10.0), (2, 30.0)]) == MemoryLine(0, 14)
    assert MemoryLine.through([(1, 10.0), (2, 30.0)], fixed=5) == MemoryLine(5, 11)


def test_a_falling_line_counts_as_constant() -> None:
    assert MemoryLine.through([(10, 100.0), (20, 90.0)]) == MemoryLine(100, 0)


def test_more_than_two_points_are_fitted_by_least_squares() -> None:
    line = MemoryLine.through([(1, 13.0), (2, 13.0), (3, 16.0)])
    assert math.isclose(line.per_sample_bytes, 1.5) and math.isclose(line.fixed_bytes, 11)


# Predictions


@given(ANY_LINES, ANY_LINES, BYTES, BYTES)
def test_predictions_grow_with_memory_and_retry_free_is_never_above_max(
    minimum: MemoryLine, retry_free: MemoryLine, one: int, other: int
) -> None:
    below = batches_by_lines(minimum, retry_free, min(one, other))
    above = batches_by_lines(minimum, retry_free, max(one, other))
    assert below[0] <= above[0] and below[1] <= above[1]
    assert below[1] <= below[0] and above[1] <= above[0]


def test_a_constant_line_sets_no_bound() -> None:
    flat, grows = MemoryLine(10, 0), MemoryLine(10, 1)
    assert batches_by_lines(grows, flat, 50) == (40, 40)
    assert batches_by_lines(flat, grows, 50) == (NO_LIMIT, 40)
    assert batches_by_lines(flat, flat, 50) == (NO_LIMIT, NO_LIMIT)


# Memory of traces


@given(traces(), st.booleans())
def test_a_trace_fits_in_its_minimum_memory(trace: AllocationTrace, is_optional: bool) -> None:
    optional = workspaces(trace) if is_optional else frozenset[int]()
    minimum = minimum_bytes(trace, optional)
    assert replay(trace, minimum, optional).fits
    assert allocated_peak(trace, optional) <= minimum <= retry_free_bytes(trace)


@given(traces())
def test_retry_free_memory_is_the_least_without_a_retry(trace: AllocationTrace) -> None:
    size = retry_free_bytes(trace)
    assume(size)
    assert replay(trace, size).retries == 0
    assert replay(trace, size - 1).retries > 0


def test_fragmentation_raises_the_minimum_memory() -> None:
    """12 MiB are split off a cached block of 20 MiB, so the next 20 MiB need a new segment."""
    trace = AllocationTrace((20 * MiB, ~0, 12 * MiB, 20 * MiB))
    assert minimum_bytes(trace) == 40 * MiB == retry_free_bytes(trace)


def test_freeing_the_cache_lowers_the_minimum_memory() -> None:
    trace = AllocationTrace((20 * MiB, ~0, 30 * MiB))
    assert (minimum_bytes(trace), retry_free_bytes(trace)) == (30 * MiB, 50 * MiB)


def test_optional_workspace_lowers_the_minimum_memory() -> None:
    trace = AllocationTrace((20 * MiB, 30 * MiB, ~1))
    assert minimum_bytes(trace) == 50 * MiB
    assert minimum_bytes(trace, workspaces(trace)) == 20 * MiB


def test_an_empty_trace_needs_no_memory() -> None:
    assert minimum_bytes(AllocationTrace(())) == retry_free_bytes(AllocationTrace(())) == 0


def test_minimum_memory_is_above_all_limits_that_fail() -> None:
    """Below 50 MiB, the first block is released for the 26 MiB, so 14 + 32 fit at the end. With 50
    MiB it stays cached and is split for the 14 MiB, so the end needs 24 + 32."""
    trace = AllocationTrace((24 * MiB, ~0, 26 * MiB, 14 * MiB, ~1, 32 * MiB))
    fitting = [cap for cap in range(40, 84, 2) if replay(trace, cap * MiB).fits]
    assert fitting == [46, 48, *range(56, 84, 2)]
    assert minimum_bytes(trace) == 56 * MiB


# Exact without fragmentation

PAGE = 2 * MiB
LAYERS = st.lists(st.integers(0, 6), min_size=1, max_size=8).filter(any)


def training(layers: list[int], batch: int, weights: int, steps: int = 3) -> AllocationTrace:
    """Return steps that allocate a tensor per layer and free them in reverse order.

    Each tensor has at least 10 MiB and whole pages, so it gets its own segment, which the next step
    reuses.
    """
    events = [weights * PAGE]
    for _ in range(steps):
        first = sum(event >= 0 for event in events)
        events += [(5 + pages * batch) * PAGE for pages in layers]
        events += [~number for number in reversed(range(first, first + len(layers)))]
    return AllocationTrace(tuple(events))


@given(LAYERS, st.integers(1, 40), st.integers(5, 20))
def test_whole_pages_need_exactly_what_they_allocate(
    layers: list[int], batch: int, weights: int
) -> None:
    trace = training(layers, batch, weights)
    used = (weights + sum(5 + pages * batch for pages in layers)) * PAGE
    assert minimum_bytes(trace) == allocated_peak(trace) == retry_free_bytes(trace) == used


@given(LAYERS, st.integers(5, 20), st.integers(0, 2 * GiB))
def test_the_max_batch_from_two_small_ones_equals_a_search_by_replay(
    layers: list[int], weights: int, limit: int
) -> None:
    line = MemoryLine.through(
        [(b, float(minimum_bytes(training(layers, b, weights)))) for b in (1, 4)]
    )
    max_batch, retry_free = batches_by_lines(line, line, limit)
    searched = 0
    while replay(training(layers, searched + 1, weights), limit).fits:
        searched += 1
    assert max_batch == retry_free == searched


@given(traces(), st.integers(1, 64), st.integers(0, 4 * GiB))
def test_a_batch_fits_in_the_memory_that_two_small_ones_predict(
    sample: AllocationTrace, batch: int, more: int
) -> None:
    small, large, real = (
        AllocationTrace(tuple(event if event < 0 else times * event for event in sample))
        for times in (2, 6, batch)
    )
    growth = trace_growth(small, 2, large, 6)
    assert growth is not None
    predicted = growth.at(batch)
    assert replay(real, minimum_bytes(predicted)).fits
    assert replay(real, retry_free_bytes(predicted) + more).retries == 0


# Both batches by replay


def random_net(seed: int) -> Net:
    dice = random.Random(seed)
    layers = range(dice.randint(2, 6))
    return Net(
        [dice.randint(1, 60) * MiB // 2 for _ in layers],
        [int(dice.uniform(0.3, 6) * MiB) for _ in layers],
        [int(dice.choice([0, 0, 1, 3]) * dice.uniform(0.1, 3) * MiB) for _ in layers],
    )


def growth_of(net: Net, small: int, large: int) -> TraceGrowth:
    growth = trace_growth(net.trace(small), small, net.trace(large), large)
    assert growth is not None
    return growth


@pytest.mark.parametrize("seed", range(12))
def test_the_prediction_equals_a_brute_force_search(seed: int) -> None:
    net = random_net(seed)
    limit = (3 + seed % 4) * GiB
    middle = limit // sum(net.activations)
    growth = growth_of(net, middle // 3, 2 * middle // 3)
    max_batch, retry_free = batches_by_replay(growth, limit, (middle, middle))
    gpu = SimulatedGpu(net)
    trying = range(max(1, max_batch * 9 // 10), max_batch * 12 // 10)
    passing = max(batch for batch in trying if gpu.passes(batch, limit))
    without_retries = [
        b for b in range(max(1, retry_free // 2), max_batch + 1) if gpu.is_retry_free(b, limit)
    ]
    assert gpu.passes(max_batch, limit) and gpu.is_retry_free(retry_free, limit)
    assert 0.99 * passing - 1 <= max_batch <= passing
    assert 0.99 * max(without_retries) - 1 <= retry_free <= max(without_retries)


@pytest.mark.parametrize("seed", range(4))
def test_predictions_hardly_shrink_with_more_memory(seed: int) -> None:
    """With another limit, blocks are split differently, so a little more memory may fit a little
    less."""
    net = random_net(seed)
    growth = growth_of(net, 20, 60)
    best = 0
    for limit in range(2 * GiB, 4 * GiB, GiB // 8):
        max_batch, retry_free = batches_by_replay(
            growth, limit, (limit / sum(net.activations),) * 2
        )
        assert retry_free <= max_batch
        assert max_batch >= 0.98 * best
        best = max(best, max_batch)


def test_the_prediction_does_not_depend_on_the_guess() -> None:
    net = random_net(1)
    growth = growth_of(net, 20, 60)
    near = batches_by_replay(growth, 4 * GiB, (150, 150))
    for guess in (1, 2000):
        max_batch, retry_free = batches_by_replay(growth, 4 * GiB, (guess, guess))
        assert abs(max_batch - near[0]) <= 0.01 * near[0]
        assert abs(retry_free - near[1]) <= 0.01 * near[1]


def test_predictions_respect_the_upper_bound_and_are_zero_if_none_fits() -> None:
    growth = growth_of(random_net(1), 20, 60)
    assert batches_by_replay(growth, 4 * GiB, (40, 40), upper=40) == (40, 40)
    assert batches_by_replay(growth, 4 * GiB, (500, 500), upper=40) == (40, 40)
    assert batches_by_replay(growth, 10 * MiB, (5, 5)) == (0, 0)


# Tripathi 2019


def test_the_line_of_the_thesis() -> None:
    """10 need 3 GiB and 50 need 7: 0.1 GiB each plus 2 GiB, so 140 fit in 16 GiB."""
    per_sample, fixed, batch = linear_2019(10, 3 * GiB, 50, 7 * GiB, 16 * GiB)
    assert math.isclose(per_sample, 0.1 * GiB) and math.isclose(fixed, 2 * GiB)
    assert batch in (139, 140)
    assert linear_2019(10, 3 * GiB, 50, 7 * GiB, 16.05 * GiB, GiB)[2] == 130
    assert linear_2019(10, 3 * GiB, 50, 7 * GiB, GiB)[2] == 0


def test_without_growth_the_thesis_has_no_answer() -> None:
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
    """Measured with a DataLoader for the first, third and fourth: 3.1, 7.5 and 5.2 batches."""
    assert host_batches_in_flight(workers, prefetch, pinned) == in_flight


def test_host_memory_and_shm_each_limit_the_batch() -> None:
    sample = MiB
    assert max_host_batch(sample, 2, 2, False, 700 * MiB, GiB) == (100, "host memory")
    assert max_host_batch(sample, 2, 2, False, 7 * GiB, 64 * MiB) == (12, "/dev/shm")
    assert max_host_batch(sample, 2, 2, True, 70 * GiB, 64 * MiB) == (16, "/dev/shm")
    assert max_host_batch(sample, 2, 2, False, 700 * MiB, None) == (100, "host memory")
    assert max_host_batch(sample, 0, 2, False, 300 * MiB, 0) == (100, "host memory")
    assert max_host_batch(sample, 2, 2, False, 0, 0)[0] == 0
    assert max_host_batch(0, 2, 2, False, GiB, GiB)[0] == NO_LIMIT


def test_pinned_batches_are_rounded_to_powers_of_two() -> None:
    """5 of 8 batches in flight are pinned: 64 samples need 8·64 MiB, 65 need 3·65 + 5·128."""
    assert max_host_batch(MiB, 2, 2, True, 8 * 64 * MiB, None)[0] == 64
    assert max_host_batch(MiB, 2, 2, True, (3 * 65 + 5 * 128) * MiB - 1, None)[0] == 64
    assert max_host_batch(MiB, 2, 2, True, (3 * 65 + 5 * 128) * MiB, None)[0] == 65


@given(
    st.integers(1, GiB), st.integers(0, 16), st.integers(1, 8), st.booleans(), BYTES, BYTES, BYTES
)
def test_the_host_batch_fits_and_grows_with_memory(
    sample: int, workers: int, prefetch: int, pinned: bool, one: int, other: int, shm: int
) -> None:
    small, _ = max_host_batch(sample, workers, prefetch, pinned, min(one, other), shm)
    large, _ = max_host_batch(sample, workers, prefetch, pinned, max(one, other), shm)
    in_flight = host_batches_in_flight(workers, prefetch, pinned)
    assert small <= large
    assert small * sample * in_flight <= min(one, other)
    assert not workers or small * sample * workers * prefetch <= shm


def test_equation_4_10_is_strictly_below() -> None:
    assert max_host_batch_2019(100, 2, 5) == 9
    assert max_host_batch_2019(101, 2, 5) == 10
    assert max_host_batch_2019(100, 0, 5) == 19
    assert max_host_batch_2019(0, 1, 5) == 0


# Estimates


PRESENT = MemoryLine(400.0, 30.0)
PARTS_OF_10 = Parts(
    weights_bytes=100,
    gradients_bytes=80,
    optimizer_bytes=160,
    inputs_bytes=20,
    activations_bytes=240,
)
"""Of a batch of 10. Per sample: 2 bytes of inputs, 24 of activations, 4 of others."""


def test_bf16_shrinks_a_sample_and_adds_copies() -> None:
    line = estimate_bf16(PRESENT, PARTS_OF_10, 10)
    assert line.fixed_bytes == 450
    assert math.isclose(line.per_sample_bytes, 3 + 0.55 * 28)


def test_checkpointing_shrinks_activations_by_the_root_of_the_layers() -> None:
    assert estimate_checkpointing(PRESENT, PARTS_OF_10, 10, 16) == MemoryLine(400, 6 + 24 * 2 / 4)
    assert estimate_checkpointing(PRESENT, PARTS_OF_10, 10, 4) == PRESENT
    assert estimate_checkpointing(PRESENT, PARTS_OF_10, 10, 0) == PRESENT


def test_another_optimizer_has_another_state() -> None:
    assert estimate_optimizer(PRESENT, PARTS_OF_10, "sgd") == MemoryLine(240, 30)
    assert estimate_optimizer(PRESENT, PARTS_OF_10, "momentum") == MemoryLine(320, 30)
    assert estimate_optimizer(PRESENT, PARTS_OF_10, "adamw") == PRESENT


@given(ANY_LINES, PARTS, st.integers(0, 1000), st.integers(0, 500))
def test_estimates_are_valid_lines(line: MemoryLine, parts: Parts, batch: int, layers: int) -> None:
    estimates = [
        estimate_bf16(line, parts, batch),
        estimate_checkpointing(line, parts, batch, layers),
        *(estimate_optimizer(line, parts, name) for name in ("sgd", "momentum", "adam", "adamw")),
    ]
    assert all(each.fixed_bytes >= 0 and each.per_sample_bytes >= 0 for each in estimates)
    assert estimates[1].per_sample_bytes <= line.per_sample_bytes


# Leaks


def test_memory_that_grows_evenly_is_a_leak() -> None:
    step = 100 * KiB
    assert leak_per_step([9 * MiB, 9 * MiB + step, 9 * MiB + 2 * step]) == step
    assert leak_per_step([0, step, 2 * step + 512, 3 * step]) == step


@pytest.mark.parametrize(
    "allocated",
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
def test_uneven_small_or_short_growth_is_not_a_leak(allocated: list[int]) -> None:
    assert leak_per_step(allocated) is None
