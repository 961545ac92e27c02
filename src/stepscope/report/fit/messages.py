"""The texts of a fit: its summary, its notes, and how a batch failed."""

from __future__ import annotations

from collections.abc import Iterator

from stepscope.fit.linear2019 import BATCHES
from stepscope.fit.result import (
    Batch,
    Device,
    FitResult,
    Linear2019,
    MemoryBreakdown,
    MemoryBudget,
    NoteKind,
    OtherProcess,
    Verdict,
    WhatIf,
)
from stepscope.report.kit.format import (
    MISSING,
    is_known,
    plural,
    rate_text,
    share_text,
    upper_first,
)
from stepscope.trials.limits.spec import size_text
from stepscope.workloads.frameworks.registry import framework_name
from stepscope.workloads.probing import ProbeResult
from stepscope.workloads.spec import option_name

_SLOWER_SHARE = 0.02
"""Smaller differences in throughput are not mentioned."""
_PHASES = {
    "start": "before the framework was imported",
    "import": "while importing the framework",
    "data": "while loading the dataset",
    "build": "while building the model",
    "move to device": "while moving the model to the device",
    "evaluation": "in the evaluation",
    "smaller batch": "in the smaller last batch of the epoch",
    "step after evaluation": "in a step after the evaluation",
}
_NOTES = {
    NoteKind.REPORTED: "{text}",
    NoteKind.BATCH_FAILED: "batch size {batch:,} fails for a reason other than memory: {text}",
    NoteKind.EDGE_UNSTABLE: "the limit is unstable: batch sizes that passed at first failed later",
    NoteKind.SOFT_LIMIT: (
        "no cgroup is available, so the memory limit was enforced by polling, which reacts late; "
        "the answer may be too large"
    ),
    NoteKind.PEAKS_DIFFER: (
        "at batch size {batch:,}, identical processes used between {low} and {high}, because "
        "malloc keeps a varying amount of freed memory. Set MALLOC_MMAP_THRESHOLD_=1048576 for "
        "both training and `stepscope fit` to get a sharp limit"
    ),
}
_RECOMMENDATIONS = {
    ("gpu", "state"): (
        "Weights, gradients and optimizer state take {share} of this peak and do not shrink with "
        "the batch size. An optimizer with less state, or sharding over several GPUs, saves the "
        "most."
    ),
    ("gpu", "workspace"): (
        "Kernel workspace takes {share} of the peak. channels_last or another precision makes "
        "cuDNN select other algorithms."
    ),
    ("gpu", "activations"): (
        "Activations take {share} of the memory in use at the peak and grow with every sample. "
        "bf16 or gradient checkpointing saves the most."
    ),
    ("host", "data"): (
        "The dataset takes {data} of {limit}. A smaller --samples leaves more memory for "
        "batches, which need {per_sample} per sample."
    ),
    ("host", "state"): (
        "Of the parts that you can change, weights, gradients and optimizer state take the most. "
        "SGD without momentum needs less."
    ),
    ("host", "activations"): (
        "Of the parts that you can change, activations take the most: {per_sample} per sample. Use "
        "smaller inputs, gradient checkpointing, or --accumulate with smaller batches."
    ),
}
_REASONS = {
    "precision": "roughly halves the activations; weights stay in fp32",
    "checkpointing": "keeps about 2/√{layers} of the activations for a third more compute",
    "optimizer": "different optimizer state per weight",
}


def memory_text(size: float | None) -> str:
    """Format bytes exactly enough to be passed back to `--gpu-memory`."""
    if not is_known(size):
        return MISSING
    return f"-{size_text(round(-size))}" if size < 0 else size_text(round(size))


def retries_text(retries: int) -> str:
    if retries == 1:
        return "1 allocator retry"
    return f"{retries:,} allocator retries" if retries > 0 else "allocator retries"


def other_process_text(other: OtherProcess) -> str:
    size = f" uses {size_text(other.memory_bytes)}" if other.memory_bytes is not None else ""
    return f"{other.name or 'a process'} (PID {other.pid}){size}"


def framework_of(fit: FitResult) -> str:
    return framework_name(str(fit.settings.get("framework", "torch")))


# How a batch went


def batch_facts(batch: Batch, device: Device, faster: Batch | None = None) -> Iterator[str]:
    """Yield throughput and allocator retries of a batch, compared with a faster one if given."""
    rate, best = batch.samples_per_second, faster.samples_per_second if faster else None
    if rate:
        slower = 1 - rate / best if best else 0.0
        suffix = f" ({share_text(slower)} slower)" if slower > _SLOWER_SHARE else ""
        yield f"{rate_text(rate)} samples/s{suffix}"
    if not batch.passes:
        yield "predicted, not run"
    elif batch.retried:
        yield retries_text(batch.retries)
    elif device == "gpu":
        yield "no allocator retries"


def phase_text(phase: str) -> str:
    return _PHASES.get(phase, f"in {phase}" if phase else "")


def attempts_text(batch: Batch) -> str:
    failed, attempts = batch.attempts_above
    return f"failed in {failed} of {attempts} processes" if failed < attempts else ""


def failure_text(failure: ProbeResult) -> str:
    place = phase_text(failure.phase)
    if failure.is_oom:
        return f"out of memory {place}".rstrip()
    return f"{f'failed {place}'.rstrip()}: {failure.message}"


def tried_text(result: ProbeResult) -> str:
    """Return the progress line of a probe on the host."""
    if not result.is_ok:
        return f"batch size {result.batch:,}: {failure_text(result)}"
    peak = result.reserved_peak_bytes
    return f"batch size {result.batch:,}: peak {size_text(peak) if peak else 'at the limit'}"


def free_text(batch: Batch, total: str = "") -> str:
    if not batch.free_bytes:
        return "no memory is left"
    return f"{memory_text(batch.free_bytes)}{total} remains free"


def next_batch_text(batch: Batch) -> str:
    """Return how the next larger batch failed; empty if none was tried."""
    above = batch.failure_above
    if above is None:
        return ""
    attempts, why = attempts_text(batch), failure_text(above)
    if attempts:
        return f"{above.batch:,} {attempts} ({why})"
    if above.shortfall_bytes:
        return f"{above.batch:,} needs at least {memory_text(above.shortfall_bytes)} more ({why})"
    return f"{above.batch:,} does not fit ({why})" if above.is_oom else f"{above.batch:,} {why}"


# Summary


def summary(fit: FitResult) -> str:
    """Return the result in one or two sentences."""
    if fit.method != "linear2019":
        return _host_summary(fit) if fit.budget.device == "host" else _gpu_summary(fit)
    limit, linear = size_text(fit.budget.limit_bytes), fit.linear2019
    if linear is None:
        return (
            f"The two small batches that this method needs do not fit in {limit}, so there is "
            "nothing to extrapolate."
        )
    return (
        "The linear2019 method estimates a max batch size of "
        f"{linear.max_batch_by_reserve[0][1]:,} in "
        f"{limit} without a reserve: {size_text(int(linear.fixed_bytes))} + "
        f"{size_text(int(linear.per_sample_bytes))} per sample. This is a linear extrapolation "
        "from two small batches; no larger batch was run."
    )


def _gpu_summary(fit: FitResult) -> str:
    within = f"{size_text(fit.budget.limit_bytes)} of GPU memory"
    if fit.leak:
        return (
            f"Memory leak: {size_text(int(fit.leak.bytes_per_step))} more stays allocated after "
            f"every step. Batch size {fit.leak.batch:,} would run out of memory after about "
            f"{fit.leak.steps_left:,} steps, and any other batch size sooner or later. A common "
            "cause is a list of losses without .item() or .detach()."
        )
    if fit.max_batch is None or fit.recommended_batch is None:
        return _gpu_failure(fit, within)
    max_batch, recommended = fit.max_batch, fit.recommended_batch
    if fit.verdict == Verdict.NO_LIMIT:
        return (
            f"Memory does not limit the batch size: batch size {max_batch.size:,} was trained "
            f"within {within}, and memory hardly grows with the batch."
        )
    if not max_batch.passes:
        return (
            f"In {within}, the predicted max batch size is {max_batch.size:,} and the recommended "
            f"batch size {recommended.size:,}. Neither was run."
        )
    is_both = max_batch.size == recommended.size
    name = "recommended and max" if is_both else "recommended"
    text = f"The {name} batch size is {recommended.size:,} ({_facts(recommended)})"
    if not is_both:
        text += f". The max batch size is {max_batch.size:,} ({_facts(max_batch)})"
    text += f": {free_text(max_batch, f' of {within}')}"
    above = next_batch_text(max_batch)
    return f"{text}; {above}." if above else f"{text}."


def _facts(batch: Batch) -> str:
    return ", ".join(batch_facts(batch, "gpu"))


def _gpu_failure(fit: FitResult, within: str) -> str:
    text = f"Not even a batch of 1 fits in {within}."
    failure = fit.failure
    if failure is None:
        return text
    if failure.shortfall_bytes:
        text += f" At least {size_text(failure.shortfall_bytes)} more is needed."
    smallest = failure.smallest
    if smallest and not smallest.is_ok:
        text += f" Batch size {smallest.batch} {_failed(smallest, 'GPU')}."
    if smallest and smallest.parts.state_bytes:
        text += (
            " Weights, gradients and optimizer state take "
            f"{size_text(smallest.parts.state_bytes)}, the activations of one sample "
            f"{size_text(smallest.parts.activations_bytes)}."
        )
    elif fit.subject and fit.subject.parameters:
        weights = size_text(4 * fit.subject.parameters)
        text += f" The weights take {weights}, and their gradients take as much again."
    return text


def _failed(result: ProbeResult, memory: str) -> str:
    place = phase_text(result.phase)
    if result.is_oom:
        return f"ran out of {memory} memory {place}".rstrip()
    return failure_text(result)


def _host_summary(fit: FitResult) -> str:
    limit = size_text(fit.budget.limit_bytes)
    if fit.leak:
        return (
            f"Memory leak: {size_text(int(fit.leak.bytes_per_step))} more stays in use after every "
            f"step at batch size {fit.leak.batch}. The limit of {limit} is reached after about "
            f"{fit.leak.steps_left:,} more steps, and sooner with a larger batch. Common causes "
            "are a list of losses (store loss.item() instead) and a dataset that caches "
            "everything it reads."
        )
    if fit.max_batch is None:
        return f"{fit.model} does not fit in {limit}: {_host_failure(fit)}"
    max_batch, recommended = fit.max_batch, fit.recommended_batch
    if fit.verdict == Verdict.NO_LIMIT:
        peaks = (p.reserved_peak_bytes for p in fit.curve if p.batch == max_batch.size)
        why = "memory hardly grows with the batch"
        if max_batch.size == fit.data_set_limit:
            why = _data_set_text(fit.data_set_limit)
        return (
            f"Memory does not limit the batch size: batch size {max_batch.size:,} uses "
            f"{memory_text(next(peaks, None))} of {limit}, and {why}."
        )
    passes = max_batch.passes
    text = (
        f"The max batch size in {limit} is {max_batch.size:,}: it passed in {passes} of {passes} "
        f"fresh {plural(passes, 'process', 'processes')}, and {free_text(max_batch)}"
    )
    if above := next_batch_text(max_batch):
        text += f"; {above}"
    if recommended and recommended.size != max_batch.size:
        text += f". The recommended batch size is {recommended.size:,}, which is faster"
    return f"{text}."


def _data_set_text(limit: int) -> str:
    return f"the dataset limits the batch to {limit:,} samples"


def _host_failure(fit: FitResult) -> str:
    failure = fit.failure
    if failure is None or failure.smallest is None:
        return "no batch was tried."
    batch, result = f"batch size {failure.smallest.batch}", failure.larger_limit_result
    if result is None or not result.is_ok:
        text = f"{batch} {_failed(failure.smallest, 'host')}."
        if result and result.is_oom:
            text += f" {size_text(failure.larger_limit_bytes)} is not enough either."
        return text
    shortfall, data = failure.shortfall_bytes, failure.data_bytes
    text = f"{batch} needs {size_text(result.reserved_peak_bytes or failure.larger_limit_bytes)}"
    text += f", {size_text(shortfall)} more than the limit" if shortfall else ", and sometimes more"
    libraries = max(0, failure.before_bytes - result.parts.weights_bytes - data)
    text += f". {framework_of(fit)} and its libraries take {size_text(libraries)}"
    text += f", the dataset {size_text(data)}" if data else ""
    state = size_text(result.parts.state_bytes)
    text += f", the model with its gradients and optimizer state {state}."
    if data > shortfall > 0:
        text += " A smaller --samples is enough to make it fit."
    return text


def linear_note(linear: Linear2019) -> str:
    if linear.per_sample_bytes <= 0:
        return "memory did not grow from the small batch to the large one, so no line can be fitted"
    if (linear.small_batch, linear.large_batch) == BATCHES:
        return ""
    return (
        f"batch sizes {linear.small_batch} and {linear.large_batch} replaced {BATCHES[0]} and "
        f"{BATCHES[1]}, which did not fit"
    )


# Notes


def notes(fit: FitResult) -> list[str]:
    subject, max_batch, budget = fit.subject, fit.max_batch, fit.budget
    texts = list(subject.notes if subject else ())
    for note in fit.notes:
        low, high = size_text(note.low_bytes), size_text(note.high_bytes)
        texts.append(_NOTES[note.kind].format(text=note.text, batch=note.batch, low=low, high=high))
    if fit.method == "auto":
        if subject and subject.variable_size:
            texts.append(
                "samples differ in size; the probes used the largest samples that were seen"
            )
        if fit.verdict == Verdict.FITS and max_batch and max_batch.size == fit.data_set_limit:
            texts.append(_data_set_text(fit.data_set_limit))
        if fit.verdict == Verdict.FITS and max_batch and not max_batch.passes:
            texts.append("estimated from smaller batches; nothing was run near the limit")
        if budget.device == "host" and fit.verdict in (Verdict.FITS, Verdict.NO_LIMIT):
            texts.append(
                "throughput on a CPU differs by 4 to 11% between identical processes, so it is "
                "approximate"
            )
    if budget.available_bytes is not None and budget.available_bytes != budget.requested_bytes:
        texts.append(
            f"`--gpu-memory {memory_text(budget.requested_bytes)}` is not available: the fit used "
            f"the {memory_text(budget.available_bytes)} that is free for {framework_of(fit)}"
        )
    return list(dict.fromkeys(map(upper_first, texts)))


# Recommendations and what-if estimates


def recommendation(breakdown: MemoryBreakdown, budget: MemoryBudget) -> str:
    parts = breakdown.parts
    sizes = {
        "state": parts.state_bytes,
        "workspace": breakdown.workspace_bytes,
        "activations": parts.activations_bytes,
    }
    share = sizes.get(breakdown.dominant, 0) / max(1, breakdown.allocated_peak_bytes)
    per_sample = (parts.activations_bytes + parts.inputs_bytes) / max(1, breakdown.batch)
    return _RECOMMENDATIONS[budget.device, breakdown.dominant].format(
        share=share_text(share),
        data=memory_text(breakdown.data_bytes),
        limit=memory_text(budget.limit_bytes),
        per_sample=memory_text(per_sample),
    )


def change_text(what_if: WhatIf) -> str:
    if what_if.change == "checkpointing":
        return "gradient checkpointing"
    return " ".join(f"{option_name(name)} {value}" for name, value in what_if.settings.items())


def reason_text(what_if: WhatIf, fit: FitResult) -> str:
    return _REASONS[what_if.change].format(layers=fit.subject.layers if fit.subject else 1)
