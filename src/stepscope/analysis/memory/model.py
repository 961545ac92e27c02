"""Memory model: how much memory a batch needs, and which batch fits a memory limit.

A batch is described by two amounts of GPU memory. Its *minimum* memory, at which the allocator
has to free its cache and kernels run without workspace, bounds the max batch size. Its
*retry-free* memory, at which neither happens, bounds the recommended batch size. Both come from
replaying an allocation trace (`caching_allocator`) and grow linearly with the batch: a fixed part
(weights, gradients, optimizer state) plus a part per sample (inputs, activations, workspace).
"""

from __future__ import annotations

import statistics
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from stepscope.analysis.memory import bracket
from stepscope.analysis.memory.caching_allocator import (
    ROUND_LARGE,
    AllocationTrace,
    KiB,
    TraceGrowth,
    allocated_peak,
    replay,
    workspaces,
)

NO_LIMIT = 1 << 53
"""A batch size that stands for "memory sets no limit". Floats are exact up to this number."""


@dataclass(frozen=True)
class Parts:
    """What the memory of a batch consists of."""

    weights_bytes: int = 0  # parameters and buffers
    gradients_bytes: int = 0  # gradients of all parameters
    optimizer_bytes: int = 0  # optimizer state
    inputs_bytes: int = 0  # one batch as the model receives it
    activations_bytes: int = 0  # kept by the forward pass for the backward pass
    context_bytes: int = 0  # CUDA context; on the host: interpreter, libraries and dataset

    @property
    def state_bytes(self) -> int:
        """Memory that does not depend on the batch: weights, gradients and optimizer state."""
        return self.weights_bytes + self.gradients_bytes + self.optimizer_bytes


# Linear growth with the batch


@dataclass(frozen=True)
class MemoryLine:
    """Memory as a linear function of the batch size."""

    fixed_bytes: float  # independent of the batch
    per_sample_bytes: float  # for each sample of the batch

    def at(self, batch: int) -> float:
        return self.fixed_bytes + self.per_sample_bytes * batch

    def max_batch(self, limit: float) -> int | None:
        """Return the largest batch within `limit` bytes: 0 if none fits, None if all do."""
        if self.at(1) > limit:
            return 0
        if (limit - self.fixed_bytes) >= self.per_sample_bytes * NO_LIMIT:
            return None
        about = int((limit - self.fixed_bytes) / self.per_sample_bytes)
        return about + 1 if self.at(about + 1) <= limit else about - (self.at(about) > limit)

    @classmethod
    def through(cls, points: Sequence[tuple[int, float]], fixed: float | None = None) -> MemoryLine:
        """Fit a line to (batch, bytes) points by least squares.

        `fixed` is the memory of batch 0 (weights, gradients, optimizer state). It is used when the
        points do not determine it: they all have the same batch, or the line would start below 0.
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


def batches_by_lines(minimum: MemoryLine, retry_free: MemoryLine, limit: int) -> tuple[int, int]:
    """Return the max batch and the largest retry-free one; NO_LIMIT if memory does not grow."""
    max_batch, max_retry_free = minimum.max_batch(limit), retry_free.max_batch(limit)
    upper = NO_LIMIT if max_batch is None else max_batch
    return upper, upper if max_retry_free is None else min(max_retry_free, upper)


# Memory of a trace

_MINIMUM_TOLERANCE = 0.002
_COARSE_STEPS = 8
"""Limits tried between the retry-free memory and the lower bound before bisection starts."""


def retry_free_bytes(trace: AllocationTrace) -> int:
    """Return the memory at which a trace runs with all its workspace and without a retry."""
    return replay(trace).reserved_peak


def minimum_bytes(trace: AllocationTrace, optional: frozenset[int] = frozenset()) -> int:
    """Return the memory from which on a trace fits, to 0.2%. A replay in it has passed.

    A trace that fits a limit may fail in a slightly larger one, because other blocks are split.
    Limits are therefore tried from above, where the trace certainly fits, down to the first
    failure. A failure between two limits that fit can still be missed.
    """
    lowest = -(-allocated_peak(trace, optional) // ROUND_LARGE)
    passes, fails = retry_free_bytes(trace) // ROUND_LARGE, lowest - 1
    span = passes - lowest
    steps = {lowest + span * step // _COARSE_STEPS for step in range(_COARSE_STEPS)}
    for pages in sorted(steps, reverse=True):
        if not replay(trace, pages * ROUND_LARGE, optional).fits:
            fails = pages
            break
        passes = pages
    while passes - fails > max(1, int(passes * _MINIMUM_TOLERANCE)):
        middle = (passes + fails) // 2
        if replay(trace, middle * ROUND_LARGE, optional).fits:
            passes = middle
        else:
            fails = middle
    return passes * ROUND_LARGE


def batches_by_replay(
    growth: TraceGrowth,
    limit: int,
    guess: tuple[float, float],
    upper: int | None = None,
    thorough: bool = True,
    required_workspace: float = 0.0,
) -> tuple[int, int]:
    """Return the max batch and the largest retry-free one within `limit`, by replays near a guess.

    `thorough` also looks for larger batches that pass beyond the first failure.
    `required_workspace` is the share of the workspace that must fit.
    """
    extra = max(_MIN_EXTRA_TRIES, min(_MAX_EXTRA_TRIES, _REPLAYED_EVENTS // len(growth.events)))
    extra = extra if thorough else 0

    def passes(batch: int) -> bool:
        trace = growth.at(batch)
        return replay(trace, limit, workspaces(trace), required_workspace).fits

    def is_retry_free(batch: int) -> bool:
        return retry_free_bytes(growth.at(batch)) <= limit

    max_batch = _last_edge(passes, guess[0], upper, extra)
    return max_batch, min(max_batch, _last_edge(is_retry_free, guess[1], max_batch, extra))


_MIN_EXTRA_TRIES, _MAX_EXTRA_TRIES = 4, 16
_REPLAYED_EVENTS = 150_000
"""Events to replay beyond the first edge, about a second: a long trace gets fewer tries."""
_EXTRA_TRY_SPACING = 0.015
"""Distance between extra tries, as a share of the batch."""


def _last_edge(passes: Callable[[int], bool], guess: float, upper: int | None, extra: int) -> int:
    """Return the largest batch that passes.

    Beyond the first failure, larger batches may pass again, so `extra` more are tried.
    """
    edge = _first_edge(passes, max(1.0, guess), upper)
    stride = max(1, round(edge * _EXTRA_TRY_SPACING))
    if upper is not None and extra:
        stride = max(stride, (upper - edge) // extra)
    further = [edge + stride * n for n in range(extra, 0, -1)]
    higher = next((b for b in further if (upper is None or b <= upper) and passes(b)), None)
    return edge if higher is None else _first_edge(passes, higher, upper)


def _first_edge(passes: Callable[[int], bool], guess: float, upper: int | None) -> int:
    tried: dict[int, bool] = {}
    while batches := bracket.next_batches(tried, guess, upper=upper):
        tried |= {batch: passes(batch) for batch in batches}
    return bracket.edges(tried)[0]


# Tripathi 2019: a line through two small batches, and the same from the sizes of the layers


def linear_2019(
    small: int, small_bytes: float, large: int, large_bytes: float, limit: float, reserve: float = 0
) -> tuple[float, float, int | None]:
    """Return bytes per sample, fixed bytes and the max batch (equations 4.1 to 4.9).

    The batch is None if the larger batch did not need more memory: the method has no answer then.
    """
    per_sample = (large_bytes - small_bytes) / (large - small)
    fixed = small_bytes - small * per_sample
    if per_sample <= 0:
        return per_sample, fixed, None
    return per_sample, fixed, max(0, int((limit - reserve - fixed) // per_sample))


def layers_2019(
    layers: Sequence[tuple[int, int]], input_bytes: int, output_bytes: int, limit: int
) -> int:
    """Solve equation 4.1 for the batch.

    `layers` are (parameter bytes, output bytes per sample). An output counts twice: as a feature
    map and as its gradient.
    """
    per_sample = input_bytes + output_bytes + 2 * sum(output for _, output in layers)
    return max(0, (limit - sum(parameters for parameters, _ in layers)) // per_sample)


# Host memory of the data loader


def host_batches_in_flight(workers: int, prefetch: int, pinned: bool) -> int:
    """Return the most batches that exist on the host at once while PyTorch's DataLoader runs.

    The variable of the training loop holds one batch until the next one arrives. The loader sends
    out a new index for each batch that it returns, so workers × prefetch batches are queued or in
    progress. A batch in progress exists twice, as single samples and as the batch that they are
    collated into: one more per worker. Pinning holds one more during the copy; without workers it
    copies after the samples were freed.
    """
    if workers <= 0:
        return 3
    return workers * prefetch + workers + 1 + pinned


def max_host_batch(
    sample_bytes: int,
    workers: int,
    prefetch: int,
    pinned: bool,
    memory_free: int,
    shm_free: int | None,
) -> tuple[int, str]:
    """Return the max batch for host memory and its limit: "host memory" or "/dev/shm".

    Pinned memory is allocated in powers of two: a batch of 65 MiB takes 128 MiB. /dev/shm holds
    only the batches of workers, until the loop releases them or they are copied to pinned memory.
    It is part of host memory.
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


def max_host_batch_2019(dram: int, workers: int, sample_bytes: int) -> int:
    """Solve equation 4.10, without prefetch and copies: the largest integer < DRAM / (W·I)."""
    per_sample = max(workers, 1) * sample_bytes
    return max(0, -(-dram // per_sample) - 1)


# What-if estimates: computed, never run


_BF16_SHARE = 0.55
"""Share of the activations that remains with bf16. Convolutions and matrix products keep half;
autocast leaves some tensors (inputs of norms and losses, softmax) in fp32."""

OPTIMIZER_STATE = {"sgd": 0, "momentum": 1, "adam": 2, "adamw": 2}
"""Bytes of state for each byte of parameters."""


def estimate_bf16(line: MemoryLine, parts: Parts, batch: int) -> MemoryLine:
    """Estimate the memory with autocast to bf16.

    Weights, gradients, optimizer state and inputs stay fp32, weights and inputs get a copy of half
    their size, and the rest of a sample shrinks.
    """
    inputs = min(line.per_sample_bytes, parts.inputs_bytes / max(1, batch))
    rest = line.per_sample_bytes - inputs
    return MemoryLine(line.fixed_bytes + parts.weights_bytes / 2, 1.5 * inputs + _BF16_SHARE * rest)


def estimate_checkpointing(line: MemoryLine, parts: Parts, batch: int, layers: int) -> MemoryLine:
    """Estimate the memory with √layers gradient checkpoints.

    The activations at the checkpoints are kept; those of one segment between two checkpoints, about
    as many, are recomputed.
    """
    kept = min(1.0, 2 / max(1, layers) ** 0.5)
    inputs = min(line.per_sample_bytes, parts.inputs_bytes / max(1, batch))
    activations = min(line.per_sample_bytes - inputs, parts.activations_bytes / max(1, batch))
    return MemoryLine(line.fixed_bytes, line.per_sample_bytes - activations * (1 - kept))


def estimate_optimizer(line: MemoryLine, parts: Parts, optimizer: str) -> MemoryLine:
    """Estimate the memory with the state of another optimizer, for parameters with gradients."""
    state = OPTIMIZER_STATE[optimizer] * (parts.gradients_bytes or parts.weights_bytes)
    fixed = max(0.0, line.fixed_bytes - parts.optimizer_bytes + state)
    return MemoryLine(fixed, line.per_sample_bytes)


# Memory leaks

_MIN_LEAK_BYTES = 64 * KiB
"""Smaller growth per step is not a leak."""
_MAX_LEAK_RATIO = 2.0
"""Largest ratio between the growth of two steps: a leak grows evenly."""


def leak_per_step(allocated: Sequence[int]) -> float | None:
    """Return the bytes by which memory grows after each step, or None if it does not grow evenly.

    `allocated` are the bytes in use after each step.
    """
    growth = [later - sooner for sooner, later in pairwise(allocated)]
    if len(growth) < 2 or min(growth) < _MIN_LEAK_BYTES:
        return None
    if max(growth) > _MAX_LEAK_RATIO * min(growth):
        return None
    return statistics.median(growth)
