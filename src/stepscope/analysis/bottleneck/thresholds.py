"""The one table of thresholds: each with the reason for it, or who says so. The docs print it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Threshold:
    """A number that decides, and why it is that number."""

    key: str
    value: float
    unit: str
    reason: str


# fmt: off
_TABLE = (
    Threshold("least_steps", 20, "count",
        "With fewer steps neither a warm-up nor a share can be told from chance"),
    Threshold("least_seconds", 3.0, "s",
        "GPU counters are means over 0.2 s and memory readings come every second: below this "
        "there are too few of them"),
    Threshold("input_wait", 0.05, "share",
        "TensorFlow's profiler calls a step that waits longer than this moderately input-bound"),
    Threshold("input_wait_sure", 0.2, "share",
        "TensorFlow's profiler calls a step that waits longer than this highly input-bound"),
    Threshold("worth", 1.1, "times",
        "A ceiling below it is nothing to fix: the same training differs as much from one process "
        "to the next"),
    Threshold("far_longer", 2.0, "times",
        "A step that takes this many medians did something else besides"),
    Threshold("most_of_it", 0.5, "share", "More than half of a whole is what it is named after"),
    Threshold("cores_saturated", 0.85, "share",
        "Above this share of the allowed cores in use, queueing for a core dominates; the last "
        "tenth goes to the watcher, the kernel and uneven load"),
    Threshold("idle_cores", 0.4, "cores", "Less is not enough for another worker to gain anything"),
    Threshold("computing", 0.7, "share",
        "Of the time that its threads could compute, a training process does on a CPU: the rest "
        "is what does not split over threads"),
    Threshold("oversubscribed", 2.5, "times",
        "Threads that want to run, per core. One process per core and a training thread beside "
        "them are below 2; what is above comes from thread pools in several processes"),
    Threshold("threads_each", 1.5, "times",
        "Threads that want to run, per process: fewer means many processes, not pools"),
    Threshold("throttled", 0.05, "seconds/s",
        "Below this a quota was met now and then, and hardly delays a step"),
    Threshold("others_cores", 0.25, "cores",
        "What a desktop or a container's own services use is below it"),
    Threshold("busy_machine", 0.85, "share",
        "Of the machine's cores. Below it there is nearly always one free: others take nothing "
        "away"),
    Threshold("stolen_cores", 0.05, "share",
        "Of the machine's cores. Less is the hypervisor's own housekeeping"),
    Threshold("others_gpu", 0.1, "share", "A display or a monitor uses less of a GPU"),
    Threshold("host_ahead", 0.5, "share",
        "If the host had queued a whole step before the GPU began it, in most steps, the GPU is "
        "never kept waiting by launches"),
    Threshold("copy_share", 0.1, "share", "Of the step; less cannot be gained back measurably"),
    Threshold("sync_share", 0.1, "share", "Of the training thread's time, as for copies"),
    Threshold("logging_share", 0.1, "share", "Of the training thread's time, as for copies"),
    Threshold("explains_idle", 0.4, "share",
        "Of the GPU's idle time: what takes as much of the training thread's time is why"),
    Threshold("outside_share", 0.1, "share",
        "Evaluation and checkpoints are needed; below a tenth nobody would notice"),
    Threshold("gpu_busy", 0.85, "share",
        "Kernels run nearly all of the time: a bf16 training loop of large matrices is at 0.9 to "
        "1.0 on an H200 (benchmarks/results/*_explain_gpu_*)"),
    Threshold("gpu_filled", 0.5, "share",
        "Multiprocessors with work, while kernels run. Large layers are above 0.8"),
    Threshold("dram_bound", 0.55, "share",
        "Copies alone reach 0.87 to 0.92 of the peak on an H200; a training step of element-wise "
        "kernels 0.6 to 0.8"),
    Threshold("tensor_idle", 0.05, "share",
        "Mixed precision and TF32 keep tensor cores above 0.2 where matrices are large"),
    Threshold("fp32_busy", 0.35, "share",
        "The ordinary float32 units are that busy only in products of float32 matrices"),
    Threshold("small_batch", 8, "count",
        "Below a tile of the matrix units (8 to 16 rows) a sample more costs nothing"),
    Threshold("others_busy", 0.3, "share",
        "The driver shares a GPU by time slices, equally among those that always have work: a "
        "process seen this often takes every other turn"),
    Threshold("takes_turns", 2.2, "times",
        "Two processes that always have work get less than half of a GPU each: on an H200 43 to "
        "46 %, since changing between them takes time (benchmarks/results/*_explain_gpu_*)"),
    Threshold("copy_rate", 0.5e9, "bytes/s",
        "A hundredth of what PCIe carries: below it copies cannot be what takes long"),
    Threshold("fetch_rate", 1e6, "bytes/s",
        "Logs, pipes and heartbeats move less: below it nothing says where data comes from"),
    Threshold("fp32_in_products", 0.78, "share",
        "How busy the float32 units are in a product of float32 matrices on an H200"),
    Threshold("tf32_gain", 7.0, "times",
        "Peak rate of TF32 over float32: 495 to 67 TFLOP/s on H100 and H200, 7 to 8 since Ampere"),
    Threshold("launch_overhead", 0.05, "share",
        "A kernel that is started by itself keeps the GPU busy for about 1 µs beyond its work, "
        "and Python starts some 50,000 a second"),
    Threshold("overhead_step", 0.02, "s",
        "A few hundred operations at 10 to 50 µs each: what calling them costs on a CPU"),
    Threshold("safe_growth", 16, "times",
        "One sample leaves vector units, caches and multiprocessors so empty that 16 cost little "
        "more; how much more than 16 pays cannot be told from one batch size"),
    Threshold("small_batch_cpu", 2, "count", "On a CPU a few samples are work already"),
    Threshold("safe_growth_cpu", 8, "times", "As on a GPU, but a CPU is filled sooner"),
    Threshold("straggler", 0.1, "share", "Of the step, that the other ranks wait for the last"),
    Threshold("communication", 0.15, "share", "Of the step; overlapped communication is below"),
    Threshold("backward_per_forward", 2.0, "times",
        "A backward pass computes two products for each one of the forward pass"),
    Threshold("rank_traffic", 1e6, "bytes/s", "Heartbeats and barriers move less"),
    Threshold("goes_on", 0.35, "share",
        "A leak grows in the second half of a run as well: by this part of what it did in the "
        "first, at least; caches that fill do not"),
    Threshold("growth_share", 0.03, "share",
        "Of the memory at the beginning: less growth over a run is noise"),
    Threshold("growth_bytes", 96e6, "bytes",
        "Caches, arenas of allocators and copies of what forks share grow by as much"),
    Threshold("leak_horizon", 7 * 86400.0, "s",
        "Memory that lasts for another week of this run will not end it"),
    Threshold("memory_full", 0.95, "share",
        "Beyond it the next larger batch, evaluation or a neighbour ends the run"),
    Threshold("retries", 0.05, "count",
        "Allocator retries per step: each frees the cache and waits for the device"),
    Threshold("slowed", 0.3, "share", "Of the readings that found the clocks held down"),
    Threshold("drift", 0.25, "share",
        "Change of the step time over the run that Mann and Kendall's test is sure of"),
    Threshold("drift_seconds", 8.0, "s",
        "Caches fill and clocks settle in the first seconds: that is no drift"),
)
# fmt: on

THRESHOLDS: dict[str, Threshold] = {threshold.key: threshold for threshold in _TABLE}


def limit(key: str) -> float:
    return THRESHOLDS[key].value
