"""Texts of causes, evidence and reasons: one entry for each key of `analysis.bottleneck`.

`{name}` is a value of the finding or its evidence, `{name:pct}` is formatted by FORMATS, and text
in [brackets] is omitted if one of its values is missing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from string import Formatter
from typing import Any

from stepscope.records import FindingValue
from stepscope.report.kit.format import (
    MISSING,
    bytes_text,
    plural,
    seconds_text,
    significant,
)

Template = str | Mapping[str, str]
"""A template, or one for each variant of the finding."""


@dataclass(frozen=True)
class CauseText:
    """The texts of a cause: title, meaning, summary of a finding, and reason for the confidence."""

    title: str
    meaning: str
    summary: Template
    reason: Template = ""  # empty if the findings of the cause have keys of REASONS


_WAITS = "Training waits for data {data_wait:pct} of the time"
_BLOCKED = _WAITS + ": {batch_blocked:pct} of the batch preparation time is spent waiting for "
_PREPARATION = _WAITS + ": preparing a batch takes {batch_cpu:time} of CPU time, and "
_COUNTERS = "the GPU's counters"
_COUNTERS_AND_EVENTS = f"{_COUNTERS}, and CUDA events around steps"
_HOST_BEHIND = "the host does not queue work ahead of the GPU"
_STACKS = "stack samples of the training thread"
_GPU_LIMIT = "The GPU is probably the limit: kernels run {kernel_time:pct} of the time."
_WAIT_FOR_CORE = "the scheduler counts the time that threads wait for a core"

# fmt: off
CAUSE_TEXTS: dict[str, CauseText] = {
    "input.workers": CauseText(
        "Too few loader workers",
        "Batches are prepared too slowly although CPU cores are idle.",
        {"none": _WAITS + ": the training process loads the data itself (num_workers=0)"
                 "[ while {cores_idle:.1f} cores are idle].",
         "few": _WAITS + ": {workers:workers} cannot keep up[ while {cores_idle:.1f} cores are "
                         "idle]."}),
    "input.preparation": CauseText(
        "CPU-bound data preparation",
        "Preparing batches uses all cores available to the run, and training still waits for "
        "data.",
        {"none": _PREPARATION + "the training process prepares each batch itself.",
         "few": _PREPARATION + "{workers:workers} cannot keep up.",
         "unobserved": _WAITS + ". How the batches are prepared was not observed.",
         "resources": "The GPU is idle {kernel_time:rest} of the time while {cores_used:.1f} of "
                      "{allowed:cores} are busy: it probably waits for data."},
        {"unobserved": "the data preparation was not observed"}),
    "input.fetch": CauseText(
        "Slow storage or network reads",
        "The processes that prepare batches are blocked, waiting for data to arrive.",
        {"storage": _BLOCKED + "storage.",
         "network": _BLOCKED + "the network.",
         "either": _BLOCKED + "storage or the network.",
         "unknown": _BLOCKED + "storage, the network, a lock or another process."}),
    "input.collation": CauseText(
        "Slow collation",
        "`collate_fn` takes longer than loading the samples.",
        _WAITS + ": collating a batch takes {batch_collation:time}, loading its samples "
        "{batch_samples:time}."),
    "input.ipc": CauseText(
        "Inter-process transfer of batches",
        "Loader workers are idle while training waits: pickling, shared memory or pinning is slow.",
        _WAITS + " although the loader workers are busy only {workers_busy:pct} of the time: "
        "transferring batches to the training process is slow."),
    "input.worker_startup": CauseText(
        "Loader worker startup",
        "Loader workers are restarted in every epoch, and training waits for them.",
        "Training waits {startup_wait:pct} of the time for loader workers to start: {each:.1f} s "
        "at the start of each of {epochs_started:.0f} epochs.",
        "the wait for the first batch of each epoch was measured"),
    "cpu.quota": CauseText(
        "CPU quota throttling",
        "The CPU quota of the cgroup stops threads that are ready to run.",
        "A CPU quota of {allowed:cores} throttles the run: its threads wait {throttled:.1f} s per "
        "second, summed over CPUs.",
        "the kernel counts the time that threads are stopped"),
    "cpu.cores": CauseText(
        "Too few CPU cores",
        "The run is restricted to some of the machine's cores and saturates them.",
        "The run is limited to {cores_allowed:g} of {machine_cores:cores}[: on average, "
        "{threads_waiting:.1f} more threads are ready to run].",
        {"waiting": _WAIT_FOR_CORE, "in_use": "all allowed cores are busy"}),
    "cpu.threads": CauseText(
        "Thread oversubscription",
        "Far more threads are ready to run than there are cores.",
        "{runnable:.0f} threads compete for {allowed:cores}: the thread pools of "
        "{processes:processes} oversubscribe the CPU.",
        _WAIT_FOR_CORE),
    "cpu.serial": CauseText(
        "Too few compute threads",
        "The model is computed on the CPU with fewer threads than there are cores.",
        "The model is computed with {framework_threads:threads} while {cores_idle:.1f} of "
        "{allowed:cores} are idle.",
        "how well the model parallelizes over threads is unknown"),
    "gpu.transfer": CauseText(
        "Host-to-device copies",
        "The GPU is idle while batches are copied to it.",
        {"pinned": "The GPU is idle {kernel_time:rest} of the time, mostly waiting for batches to "
                   "be copied: {copied:bytes} per step.",
         "unpinned": "The GPU is idle {kernel_time:rest} of the time, mostly waiting for batches "
                     "to be copied: {copied:bytes} per step from memory that is not pinned."},
        f"{_STACKS}, and PCIe traffic"),
    "gpu.launch": CauseText(
        "Kernel launch overhead",
        "The GPU finishes kernels faster than the host launches new ones.",
        "The GPU is idle {step_kernel_time:rest} of each step, waiting for kernel launches: the "
        "host takes {queueing:time} to queue a step that the GPU can compute in "
        "{device_step:time}.",
        _COUNTERS_AND_EVENTS),
    "gpu.sync": CauseText(
        "GPU synchronization",
        "`.item()` and similar calls make the host wait for the GPU, and then the GPU wait for the "
        "host.",
        "The GPU is idle {kernel_time:rest} of the time because the host keeps waiting for it: "
        "{device_to_host_reads:pct} of the training thread's time is spent reading back results"
        "[ at {location}].",
        f"{_STACKS}, and {_HOST_BEHIND}"),
    "loop.logging": CauseText(
        "Logging in every step",
        "Training pauses while the training thread formats and writes logs.",
        "Logging takes {logging:pct} of the training thread's time[, mostly at {location}].",
        _STACKS),
    "batch.small": CauseText(
        "Small batch size",
        "The fixed cost of a step exceeds the cost of its samples.",
        {"gpu": "A batch of {batch_size:.0f} does not fill the GPU: only {sm_active:pct} of the "
                "multiprocessors have work, and a step takes {step_seconds:time} regardless of the "
                "batch size.",
         "cpu": "A batch of {batch_size:.0f} is mostly overhead: calling the operations of a step "
                "takes {step_seconds:time} regardless of the batch size."},
        {"gpu": f"{_COUNTERS}, and {_HOST_BEHIND}",
         "cpu": "steps this short take about the same time with more samples"}),
    "gpu.precision": CauseText(
        "Idle tensor cores (float32)",
        "Matrix products run in float32 on the regular units instead of the tensor cores.",
        "The GPU computes in float32 on its regular units ({fp32_units:pct} busy) while the tensor "
        "cores are idle ({tensor_cores:pct} busy).",
        _COUNTERS),
    "gpu.underutilized": CauseText(
        "Underutilized GPU",
        "Kernels run all the time, but only on some of the multiprocessors.",
        "Kernels run {kernel_time:pct} of the time, but only on {sm_filled:pct} of the "
        "multiprocessors: there is too little parallel work.",
        "how much a larger batch helps depends on the model"),
    "gpu.compute": CauseText(
        "GPU compute-bound",
        "The GPU is busy computing.",
        {"": "The GPU is the limit, which is healthy: kernels run {kernel_time:pct} of the time on "
             "{sm_active:pct} of the multiprocessors, and the tensor cores are {tensor_cores:pct} "
             "busy.",
         "no_counters": "The GPU is the limit: kernels run {kernel_time:pct} of the time.",
         "resources": _GPU_LIMIT},
        {"": _COUNTERS_AND_EVENTS,
         "no_counters": "this GPU does not report how busy its units are; GPM requires Hopper or "
                        "later"}),
    "gpu.bandwidth": CauseText(
        "GPU memory-bandwidth-bound",
        "The GPU is busy moving data between its memory and its multiprocessors.",
        {"": "The memory bandwidth of the GPU is the limit, which is healthy: "
             "{memory_bandwidth:pct} of the peak while kernels run {kernel_time:pct} of the time.",
         "resources": _GPU_LIMIT},
        _COUNTERS_AND_EVENTS),
    "cpu.compute": CauseText(
        "CPU compute-bound",
        "The CPU is busy computing the model.",
        {"": "The CPU is the limit, which is healthy: the model is computed on {cores_used:.1f} of "
             "{allowed:cores}, and training waits for data only {data_wait_share:pct} of the time.",
         "resources": "The CPU is probably the limit: the run uses {cores_used:.1f} of "
                      "{allowed:cores}."},
        "the data wait was measured, and the training process keeps the cores busy"),
    "ranks.straggler": CauseText(
        "Straggler rank",
        "In every step, all ranks wait for the slowest one.",
        "Rank {rank} is slower than the other ranks and keeps {others:ranks} waiting: its own work "
        "takes up an extra {straggler_wait:pct} of each step ({kind}[, mostly at {location}]).",
        "stack samples of all ranks over the same steps"),
    "ranks.communication": CauseText(
        "Communication between ranks",
        "Ranks spend much of each step exchanging gradients.",
        "{ranks} ranks spend {communication:pct} of each step exchanging [{gradients:bytes} of "
        "]gradients.",
        "time of the backward pass beyond twice the forward pass, and traffic between ranks"),
    "loop.checkpoint": CauseText(
        "Checkpoint saving",
        "Training pauses while a checkpoint is saved.",
        "Saving checkpoints takes {checkpointing:pct} of the time: training pauses for "
        "{saved:.1f} s of {seconds:.1f} s.",
        f"{_STACKS}, and unusually long steps"),
    "loop.evaluation": CauseText(
        "Evaluation",
        "Much of the time is spent on evaluation.",
        "Evaluation takes {evaluation:pct} of the time: {evaluated:.1f} s of {seconds:.1f} s, in "
        "passes over data loaders without an optimizer step.",
        "each evaluation pass was timed"),
    "loop.sleep": CauseText(
        "Sleep in the training loop",
        "The training thread sleeps between steps.",
        "The training thread sleeps {sleep:pct} of the time.",
        _STACKS),
    "memory.gpu": CauseText(
        "GPU memory nearly full",
        "The allocator frees its cache and retries, or hardly any memory is free.",
        {"retries": "{gpu} repeatedly runs out of memory: the allocator freed its cache and "
                    "retried {count:.0f} times in {steps} steps, and training waits each time.",
         "full": "{gpu} has only {free:bytes} of {size:bytes} free: a larger batch or an "
                 "evaluation may not fit."},
        {"retries": "PyTorch's allocator counts its retries",
         "full": "the driver reports the memory in use, but the allocator may hold more than it "
                 "needs"}),
    "memory.host": CauseText(
        "Host memory nearly full",
        "The host swaps, reclaims memory or is close to its limit.",
        "Host memory is {in_use:pct} full, and tasks wait for memory {memory_pressure:pct} of the "
        "time.",
        "the kernel counts the time that tasks wait for memory"),
    "memory.shm": CauseText(
        "Shared memory nearly full",
        "/dev/shm is nearly full.",
        "/dev/shm is {in_use:pct} full: loader workers pass batches through it, and the next batch "
        "may crash the run.",
        "/dev/shm is read once per second"),
    "leak.host": CauseText(
        "Host memory leak",
        "Host memory grows until it is exhausted.",
        "Host memory grows at {growth:growth}[ in {process:process}]{seconds_left:until}.",
        "memory grew throughout the run, in the second half as in the first"),
    "leak.gpu": CauseText(
        "GPU memory leak",
        "GPU memory grows until it is exhausted.",
        "Memory in use on {gpu} grows at {growth:growth}{seconds_left:until}.",
        "the memory still allocated at the end of each step grew throughout the run"),
    "loop.slowdown": CauseText(
        "Increasing step time",
        "Each step does more work than the one before.",
        "Steps get slower: {first_step:time} at the start, {last_step:time} at the end. At this "
        "rate the step time doubles in {doubling:period}.",
        "the Mann-Kendall test finds a significant trend"),
    "throttle.power": CauseText(
        "Power throttling",
        "The power limit lowers the GPU clock.",
        "The power limit lowers the GPU clock to {clock:whole} MHz ({power:whole} W).",
        "reported by the driver; the benefit of a higher clock depends on the model"),
    "throttle.thermal": CauseText(
        "Thermal throttling",
        "The GPU lowers its clock because it is too hot.",
        "High temperature lowers the GPU clock to {clock:whole} MHz.",
        "reported by the driver"),
    "interference.cpu": CauseText(
        "CPU used by other processes",
        "Processes outside the run use cores that it needs.",
        "Other processes use {other_cores:.1f} of {machine:cores}: on average, {waiting:.1f} "
        "threads of this run are ready to run but have no core.",
        "CPU usage of the machine, minus that of the run and the monitor"),
    "interference.gpu": CauseText(
        "GPU used by other processes",
        "Processes outside the run compute on the same GPU.",
        "Another process runs kernels on the same GPU {other_process_kernels:pct} of the time, and "
        "the two take turns.",
        "the driver samples which process runs kernels"),
    "io.wait": CauseText(
        "Slow storage",
        "Processes wait for storage (based on resource usage only).",
        "Processes wait for storage {io_pressure:pct} of the time."),
    "gpu.idle": CauseText(
        "Idle GPU",
        "The GPU is idle although the CPU is not saturated (based on resource usage only).",
        "The GPU is idle {kernel_time:rest} of the time although the CPU is not saturated: it "
        "waits for storage, for copies, or for the one thread that launches its kernels."),
    "too_short": CauseText(
        "Run too short",
        "There are too few steps for a diagnosis.",
        "The run is too short for a diagnosis: [{steps:,.0f} steps in ]{seconds:.1f} s after the "
        "warm-up.",
        "fewer steps or seconds than a diagnosis needs"),
    "unknown": CauseText(
        "No clear bottleneck",
        "No part of the machine is near its limit for long.",
        "No part of the machine is near its limit for long.",
        "no known cause matches"),
}

REASONS = {
    "wait_measured": "the wait for each batch was measured over {steps:,.0f} steps",
    "wait_is_small": "the wait was measured, but is a small part of the step",
    "source_unknown": "disk and network traffic do not show what it waits for",
    "transfer_not_measured": "the transfer itself was not measured",
    "no_steps": "no steps were observed; based on resource usage only",
}

EVIDENCE = {
    "allowed_cores_used": "Allowed cores in use",
    "batch_blocked": "Batch preparation time blocked",
    "batch_collation": "Collation time per batch",
    "batch_cpu": "CPU time per batch",
    "batch_cpu_share": "Batch preparation time on the CPU (share)",
    "batch_preparation": "Preparation time per batch",
    "batch_samples": "Sample loading time per batch",
    "batch_size": "Batch size",
    "checkpointing": "Time saving checkpoints",
    "clock": "GPU clock",
    "clock_throttled": "Readings with a throttled clock",
    "collation_share": "Batch preparation time in collation",
    "communication": "Time exchanging gradients",
    "copying": "Time in host-to-device copies",
    "cores_allowed": "Cores allowed",
    "cores_idle": "Cores idle",
    "cores_used": "Cores used",
    "cores_used_by_run": "Cores used by the run",
    "data_wait": "Time waiting for data",
    "data_wait_share": "Time waiting for data",
    "device_to_host_reads": "Time reading back results",
    "epochs_started": "Epochs started",
    "evaluation": "Time in evaluation",
    "first_step": "Step time at the start",
    "fp32_units": "Float32 units busy",
    "framework_threads": "PyTorch threads",
    "growth": "Memory growth",
    "in_use": "Memory in use",
    "initial_memory": "Memory at the start",
    "involuntary_switches": "Involuntary context switches",
    "io_pressure": "Time that tasks wait for storage",
    "kernel_time": "Time with kernels running",
    "last_step": "Step time at the end",
    "launching": "Time launching kernels",
    "logging": "Time in logging",
    "long_step_excess": "Excess time of long steps",
    "machine_cores": "Cores of the machine",
    "memory_bandwidth": "Memory bandwidth used",
    "memory_left": "Free memory",
    "memory_pressure": "Time that tasks wait for memory",
    "network_received": "Received from the network",
    "other_cores": "Cores used by other processes",
    "other_process_kernels": "Time with kernels of other processes",
    "other_ranks_time": "Own work of the other ranks",
    "pcie_received": "PCIe traffic to the GPU",
    "power": "Power",
    "queued_ahead": "Steps queued ahead of the GPU",
    "queueing": "Time to queue a step",
    "rank_traffic": "Traffic between ranks",
    "retries": "Allocator retries per step",
    "seconds": "Duration",
    "sleep": "Time sleeping",
    "sm_active": "Multiprocessors active",
    "sm_filled": "Multiprocessors active while kernels run",
    "startup_share": "Share of the data wait for worker startup",
    "startup_wait": "Time waiting for workers to start",
    "steal": "Cores taken by the hypervisor",
    "step": "Step time",
    "step_change": "Change of the step time",
    "step_kernel_time": "Step time with kernels running",
    "step_without_wait": "Step time without data wait",
    "steps": "Steps",
    "storage_read": "Read from storage",
    "straggler_time": "Own work of rank {rank}",
    "straggler_wait": "Time waiting for rank {rank}",
    "tensor_cores": "Tensor cores busy",
    "threads_per_core": "Runnable threads per core",
    "threads_waiting": "Threads waiting for a core",
    "throttled": "Time stopped by the quota",
    "total_growth": "Total memory growth",
    "workers_busy": "Time preparing batches",
}
# fmt: on


def cause_title(cause: str) -> str:
    """Return the title of a cause; results of older versions contain the title itself."""
    return CAUSE_TEXTS[cause].title if cause in CAUSE_TEXTS else cause


def fill(template: str, values: Mapping[str, FindingValue]) -> str:
    """Fill a template with the values of a finding."""

    def optional(match: re.Match[str]) -> str:
        fields = [name for _, name, _, _ in Formatter().parse(match[1]) if name is not None]
        return "" if any(values.get(name) is None for name in fields) else match[1]

    return _FORMATTER.vformat(re.sub(r"\[([^]]*)\]", optional, template), (), values)


def duration_text(seconds: float, digits: int = 3) -> str:
    """Format a duration; parts of a step may take microseconds."""
    if seconds >= 0.9995 or seconds <= 0:
        return seconds_text(seconds)
    is_small = seconds < 9.995e-4
    return (
        f"{significant(seconds * (1e6 if is_small else 1e3), digits)} {'µs' if is_small else 'ms'}"
    )


def _until(seconds: float | None) -> str:
    if seconds is None:
        return ""
    for unit, length in (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0)):
        if seconds >= 2 * length:
            return f", and memory will run out in about {seconds / length:.0f} {unit}"
    return f", and memory will run out in about {seconds:.0f} s"


def _growth(rate: float) -> str:
    """Format bytes per second, per hour if that is more readable."""
    return f"{bytes_text(rate)}/s" if rate >= 1e5 else f"{bytes_text(rate * 3600)} per hour"


def _period(seconds: float) -> str:
    return f"{seconds / 60:.0f} minutes" if seconds >= 120 else f"{seconds:.0f} s"


def _counted(noun: str, several: str = "") -> Callable[[float], str]:
    return lambda count: f"{count:g} {plural(count, noun, several)}"


_PROCESSES = {"worker": "the loader workers", "main": "the training process"}
FORMATS: dict[str, Callable[[Any], str]] = {
    "pct": lambda share: f"{(share or 0.0) * 100:.0f}%",
    "rest": lambda share: f"{(1 - share) * 100:.0f}%",
    "whole": lambda value: f"{value or 0:.0f}",
    "time": lambda seconds: duration_text(seconds, 2),
    "bytes": bytes_text,
    "growth": _growth,
    "until": _until,
    "period": _period,
    "cores": _counted("core"),
    "ranks": _counted("rank"),
    "threads": _counted("thread"),
    "processes": _counted("process", "processes"),
    "workers": _counted("loader worker"),
    "process": lambda role: _PROCESSES.get(role, role),
}
_ACCEPTS_NONE = {"pct", "whole", "bytes", "until"}


class _ValueFormatter(Formatter):
    def get_value(
        self, key: int | str, args: Any, kwargs: Mapping[str, FindingValue]
    ) -> FindingValue:
        return kwargs.get(str(key))

    def format_field(self, value: Any, format_spec: str) -> str:
        if value is None and format_spec not in _ACCEPTS_NONE:
            return MISSING
        known = FORMATS.get(format_spec)
        return known(value) if known else format(value, format_spec)


_FORMATTER = _ValueFormatter()
