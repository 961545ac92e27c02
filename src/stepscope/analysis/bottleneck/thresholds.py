"""All thresholds with their reasons. The docs include this table."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Threshold:
    """A threshold and the reason for its value."""

    key: str
    value: float
    unit: str
    reason: str


# fmt: off
_TABLE = (
    Threshold("min_steps", 20, "count",
        "With fewer steps, warm-up detection and percentages are not statistically reliable."),
    Threshold("min_seconds", 3.0, "s",
        "Below this there are too few readings: GPU counters are means over 0.3 s, and memory is "
        "read once per second."),
    Threshold("data_wait", 0.05, "share",
        "Above this, TensorFlow's profiler calls a step moderately input-bound."),
    Threshold("data_wait_high", 0.2, "share",
        "Above this, TensorFlow's profiler calls a step highly input-bound."),
    Threshold("min_speedup", 1.1, "times",
        "Below this, fixing a finding gains less than the noise between identical processes."),
    Threshold("long_step", 2.0, "times",
        "Above this multiple of the median, a step includes work other than training."),
    Threshold("majority", 0.5, "share", "Above this, a part dominates the whole."),
    Threshold("cores_saturated", 0.85, "share",
        "Above this share of the allowed cores, threads queue for cores; the monitor, the kernel "
        "and uneven load take the rest."),
    Threshold("idle_cores", 0.4, "cores",
        "Below this, another loader worker gains nothing."),
    Threshold("compute_share", 0.7, "share",
        "Above this share of what its threads can use, a training process on a CPU is "
        "compute-bound; the rest is work that does not parallelize."),
    Threshold("oversubscribed", 2.5, "times",
        "Runnable threads per core. One process per core plus the training thread stays below 2; "
        "more comes from thread pools in several processes."),
    Threshold("threads_per_process", 1.5, "times",
        "Runnable threads per process. Below this there are many processes rather than large "
        "thread pools."),
    Threshold("quota_throttled", 0.05, "seconds/s",
        "Below this, the quota is reached only occasionally and hardly delays a step."),
    Threshold("other_cores", 0.25, "cores",
        "Desktops and the services of a container use less than this."),
    Threshold("machine_busy", 0.85, "share",
        "Below this share of the machine's cores a core is almost always free, so other processes "
        "do not slow the run down."),
    Threshold("steal", 0.05, "share",
        "Below this share of the machine's cores, steal time is hypervisor housekeeping."),
    Threshold("other_gpu_use", 0.1, "share",
        "A display or a monitoring tool uses less of a GPU than this."),
    Threshold("host_ahead", 0.5, "share",
        "Above this share of steps that the host queues completely before the GPU starts them, "
        "the GPU does not wait for launches."),
    Threshold("copy_share", 0.1, "share",
        "Below this share of the step, removing copies gains nothing measurable."),
    Threshold("sync_share", 0.1, "share",
        "Below this share of the training thread's time, removing synchronization gains nothing "
        "measurable."),
    Threshold("logging_share", 0.1, "share",
        "Below this share of the training thread's time, removing logging gains nothing "
        "measurable."),
    Threshold("idle_explained", 0.4, "share",
        "An activity explains the GPU's idle time if the training thread spends at least this "
        "share of that time on it."),
    Threshold("loop_share", 0.1, "share",
        "Below this, the time for evaluation and checkpoints is not noticeable."),
    Threshold("gpu_busy", 0.85, "share",
        "Above this, kernels run nearly all the time: a bf16 training loop with large matrices "
        "reaches 90 to 100% on an H200 (benchmarks/results/*_explain_gpu_*)."),
    Threshold("gpu_filled", 0.5, "share",
        "Below this share of multiprocessors with work, kernels are too small for the GPU. Large "
        "layers exceed 80%."),
    Threshold("bandwidth_bound", 0.55, "share",
        "Pure copies reach 87 to 92% of the peak bandwidth on an H200, a training step of "
        "element-wise kernels 60 to 80%."),
    Threshold("tensor_cores_idle", 0.05, "share",
        "Mixed precision and TF32 keep the tensor cores above 20% with large matrices."),
    Threshold("fp32_busy", 0.35, "share",
        "Only products of float32 matrices keep the regular float32 units this busy."),
    Threshold("small_batch", 8, "count",
        "Below one tile of the matrix units (8 to 16 rows), another sample costs nothing."),
    Threshold("other_gpu_busy", 0.3, "share",
        "The driver time-slices a GPU equally among busy processes: a process seen this often "
        "takes every other slice."),
    Threshold("gpu_time_slicing", 2.2, "times",
        "Two busy processes get less than half of a GPU each, 43 to 46% on an H200, because "
        "switching takes time (benchmarks/results/*_explain_gpu_*)."),
    Threshold("copy_rate", float(512 << 20), "bytes/s",
        "Below this, a hundredth of the PCIe bandwidth, copies cannot be the bottleneck."),
    Threshold("fetch_rate", float(1 << 20), "bytes/s",
        "Below this, traffic may be logs, pipes or heartbeats and does not show where the data "
        "comes from."),
    Threshold("fp32_matmul", 0.78, "share",
        "Utilization of the float32 units in a product of float32 matrices on an H200."),
    Threshold("tf32_speedup", 7.0, "times",
        "Peak throughput of TF32 over float32: 495 versus 67 TFLOP/s on H100 and H200; "
        "other GPUs differ."),
    Threshold("launch_overhead", 0.05, "share",
        "A separately launched kernel keeps the GPU busy for about 1 µs beyond its work, and "
        "Python launches about 50,000 per second."),
    Threshold("launch_bound_step", 0.02, "s",
        "Calling a few hundred operations takes this long on a CPU, at 10 to 50 µs each."),
    Threshold("batch_growth", 16, "times",
        "One sample leaves vector units, caches and multiprocessors so empty that 16 cost little "
        "more; a single batch size does not show what an even larger batch gains."),
    Threshold("small_batch_cpu", 2, "count",
        "Above this, the samples of a batch keep a CPU busy."),
    Threshold("batch_growth_cpu", 8, "times", "Like `batch_growth`, but a CPU saturates sooner."),
    Threshold("straggler", 0.1, "share",
        "Below this share of the step, the wait for the slowest rank is not noticeable."),
    Threshold("communication", 0.15, "share",
        "Communication that overlaps with computation stays below this share of the step."),
    Threshold("backward_per_forward", 2.0, "times",
        "A backward pass computes two matrix products for each one of the forward pass."),
    Threshold("rank_traffic", float(1 << 20), "bytes/s",
        "Heartbeats and barriers cause less traffic than this."),
    Threshold("growth_continues", 0.35, "share",
        "A leak grows in the second half of a run by at least this share of its growth in the "
        "first half; caches that fill up do not."),
    Threshold("growth_share", 0.03, "share",
        "Below this share of the initial memory, growth over a run is noise."),
    Threshold("growth_bytes", float(96 << 20), "bytes",
        "Caches, allocator arenas and copy-on-write pages grow by up to this much."),
    Threshold("leak_horizon", 7 * 86400.0, "s",
        "A leak that takes longer than a week to exhaust memory is unlikely to crash the run."),
    Threshold("memory_full", 0.95, "share",
        "Above this, a larger batch, an evaluation or another process can crash the run."),
    Threshold("retries", 0.05, "count",
        "Allocator retries per step. Each one frees the cache and waits for the device."),
    Threshold("clock_throttled", 0.3, "share",
        "Below this share of the readings, throttled clocks hardly change the step time."),
    Threshold("step_drift", 0.25, "share",
        "Change of the step time over the run, if the Mann-Kendall test finds it significant."),
    Threshold("step_drift_seconds", 8.0, "s",
        "In the first seconds caches fill and clocks settle, which is not drift."),
)
# fmt: on

THRESHOLDS: dict[str, Threshold] = {threshold.key: threshold for threshold in _TABLE}


def limit(key: str) -> float:
    return THRESHOLDS[key].value
