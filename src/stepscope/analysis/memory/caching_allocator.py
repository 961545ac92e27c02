"""A model of PyTorch's caching allocator: how much GPU memory a trace of allocations needs.

The allocator reserves segments from the driver, splits them into blocks and caches freed blocks.
A process therefore reserves more memory than it uses, by an amount that depends on the order of
the sizes, and can run out of memory while much of it is free. Replaying a trace through the same
rules predicts when that happens. The rules are those of CUDACachingAllocator.cpp without
expandable segments, for one stream, with memory limited by `set_per_process_memory_fraction`.

One difference: the driver may reuse an address, while every segment here gets a new one. This
affects only the choice between blocks of the same size.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass
from itertools import pairwise

KiB, MiB = 1 << 10, 1 << 20

# The constants of CUDACachingAllocator.cpp, in bytes.
_MIN_BLOCK_SIZE = 512
"""All block sizes are multiples of it."""
_SMALL_SIZE = 1 * MiB
"""Requests up to this size use the pool of small blocks. In the other pool, a block is split only
if the remainder is larger than this."""
_SMALL_BUFFER = 2 * MiB
"""Segment size of the small pool."""
_MIN_LARGE_ALLOC = 10 * MiB
"""Smaller requests share segments of `_LARGE_BUFFER`; larger ones get a segment each."""
_LARGE_BUFFER = 20 * MiB
ROUND_LARGE = 2 * MiB
"""All segment sizes are multiples of it, so memory limits matter only to this granularity."""

_NO_HANDLE = -1
"""The handle of an allocation of 0 bytes."""


class OutOfMemory(Exception):
    """No memory for a segment, even after the cache was freed."""

    def __init__(self, requested: int, shortfall: int) -> None:
        super().__init__(f"a segment of {requested} bytes is {shortfall} bytes too large")
        self.requested = requested
        self.shortfall = shortfall


class CachingAllocator:
    """Allocates memory as PyTorch does. A handle is the address."""

    def __init__(self, cap: int | None = None) -> None:
        self.cap = cap
        self.allocated = self.allocated_peak = 0
        self.reserved = self.reserved_peak = 0
        self.retries = 0
        self.in_use: dict[int, int] = {}
        """Sizes of blocks in use, by address."""
        self.segments: dict[int, int] = {}
        """Sizes of segments reserved from the driver, by address."""
        self._small = _Pool(_MIN_BLOCK_SIZE)
        self._large = _Pool(_SMALL_SIZE + _MIN_BLOCK_SIZE)
        self._next_address = 0

    def alloc(self, size: int) -> int:
        """Allocate `size` bytes and return the handle. Raise OutOfMemory if they do not fit."""
        if size <= 0:
            return _NO_HANDLE
        size = round_size(size)
        pool = self._small if size <= _SMALL_SIZE else self._large
        address, block = pool.take(size) or self._new_segment(size)
        if block - size >= pool.min_remainder:
            pool.put(address + size, block - size)
            block = size
        self.in_use[address] = block
        self.allocated += block
        self.allocated_peak = max(self.allocated_peak, self.allocated)
        return address

    def free(self, handle: int) -> None:
        """Return a block to the cache, merged with free blocks on both sides."""
        if handle == _NO_HANDLE:
            return
        size = self.in_use.pop(handle)
        self.allocated -= size
        (self._small if size <= _SMALL_SIZE else self._large).put_merged(handle, size)

    def empty_cache(self) -> None:
        """Return all unused segments to the driver."""
        for pool in (self._small, self._large):
            for address, size in sorted(pool.size_at.items()):
                if self.segments.get(address) == size:
                    pool.remove(address, size)
                    del self.segments[address]
                    self.reserved -= size

    def _new_segment(self, size: int) -> tuple[int, int]:
        segment = -(-size // ROUND_LARGE) * ROUND_LARGE
        if size <= _SMALL_SIZE:
            segment = _SMALL_BUFFER
        elif size < _MIN_LARGE_ALLOC:
            segment = _LARGE_BUFFER
        if self._shortfall(segment) > 0:
            self.empty_cache()
            self.retries += 1
            if self._shortfall(segment) > 0:
                raise OutOfMemory(segment, self._shortfall(segment))
        address = self._next_address
        self._next_address += segment + _MIN_BLOCK_SIZE  # a gap, so that segments never merge
        self.segments[address] = segment
        self.reserved += segment
        self.reserved_peak = max(self.reserved_peak, self.reserved)
        return address, segment

    def _shortfall(self, segment: int) -> int:
        return 0 if self.cap is None else self.reserved + segment - self.cap


class _Pool:
    """Free blocks, sorted by size and then by address."""

    def __init__(self, min_remainder: int) -> None:
        self.min_remainder = min_remainder
        """A block is split only if at least this many bytes remain."""
        self._blocks: list[tuple[int, int]] = []
        self.size_at: dict[int, int] = {}
        self._start_by_end: dict[int, int] = {}

    def take(self, size: int) -> tuple[int, int] | None:
        """Remove the smallest sufficient block and return its address and size."""
        position = bisect_left(self._blocks, (size, -1))
        if position == len(self._blocks):
            return None
        block, address = self._blocks.pop(position)
        del self.size_at[address], self._start_by_end[address + block]
        return address, block

    def put(self, address: int, size: int) -> None:
        insort(self._blocks, (size, address))
        self.size_at[address] = size
        self._start_by_end[address + size] = address

    def put_merged(self, address: int, size: int) -> None:
        before = self._start_by_end.get(address)
        if before is not None:
            self.remove(before, address - before)
            address, size = before, size + address - before
        after = self.size_at.get(address + size)
        if after is not None:
            self.remove(address + size, after)
            size += after
        self.put(address, size)

    def remove(self, address: int, size: int) -> None:
        self._blocks.pop(bisect_left(self._blocks, (size, address)))
        del self.size_at[address], self._start_by_end[address + size]


def round_size(size: int) -> int:
    return -(-size // _MIN_BLOCK_SIZE) * _MIN_BLOCK_SIZE


AllocationTrace = tuple[int, ...]
"""Allocations and frees of one process on one stream, in order. An event >= 0 is an allocation of
that many bytes; allocations are numbered from 0. `~n` frees allocation n."""


@dataclass(frozen=True)
class ReplayResult:
    failed_at: int | None
    """Index of the event that failed."""
    shortfall: int
    """Bytes missing for that event."""
    allocated_peak: int
    reserved_peak: int
    retries: int
    skipped: int
    """Optional allocations that were skipped for lack of memory."""

    @property
    def fits(self) -> bool:
        return self.failed_at is None


def replay(
    trace: AllocationTrace,
    cap: int | None = None,
    optional: frozenset[int] = frozenset(),
    required_share: float = 0.0,
) -> ReplayResult:
    """Replay a trace within `cap` bytes.

    An optional allocation that does not fit is skipped, or reduced to `required_share` of its
    size, which then must fit.
    """
    allocator = CachingAllocator(cap)
    handles: list[int] = []
    skipped = 0
    failed_at, shortfall = None, 0
    for position, event in enumerate(trace):
        if event < 0:
            allocator.free(handles[~event])
            continue
        try:
            handles.append(allocator.alloc(event))
        except OutOfMemory as error:
            failed_at, shortfall = position, error.shortfall
            if len(handles) not in optional:
                break
            try:
                reduced = int(required_share * event)
                handles.append(allocator.alloc(reduced) if required_share else _NO_HANDLE)
            except OutOfMemory:
                break
            skipped += 1
            failed_at, shortfall = None, 0
    return ReplayResult(
        failed_at,
        shortfall,
        allocator.allocated_peak,
        allocator.reserved_peak,
        allocator.retries,
        skipped,
    )


def allocated_peak(trace: AllocationTrace, without: frozenset[int] = frozenset()) -> int:
    """Return the most bytes in use at once: a lower bound for any allocator."""
    sizes: list[int] = []
    allocated = peak = 0
    for event in trace:
        if event < 0:
            allocated -= sizes[~event]
            continue
        size = 0 if len(sizes) in without else round_size(event)
        sizes.append(size)
        allocated += size
        peak = max(peak, allocated)
    return peak


def workspaces(trace: AllocationTrace, min_size: int = MiB) -> frozenset[int]:
    """Return the allocations that the very next event frees: workspace of kernels.

    They are optional: when the memory is missing, cuDNN selects an algorithm that needs less.
    """
    number, numbers = 0, set()
    for event, following in pairwise(trace):
        if event >= 0:
            if event >= min_size and following == ~number:
                numbers.add(number)
            number += 1
    return frozenset(numbers)


@dataclass(frozen=True)
class TraceGrowth:
    """A linear model of a trace as a function of the batch size, from the traces of two batches."""

    batch: int
    """The larger of the two batches, to which `events` belong."""
    events: AllocationTrace
    per_sample: tuple[float, ...]
    """Bytes by which each allocation grows per sample."""

    def at(self, batch: int) -> AllocationTrace:
        more = batch - self.batch
        number, events = 0, []
        for event in self.events:
            if event >= 0:
                events.append(max(0, round(event + more * self.per_sample[number])))
                number += 1
            else:
                events.append(event)
        return tuple(events)


_TINY_SIZES = (0, 4 * KiB, 64 * KiB, MiB)
"""Sizes below which tensors are ignored, tried in this order until two traces match."""


@dataclass(frozen=True)
class _Outline:
    """A trace without workspaces and tiny tensors, and the positions of the workspaces."""

    shape: tuple[int | None, ...]
    """None for an allocation, `~n` for the free of the n-th of them."""
    numbers: tuple[int, ...]
    """Numbers of these allocations in the whole trace."""
    sizes: tuple[int, ...]
    workspaces: dict[int, list[tuple[int, int]]]
    """Number and size of workspaces, by the position in `shape` that they precede."""

    @classmethod
    def of(cls, trace: AllocationTrace, tiny: int) -> _Outline:
        shape: list[int | None] = []
        numbers: dict[int, int] = {}
        sizes: list[int] = []
        workspaces: dict[int, list[tuple[int, int]]] = {}
        number = -1
        for event, following in pairwise((*trace, 0)):
            if event >= 0:
                number += 1
                if following == ~number:
                    workspaces.setdefault(len(shape), []).append((number, event))
                elif event >= tiny:
                    numbers[number] = len(numbers)
                    sizes.append(event)
                    shape.append(None)
            elif ~event in numbers:
                shape.append(~numbers[~event])
        return cls(tuple(shape), tuple(numbers), tuple(sizes), workspaces)


def trace_growth(
    small: AllocationTrace, small_batch: int, large: AllocationTrace, large_batch: int
) -> TraceGrowth | None:
    """Model how a trace grows with the batch, or return None if the two traces do not match.

    Segments are rounded coarsely, so the reserved memory of two batches says little about a third
    batch; their allocations do. Workspaces depend on the algorithm that cuDNN selects for a batch,
    and some tiny tensors differ too: both are ignored until the rest of the traces matches. An
    allocation without a counterpart grows with the batch if it is a workspace and is constant
    otherwise.
    """
    if small_batch == large_batch:
        return None
    outlines = ((_Outline.of(small, tiny), _Outline.of(large, tiny)) for tiny in _TINY_SIZES)
    matching = next(((one, other) for one, other in outlines if one.shape == other.shape), None)
    if matching is None:
        return None
    one, other = matching
    more = large_batch - small_batch
    slopes = [0.0] * sum(event >= 0 for event in large)
    for number, before, after in zip(other.numbers, one.sizes, other.sizes, strict=True):
        slopes[number] = (after - before) / more
    for position, found in other.workspaces.items():
        partners = one.workspaces.get(position, [])
        is_matched = len(partners) == len(found)
        for n, (number, size) in enumerate(found):
            slopes[number] = (size - partners[n][1]) / more if is_matched else size / large_batch
    return TraceGrowth(large_batch, large, tuple(slopes))
