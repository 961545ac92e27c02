"""Trials as a document: one trial as a list of facts, repeats as a table with their mean."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict

from stepscope.analysis.trial.measurement import Part
from stepscope.analysis.trial.throughput import Interval
from stepscope.records.codec import salvage
from stepscope.records.trial import LimitFacts, ProcessNoise, TrialSettings
from stepscope.report.kit.document import Document, Facts, Paragraph, Section, Verbatim
from stepscope.report.kit.format import (
    MISSING,
    bytes_text,
    count_text,
    joules_text,
    plural,
    rate_text,
    seconds_text,
    share_text,
    significant,
)
from stepscope.report.kit.outcomes import Tone
from stepscope.report.kit.table import Column, Table
from stepscope.report.trial.json import trials_dict
from stepscope.report.trial.view import TrialView, mean_of, recommendation_text_for
from stepscope.runs.paths import RunPaths
from stepscope.trials.limits.spec import size_text

Rows = Iterator[tuple[str, str]]

_PART_NAMES = {
    "imports": "import",
    "build": "model",
    "first_step": "first step",
    "warmup": "warm-up",
    "closing": "shutdown",
    "cleanup": "cleanup",
}
"""Names of parts outside the measured steps that differ from the field names."""
_MIN_SHOWN_S = 0.05  # shorter parts are omitted


def trials_document(views: Sequence[TrialView]) -> Document:
    return _one(views[0]) if len(views) == 1 else _repeats(views)


def trial_rows(view: TrialView) -> list[tuple[str, str]]:
    """Return labels and texts; an empty label continues the previous row."""
    failure = _labelled("Failure", view.failure_details)
    rows = [*failure, *_measured_rows(view), *_setting_rows(view)]
    return [(label, text) for label, text in rows if text]


def _one(view: TrialView) -> Document:
    facts = (
        Facts(tuple(trial_rows(view))),
        Verbatim(str(view.folder), "Run folder"),
        Verbatim(RunPaths(view.folder).report_html.absolute().as_uri(), "Report"),
    )
    return Document(
        view.name,
        view.outcome,
        view.tone,
        (Section("", facts), _recommendation_section(view.recommendation_text, view.is_ok)),
        reason=view.exit_status.reason,
        header=(Paragraph(_workload_text(view), "note"),),
        data=trials_dict([view]),
    )


def _repeats(views: Sequence[TrialView]) -> Document:
    first, mean = views[0], mean_of(views)
    ok = sum(view.is_ok for view in views)
    tone: Tone = "good" if ok == len(views) else "bad"
    note = ""
    if busy := [view for view in views if view.measured.has_interference]:
        trials = f"{plural(len(busy), 'trial')} {', '.join(map(_number, busy))}"
        busiest = max(busy, key=lambda view: view.measured.interference.other_cores or 0.0)
        note = _interference_text(busiest, f" in {trials}")
    rows = [
        ("Mean samples/s", _with_interval(mean.mean, mean.interval) if mean else ""),
        ("Noise", _noise_text(mean.noise) if mean else ""),
        ("Note", note),
        *_setting_rows(first),
    ]
    folders = [Verbatim(str(view.folder), f"Run folder {_number(view)}") for view in views]
    failed = next((view for view in views if not view.is_ok), None)
    failure: list[tuple[str, str]] = []
    if failed:
        reason, details = failed.exit_status.reason, failed.failure_details
        texts = details if any(reason in text for text in details) else (reason, *details)
        failure = list(_labelled(f"Failure, trial {_number(failed)}", texts))
    blocks = (
        _repeats_table(views).without_empty_columns(),
        Section("", (Facts(tuple((label, text) for label, text in rows if text)), *folders)),
        Facts(tuple(failure)),
        _recommendation_section(recommendation_text_for(views), failed is None),
    )
    return Document(
        first.name,
        f"{ok} of {len(views)} trials ok",
        tone,
        blocks,
        header=(Paragraph(_workload_text(first), "note"),),
        data=trials_dict(views),
    )


def _recommendation_section(recommendation: str, is_ok: bool) -> Section:
    """Put a command or path on lines of its own that are not wrapped, so that it can be copied."""
    sentence, *copied = recommendation.splitlines() or [""]
    text = Paragraph(sentence, "" if is_ok else "strong")
    return Section("", (text, *map(Verbatim, copied)))


def _repeats_table(views: Sequence[TrialView]) -> Table:
    def steady(view: TrialView) -> str:
        return "yes" if view.measured.steady.steady else "no"

    table = Table.of(
        views,
        (
            (Column("Trial"), _number),
            (Column("Outcome", number=False, colored=True), lambda v: v.outcome),
            (Column("Samples/s"), lambda v: rate_text(v.samples_per_second)),
            (Column("Step"), lambda v: _step_text(v.measured.step)),
            (Column("Data wait"), lambda v: share_text(v.measured.data_wait_share)),
            (Column("Warm-up", drop=3), lambda v: count_text(v.warmup_steps)),
            (Column("Steps", drop=4), lambda v: count_text(v.measured.steady_steps)),
            (Column("Steady", drop=1, number=False), steady),
            (Column("Host memory"), lambda v: bytes_text(v.measured.host_memory_peak)),
            (Column("GPU memory", gpu=True), lambda v: bytes_text(v.measured.device_memory.peak)),
            (Column("Outside steps", drop=2), lambda v: seconds_text(v.measured.overhead.total)),
        ),
    )
    return Table(table.columns, table.rows, tuple(view.tone for view in views))


def _workload_text(view: TrialView) -> str:
    """Return data, device, precision and framework."""
    rank, settings = view.record.first, view.record.settings
    name = rank.data.name or settings.data
    data = f"{name} data" if name else ""
    if data and rank.data.source == "generated":
        data += " (generated)"
    parts = (
        data,
        rank.device_name or rank.device or settings.device,
        settings.precision,
        " ".join(str(part) for part in next(iter(rank.versions.items()), ())),
    )
    return ", ".join(filter(None, parts))


def _labelled(label: str, texts: Sequence[str]) -> Rows:
    for index, text in enumerate(texts):
        yield (label if index == 0 else "", text)


def _measured_rows(view: TrialView) -> Rows:
    measured = view.measured
    rate, noise, step = measured.rate, measured.noise, measured.step
    if rate is None:
        yield "Samples/s", f"{MISSING}  ({view.no_throughput_reason})"
    else:
        yield "Samples/s", _with_interval(rate.per_second, measured.interval)
    if rate and noise:
        yield "Noise", f"{_noise_text(noise)}, {share_text(rate.relative_error)} within this trial"
    if measured.has_interference:
        yield "Note", _interference_text(view)
    yield "Step", f"{_step_text(step)}, p95 {_duration_text(step.p95)}" if step else ""
    parts = (("wait", measured.wait), ("copy", measured.copy), ("compute", measured.compute))
    yield "", ", ".join(f"{name} {_step_text(part)}" for name, part in parts if part)
    if measured.data_wait_share is not None:
        yield "Data wait", f"{share_text(measured.data_wait_share)} of the time"
    if measured.steps:
        warmup = f"{count_text(view.warmup_steps)} of {count_text(measured.steps)} steps"
        yield "Warm-up", f"{warmup}; {measured.steady.reason or 'the other steps are steady'}"
    if measured.epoch_seconds is not None:
        source = "measured" if measured.epoch_measured else "estimated"
        yield "Epoch", f"{seconds_text(measured.epoch_seconds)} ({source})"
    if measured.imbalance is not None:
        slower = f"{measured.imbalance:.2f}×"
        yield "Ranks", f"a step takes {slower} as long on the slowest rank as on the fastest"
    if (peak := measured.host_memory_peak) is not None:
        limit = view.record.limits.memory
        # The kernel charges a page that several cgroups share to only one of them.
        is_over = limit is not None and peak > limit.requested and not limit.is_soft
        shared = " (includes shared library pages that the limit does not count)" if is_over else ""
        yield "Host memory", f"{bytes_text(peak)} peak{shared}"
    memory = measured.device_memory
    names = ("allocated", "reserved", "on the device")
    peaks = zip(names, (memory.allocated, memory.reserved, memory.device), strict=True)
    texts = [f"{bytes_text(peak)} {name}" for name, peak in peaks if peak is not None]
    if memory.retries:
        texts.append(
            f"{count_text(memory.retries)} allocator {plural(memory.retries, 'retry', 'retries')}"
        )
    yield "GPU memory", ", ".join(texts)
    if measured.joules is not None:
        per_joule = rate_text(measured.samples_per_joule)
        joules = joules_text(measured.joules)
        yield "Energy", f"{joules} over the measured steps, {per_joule} samples/J"
    seconds = asdict(measured.overhead)
    total = seconds.pop("total")
    outside = ", ".join(
        f"{_PART_NAMES.get(name, name)} {seconds_text(part)}"
        for name, part in seconds.items()
        if part and part >= _MIN_SHOWN_S
    )
    if total is not None:
        outside = f"{seconds_text(total)} ({outside})"
    yield "Outside steps", outside


def _setting_rows(view: TrialView) -> Rows:
    settings, batch = view.record.settings, view.record.samples_per_step
    if batch and settings.batch_size and settings.accumulate:
        ranks = f"{count_text(settings.ranks)} {plural(settings.ranks, 'rank')}"
        per_rank, accumulated = count_text(settings.batch_size), count_text(settings.accumulate)
        split = f"{per_rank} per rank × {accumulated} accumulated × {ranks}"
        yield "Global batch", f"{count_text(batch)}  ({split})"
    used = salvage(TrialSettings, view.workload)
    # The optimizer of a custom workload is recorded without a learning rate.
    yield "Optimizer", used.optimizer + ("" if used.lr is None else f", lr {used.lr:g}")
    data = view.record.first.data
    yield from _labelled("Data", tuple(filter(None, dict.fromkeys((data.note, *data.notes)))))
    yield from _labelled("Limits", _limit_texts(view.record.limits))
    yield "Leftovers", ", ".join(view.record.trial.leftovers)


def _limit_texts(limits: LimitFacts) -> list[str]:
    texts = []
    if cpus := limits.cpus:
        count = f"{cpus.requested:g} {plural(cpus.requested, 'CPU')}"
        text = f"{count}{_in_parentheses(cpus.enforced_by, cpus.note)}"
        if cpus.escaped:
            processes = plural(len(cpus.escaped), "process", "processes")
            text += f", {len(cpus.escaped)} {processes} escaped the limit"
        texts.append(text)
    if memory := limits.memory:
        text = f"{size_text(memory.requested)} host memory"
        text += _in_parentheses(memory.enforced_by, memory.reason, memory.note)
        if memory.peak:
            text += f", peak {size_text(memory.peak, memory.requested)} including page cache"
        texts.append(text)
    if gpu := limits.gpu_memory:
        size = size_text(gpu.requested)
        texts.append(f"{size} GPU memory per rank{_in_parentheses(gpu.enforced_by)}")
    if limits.gpus is not None:
        names = limits.gpus.requested
        text = f"GPU {', '.join(names)}" if names else "no GPU"
        texts.append(text + _in_parentheses(limits.gpus.enforced_by))
    return texts


def _in_parentheses(*texts: str) -> str:
    known = "; ".join(filter(None, texts))
    return f" ({known})" if known else ""


def _with_interval(rate: float, interval: Interval | None) -> str:
    if interval is None:
        return rate_text(rate)
    half = share_text((interval.high - rate) / rate)
    range_text = f"{rate_text(interval.low)} to {rate_text(interval.high)}"
    confidence = f"{share_text(interval.confidence)} confidence"
    return f"{rate_text(rate)} ± {half}  ({range_text}, {confidence})"


def _noise_text(noise: ProcessNoise) -> str:
    trials = count_text(noise.trials)
    if noise.source == "learned":
        source = f"measured in {trials} trials"
    elif noise.source == "other_workloads" and noise.assumed is None:
        source = "estimated from other workloads on this machine, because this one was not repeated"
    elif not noise.trials:
        source = "assumed: no repeats on this machine"
    elif noise.assumed is None:
        source = f"from {trials} repeats and a default"
    else:
        source = f"from {trials} repeats and a default of {share_text(noise.assumed)}"
    return f"{share_text(noise.cv)} between processes ({source})"


def _step_text(part: Part | None) -> str:
    return _duration_text(part.median if part else None)


def _duration_text(seconds: float | None) -> str:
    """Format the duration of a step, which may take microseconds or minutes."""
    if seconds is None or seconds >= 0.9995:
        return seconds_text(seconds)
    is_small = 0 < seconds < 1e-4
    return f"{significant(seconds * (1e6 if is_small else 1e3))} {'µs' if is_small else 'ms'}"


def _interference_text(view: TrialView, trials: str = "") -> str:
    measured = view.measured.interference
    used = f"other processes used {measured.other_cores:.1f} of {measured.machine_cores:g} CPUs"
    return f"{used}{trials}, so the throughput is that of a busy machine"


def _number(view: TrialView) -> str:
    return count_text(view.record.trial.repeat)
