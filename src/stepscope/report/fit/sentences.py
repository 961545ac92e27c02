"""The sentences of a fit: its summary, its notes, and how a batch failed."""

from __future__ import annotations

from stepscope.fit.answer import (
    Batch,
    Composition,
    Device,
    Fit,
    Linear2019,
    MemoryBudget,
    NoteKind,
    OtherProcess,
    Verdict,
    WhatIf,
)
from stepscope.fit.linear2019 import BATCHES
from stepscope.report.kit.format import MISSING, is_known
from stepscope.trials.limits.spec import size_text
from stepscope.workloads.frameworks.registry import framework_name
from stepscope.workloads.probing import ProbeResult
from stepscope.workloads.spec import option_name

_PHASES = {
    "start": "before the framework was there",
    "import": "while the framework was imported",
    "data": "while the data set was made",
    "build": "while the model was built",
    "evaluation": "in the evaluation",
    "smaller batch": "in a smaller batch after the steps",
    "again": "in a step after the evaluation",
}
_NOTES = {
    NoteKind.REPORTED: "{text}",
    NoteKind.BATCH_FAILED: "batch {batch:,} fails for another reason than memory: {text}",
    NoteKind.EDGE_UNSTABLE: "the edge did not hold still: what passed once did not again",
    NoteKind.SOFT_LIMIT: (
        "no control group can be had here: the limit was kept by looking, which is late by nature, "
        "so that the answer may be too large"
    ),
    NoteKind.PEAKS_DIFFER: (
        "the same batch of {batch:,} held between {low} and {high} in different processes: malloc "
        "keeps what was freed, more or less of it, so that there is no sharp limit. With "
        "MALLOC_MMAP_THRESHOLD_=1048576 in the environment of both training and fit there is one"
    ),
}
_ADVICE = {
    ("gpu", "state"): (
        "Weights, gradients and optimizer state take {share} of it whatever the batch: an "
        "optimizer with less state, or sharding them over GPUs, frees most."
    ),
    ("gpu", "workspace"): (
        "Kernels' workspace takes {share} of it: channels_last or another precision changes the "
        "algorithms that cuDNN picks."
    ),
    ("gpu", "activations"): (
        "Activations take {share} of it and grow with every sample: bf16 or gradient checkpointing "
        "frees most."
    ),
    ("host", "data"): (
        "The data set takes {data} of {limit}: fewer --samples leave more for batches, of which "
        "each sample takes {per_sample}."
    ),
    ("host", "state"): (
        "Of what you can change, the model, its gradients and optimizer take most: sgd without "
        "momentum keeps less."
    ),
    ("host", "activations"): (
        "Of what you can change, what the forward pass keeps takes most, {per_sample} for each "
        "sample: smaller inputs, checkpointing, or --accumulate with smaller batches."
    ),
}
_REASONS = {
    "precision": "activations about halve; weights stay fp32",
    "checkpointing": "keeps about 2/√{layers} of the activations, for a third more compute",
    "optimizer": "another optimizer state for each weight",
}


def memory_text(size: float | None) -> str:
    """Binary units, as `--gpu-memory` takes them: what the answer says can be given back."""
    if not is_known(size):
        return MISSING
    return f"-{size_text(round(-size))}" if size < 0 else size_text(round(size))


def retries_text(retries: int) -> str:
    if retries == 1:
        return "1 allocator retry"
    return f"{retries:,} allocator retries" if retries > 0 else "allocator retries"


def other_process_text(other: OtherProcess) -> str:
    size = f" holds {size_text(other.held)}" if other.held is not None else ""
    return f"{other.name or 'a process'} (pid {other.pid}){size}"


def framework_of(fit: Fit) -> str:
    return framework_name(str(fit.settings.get("framework", "torch")))


# How a batch went


def phase_text(phase: str) -> str:
    return _PHASES.get(phase, f"in {phase}" if phase else "")


def often_text(batch: Batch) -> str:
    failed, tried = batch.attempts_above
    return f"failed in {failed} of {tried}" if failed < tried else ""


def failure_text(failure: ProbeResult, device: Device) -> str:
    place = phase_text(failure.phase)
    if device == "host":
        return place
    place = place or "at once"
    return place if failure.is_oom else f"{place}: {failure.message}"


def tried_text(result: ProbeResult) -> str:
    """How a batch went on the host, while others are still to be tried."""
    if not result.is_ok:
        return f"batch {result.batch:,} {_failed(result)}"
    peak = result.reserved_peak
    held = f"holds {size_text(peak)} at most" if peak else "just fits"
    return f"batch {result.batch:,} {held}"


def _failed(result: ProbeResult) -> str:
    place = phase_text(result.phase)
    if result.is_oom:
        return f"ran out of host memory {place}".rstrip()
    return f"{f'failed {place}'.rstrip()}: {result.message}"


# The summary


def summary(fit: Fit) -> str:
    """The answer in a sentence or two."""
    if fit.method != "linear2019":
        return _host_summary(fit) if fit.budget.device == "host" else _gpu_summary(fit)
    limit, linear = size_text(fit.budget.limit), fit.linear
    if linear is None:
        return f"Not even two small batches fit into {limit}: there is no line."
    return (
        f"The 2019 method estimates {linear.by_reserve[0][1]:,} with no reserve in {limit}: "
        f"{size_text(int(linear.per_sample))} a sample and {size_text(int(linear.fixed))} "
        "beside. It is a line through two small batches: nothing larger was tried."
    )


def _gpu_summary(fit: Fit) -> str:
    within = f"{size_text(fit.budget.limit)} of GPU memory"
    if fit.leak:
        return (
            f"The training leaks: {size_text(int(fit.leak.bytes_per_step))} more stay in memory "
            f"after every step. A batch of {fit.leak.batch:,} would run out after some "
            f"{fit.leak.steps_left:,} steps, and so would any other, sooner or later. Something "
            "keeps tensors: a list of losses without .item() or .detach(), for example."
        )
    if fit.max_batch is None or fit.recommended_batch is None:
        return _gpu_misfit(fit, within)
    largest, use = fit.max_batch, fit.recommended_batch
    if fit.verdict == Verdict.NO_LIMIT:
        return (
            f"Memory hardly grows with the batch: {largest.size:,} samples were trained within "
            f"{within}, and there is no telling a largest one. Something else limits it."
        )
    rate = use.samples_per_second
    speed = f" at {rate:,.0f} samples/s" if rate else ""
    how = "with allocator retries" if use.retried else "without an allocator retry"
    text = f"Use a batch of {use.size:,}: it trains{speed} {how}. "
    if not largest.passed:
        return f"{text}{largest.size:,} should be the largest within {within}: foreseen, not tried."
    text += f"{largest.size:,} is the largest: it fits"
    text += ", but thrashes," if largest.retried else ""
    text += f" and leaves {size_text(largest.free_bytes)} of {within}"
    above = largest.failure_above
    if above is None:
        return f"{text}."
    if above.missing:
        return f"{text}; {above.batch:,} would need at least {size_text(above.missing)} more."
    return f"{text}; {above.batch:,} fails {failure_text(above, 'gpu')}."


def _gpu_misfit(fit: Fit, within: str) -> str:
    text = f"Not even a batch of 1 fits into {within}."
    misfit = fit.misfit
    if misfit is None:
        return text
    if misfit.shortfall:
        text += f" At least {size_text(misfit.shortfall)} more would be needed."
    one = misfit.smallest
    if one and not one.is_ok:
        text += f" It fails {failure_text(one, 'gpu')}."
    if one and one.parts.state:
        text += (
            f" Weights, gradients and optimizer state alone take {size_text(one.parts.state)}, "
            f"and one sample keeps {size_text(one.parts.activations)}."
        )
    elif fit.subject and fit.subject.parameters:
        weights = size_text(4 * fit.subject.parameters)
        text += f" Its weights take {weights}, and as much again for their gradients."
    return text


def _host_summary(fit: Fit) -> str:
    limit = size_text(fit.budget.limit)
    if fit.leak:
        return (
            f"Memory grows by {size_text(int(fit.leak.bytes_per_step))} with every step of batch "
            f"{fit.leak.batch}, and does not come back: after about {fit.leak.steps_left:,} more "
            f"steps {limit} are full, and sooner with a larger batch. Something keeps what belongs "
            "to a step: a list of losses (keep loss.item() instead), or a data set that keeps all "
            "that it has read."
        )
    if fit.max_batch is None:
        return f"{fit.model} does not fit into {limit}: {_host_misfit(fit)}"
    largest, use = fit.max_batch, fit.recommended_batch
    if fit.verdict == Verdict.NO_LIMIT:
        held = next((size_text(p.reserved) for p in fit.curve if p.batch == largest.size), MISSING)
        why = "memory hardly grows with the batch"
        if largest.size == fit.data_batch:
            why = f"the data set has no more than {fit.data_batch:,} samples for a batch"
        return (
            f"Memory sets no limit here: batch {largest.size:,} holds {held} of {limit}, and {why}."
        )
    free = f"leaves {size_text(largest.free_bytes)}" if largest.free_bytes else "leaves nothing"
    text = (
        f"{largest.size:,} is the largest batch that trains within {limit}: it passed in "
        f"{largest.passed} fresh {'process' if largest.passed == 1 else 'processes'} of "
        f"{largest.passed} and {free}"
    )
    above = largest.failure_above
    if above:
        often = often_text(largest)
        text += f"; {above.batch:,} {often}: it " if often else f"; {above.batch:,} "
        text += _failed(above)
    if use and use.size != largest.size:
        return f"{text}. {use.size:,} is faster, and leaves more."
    return f"{text}."


def _host_misfit(fit: Fit) -> str:
    misfit = fit.misfit
    if misfit is None or misfit.smallest is None:
        return "no batch was tried."
    batch, larger = f"batch {misfit.smallest.batch}", misfit.within_larger
    if larger is None or not larger.is_ok:
        text = f"{batch} {_failed(misfit.smallest)}."
        if larger and larger.is_oom:
            text += f" {size_text(misfit.larger_limit)} are not enough either."
        return text
    text = f"{batch} needs {size_text(larger.reserved_peak or misfit.larger_limit)}"
    shortfall, data = misfit.shortfall, misfit.data_bytes
    text += f", {size_text(shortfall)} more" if shortfall else " at times more than that"
    rest = max(0, misfit.before - larger.parts.weights - data)
    text += f". {framework_of(fit)} and what it loads take {size_text(rest)}"
    text += f", the data set {size_text(data)}" if data else ""
    text += f", the model with gradients and optimizer {size_text(larger.parts.state)}."
    return f"{text} Fewer --samples would do." if data > shortfall > 0 else text


def linear_note(linear: Linear2019) -> str:
    if linear.per_sample <= 0:
        return "memory did not grow from the small batch to the large one: there is no line"
    if (linear.small, linear.large) == BATCHES:
        return ""
    return (
        f"batches {linear.small} and {linear.large} in the place of {BATCHES[0]} and {BATCHES[1]}, "
        "which did not fit"
    )


# What a user should know beside it


def notes(fit: Fit) -> list[str]:
    subject, largest, budget = fit.subject, fit.max_batch, fit.budget
    texts = list(subject.notes if subject else ())
    for note in fit.notes:
        low, high = size_text(note.low), size_text(note.high)
        texts.append(_NOTES[note.kind].format(text=note.text, batch=note.batch, low=low, high=high))
    if fit.method == "auto":
        if subject and subject.varies:
            texts.append("samples differ in size: batches of the largest that was seen were probed")
        if fit.verdict == Verdict.FITS and largest and largest.size == fit.data_batch:
            texts.append(f"the data set has no more than {fit.data_batch:,} samples")
        if fit.verdict == Verdict.FITS and largest and not largest.passed:
            texts.append("estimated from smaller batches: nothing near the limit was run")
        if budget.device == "host" and fit.verdict in (Verdict.FITS, Verdict.NO_LIMIT):
            texts.append(
                "throughput differs by 6 to 10 % between processes on a CPU: take it as a hint"
            )
    if budget.available is not None and budget.available != budget.requested:
        texts.append(
            f"--gpu-memory {memory_text(budget.requested)} cannot be had now: "
            f"{memory_text(budget.available)} are free for {framework_of(fit)}, and that is what "
            "was fitted into"
        )
    return list(dict.fromkeys(texts))


# What would change it


def advice(made_of: Composition, budget: MemoryBudget) -> str:
    parts = made_of.parts
    sizes = {"state": parts.state, "workspace": made_of.workspace, "activations": parts.activations}
    per_sample = (parts.activations + parts.inputs) / max(1, made_of.batch)
    return _ADVICE[budget.device, made_of.dominant].format(
        share=f"{sizes.get(made_of.dominant, 0) / max(1, made_of.peak):.0%}",
        data=memory_text(made_of.data_bytes),
        limit=memory_text(budget.limit),
        per_sample=memory_text(per_sample),
    )


def change_text(what_if: WhatIf) -> str:
    if what_if.change == "checkpointing":
        return "gradient checkpointing"
    return " ".join(f"{option_name(name)} {value}" for name, value in what_if.settings.items())


def reason_text(what_if: WhatIf, fit: Fit) -> str:
    return _REASONS[what_if.change].format(layers=fit.subject.layers if fit.subject else 1)
