"""Each rule of the allocator, worked out by hand, and invariants for any trace."""

from __future__ import annotations

from itertools import pairwise

import hypothesis.strategies as st
import pytest
from hypothesis import assume, given, settings

from simulated_gpu import Net
from stepscope.analysis.memory.caching_allocator import (
    AllocationTrace,
    CachingAllocator,
    KiB,
    MiB,
    OutOfMemory,
    allocated_peak,
    replay,
    trace_growth,
    workspaces,
)
from synthetic_traces import traces

# Rules


@pytest.mark.parametrize(
    ("size", "allocated", "reserved"),
    [
        (1, 512, 2 * MiB),
        (512, 512, 2 * MiB),
        (513, 1024, 2 * MiB),
        (MiB, MiB, 2 * MiB),
        (MiB + 1, MiB + 512, 20 * MiB),
        (10 * MiB - 1, 10 * MiB, 10 * MiB),
        (10 * MiB - 512, 10 * MiB - 512, 20 * MiB),
        (10 * MiB, 10 * MiB, 10 * MiB),
        (11 * MiB - 512, 12 * MiB - MiB - 512, 12 * MiB),
        (12 * MiB + 1, 12 * MiB + 512, 14 * MiB),
        (0, 0, 0),
    ],
)
def test_rounding_of_sizes_and_segments(size: int, allocated: int, reserved: int) -> None:
    allocator = CachingAllocator()
    allocator.alloc(size)
    assert (allocator.allocated, allocator.reserved) == (allocated, reserved)


def test_a_remainder_of_up_to_1_mib_is_not_split_off() -> None:
    allocator = CachingAllocator()
    allocator.alloc(11 * MiB)
    assert (allocator.allocated, allocator.reserved) == (12 * MiB, 12 * MiB)


def test_a_remainder_above_1_mib_is_split_off_and_reused() -> None:
    allocator = CachingAllocator()
    first = allocator.alloc(11 * MiB - 512)
    second = allocator.alloc(MiB + 512)
    assert second == first + 11 * MiB - 512
    assert allocator.reserved == allocator.allocated == 12 * MiB


def test_a_small_segment_is_split_down_to_512_bytes() -> None:
    allocator = CachingAllocator()
    for size in (MiB, MiB - 512, 512):
        allocator.alloc(size)
    assert allocator.allocated == allocator.reserved == 2 * MiB
    allocator.alloc(1)
    assert allocator.reserved == 4 * MiB


def test_requests_below_10_mib_share_segments_of_20() -> None:
    allocator = CachingAllocator()
    for _ in range(4):
        allocator.alloc(5 * MiB)
    assert allocator.reserved == 20 * MiB
    allocator.alloc(5 * MiB)
    assert allocator.reserved == 40 * MiB


def test_pools_are_separate() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.alloc(5 * MiB))
    allocator.alloc(512)
    assert allocator.reserved == 22 * MiB


def test_the_smallest_sufficient_block_is_used() -> None:
    allocator = CachingAllocator()
    blocks = {size: allocator.alloc(size * MiB) for size in (40, 20, 30)}
    for handle in blocks.values():
        allocator.free(handle)
    assert allocator.alloc(18 * MiB) == blocks[20]
    assert allocator.alloc(30 * MiB) == blocks[30]
    assert allocator.reserved == 90 * MiB


def test_among_equal_blocks_the_lowest_address_is_used() -> None:
    allocator = CachingAllocator()
    first, second, third = (allocator.alloc(12 * MiB) for _ in range(3))
    for handle in (third, first, second):
        allocator.free(handle)
    assert [allocator.alloc(12 * MiB) for _ in range(3)] == [first, second, third]


def test_a_much_larger_cached_block_is_used() -> None:
    allocator = CachingAllocator()
    large = allocator.alloc(1000 * MiB)
    allocator.free(large)
    assert allocator.alloc(2 * MiB) == large
    assert allocator.alloc(998 * MiB) == large + 2 * MiB
    assert allocator.reserved == 1000 * MiB


def test_adjacent_free_blocks_merge() -> None:
    allocator = CachingAllocator()
    left, middle, right = (allocator.alloc(size * MiB) for size in (6, 8, 6))
    for handle in (left, right, middle):
        allocator.free(handle)
    assert allocator.alloc(20 * MiB) == left
    assert allocator.reserved == 20 * MiB


def test_segments_do_not_merge() -> None:
    allocator = CachingAllocator()
    for handle in [allocator.alloc(12 * MiB) for _ in range(2)]:
        allocator.free(handle)
    allocator.alloc(24 * MiB)
    assert allocator.reserved == 48 * MiB


def test_at_the_limit_free_segments_are_released_and_the_allocation_is_retried() -> None:
    allocator = CachingAllocator(32 * MiB)
    allocator.free(allocator.alloc(512))
    allocator.free(allocator.alloc(20 * MiB))
    allocator.alloc(30 * MiB)
    assert (allocator.reserved, allocator.retries) == (30 * MiB, 1)
    assert allocator.reserved_peak == 30 * MiB


def test_no_retry_below_the_limit() -> None:
    allocator = CachingAllocator(32 * MiB)
    allocator.alloc(12 * MiB)
    allocator.alloc(20 * MiB)
    assert (allocator.reserved, allocator.retries) == (32 * MiB, 0)


def test_a_partly_used_segment_is_not_released() -> None:
    allocator = CachingAllocator(40 * MiB)
    allocator.alloc(2 * MiB)
    with pytest.raises(OutOfMemory) as failed:
        allocator.alloc(30 * MiB)
    assert (failed.value.requested, failed.value.shortfall) == (30 * MiB, 10 * MiB)
    assert (allocator.reserved, allocator.retries) == (20 * MiB, 1)


def test_the_allocator_works_after_a_failure() -> None:
    allocator = CachingAllocator(20 * MiB)
    held = allocator.alloc(20 * MiB)
    with pytest.raises(OutOfMemory):
        allocator.alloc(2 * MiB)
    allocator.free(held)
    assert allocator.alloc(2 * MiB) == held
    assert allocator.allocated == 2 * MiB


# Any trace


@given(traces(), st.one_of(st.none(), st.integers(0, 400 * MiB)))
def test_blocks_in_use_are_inside_segments_and_do_not_overlap(
    trace: AllocationTrace, cap: int | None
) -> None:
    allocator = CachingAllocator(cap)
    handles: list[int | None] = []
    wanted: dict[int, int] = {}
    for event in trace:
        if event < 0:
            handle = handles[~event]
            if handle is not None:
                allocator.free(handle)
                wanted.pop(handle, None)
        else:
            try:
                handles.append(allocator.alloc(event))
                if event:
                    wanted[handles[-1] or 0] = event
            except OutOfMemory as error:
                handles.append(None)
                assert cap is not None
                assert allocator.reserved + error.requested - cap == error.shortfall > 0
        _check(allocator, wanted, cap)


def _check(allocator: CachingAllocator, wanted: dict[int, int], cap: int | None) -> None:
    assert allocator.in_use.keys() == wanted.keys()
    assert all(allocator.in_use[handle] >= size for handle, size in wanted.items())
    assert allocator.allocated == sum(allocator.in_use.values()) <= allocator.reserved
    assert allocator.reserved == sum(allocator.segments.values()) <= allocator.reserved_peak
    assert cap is None or allocator.reserved <= cap
    spans = sorted((start, start + size) for start, size in allocator.in_use.items())
    assert all(one[1] <= other[0] for one, other in pairwise(spans))
    segments = [(start, start + size) for start, size in allocator.segments.items()]
    assert all(any(a <= start and end <= b for a, b in segments) for start, end in spans)


@given(traces())
def test_empty_cache_releases_everything_that_is_freed(trace: AllocationTrace) -> None:
    allocator = CachingAllocator()
    handles = [allocator.alloc(event) for event in trace if event >= 0]
    for handle in handles:
        allocator.free(handle)
    assert allocator.allocated == 0
    allocator.empty_cache()
    assert (allocator.reserved, dict(allocator.segments)) == (0, {})


# Replays


def test_an_optional_allocation_is_skipped_with_its_free() -> None:
    trace = AllocationTrace((20 * MiB, 30 * MiB, ~1, 12 * MiB, ~0, ~2))
    assert not replay(trace, 32 * MiB).fits
    result = replay(trace, 32 * MiB, frozenset({1}))
    assert result.fits and result.skipped == 1 and result.failed_at is None
    assert result.reserved_peak == result.allocated_peak == 32 * MiB


def test_a_replay_ends_at_the_event_that_fails() -> None:
    result = replay(AllocationTrace((20 * MiB, ~0, 12 * MiB, 30 * MiB)), 32 * MiB)
    assert not result.fits
    assert (result.failed_at, result.shortfall, result.retries) == (3, 18 * MiB, 1)


def test_fragmentation_makes_a_trace_fail_although_enough_is_free() -> None:
    """12 MiB are split off a cached block of 20 MiB; the other 8 do not help the next 20."""
    trace = AllocationTrace((20 * MiB, ~0, 12 * MiB, 20 * MiB))
    assert allocated_peak(trace) == 32 * MiB
    result = replay(trace, 32 * MiB)
    assert (result.fits, result.shortfall) == (False, 8 * MiB)
    assert replay(trace, 40 * MiB).fits


@given(traces())
def test_without_a_limit_a_trace_fits_and_reserves_at_least_what_it_allocates(
    trace: AllocationTrace,
) -> None:
    result = replay(trace)
    assert result.fits and result.retries == result.skipped == result.shortfall == 0
    assert allocated_peak(trace) <= result.allocated_peak <= result.reserved_peak


def test_allocated_peak_counts_rounded_sizes_and_excludes_allocations() -> None:
    trace = AllocationTrace((1, 600, ~0, 512, ~1, ~2))
    assert allocated_peak(trace) == 512 + 1024
    assert allocated_peak(trace, frozenset({1})) == 512
    assert allocated_peak(AllocationTrace(())) == 0


def test_workspaces_are_freed_by_the_next_event() -> None:
    trace = AllocationTrace((2 * MiB, ~0, 2 * MiB, 3 * MiB, ~1, ~2, 512, ~3, MiB, ~4, 5 * MiB))
    assert workspaces(trace) == {0, 4}
    assert workspaces(trace, min_size=512) == {0, 3, 4}


# TraceGrowth


def at(
    batch: int, small: AllocationTrace, small_batch: int, large: AllocationTrace, large_batch: int
) -> AllocationTrace:
    found = trace_growth(small, small_batch, large, large_batch)
    assert found is not None
    return found.at(batch)


def test_each_allocation_of_a_trace_grows_linearly() -> None:
    small, large = AllocationTrace((1000, 40, ~0, 80)), AllocationTrace((1000, 80, ~0, 120))
    assert at(16, small, 4, large, 8) == AllocationTrace((1000, 160, ~0, 200))
    assert at(4, small, 4, large, 8) == small
    assert at(0, small, 4, large, 8) == AllocationTrace((1000, 0, ~0, 40))


def test_different_traces_have_no_growth() -> None:
    small = AllocationTrace((10 * MiB, 20 * MiB, ~0))
    assert trace_growth(small, 1, small, 2) is not None
    assert trace_growth(small, 1, AllocationTrace((10 * MiB, 20 * MiB, ~1, ~0)), 2) is None
    assert trace_growth(small, 1, AllocationTrace((10 * MiB, 20 * MiB, 30 * MiB)), 2) is None
    assert trace_growth(small, 1, AllocationTrace((10 * MiB, 20 * MiB)), 2) is None
    assert trace_growth(small, 1, small, 1) is None


def test_workspace_of_only_the_larger_batch_grows_with_the_batch() -> None:
    small = AllocationTrace((2 * MiB, 4 * MiB, ~0))
    large = AllocationTrace((4 * MiB, 10 * MiB, ~1, 8 * MiB, ~0))
    assert at(6, small, 2, large, 4) == AllocationTrace((6 * MiB, 15 * MiB, ~1, 12 * MiB, ~0))


def test_workspace_of_only_the_smaller_batch_is_ignored() -> None:
    small = AllocationTrace((2 * MiB, 10 * MiB, ~1, 4 * MiB, ~0))
    large = AllocationTrace((4 * MiB, 8 * MiB, ~0))
    assert at(6, small, 2, large, 4) == AllocationTrace((6 * MiB, 12 * MiB, ~0))


def test_workspace_of_both_batches_grows_linearly() -> None:
    small = AllocationTrace((2 * MiB, 10 * MiB, ~1, 3 * MiB))
    large = AllocationTrace((4 * MiB, 12 * MiB, ~1, 3 * MiB))
    assert at(6, small, 2, large, 4) == AllocationTrace((6 * MiB, 14 * MiB, ~1, 3 * MiB))


@pytest.mark.parametrize("size", [512, 4 * KiB - 1, 64 * KiB - 1, MiB - 1])
def test_a_tiny_tensor_of_only_one_batch_is_constant(size: int) -> None:
    small = AllocationTrace((2 * MiB, 4 * MiB, ~0))
    large = AllocationTrace((4 * MiB, size, 8 * MiB, ~1, ~0))
    assert at(6, small, 2, large, 4) == AllocationTrace((6 * MiB, size, 12 * MiB, ~1, ~0))
    assert at(3, large, 4, small, 2) == AllocationTrace((3 * MiB, 6 * MiB, ~0))


def test_a_large_tensor_of_only_one_batch_means_no_growth() -> None:
    small = AllocationTrace((2 * MiB, 4 * MiB, ~0))
    assert trace_growth(small, 2, AllocationTrace((4 * MiB, MiB, 8 * MiB, ~1, ~0)), 4) is None


@given(traces(), st.integers(0, 50))
@settings(max_examples=50)
def test_proportional_growth_is_predicted_exactly(trace: AllocationTrace, batch: int) -> None:
    larger = AllocationTrace(tuple(event if event < 0 else 3 * event for event in trace))
    wanted = AllocationTrace(tuple(event if event < 0 else batch * event for event in trace))
    assert at(batch, trace, 1, larger, 3) == wanted


NETS = st.lists(st.tuples(*[st.integers(0, 8 * MiB)] * 3), min_size=1, max_size=6)


@given(NETS, st.integers(1, 300), st.integers(1, 300), st.integers(1, 1000))
@settings(max_examples=50)
def test_two_batches_predict_the_trace_of_any_other(
    layers: list[tuple[int, int, int]], one: int, other: int, batch: int
) -> None:
    assume(one != other)
    weights, activations, workspaces = zip(*layers, strict=True)
    net = Net(weights, activations, workspaces)
    small, large = min(one, other), max(one, other)
    assert at(batch, net.trace(small), small, net.trace(large), large) == net.trace(batch)
