"""The words of causes, evidence and reasons: one row for each key of `analysis.bottleneck`.

`{name}` is a value of the finding or of its evidence, `{name:pct}` is worded by FORMATS, and a part
in [brackets] is left out where a value in it is missing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from string import Formatter
from typing import Any

from stepscope.records import FindingValue
from stepscope.report.kit.format import MISSING, plural

Sentence = str | Mapping[str, str]
"""A template, or one for each variant of the finding."""


@dataclass(frozen=True)
class CauseWords:
    """A cause: a few words, what it means, the finding in a sentence, and why that is sure."""

    title: str
    meaning: str
    finding: Sentence
    reason: Sentence = ""  # nothing where findings of the cause name their reasons


_WAITS = "Training waits for data {data_wait:pct} of the time"
_FETCHES = _WAITS + ": preparing a batch is standing still for "
_COUNTERS = "the GPU's own counters"
_NEVER_LATE = f"{_COUNTERS}, and the host is never late"
_THREAD_SAMPLES = "stack samples of the training thread"
_SEEMS_LIMIT = "The GPU seems to be the limit: kernels run {kernels_ran:pct} of the time."
_WAITS_FOR_CORE = "the scheduler counts how long threads wait for a core"

# fmt: off
CAUSE_WORDS: dict[str, CauseWords] = {
    "input.workers": CauseWords(
        "too few loader workers", "Batches are prepared too late although cores are idle.",
        {"none": _WAITS + ": the training process loads its data itself (num_workers=0)"
                 "[, while {cores_idle:.1f} cores are idle].",
         "few": _WAITS + ": {workers:worker} cannot keep up[, while {cores_idle:.1f} cores are "
                         "idle]."}),
    "input.preparation": CauseWords(
        "preparing samples takes too much CPU",
        "The workers have all cores busy, and the training still waits for them.",
        {"": _WAITS + ": preparing a batch takes {batch_cpu:ms} of CPU, and {workers:who} cannot "
             "do it faster.",
         "unseen": _WAITS + "; how batches are made was not seen.",
         "resources": "The GPU is idle {kernels_ran:rest} of the time while all {allowed:g} cores "
                      "are busy: it seems to wait for data."},
        {"unseen": "the preparation itself was not seen"}),
    "input.fetch": CauseWords(
        "fetching samples from storage or network",
        "Whoever prepares batches stands still, waiting for bytes.",
        {"storage": _FETCHES + "storage, {batch_blocked:pct} of it.",
         "network": _FETCHES + "the network, {batch_blocked:pct} of it.",
         "either": _FETCHES + "storage or the network, {batch_blocked:pct} of it.",
         "unknown": _FETCHES + "storage, the network, a lock or another process, "
                    "{batch_blocked:pct} of it."}),
    "input.collation": CauseWords(
        "putting batches together", "`collate_fn` takes longer than the samples themselves.",
        _WAITS + ": putting a batch together takes {batch_collation:ms}, its samples "
        "{batch_samples:ms}."),
    "input.handover": CauseWords(
        "handing batches over",
        "Workers are idle, and the training waits: pickling, shared memory, pinning.",
        _WAITS + " although the workers are busy only {workers_busy:pct} of theirs: batches are "
        "slow to be handed over."),
    "input.startup": CauseWords(
        "starting loader workers again and again",
        "Workers are started anew for every epoch, and the training waits for them.",
        "Training waits {startup_wait:pct} of the time for loader workers to start: {each:.1f} s "
        "at each of {epochs_begun:.0f} epochs.",
        "the wait for the first batch of {epochs_begun:.0f} epochs was measured"),
    "cpu.quota": CauseWords(
        "a CPU quota holds threads back", "The control group's quota stops threads that have work.",
        "A CPU quota of {allowed:g} cores stops the run's threads for {throttled:.1f} s in every "
        "second.",
        "the kernel counts how long threads were stopped"),
    "cpu.cores": CauseWords(
        "too few CPU cores",
        "The run may use fewer cores than the machine has, and has all of them busy.",
        "The run may use {cores_allowed:g} of {cores_of_machine:.0f} cores and has them busy; "
        "{threads_waiting:some} more threads are ready at any time.",
        {"waiting": _WAITS_FOR_CORE, "in_use": "all allowed cores are in use"}),
    "cpu.threads": CauseWords(
        "threads fight for the cores", "Many more threads want to run than there are cores.",
        "{wanted:.0f} threads want to run on {allowed:g} cores: {processes:.0f} processes have "
        "pools of threads that fight each other.",
        _WAITS_FOR_CORE),
    "cpu.serial": CauseWords(
        "computing on some of the cores only",
        "The model is computed on the CPU, by fewer threads than there are cores.",
        "The model is computed by {framework_threads:thread} while {cores_idle:.1f} of {allowed:g} "
        "cores are idle.",
        "how well the model's operations split over threads is not known"),
    "transfer": CauseWords(
        "copying batches to the GPU", "The GPU waits while batches are copied to it.",
        {"pinned": "The GPU waits {kernels_ran:rest} of the time, most of it for batches to be "
                   "copied: {copied:mb} a step.",
         "unpinned": "The GPU waits {kernels_ran:rest} of the time, most of it for batches to be "
                     "copied: {copied:mb} a step from memory that is not pinned."},
        f"{_THREAD_SAMPLES}, and bytes over PCIe"),
    "launch": CauseWords(
        "launching kernels", "The GPU is done with kernels sooner than Python can launch the next.",
        "The GPU waits {step_kernels_ran:rest} of each step for kernels to be launched: the host "
        "takes {queueing:ms} to queue a step that the GPU could do in {device_step:ms}.",
        "CUDA events around steps, and the GPU's own counters"),
    "sync": CauseWords(
        "waiting for the GPU in every step",
        "`.item()` and the like make the host wait, and then the GPU for the host.",
        "The GPU waits {kernels_ran:rest} of the time for a host that waits for it: "
        "{reading_back:pct} of the training thread's time goes to reading results back[ at "
        "{where}].",
        f"{_THREAD_SAMPLES}, and the host is never ahead of the GPU"),
    "sync.logging": CauseWords(
        "logging in every step",
        "The training thread formats and writes logs while nothing is computed.",
        "{logging:pct} of the training thread's time goes to logging[, most of it at {where}].",
        _THREAD_SAMPLES),
    "batch.small": CauseWords(
        "the batch is too small", "What a step costs at any size outweighs what its samples cost.",
        {"gpu": "A batch of {batch_size:.0f} does not fill the GPU: {sm_active:pct} of its "
                "multiprocessors have work, and a step takes {step_seconds:ms} at any size.",
         "cpu": "A batch of {batch_size:.0f} makes every step overhead: {step_seconds:ms1} go into "
                "calling operations, whatever their size."},
        {"gpu": f"{_COUNTERS}, and the host is never ahead of the GPU",
         "cpu": "steps this short cost about the same with more samples"}),
    "gpu.precision": CauseWords(
        "tensor cores are idle", "Matrix products run in float32 on the ordinary units.",
        "The GPU computes in float32 on its ordinary units ({fp32_units:pct} busy) while the "
        "tensor cores are idle ({tensor_cores:pct}).",
        _COUNTERS),
    "gpu.underfilled": CauseWords(
        "the GPU is not filled", "Kernels run all the time, on a part of the multiprocessors.",
        "Kernels run {kernels_ran:pct} of the time, but only on {sm_filled:pct} of the "
        "multiprocessors: there is too little to do at once.",
        "how far a larger batch fills them depends on the model"),
    "gpu.compute": CauseWords(
        "the GPU computes", "It is as busy as it can be.",
        {"": "The GPU is the limit, as it should be: kernels run {kernels_ran:pct} of the time on "
             "{sm_active:pct} of its multiprocessors, tensor cores {tensor_cores:pct}.",
         "no_counters": "The GPU is the limit: something ran on it {kernels_ran:pct} of the time.",
         "resources": _SEEMS_LIMIT},
        {"": _NEVER_LATE,
         "no_counters": "this GPU does not tell what its units do (GPM needs Hopper or later)"}),
    "gpu.bandwidth": CauseWords(
        "the GPU moves memory", "Its memory bandwidth is the limit.",
        {"": "The GPU is the limit, by its memory bandwidth: {memory_bandwidth:pct} of the peak, "
             "while kernels run {kernels_ran:pct} of the time.",
         "resources": _SEEMS_LIMIT},
        _NEVER_LATE),
    "cpu.compute": CauseWords(
        "the CPU computes", "All cores compute the model.",
        {"": "The CPU is the limit, as it should be: the model is computed on {cores_used:.1f} of "
             "{allowed:g} cores, and data is waited for {data_wait_share:pct} of the time.",
         "resources": "All {allowed:g} cores are busy: the CPU seems to be the limit."},
        "waits were measured, and the cores are busy with the training process"),
    "ranks.straggler": CauseWords(
        "one rank is slower than the others", "All ranks wait in every step for the slowest.",
        "Rank {rank} is slower than the others: it works {straggler_wait:pct} of each step longer "
        "by itself ({kind}[, most of it at {where}]), and {others} of {ranks} ranks wait.",
        "stack samples of every rank over the same steps"),
    "ranks.communication": CauseWords(
        "communication between ranks", "Steps are spent exchanging gradients.",
        "{ranks} ranks spend {communication:pct} of each step exchanging [{gradients:mb} of "
        "]gradients.",
        "what the backward pass takes beyond twice the forward pass, and bytes between ranks"),
    "outside.checkpoint": CauseWords(
        "saving checkpoints", "Training stands still while it saves.",
        "{saving:pct} of the time goes to saving checkpoints: training stands still for "
        "{saved:.1f} s of {seconds:.1f} s.",
        f"{_THREAD_SAMPLES}, and steps that take far longer"),
    "outside.evaluation": CauseWords(
        "evaluation", "Much of the time goes to evaluation.",
        "{evaluation:pct} of the time goes to evaluation: {evaluated:.1f} s of {seconds:.1f} s, in "
        "passes over loaders without a single optimizer step.",
        "each pass was timed"),
    "outside.other": CauseWords(
        "work between steps", "Some steps take far longer than the others.",
        "The training thread sleeps {sleeping:pct} of the time.",
        _THREAD_SAMPLES),
    "memory.gpu": CauseWords(
        "GPU memory is at its edge",
        "The allocator has to give memory back and ask again, or hardly any is left.",
        {"retries": "{gpu} is out of memory again and again: the allocator had to free its cache "
                    "{count:.0f} times in {steps} steps, and everything waits each time.",
         "full": "{gpu} has {left:gb1} of {size:gb} left: a larger batch, or an evaluation, may "
                 "not fit."},
        {"retries": "PyTorch's allocator counts it",
         "full": "what the driver says is in use; the allocator may hold more than it needs"}),
    "memory.host": CauseWords(
        "host memory is at its edge", "Swapping, reclaiming, or close to the limit.",
        "The host's memory is {in_use:pct} full, and tasks waited for memory {memory_pressure:pct} "
        "of the time.",
        "the kernel counts how long tasks wait for memory"),
    "memory.shm": CauseWords(
        "shared memory is at its edge", "/dev/shm is nearly full.",
        "/dev/shm is {in_use:pct} full: loader workers hand batches over through it, and the next "
        "one may end the run.",
        "read once a second"),
    "leak.host": CauseWords(
        "host memory grows without end", "It will reach the limit.",
        "Host memory grows by {growth:growth}[ in {process:process}] {seconds_left:until}.",
        "it grew in every part of the run, in the second half as in the first"),
    "leak.gpu": CauseWords(
        "GPU memory grows without end", "It will reach the limit.",
        "Memory of {gpu} grows by {growth:growth} {seconds_left:until}.",
        "tensors held at the ends of steps grew in every part of the run"),
    "drift.steps": CauseWords(
        "steps get slower and slower", "Each step does more than the last.",
        "Steps get slower: {first_step:ms} at the beginning, {last_step:ms} at the end; at this "
        "pace they take twice as long every {doubling:period}.",
        "Mann and Kendall's test is sure of the trend"),
    "throttle.power": CauseWords(
        "the power limit holds the clocks down",
        "The GPU would run faster if it were allowed more power.",
        "The power limit holds the GPU's clocks down to {clock:whole} MHz ({power:whole} W).",
        "the driver says so; how much a step gains by higher clocks depends on the model"),
    "throttle.heat": CauseWords(
        "heat holds the clocks down", "The GPU is too hot.",
        "Heat holds the GPU's clocks down to {clock:whole} MHz.",
        "the driver says so"),
    "interference.cpu": CauseWords(
        "others use the CPUs", "Processes outside of the run take the cores that it wants.",
        "Other processes use {others_cores:.1f} of {machine} cores, and this run's threads wait "
        "for them: {waiting:.1f} are ready at any time and have no core.",
        "the whole machine's use less that of the run and of the watcher"),
    "interference.gpu": CauseWords(
        "others use the GPU", "Processes outside of the run compute on the same GPU.",
        "Another process computes on the same GPU {others_kernels:pct} of the time; the two take "
        "turns.",
        "the driver samples which process's kernels run"),
    "io.bound": CauseWords(
        "storage or network", "Judged by resources alone.",
        "Tasks wait for storage {io_pressure:pct} of the time."),
    "gpu.idle": CauseWords(
        "the GPU is idle", "Judged by resources alone.",
        "The GPU is idle {kernels_ran:rest} of the time, and the CPUs are not the reason: it waits "
        "for storage, for one thread that launches its kernels, or for copies."),
    "short": CauseWords(
        "too short to tell", "There are too few steps to judge.",
        "Too short to tell: {steps:.0f} steps in {seconds:.1f} s after the start.",
        "fewer steps or seconds than a judgement needs"),
    "unclear": CauseWords(
        "nothing stands out", "No part is near its limit for long.",
        "Nothing stands out: no part of the machine is near its limit for long.",
        "none of the known causes fits"),
}

REASONS = {
    "wait_measured": "each batch's wait was measured, {steps} steps",
    "wait_is_small": "the wait was measured, but it is a small part of the step",
    "source_unknown": "what for does not show in bytes",
    "handover_unseen": "what the hand-over does was not seen",
    "no_steps": "no steps were seen: judged by the use of resources alone",
}

EVIDENCE = {
    "allowed_cores_used": "of the allowed cores in use",
    "at_beginning": "at the beginning",
    "batch_blocked": "of preparing a batch, standing still",
    "batch_collation": "collating a batch",
    "batch_cpu": "CPU time to prepare a batch",
    "batch_cpu_share": "share of it that is CPU",
    "batch_preparation": "a batch takes to prepare",
    "batch_samples": "reading its samples",
    "batch_size": "samples in a batch",
    "clock": "clock",
    "collation_share": "of preparing a batch, collation",
    "communication": "exchanging gradients",
    "copying": "copying to the GPU",
    "cores_allowed": "cores allowed",
    "cores_idle": "cores idle",
    "cores_of_machine": "cores of the machine",
    "cores_used": "cores used",
    "cores_used_by_run": "cores used by the run",
    "data_wait": "waited for the next batch",
    "data_wait_share": "of the time, waited for data",
    "epochs_begun": "epochs begun",
    "evaluation": "spent in evaluation",
    "first_step": "a step at the beginning",
    "fp32_units": "float32 units busy",
    "framework_threads": "threads of PyTorch",
    "grown": "grew in all",
    "growth": "grows by",
    "in_use": "in use",
    "involuntary_switches": "threads thrown off a core",
    "io_pressure": "some task waited for storage",
    "kernels_ran": "kernels ran",
    "last_step": "a step at the end",
    "launching": "training thread launching",
    "left": "left",
    "logging": "logging",
    "long_steps": "steps beyond twice the median, in excess",
    "memory_bandwidth": "memory bandwidth",
    "memory_pressure": "some task waited for memory",
    "network_received": "received over the network",
    "others_alone": "the other ranks",
    "others_cores": "cores used by others",
    "others_kernels": "kernels of other processes ran",
    "pcie_received": "over PCIe to the GPU",
    "power": "power",
    "queueing": "queueing a step",
    "rank_traffic": "bytes between the ranks",
    "reading_back": "reading results back",
    "retries": "allocator retries per step",
    "saving": "saving",
    "seconds": "seconds",
    "sleeping": "sleeping",
    "slowed": "readings that found it so",
    "sm_active": "multiprocessors with work",
    "sm_filled": "multiprocessors with work, while kernels run",
    "startup_share": "of all waiting",
    "startup_wait": "waited for workers to start",
    "step": "a step takes",
    "step_besides": "a step takes besides",
    "step_change": "change of the step time",
    "step_kernels_ran": "of the step, kernels ran",
    "steps": "steps",
    "steps_ahead": "steps queued before the GPU began them",
    "stolen_cores": "taken by the hypervisor",
    "storage_read": "read from storage",
    "straggler_alone": "rank {rank}, apart from exchanging gradients",
    "straggler_wait": "waited for by the others",
    "tensor_cores": "tensor cores",
    "threads_per_core": "threads per core that want to run",
    "threads_waiting": "threads ready to run, without a core",
    "throttled": "stopped by the quota",
    "workers_busy": "workers busy",
}
# fmt: on


def cause_title(cause: str) -> str:
    """The title of a cause; results of older versions have the title itself."""
    return CAUSE_WORDS[cause].title if cause in CAUSE_WORDS else cause


def fill(template: str, values: Mapping[str, FindingValue]) -> str:
    """A template with the values of a finding."""

    def present(match: re.Match[str]) -> str:
        fields = [name for _, name, _, _ in Formatter().parse(match[1]) if name is not None]
        return "" if any(values.get(name) is None for name in fields) else match[1]

    return _WORDS.vformat(re.sub(r"\[([^]]*)\]", present, template), (), values)


def _until(seconds: float | None) -> str:
    """When memory that grows is gone."""
    if seconds is None:
        return "until it is gone"
    for unit, length in (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0)):
        if seconds >= 2 * length:
            return f"and is gone in about {seconds / length:.0f} {unit}"
    return f"and is gone in about {seconds:.0f} s"


def _growth(rate: float) -> str:
    """Bytes a second in a unit that shows them."""
    return f"{rate / 1e6:.1f} MB/s" if rate >= 1e5 else f"{rate * 3600 / 1e6:.1f} MB an hour"


def _period(seconds: float) -> str:
    return f"{seconds / 60:.0f} minutes" if seconds >= 120 else f"{seconds:.0f} s"


def _counted(noun: str) -> Callable[[int], str]:
    return lambda count: f"{count:g} {plural(count, noun)}"


def _who(workers: int) -> str:
    if workers == 0:
        return "the training process"
    return f"{workers} workers" if workers > 1 else "one worker"


_PROCESSES = {"worker": "the loader workers", "main": "the training process"}
FORMATS: dict[str, Callable[[Any], str]] = {
    "pct": lambda share: f"{(share or 0.0) * 100:.0f} %",
    "rest": lambda share: f"{(1 - share) * 100:.0f} %",
    "whole": lambda value: f"{value or 0:.0f}",
    "some": lambda value: f"{value or 0:.1f}",
    "ms": lambda seconds: f"{seconds * 1e3:.0f} ms",
    "ms1": lambda seconds: f"{seconds * 1e3:.1f} ms",
    "mb": lambda count: f"{count / 1e6:.0f} MB",
    "mb1": lambda count: f"{count / 1e6:.1f} MB",
    "gb": lambda count: f"{count / 1e9:.0f} GB",
    "gb1": lambda count: f"{count / 1e9:.1f} GB",
    "growth": _growth,
    "until": _until,
    "period": _period,
    "worker": _counted("worker"),
    "thread": _counted("thread"),
    "who": _who,
    "process": lambda role: _PROCESSES.get(role, role),
}


_NEEDS_A_VALUE = {"rest", "ms", "ms1", "mb", "mb1", "gb", "gb1"}


class _WordFormatter(Formatter):
    def get_value(
        self, key: int | str, args: Any, kwargs: Mapping[str, FindingValue]
    ) -> FindingValue:
        return kwargs.get(str(key))

    def format_field(self, value: Any, format_spec: str) -> str:
        known = FORMATS.get(format_spec)
        if value is None and (known is None or format_spec in _NEEDS_A_VALUE):
            return MISSING
        return known(value) if known else format(value, format_spec)


_WORDS = _WordFormatter()
