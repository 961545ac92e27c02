"""The numbers that decide in a search for a batch size, each with its reason."""

from __future__ import annotations

# Both searches

PASSES = 3
"""Fresh processes in which an answer has to pass: on the host always, on a GPU with --prove."""

# On a GPU: the edge is sharp, and a probe takes seconds

CONTEXT = 1 << 30
"""Bytes that a process takes beside the allocator, until one has told."""
MOST_LANES = 6
"""Probes at once: with more, starting their contexts takes longer than it saves."""
SPARED = 0.02
"""Of the device's free memory, where several probes share it."""
WIDE, SHARED = 3, 0.8
"""How many times the limit, and what part of what is free, a probe beyond the limit may take."""
CLEARLY_WIDER = 1.5
"""How many times the limit must be free for such a probe."""
SMALL = (2, 16, 64)
LARGER = (512, 4096, 4096 << 4, 4096 << 8, 4096 << 12)
"""Where the small ones tell little: their memory is that of the weights."""
TELLING = 50
"""How many times the largest that was tried a batch can be predicted from its memory."""
TRACED = (0.4, 0.8)
"""Which parts of the expected max batch are traced."""
GPU_LEAK = 1e-4
"""Bytes that stay after every step, as a part of the limit: less does not matter."""
FINE_SMOOTH = 0.015
"""How near the edge of the batches without a retry is to be known: throughput is flat there."""
NEEDED_WORKSPACE = 0.25
"""Of workspace, where a batch does not pass without: what cuDNN's other algorithms still want."""
ABOVE_SMOOTH, FURTHEST_ABOVE = 0.01, 1.06
"""How far apart, and how far above the smooth edge, other smooth batches are looked for."""
GPU_FULL_SPEED = 0.985
"""Of the best rate: a batch is to keep 98 %, and two measurements of one differ a little."""
RATED = (0.6, 0.85, 0.95)
"""Parts of the smooth edge whose rates are compared with its own."""
NEAR_SLOWER = 0.025
"""How far below the next that is too slow the recommended batch may stay."""
LASTING = 10
"""Steps before and after the end of an epoch, of a probe that is to prove something."""
MOST_ROUNDS = 25
MOSTLY_STATE = 0.5
"""Of the peak: above it, weights, gradients and optimizer are what to reduce."""
MANY_LAYERS = 4
"""With fewer, there is nothing between checkpoints to compute again."""
HUGE = 1 << 24
"""A batch that nobody trains: where memory would allow it, memory is not what limits."""
USUAL_CARDS = tuple(size << 30 for size in (11, 16, 24, 40, 80))

# On the host: processes differ, and a probe is a trial that takes many seconds

HOST_STEPS, FIRST_STEPS = 3, 7
"""The first batch is small, and a leak needs some steps to show."""
SETTLING_STEPS = 2
"""Of these, in which optimizer and libraries make what they keep."""
HOST_LEAK = 0.0025
"""Of the limit, per step: less may be anything."""
HOST_FULL_SPEED = 0.85
"""Of a faster one's rate: on a CPU, processes that do the same differ by some 10 %."""
NEAR_MAX = 0.9
"""Of the max batch: rates of these are the usual one."""
FASTER_PROBES = 2
"""Probes that have to say that smaller batches are faster: one may be disturbed, or lucky."""
PART_OF_FREE, CLEARLY_MORE = 0.9, 1.1
"""Of what is free, and of the limit: what a trial may take that is to tell how much is missing."""
MUCH_DATA = 0.25
"""Of the limit: a data set that takes more is what to reduce."""
SAME_PEAK = 0.005
"""Of a peak: processes that differ by less are alike."""
FIRST = 8
ENOUGH = 1 << 16
"""Batches beyond this are not tried where memory hardly grows with the batch."""
MOST_TRIALS = 18
MANY_TRIALS = 9
"""After so many, one takes what one has."""
NEAR, NEAR_ONCE_CERTAIN, NEAR_IN_THE_END = 0.015, 0.02, 0.05
"""Two batches that differ by less than this part are as good as each other."""
BELOW_FAILED = 0.98
"""Of the smallest that failed: above it, nothing is an answer."""
ABOVE = 0.95
"""The answer is to be at least this part of the largest safe batch: the first above should fail."""
TIGHT = 1.01
"""How far above that one a failure still proves the answer."""
FAR, FAR_AT_FIRST = 8, 128
"""How many times as large as what has passed the next may be; beyond, memory sets no limit."""
HALF = 0.5
"""Of the memory: where the second batch is tried."""
WELL_BELOW = 0.8
"""Of the limit: what holds less passes in any process, however they differ."""
UPPER = 0.4
"""A line goes through batches of at least this part of the largest: malloc treats tensors of
different sizes differently, so that small batches lie on another line."""
PRESSED = 4 << 20
"""So near to the limit, in bytes, the kernel has taken back what it could: peaks tell no more."""
FAILED_BY = 0.01
"""By which part of the memory one that failed was above the limit, at least: a usual excess."""
NOISE, NOISE_COUNTS = 0.016, 2
"""How much a process differs from the others, as part of the batch, before anything was seen of
it; and as how many observations that counts."""
NOISES_BELOW = 2.0
"""How many standard deviations below the edge nearly all processes pass."""
LEAST_MARGIN, MOST_MARGIN = 0.02, 0.05
FREE_PART = 0.95
"""Of the host's free memory, where no limit was given: others live here, too."""
