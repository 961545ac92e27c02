"""How much memory a batch takes, and which batch fits into how much of it: device and host.

Two amounts matter for a batch. Its *minimum*, where the allocator gives back its cache and kernels
go without workspace, bounds the max batch size. Its *comfortable* amount, without either, bounds
the recommended one. Both come from replays of a trace (`caching_allocator`), and grow with the
batch as a line.
"""

from __future__ import annotations

import statistics
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from stepscope.analysis.memory import bracket
from stepscope.analysis.memory.caching_allocator import (
    PAGE,
    AllocationTrace,
    Growth,
    KiB,
    allocated_peak,
    replay,
    scratch,
)

NO_LIMIT = 1 << 53
"""A batch beyond all others, where memory sets no limit. Up to it, floats count exactly."""


@dataclass(frozen=True)
class Parts:
    """What the memory of a batch is made of, in bytes."""

    weights: int = 0
    """Parameters and buffers."""
    gradients: int = 0
    optimizer: int = 0
    inputs: int = 0
    """One batch, as the model gets it."""
    activations: int = 0
    """What the forward pass keeps for the backward pass."""
    outside: int = 0
    """What the process holds beside the allocator: the context, libraries."""

    @property
    def state(self) -> int:
        """What any batch takes."""
        return self.weights + self.gradients + self.optimizer


# How memory grows with the batch


@dataclass(frozen=True)
class MemoryLine:
    """Bytes of a batch: some for any, and some for each of its samples."""

    fixed: float
    per_sample: float

    def at(self, batch: int) -> float:
        return self.fixed + self.per_sample * batch

    def largest(self, limit: float) -> int | None:
        """The largest batch within so many bytes; 0 where not even 1 is, None where all are."""
        if self.at(1) > limit:
            return 0
        if (limit - self.fixed) >= self.per_sample * NO_LIMIT:
            return None
        about = int((limit - self.fixed) / self.per_sample)
        return about + 1 if self.at(about + 1) <= limit else about - (self.at(about) > limit)

    @classmethod
    def through(cls, points: Sequence[tuple[int, float]], fixed: float | None = None) -> MemoryLine:
        """The line nearest to what batches took (batch, bytes), by least squares.

        `fixed` is what batch 0 would need (weights, gradients, optimizer), for points that do not
        tell it: all of the same batch, or so that the line would begin below nothing.
        """
        batches, sizes = zip(*points, strict=True)
        if len(set(batches)) > 1:
            slope, start = statistics.linear_regression(batches, sizes)
            if slope <= 0:
                return cls(max(0.0, *sizes), 0.0)
            if start >= 0:
                return cls(start, slope)
        start = max(0.0, fixed or 0.0)
        squares = sum(batch * batch for batch, _ in points)
        if not squares:
            return cls(max(start, *sizes), 0.0)
        slope = sum(batch * (size - start) for batch, size in points) / squares
        return cls(start, max(0.0, slope))


def batches_on_lines(minimum: MemoryLine, comfortable: MemoryLine, limit: int) -> tuple[int, int]:
    """The max batch and the one without a retry; NO_LIMIT where the minimum never grows."""
    largest, smooth = minimum.largest(limit), comfortable.largest(limit)
    most = NO_LIMIT if largest is None else largest
    return most, most if smooth is None else min(smooth, most)


# How much a trace takes

_MINIMUM_WITHIN = 0.002
_LOOKS = 8
"""Limits tried from the comfortable amount downwards, before the last of them is refined."""


def comfortable_bytes(trace: AllocationTrace) -> int:
    """Bytes at which it runs without a retry, with all its workspace."""
    return replay(trace).reserved_peak


def minimum_bytes(trace: AllocationTrace, optional: frozenset[int] = frozenset()) -> int:
    """The least bytes, to 0.2 %, from which on it fits; a replay in as much has passed.

    A trace that fits into some memory may fail in a little more: other blocks get cut. So limits
    are tried from above, where it fits for certain, down to the first that fails. Between two that
    fit, such a hole can still be missed.
    """
    least = -(-allocated_peak(trace, optional) // PAGE)
    passes, fails = comfortable_bytes(trace) // PAGE, least - 1
    span = passes - least
    for pages in sorted({least + span * step // _LOOKS for step in range(_LOOKS)}, reverse=True):
        if not replay(trace, pages * PAGE, optional).fits:
            fails = pages
            break
        passes = pages
    while passes - fails > max(1, int(passes * _MINIMUM_WITHIN)):
        middle = (passes + fails) // 2
        if replay(trace, middle * PAGE, optional).fits:
            passes = middle
        else:
            fails = middle
    return passes * PAGE


def batches_by_replay(
    grows: Growth,
    limit: int,
    guess: tuple[float, float],
    most: int | None = None,
    thorough: bool = True,
    part: float = 0.0,
) -> tuple[int, int]:
    """The largest batch and the smooth one in so much memory, each by replays near a guess.

    Smooth is what needs no retry: then nothing is ever gone without. `thorough` looks for larger
    ones that pass again beyond the first that does not; `part` of workspace has to be there.
    """
    looks = max(_FEWEST_LOOKS, min(_MOST_LOOKS, _REPLAYED // len(grows.events)))
    looks = looks if thorough else 0

    def passes(batch: int) -> bool:
        trace = grows.at(batch)
        return replay(trace, limit, scratch(trace), part).fits

    def is_smooth(batch: int) -> bool:
        return comfortable_bytes(grows.at(batch)) <= limit

    largest = _last_edge(passes, guess[0], most, looks)
    return largest, min(largest, _last_edge(is_smooth, guess[1], largest, looks))


_FEWEST_LOOKS, _MOST_LOOKS = 4, 16
_REPLAYED = 150_000
"""Events that are worth a second: a long trace is looked at less often."""
_APART = 0.015


def _last_edge(passes: Callable[[int], bool], guess: float, most: int | None, looks: int) -> int:
    """The largest batch that passes. Where one fails, larger ones may pass again, so that from the
    first edge on more are looked at, some per cent apart."""
    edge = _edge_of(passes, max(1.0, guess), most)
    stride = max(1, round(edge * _APART))
    if most is not None and looks:
        stride = max(stride, (most - edge) // looks)
    further = [edge + stride * n for n in range(looks, 0, -1)]
    higher = next((b for b in further if (most is None or b <= most) and passes(b)), None)
    return edge if higher is None else _edge_of(passes, higher, most)


def _edge_of(passes: Callable[[int], bool], guess: float, most: int | None) -> int:
    tried: dict[int, bool] = {}
    while wanted := bracket.next_batches(tried, guess, most=most):
        tried |= {batch: passes(batch) for batch in wanted}
    return bracket.edges(tried)[0]


# Tripathi 2019: the line through two small batches, and the same from the layers


def linear_2019(
    small: int, small_bytes: float, large: int, large_bytes: float, limit: float, reserve: float = 0
) -> tuple[float, float, int | None]:
    """Bytes per sample, fixed bytes, and the largest batch (equations 4.1 to 4.9).

    The batch is None where the larger one took no more memory: the method has no answer then.
    """
    per_sample = (large_bytes - small_bytes) / (large - small)
    fixed = small_bytes - small * per_sample
    if per_sample <= 0:
        return per_sample, fixed, None
    return per_sample, fixed, max(0, int((limit - reserve - fixed) // per_sample))


def layers_2019(
    layers: Sequence[tuple[int, int]], input_bytes: int, output_bytes: int, limit: int
) -> int:
    """Equation 4.1 solved for the batch: each layer's (parameter bytes, output bytes per sample),
    the output twice, as a feature map and as its gradient."""
    per_sample = input_bytes + output_bytes + 2 * sum(output for _, output in layers)
    return max(0, (limit - sum(parameters for parameters, _ in layers)) // per_sample)


# The host's side


def host_batches_in_flight(workers: int, prefetch: int, pinned: bool) -> int:
    """Batches that exist on the host at once, at most, while PyTorch's DataLoader runs.

    The loop's variable holds a batch until the next one is there. Behind it, an index is sent out
    whenever a batch is handed over, so that workers × prefetch are queued or being made. And one
    that is being made exists twice, as single samples and as the batch they are copied into: one
    more for each worker. Pinning holds one more while it copies; without workers it does so when
    the samples are gone.
    """
    if workers <= 0:
        return 3
    return workers * prefetch + workers + 1 + pinned


def largest_host_batch(
    sample_bytes: int,
    workers: int,
    prefetch: int,
    pinned: bool,
    memory_free: int,
    shm_free: int | None,
) -> tuple[int, str]:
    """The largest batch that the host bears, and what bounds it: "host memory" or "/dev/shm".

    Pinned memory is handed out in powers of two: a batch of 65 MiB takes 128. /dev/shm has the
    batches of workers only, until the loop lets go of them or they are copied to pinned memory. It
    is part of host memory.
    """
    if sample_bytes <= 0:
        return NO_LIMIT, "host memory"
    in_flight = host_batches_in_flight(workers, prefetch, pinned)
    copies = (workers * prefetch + 1 if workers > 0 else 2) if pinned else 0

    def host_bytes(batch: int) -> int:
        size = batch * sample_bytes
        power_of_two = 1 << max(0, size - 1).bit_length() if size else 0
        return (in_flight - copies) * size + copies * power_of_two

    candidates = range(max(0, memory_free // (in_flight * sample_bytes)) + 1)
    by_memory = max(0, bisect_right(candidates, memory_free, key=host_bytes) - 1)
    if workers <= 0 or shm_free is None:
        return by_memory, "host memory"
    by_shm = max(0, shm_free) // ((workers * prefetch + (not pinned)) * sample_bytes)
    return min((by_memory, "host memory"), (by_shm, "/dev/shm"))


def largest_host_batch_2019(dram: int, workers: int, sample_bytes: int) -> int:
    """Equation 4.10: the largest integer below DRAM / (W·I), without prefetch and copies."""
    per_sample = max(workers, 1) * sample_bytes
    return max(0, -(-dram // per_sample) - 1)


# What changes would give: estimates, nothing of them is run


_BF16 = 0.55
"""Of activations: convolutions and products keep half, while autocast leaves some (norms' and
losses' inputs, softmax) in fp32."""

OPTIMIZER_STATE = {"sgd": 0, "momentum": 1, "adam": 2, "adamw": 2}
"""Bytes of state for each byte of parameters."""


def what_bf16(line: MemoryLine, parts: Parts, batch: int) -> MemoryLine:
    """With autocast to bf16: weights, gradients, optimizer and inputs stay fp32, weights and inputs
    get a copy of half their size, and the rest of a sample shrinks."""
    inputs = min(line.per_sample, parts.inputs / max(1, batch))
    rest = line.per_sample - inputs
    return MemoryLine(line.fixed + parts.weights / 2, 1.5 * inputs + _BF16 * rest)


def what_checkpointing(line: MemoryLine, parts: Parts, batch: int, layers: int) -> MemoryLine:
    """With √layers checkpoints: their activations are kept, and those of one stretch between two
    of them come and go, as many again."""
    kept = min(1.0, 2 / max(1, layers) ** 0.5)
    inputs = min(line.per_sample, parts.inputs / max(1, batch))
    activations = min(line.per_sample - inputs, parts.activations / max(1, batch))
    return MemoryLine(line.fixed, line.per_sample - activations * (1 - kept))


def what_optimizer(line: MemoryLine, parts: Parts, optimizer: str) -> MemoryLine:
    """With another optimizer's state, of the parameters that have gradients."""
    state = OPTIMIZER_STATE[optimizer] * (parts.gradients or parts.weights)
    return MemoryLine(max(0.0, line.fixed - parts.optimizer + state), line.per_sample)


# Memory that does not come back

_LEAK_LEAST = 64 * KiB
_LEAK_UNLIKE = 2.0


def leak(kept: Sequence[int]) -> float | None:
    """Bytes per step by which memory in use after each step grows, where it does so evenly."""
    grown = [later - sooner for sooner, later in pairwise(kept)]
    if len(grown) < 2 or min(grown) < _LEAK_LEAST or max(grown) > _LEAK_UNLIKE * min(grown):
        return None
    return statistics.median(grown)
