"""The allocator's rules one by one, worked out by hand, and what holds for any trace."""

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
    growth,
    replay,
    scratch,
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
def test_sizes_are_rounded_and_segments_have_their_sizes(
    size: int, allocated: int, reserved: int
) -> None:
    allocator = CachingAllocator()
    allocator.alloc(size)
    assert (allocator.allocated, allocator.reserved) == (allocated, reserved)


def test_what_is_left_of_a_large_segment_by_a_mebibyte_or_less_is_not_cut_off() -> None:
    allocator = CachingAllocator()
    allocator.alloc(11 * MiB)
    assert (allocator.allocated, allocator.reserved) == (12 * MiB, 12 * MiB)


def test_what_is_left_of_a_large_segment_by_more_than_a_mebibyte_is_used_by_the_next() -> None:
    allocator = CachingAllocator()
    first = allocator.alloc(11 * MiB - 512)
    second = allocator.alloc(MiB + 512)
    assert second == first + 11 * MiB - 512
    assert allocator.reserved == allocator.allocated == 12 * MiB


def test_a_small_segment_is_cut_to_the_last_512_bytes() -> None:
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


def test_pools_do_not_lend_to_each_other() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.alloc(5 * MiB))
    allocator.alloc(512)
    assert allocator.reserved == 22 * MiB


def test_the_smallest_block_that_suffices_is_taken() -> None:
    allocator = CachingAllocator()
    blocks = {size: allocator.alloc(size * MiB) for size in (40, 20, 30)}
    for handle in blocks.values():
        allocator.free(handle)
    assert allocator.alloc(18 * MiB) == blocks[20]
    assert allocator.alloc(30 * MiB) == blocks[30]
    assert allocator.reserved == 90 * MiB


def test_among_blocks_of_the_same_size_the_lowest_address_is_taken() -> None:
    allocator = CachingAllocator()
    first, second, third = (allocator.alloc(12 * MiB) for _ in range(3))
    for handle in (third, first, second):
        allocator.free(handle)
    assert [allocator.alloc(12 * MiB) for _ in range(3)] == [first, second, third]


def test_a_cached_block_is_taken_however_much_larger_it_is() -> None:
    allocator = CachingAllocator()
    large = allocator.alloc(1000 * MiB)
    allocator.free(large)
    assert allocator.alloc(2 * MiB) == large
    assert allocator.alloc(998 * MiB) == large + 2 * MiB
    assert allocator.reserved == 1000 * MiB


def test_free_neighbours_merge_on_both_sides() -> None:
    allocator = CachingAllocator()
    left, middle, right = (allocator.alloc(size * MiB) for size in (6, 8, 6))
    for handle in (left, right, middle):
        allocator.free(handle)
    assert allocator.alloc(20 * MiB) == left
    assert allocator.reserved == 20 * MiB


def test_segments_do_not_merge_with_each_other() -> None:
    allocator = CachingAllocator()
    for handle in [allocator.alloc(12 * MiB) for _ in range(2)]:
        allocator.free(handle)
    allocator.alloc(24 * MiB)
    assert allocator.reserved == 48 * MiB


def test_at_the_limit_what_is_wholly_free_is_given_back_once_and_it_is_tried_again() -> None:
    allocator = CachingAllocator(32 * MiB)
    allocator.free(allocator.alloc(512))
    allocator.free(allocator.alloc(20 * MiB))
    allocator.alloc(30 * MiB)
    assert (allocator.reserved, allocator.retries) == (30 * MiB, 1)
    assert allocator.reserved_peak == 30 * MiB


def test_up_to_the_limit_there_is_no_retry() -> None:
    allocator = CachingAllocator(32 * MiB)
    allocator.alloc(12 * MiB)
    allocator.alloc(20 * MiB)
    assert (allocator.reserved, allocator.retries) == (32 * MiB, 0)


def test_a_segment_of_which_a_part_is_in_use_is_not_given_back() -> None:
    allocator = CachingAllocator(40 * MiB)
    allocator.alloc(2 * MiB)
    with pytest.raises(OutOfMemory) as failed:
        allocator.alloc(30 * MiB)
    assert (failed.value.wanted, failed.value.missing) == (30 * MiB, 10 * MiB)
    assert (allocator.reserved, allocator.retries) == (20 * MiB, 1)


def test_after_a_failure_it_goes_on_as_before() -> None:
    allocator = CachingAllocator(20 * MiB)
    held = allocator.alloc(20 * MiB)
    with pytest.raises(OutOfMemory):
        allocator.alloc(2 * MiB)
    allocator.free(held)
    assert allocator.alloc(2 * MiB) == held
    assert allocator.allocated == 2 * MiB


# Any trace


@given(traces(), st.one_of(st.none(), st.integers(0, 400 * MiB)))
def test_memory_in_use_lies_within_segments_and_nowhere_twice(
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
                assert allocator.reserved + error.wanted - cap == error.missing > 0
        _check(allocator, wanted, cap)


def _check(allocator: CachingAllocator, wanted: dict[int, int], cap: int | None) -> None:
    assert allocator.live.keys() == wanted.keys()
    assert all(allocator.live[handle] >= size for handle, size in wanted.items())
    assert allocator.allocated == sum(allocator.live.values()) <= allocator.reserved
    assert allocator.reserved == sum(allocator.segments.values()) <= allocator.reserved_peak
    assert cap is None or allocator.reserved <= cap
    spans = sorted((start, start + size) for start, size in allocator.live.items())
    assert all(one[1] <= other[0] for one, other in pairwise(spans))
    segments = [(start, start + size) for start, size in allocator.segments.items()]
    assert all(any(a <= start and end <= b for a, b in segments) for start, end in spans)


@given(traces())
def test_with_all_freed_an_emptied_cache_holds_nothing(trace: AllocationTrace) -> None:
    allocator = CachingAllocator()
    handles = [allocator.alloc(event) for event in trace if event >= 0]
    for handle in handles:
        allocator.free(handle)
    assert allocator.allocated == 0
    allocator.empty_cache()
    assert (allocator.reserved, dict(allocator.segments)) == (0, {})


# Replays


def test_what_is_optional_is_gone_without_and_its_release_too() -> None:
    trace = AllocationTrace((20 * MiB, 30 * MiB, ~1, 12 * MiB, ~0, ~2))
    assert not replay(trace, 32 * MiB).fits
    went = replay(trace, 32 * MiB, frozenset({1}))
    assert went.fits and went.skipped == 1 and went.failed_at is None
    assert went.reserved_peak == went.allocated_peak == 32 * MiB


def test_a_replay_ends_at_the_event_for_which_there_is_no_memory() -> None:
    went = replay(AllocationTrace((20 * MiB, ~0, 12 * MiB, 30 * MiB)), 32 * MiB)
    assert not went.fits
    assert (went.failed_at, went.missing, went.retries) == (3, 18 * MiB, 1)


def test_fragments_make_a_trace_fail_although_enough_is_free() -> None:
    """12 of 20 MiB are taken from a cached block; the other 8 are of no use to the next 20."""
    trace = AllocationTrace((20 * MiB, ~0, 12 * MiB, 20 * MiB))
    assert allocated_peak(trace) == 32 * MiB
    went = replay(trace, 32 * MiB)
    assert (went.fits, went.missing) == (False, 8 * MiB)
    assert replay(trace, 40 * MiB).fits


@given(traces())
def test_without_a_limit_a_trace_fits_and_holds_at_least_what_it_uses(
    trace: AllocationTrace,
) -> None:
    went = replay(trace)
    assert went.fits and went.retries == went.skipped == went.missing == 0
    assert allocated_peak(trace) <= went.allocated_peak <= went.reserved_peak


def test_peak_in_use_counts_rounded_sizes_and_leaves_out_what_it_is_told_to() -> None:
    trace = AllocationTrace((1, 600, ~0, 512, ~1, ~2))
    assert allocated_peak(trace) == 512 + 1024
    assert allocated_peak(trace, frozenset({1})) == 512
    assert allocated_peak(AllocationTrace(())) == 0


def test_scratch_is_what_the_next_event_releases() -> None:
    trace = AllocationTrace((2 * MiB, ~0, 2 * MiB, 3 * MiB, ~1, ~2, 512, ~3, MiB, ~4, 5 * MiB))
    assert scratch(trace) == {0, 4}
    assert scratch(trace, least=512) == {0, 3, 4}


# Growth


def at(
    batch: int, small: AllocationTrace, small_batch: int, large: AllocationTrace, large_batch: int
) -> AllocationTrace:
    found = growth(small, small_batch, large, large_batch)
    assert found is not None
    return found.at(batch)


def test_a_trace_grows_by_each_allocations_own_line() -> None:
    small, large = AllocationTrace((1000, 40, ~0, 80)), AllocationTrace((1000, 80, ~0, 120))
    assert at(16, small, 4, large, 8) == AllocationTrace((1000, 160, ~0, 200))
    assert at(4, small, 4, large, 8) == small
    assert at(0, small, 4, large, 8) == AllocationTrace((1000, 0, ~0, 40))


def test_traces_of_other_kinds_do_not_grow_into_each_other() -> None:
    small = AllocationTrace((10 * MiB, 20 * MiB, ~0))
    assert growth(small, 1, small, 2) is not None
    assert growth(small, 1, AllocationTrace((10 * MiB, 20 * MiB, ~1, ~0)), 2) is None
    assert growth(small, 1, AllocationTrace((10 * MiB, 20 * MiB, 30 * MiB)), 2) is None
    assert growth(small, 1, AllocationTrace((10 * MiB, 20 * MiB)), 2) is None
    assert growth(small, 1, small, 1) is None


def test_workspace_that_only_the_larger_batch_has_grows_with_the_batch() -> None:
    small = AllocationTrace((2 * MiB, 4 * MiB, ~0))
    large = AllocationTrace((4 * MiB, 10 * MiB, ~1, 8 * MiB, ~0))
    assert at(6, small, 2, large, 4) == AllocationTrace((6 * MiB, 15 * MiB, ~1, 12 * MiB, ~0))


def test_workspace_that_only_the_smaller_batch_has_is_left_out() -> None:
    small = AllocationTrace((2 * MiB, 10 * MiB, ~1, 4 * MiB, ~0))
    large = AllocationTrace((4 * MiB, 8 * MiB, ~0))
    assert at(6, small, 2, large, 4) == AllocationTrace((6 * MiB, 12 * MiB, ~0))


def test_workspace_of_both_is_on_its_own_line() -> None:
    small = AllocationTrace((2 * MiB, 10 * MiB, ~1, 3 * MiB))
    large = AllocationTrace((4 * MiB, 12 * MiB, ~1, 3 * MiB))
    assert at(6, small, 2, large, 4) == AllocationTrace((6 * MiB, 14 * MiB, ~1, 3 * MiB))


@pytest.mark.parametrize("size", [512, 4 * KiB - 1, 64 * KiB - 1, MiB - 1])
def test_a_tiny_tensor_that_only_one_batch_has_stays_as_it_is(size: int) -> None:
    small = AllocationTrace((2 * MiB, 4 * MiB, ~0))
    large = AllocationTrace((4 * MiB, size, 8 * MiB, ~1, ~0))
    assert at(6, small, 2, large, 4) == AllocationTrace((6 * MiB, size, 12 * MiB, ~1, ~0))
    assert at(3, large, 4, small, 2) == AllocationTrace((3 * MiB, 6 * MiB, ~0))


def test_a_large_tensor_that_only_one_batch_has_is_another_training() -> None:
    small = AllocationTrace((2 * MiB, 4 * MiB, ~0))
    assert growth(small, 2, AllocationTrace((4 * MiB, MiB, 8 * MiB, ~1, ~0)), 4) is None


@given(traces(), st.integers(0, 50))
@settings(max_examples=50)
def test_a_trace_of_which_all_grows_is_foretold_exactly(trace: AllocationTrace, batch: int) -> None:
    larger = AllocationTrace(tuple(event if event < 0 else 3 * event for event in trace))
    wanted = AllocationTrace(tuple(event if event < 0 else batch * event for event in trace))
    assert at(batch, trace, 1, larger, 3) == wanted


NETS = st.lists(st.tuples(*[st.integers(0, 8 * MiB)] * 3), min_size=1, max_size=6)


@given(NETS, st.integers(1, 300), st.integers(1, 300), st.integers(1, 1000))
@settings(max_examples=50)
def test_a_training_at_two_batches_tells_that_at_any_other(
    layers: list[tuple[int, int, int]], one: int, other: int, batch: int
) -> None:
    assume(one != other)
    weights, activations, workspaces = zip(*layers, strict=True)
    net = Net(weights, activations, workspaces)
    small, large = min(one, other), max(one, other)
    assert at(batch, net.trace(small), small, net.trace(large), large) == net.trace(batch)
