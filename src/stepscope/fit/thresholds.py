"""The thresholds of the batch size search, each with its unit and the reason for its value."""

from __future__ import annotations

# Both searches

REQUIRED_PASSES = 3
"""Fresh processes in which an answer must pass: on the host always, on a GPU with --verify."""

# GPU search: the memory limit is sharp and a probe takes seconds

ASSUMED_CONTEXT_BYTES = 1 << 30
"""Size of a CUDA context until a probe has measured it."""
MAX_PARALLEL_PROBES = 6
"""With more probes at once, creating their contexts takes longer than the parallelism saves."""
PARALLEL_RESERVE_SHARE = 0.02
"""Share of the free GPU memory that stays unused when several probes run at once."""
WIDE_CAP_FACTOR, WIDE_CAP_FREE_SHARE = 3, 0.8
"""A probe beyond the limit may use this multiple of the limit and this share of the free memory."""
WIDE_CAP_MIN_FREE_FACTOR = 1.5
"""Multiple of the limit that must be free for such a probe."""
FIRST_BATCHES = (2, 16, 64)
LARGER_BATCHES = (512, 4096, 4096 << 4, 4096 << 8, 4096 << 12)
"""Tried when the first batches say little, because their memory is mostly weights."""
MAX_EXTRAPOLATION = 50
"""Ratio up to which a batch can be predicted from the memory of the largest one tried."""
TRACED_LIMIT_SHARES = (0.4, 0.8)
"""Shares of the limit that the two traced batches are expected to use."""
GPU_LEAK_SHARE = 1e-4
"""Share of the limit by which memory must grow per step to count as a leak."""
RETRY_FREE_TOLERANCE = 0.015
"""Share of the batch to which the retry-free edge is located: throughput is flat there."""
REQUIRED_WORKSPACE_SHARE = 0.25
"""Share of the workspace to require after a prediction without workspace failed: cuDNN's fallback
algorithms need some too."""
RETRY_FREE_SEARCH_STEP, RETRY_FREE_SEARCH_FACTOR = 0.01, 1.06
"""Step and upper end, relative to the retry-free edge, of the search for larger retry-free
batches."""
GPU_FULL_SPEED_SHARE = 0.985
"""Share of the best throughput that the recommended batch must reach: 98%, plus the difference
between two measurements of the same batch."""
COMPARED_SHARES = (0.6, 0.85, 0.95)
"""Shares of the retry-free edge whose throughput is compared with that of the edge."""
SPEED_EDGE_TOLERANCE = 0.025
"""Largest distance between the recommended batch and the next one that is too slow, as a share."""
LONG_PROBE_STEPS = 10
"""Steps before and after the evaluation in a probe that confirms an answer."""
MAX_ROUNDS = 25
STATE_DOMINANT_SHARE = 0.5
"""Share of the peak above which weights, gradients and optimizer state are what to reduce."""
CHECKPOINTING_MIN_LAYERS = 5
"""With fewer layers there is nothing to recompute between checkpoints."""
UNREALISTIC_BATCH = 1 << 24
"""Where memory allows a batch of this size, memory is not the limit."""
COMMON_GPU_MEMORY_BYTES = tuple(size << 30 for size in (11, 16, 24, 40, 80))

# Host search: processes vary, and a probe is a trial of many seconds

HOST_PROBE_STEPS, HOST_FIRST_PROBE_STEPS = 3, 7
"""The first probe is small and needs more steps, so that a leak becomes visible."""
HOST_SETTLING_STEPS = 2
"""First steps that the leak check ignores: the optimizer and libraries allocate in them."""
HOST_LEAK_SHARE = 0.0025
"""Share of the limit by which memory must grow per step to count as a leak."""
HOST_FULL_SPEED_SHARE = 0.85
"""Share of a faster batch's throughput that still counts as full speed: on a CPU, identical
processes differ by about 10%."""
NEAR_MAX_SHARE = 0.9
"""Batches above this share of the max batch define its typical throughput."""
MIN_FASTER_PROBES = 2
"""Probes that must agree that smaller batches are faster: a single one may be noise."""
SHORTFALL_FREE_SHARE, SHORTFALL_MIN_FACTOR = 0.9, 1.1
"""A trial that measures the shortfall gets this share of the free memory; it runs only if that is
at least this multiple of the limit."""
DATA_DOMINANT_SHARE = 0.25
"""Share of the limit above which the dataset is what to reduce."""
PEAK_TOLERANCE = 0.005
"""Relative difference below which the peaks of identical processes count as equal."""
FIRST_HOST_BATCH = 8
NO_LIMIT_BATCH = 1 << 16
"""Where memory hardly grows with the batch, no larger batch than this is tried."""
MAX_HOST_PROBES = 18
MANY_HOST_PROBES = 9
"""Number of probes after which a coarser answer is accepted."""
HOST_TOLERANCE, HOST_TOLERANCE_ONCE_PASSED, HOST_TOLERANCE_AFTER_MANY = 0.015, 0.02, 0.05
"""Relative difference below which two batches are equivalent: normally, once one of them passed in
enough processes, and after many probes."""
BELOW_FAILURE_SHARE = 0.98
"""No answer is above this share of the smallest batch that failed."""
ANSWER_SHARE = 0.95
"""The answer is at least this share of the largest safe batch, so the next one should fail."""
PROOF_TOLERANCE = 1.01
"""A failure up to this multiple of that next batch still confirms the answer."""
MAX_STEP_FACTOR, MAX_FIRST_STEP_FACTOR = 8, 128
"""Ratio of the next batch to the largest one that passed, later and for the second probe. An edge
beyond that ratio means that memory sets no limit."""
SECOND_PROBE_SHARE = 0.5
"""Share of the memory that the second probe should use."""
CLEARLY_BELOW_SHARE = 0.8
"""A batch that uses less than this share of the limit passes in every process."""
FITTED_SHARE = 0.4
"""Only batches above this share of the largest one are fitted with a line: malloc treats tensors of
different sizes differently, so small batches follow another line."""
HIDDEN_PEAK_BYTES = 4 << 20
"""This close to the limit, the kernel has reclaimed what it could, so the peak says nothing."""
MIN_EXCESS_SHARE = 0.01
"""Share of the memory by which a batch that failed exceeds the limit at least: a typical value."""
PRIOR_NOISE, PRIOR_NOISE_WEIGHT = 0.016, 2
"""Noise between identical processes before any was measured, as a share of the batch, and the
number of observations that it counts as."""
MARGIN_DEVIATIONS = 2.0
"""Standard deviations below the edge at which nearly all processes pass."""
MIN_MARGIN, MAX_MARGIN = 0.02, 0.05
"""Bounds of that margin, as a share of the batch."""
HOST_FREE_SHARE = 0.95
"""Share of the free host memory to use without --memory: other processes need some too."""
