"""PyTorch's caching allocator as a model: what a trace of allocations takes of a GPU's memory.

The allocator takes segments from the driver, cuts them into blocks and keeps what is freed. So a
process holds more than it uses, by an amount that depends on the order of sizes, and runs out of
memory while much of it is free. A replay of the trace through the same rules tells when. The rules
are those of CUDACachingAllocator.cpp without expandable segments, for one stream, with the memory
limited by `set_per_process_memory_fraction`.

What differs: the driver may give an address again, here each is new. It decides between blocks of
the same size only.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass
from itertools import pairwise

KiB, MiB = 1 << 10, 1 << 20

_GRAIN = 512
"""All sizes are multiples of it."""
_SMALL = 1 * MiB
"""Requests up to this size have their own pool. A cut in the other pool leaves more than this."""
_SMALL_SEGMENT = 2 * MiB
_SHARED_BELOW = 10 * MiB
"""Requests below it share segments, larger ones get their own."""
_SHARED_SEGMENT = 20 * MiB
PAGE = 2 * MiB
"""All segments are multiples of it, so that only such limits differ."""

_NOTHING = -1
"""The handle of an allocation of no bytes."""


class OutOfMemory(Exception):
    """There is no memory for a segment, even with all that was cached given back."""

    def __init__(self, wanted: int, missing: int) -> None:
        super().__init__(f"a segment of {wanted} bytes is {missing} bytes too large")
        self.wanted = wanted
        self.missing = missing


class CachingAllocator:
    """Hands out memory as PyTorch does; a handle is the address."""

    def __init__(self, cap: int | None = None) -> None:
        self.cap = cap
        self.allocated = self.allocated_peak = 0
        self.reserved = self.reserved_peak = 0
        self.retries = 0
        self.live: dict[int, int] = {}
        """What is in use: sizes by address."""
        self.segments: dict[int, int] = {}
        """What is taken from the driver: sizes by address."""
        self._small, self._large = _Pool(_GRAIN), _Pool(_SMALL + _GRAIN)
        self._next_address = 0

    def alloc(self, size: int) -> int:
        """Memory for so many bytes. Raises OutOfMemory."""
        if size <= 0:
            return _NOTHING
        size = rounded(size)
        pool = self._small if size <= _SMALL else self._large
        address, found = pool.take(size) or self._segment_for(size)
        if found - size >= pool.least_rest:
            pool.put(address + size, found - size)
            found = size
        self.live[address] = found
        self.allocated += found
        self.allocated_peak = max(self.allocated_peak, self.allocated)
        return address

    def free(self, handle: int) -> None:
        """Into the cache, together with what is free on both sides of it."""
        if handle == _NOTHING:
            return
        size = self.live.pop(handle)
        self.allocated -= size
        (self._small if size <= _SMALL else self._large).put_merged(handle, size)

    def empty_cache(self) -> None:
        """Gives back the segments of which nothing is in use."""
        for pool in (self._small, self._large):
            for address, size in sorted(pool.size_at.items()):
                if self.segments.get(address) == size:
                    pool.remove(address, size)
                    del self.segments[address]
                    self.reserved -= size

    def _segment_for(self, size: int) -> tuple[int, int]:
        segment = -(-size // PAGE) * PAGE
        if size <= _SMALL:
            segment = _SMALL_SEGMENT
        elif size < _SHARED_BELOW:
            segment = _SHARED_SEGMENT
        if self._missing(segment) > 0:
            self.empty_cache()
            self.retries += 1
            if self._missing(segment) > 0:
                raise OutOfMemory(segment, self._missing(segment))
        address = self._next_address
        self._next_address += segment + _GRAIN  # so that segments never touch, and never merge
        self.segments[address] = segment
        self.reserved += segment
        self.reserved_peak = max(self.reserved_peak, self.reserved)
        return address, segment

    def _missing(self, segment: int) -> int:
        return 0 if self.cap is None else self.reserved + segment - self.cap


class _Pool:
    """Free blocks, in the order in which they are looked for: by size, then by address."""

    def __init__(self, least_rest: int) -> None:
        self.least_rest = least_rest
        """What a cut leaves is at least so large, or there is no cut."""
        self._blocks: list[tuple[int, int]] = []
        self.size_at: dict[int, int] = {}
        self._start_of_end: dict[int, int] = {}

    def take(self, size: int) -> tuple[int, int] | None:
        """Address and size of the smallest block that suffices, which may be far larger."""
        position = bisect_left(self._blocks, (size, -1))
        if position == len(self._blocks):
            return None
        found, address = self._blocks.pop(position)
        del self.size_at[address], self._start_of_end[address + found]
        return address, found

    def put(self, address: int, size: int) -> None:
        insort(self._blocks, (size, address))
        self.size_at[address] = size
        self._start_of_end[address + size] = address

    def put_merged(self, address: int, size: int) -> None:
        before = self._start_of_end.get(address)
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
        del self.size_at[address], self._start_of_end[address + size]


def rounded(size: int) -> int:
    return -(-size // _GRAIN) * _GRAIN


AllocationTrace = tuple[int, ...]
"""What one process allocated and released on one stream, in order. An event from 0 up is an
allocation of so many bytes, the first has the number 0; `~n` is the release of number n."""


@dataclass(frozen=True)
class ReplayResult:
    failed_at: int | None
    """The event, by its place in the trace."""
    missing: int
    """Bytes that there were not for it."""
    allocated_peak: int
    reserved_peak: int
    retries: int
    skipped: int
    """Optional allocations that were gone without."""

    @property
    def fits(self) -> bool:
        return self.failed_at is None


def replay(
    trace: AllocationTrace,
    cap: int | None = None,
    optional: frozenset[int] = frozenset(),
    part: float = 0.0,
) -> ReplayResult:
    """Runs a trace in so much memory. What is optional is gone without where there is none, or
    with a part of it that has to be there."""
    allocator = CachingAllocator(cap)
    handles: list[int] = []
    skipped = 0
    failed_at, missing = None, 0
    for position, event in enumerate(trace):
        if event < 0:
            allocator.free(handles[~event])
            continue
        try:
            handles.append(allocator.alloc(event))
        except OutOfMemory as error:
            failed_at, missing = position, error.missing
            if len(handles) not in optional:
                break
            try:
                handles.append(allocator.alloc(int(part * event)) if part else _NOTHING)
            except OutOfMemory:
                break
            skipped += 1
            failed_at, missing = None, 0
    return ReplayResult(
        failed_at,
        missing,
        allocator.allocated_peak,
        allocator.reserved_peak,
        allocator.retries,
        skipped,
    )


def allocated_peak(trace: AllocationTrace, without: frozenset[int] = frozenset()) -> int:
    """Bytes in use at once: what no allocator can do with less of."""
    sizes: list[int] = []
    now = peak = 0
    for event in trace:
        if event < 0:
            now -= sizes[~event]
            continue
        size = 0 if len(sizes) in without else rounded(event)
        sizes.append(size)
        now += size
        peak = max(peak, now)
    return peak


def scratch(trace: AllocationTrace, least: int = MiB) -> frozenset[int]:
    """The allocations that are released by the very next event: workspace of kernels. Where there
    is none, cuDNN takes an algorithm that needs less, so these are optional."""
    made, found = 0, set()
    for event, following in pairwise(trace):
        if event >= 0:
            if event >= least and following == ~made:
                found.add(made)
            made += 1
    return frozenset(found)


@dataclass(frozen=True)
class Growth:
    """The trace of any batch, from those of two: each allocation on the line of its two sizes."""

    batch: int
    """The larger one, whose events these are."""
    events: AllocationTrace
    per_sample: tuple[float, ...]
    """By how much each allocation grows with a sample, by its number."""

    def at(self, batch: int) -> AllocationTrace:
        more = batch - self.batch
        made, events = 0, []
        for event in self.events:
            if event >= 0:
                events.append(max(0, round(event + more * self.per_sample[made])))
                made += 1
            else:
                events.append(event)
        return tuple(events)


_TINY = (0, 4 * KiB, 64 * KiB, MiB)


@dataclass(frozen=True)
class _Outline:
    """A trace without workspace and tiny tensors, and where the workspace was."""

    shape: tuple[int | None, ...]
    """None for an allocation, `~n` for the release of the n-th of them."""
    numbers: tuple[int, ...]
    """Of these allocations, in the whole trace."""
    sizes: tuple[int, ...]
    scratch: dict[int, list[tuple[int, int]]]
    """Number and size of workspace, by the place in the shape before which it comes."""

    @classmethod
    def of(cls, trace: AllocationTrace, tiny: int) -> _Outline:
        shape: list[int | None] = []
        numbers: dict[int, int] = {}
        sizes: list[int] = []
        scratch: dict[int, list[tuple[int, int]]] = {}
        made = -1
        for event, following in pairwise((*trace, 0)):
            if event >= 0:
                made += 1
                if following == ~made:
                    scratch.setdefault(len(shape), []).append((made, event))
                elif event >= tiny:
                    numbers[made] = len(numbers)
                    sizes.append(event)
                    shape.append(None)
            elif ~event in numbers:
                shape.append(~numbers[~event])
        return cls(tuple(shape), tuple(numbers), tuple(sizes), scratch)


def growth(
    small: AllocationTrace, small_batch: int, large: AllocationTrace, large_batch: int
) -> Growth | None:
    """How a trace grows with the batch. None where the two do not do the same in the same order.

    Segments are rounded coarsely, so that what two batches hold says little of a third; their
    allocations do. Workspace comes and goes with the algorithm that a batch gets, and some tiny
    tensors do too: these are left out until the rest is alike. What has no partner grows with the
    batch if it is workspace, and else not at all.
    """
    if small_batch == large_batch:
        return None
    outlines = ((_Outline.of(small, tiny), _Outline.of(large, tiny)) for tiny in _TINY)
    alike = next(((one, other) for one, other in outlines if one.shape == other.shape), None)
    if alike is None:
        return None
    one, other = alike
    more = large_batch - small_batch
    slopes = [0.0] * sum(event >= 0 for event in large)
    for number, before, after in zip(other.numbers, one.sizes, other.sizes, strict=True):
        slopes[number] = (after - before) / more
    for place, found in other.scratch.items():
        partners = one.scratch.get(place, [])
        is_matched = len(partners) == len(found)
        for n, (number, size) in enumerate(found):
            slopes[number] = (size - partners[n][1]) / more if is_matched else size / large_batch
    return Growth(large_batch, large, tuple(slopes))
