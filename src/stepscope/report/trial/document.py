"""Trials as a document: one as a list of facts, repeats as a table with their mean."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict

from stepscope.analysis.trial.throughput import Interval
from stepscope.records.trial import LimitFacts, ProcessNoise
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
from stepscope.report.trial.view import TrialView, advice_of, mean_of
from stepscope.runs.paths import RunPaths
from stepscope.trials.limits.spec import size_text

Rows = Iterator[tuple[str, str]]

_NAMES = {
    "imports": "import",
    "build": "model",
    "first_step": "first step",
    "warmup": "warm-up",
    "cleanup": "clean-up",
}
"""Of the parts of the overhead, where they are not named like their fields."""
_LEAST_SHOWN_S = 0.05  # shorter parts of the overhead are left out


def trials_document(views: Sequence[TrialView]) -> Document:
    return _one(views[0]) if len(views) == 1 else _repeats(views)


def trial_rows(view: TrialView) -> list[tuple[str, str]]:
    """All that is said of a trial: a name and a text; without a name it goes on from before."""
    rows = [*_labelled("Cause", view.cause), *_measured_rows(view), *_setting_rows(view)]
    return [(name, text) for name, text in rows if text]


def _one(view: TrialView) -> Document:
    found = (
        Facts(tuple(trial_rows(view))),
        Verbatim(str(view.folder), "Run folder"),
        Verbatim(str(RunPaths(view.folder).report_html), "Report"),
    )
    return Document(
        view.name,
        view.outcome,
        view.tone,
        (Section("", found), _advice_section(view.advice, view.is_ok)),
        reason=view.ending.reason,
        header=(Paragraph(_what(view), "note"),),
        data=trials_dict([view]),
    )


def _repeats(views: Sequence[TrialView]) -> Document:
    first, mean = views[0], mean_of(views)
    good = sum(view.is_ok for view in views)
    tone: Tone = "good" if good == len(views) else "bad"
    note = ""
    if disturbed := [view for view in views if view.measured.is_disturbed]:
        trials = f"{plural(len(disturbed), 'trial')} {', '.join(map(_number, disturbed))}"
        most = max(disturbed, key=lambda view: view.measured.interference.other_cores or 0.0)
        note = f"{_others_text(most)} in {trials}: these are the rates of a busy machine"
    rows = [
        ("Mean samples/s", _with_interval(mean.mean, mean.interval) if mean else ""),
        ("", _noise_text(mean.noise) if mean else ""),
        ("Note", note),
        *_setting_rows(first),
    ]
    folders = [Verbatim(str(view.folder), f"Run folder {_number(view)}") for view in views]
    failed = next((view for view in views if not view.is_ok), None)
    failure: list[tuple[str, str]] = []
    if failed:
        reason = failed.ending.reason
        is_said = any(reason in text for text in failed.cause)
        texts = failed.cause if is_said else (reason, *failed.cause)
        failure = list(_labelled(f"Cause, trial {_number(failed)}", texts))
    blocks = (
        _repeats_table(views).known(),
        Section("", (Facts(tuple((name, text) for name, text in rows if text)), *folders)),
        Facts(tuple(failure)),
        _advice_section(advice_of(views), failed is None),
    )
    return Document(
        first.name,
        f"{good} of {len(views)} trials ok",
        tone,
        blocks,
        header=(Paragraph(_what(first), "note"),),
        data=trials_dict(views),
    )


def _advice_section(advice: str, is_ok: bool) -> Section:
    """What is to be copied, a command or a path, stands below what is to be read, not wrapped."""
    words, *copied = advice.splitlines() or [""]
    text = Paragraph(words, "" if is_ok else "strong")
    return Section("", (text, *map(Verbatim, copied)))


def _repeats_table(views: Sequence[TrialView]) -> Table:
    def steady(view: TrialView) -> str:
        return "yes" if view.measured.steady.steady else "no"

    table = Table.of(
        views,
        (
            (Column("Trial"), _number),
            (Column("Outcome", number=False, toned=True), lambda v: v.outcome),
            (Column("Samples/s"), lambda v: rate_text(v.samples_per_second)),
            (Column("Step"), lambda v: _short(v.measured.step.median if v.measured.step else None)),
            (Column("Data wait"), lambda v: share_text(v.measured.data_wait_share)),
            (Column("Warm-up", spare=3), lambda v: count_text(v.warmup_steps)),
            (Column("Steps", spare=4), lambda v: count_text(v.measured.steady_steps)),
            (Column("Steady", spare=1, number=False), steady),
            (Column("Host memory"), lambda v: bytes_text(v.measured.host_memory_peak)),
            (Column("GPU memory", gpu=True), lambda v: bytes_text(v.measured.device_memory.peak)),
            (Column("Overhead", spare=2), lambda v: seconds_text(v.measured.overhead.total)),
        ),
    )
    return Table(table.columns, table.rows, tuple(view.tone for view in views))


def _what(view: TrialView) -> str:
    """Data, device, precision and framework: what a reader needs to know what was measured."""
    rank, settings = view.record.first, view.record.settings
    name = rank.data.name or settings.data
    data = f"{name} data" if name else ""
    if data and rank.data.source == "generated":
        data += " (generated)"
    parts = (
        data,
        rank.device_name or rank.device or settings.device,
        settings.precision,
        " ".join(str(word) for word in next(iter(rank.versions.items()), ())),
    )
    return ", ".join(filter(None, parts))


def _labelled(label: str, texts: Sequence[str]) -> Rows:
    for place, text in enumerate(texts):
        yield (label if place == 0 else "", text)


def _measured_rows(view: TrialView) -> Rows:
    measured = view.measured
    rate, noise, step = measured.rate, measured.noise, measured.step
    if rate is None:
        yield "Samples/s", f"{MISSING}  {view.why_no_rate}"
    else:
        yield "Samples/s", _with_interval(rate.per_second, measured.interval)
    if rate and noise:
        yield "", f"{_noise_text(noise)}, {share_text(rate.within)} within this one"
    if measured.is_disturbed:
        yield "Note", f"{_others_text(view)} meanwhile: this is the rate of a busy machine"
    yield "Step", f"{_short(step.median)}, p95 {_short(step.p95)}" if step else ""
    parts = (("wait", measured.wait), ("copy", measured.copy), ("compute", measured.compute))
    yield "", ", ".join(f"{name} {_short(part.median)}" for name, part in parts if part)
    if measured.data_wait_share is not None:
        yield "Waiting for data", f"{share_text(measured.data_wait_share)} of the time"
    if measured.steps:
        cut = f"{count_text(view.warmup_steps)} of {count_text(measured.steps)} steps cut"
        yield "Warm-up", f"{cut}; {measured.steady.reason or 'the rest is steady'}"
    if measured.epoch_seconds is not None:
        how = "measured" if measured.epoch_measured else "projected"
        yield "Epoch", f"{seconds_text(measured.epoch_seconds)}, {how}"
    if measured.imbalance is not None:
        yield "Ranks", f"the slowest takes {measured.imbalance:.2f} times the fastest's step"
    if (peak := measured.host_memory_peak) is not None:
        limit = view.record.limits.memory
        # The kernel charges a page that several control groups share to one of them only.
        is_more = limit is not None and peak > limit.asked and not limit.is_soft
        why = ", with shared library pages that its limit does not count" if is_more else ""
        yield "Host memory", f"{bytes_text(peak)} at its peak{why}"
    memory = measured.device_memory
    names = ("allocated", "reserved", "on the device")
    peaks = zip(names, (memory.allocated, memory.reserved, memory.device), strict=True)
    held = [f"{bytes_text(peak)} {name}" for name, peak in peaks if peak is not None]
    if memory.retries:
        held.append(f"{count_text(memory.retries)} retries of the allocator")
    yield "GPU memory", ", ".join(held)
    if measured.joules is not None:
        each = rate_text(measured.samples_per_joule)
        joules = joules_text(measured.joules)
        yield "Energy", f"{joules} over the measured steps, {each} samples/J"
    parts_s = asdict(measured.overhead)
    total = parts_s.pop("total")
    split = ", ".join(
        f"{_NAMES.get(name, name)} {seconds_text(cost)}"
        for name, cost in parts_s.items()
        if cost and cost >= _LEAST_SHOWN_S
    )
    if total is not None:
        split = f"{seconds_text(total)} beyond the measured steps ({split})"
    yield "Overhead", split


def _setting_rows(view: TrialView) -> Rows:
    settings, batch = view.record.settings, view.record.samples_per_step
    if batch and settings.batch_size and settings.accumulate:
        ranks = f"{count_text(settings.ranks)} {plural(settings.ranks, 'rank')}"
        each, accumulated = count_text(settings.batch_size), count_text(settings.accumulate)
        split = f"{each} per rank × {accumulated} accumulated × {ranks}"
        yield "Global batch", f"{count_text(batch)}  ({split})"
    optimizer, lr = view.workload.get("optimizer"), view.workload.get("lr")
    # An optimizer of the user's own is recorded without a learning rate.
    yield "Optimizer", f"{optimizer or ''}" + ("" if lr is None else f", lr {lr:g}")
    data = view.record.first.data
    yield from _labelled("Data", tuple(filter(None, dict.fromkeys((data.note, *data.notes)))))
    yield from _labelled("Limits", _limit_texts(view.record.limits))
    yield "Left behind", ", ".join(view.record.trial.left)


def _limit_texts(limits: LimitFacts) -> list[str]:
    """In binary units, as people ask for them. What was measured is decimal, as everywhere."""
    texts = []
    if cpus := limits.cpus:
        what = f"{cpus.asked:g} {plural(cpus.asked, 'CPU')}{_how(cpus.by, cpus.note)}"
        if cpus.escaped:
            count = len(cpus.escaped)
            what += f", and {count} {plural(count, 'process', 'processes')} escaped it"
        texts.append(what)
    if memory := limits.memory:
        what = f"{size_text(memory.asked)} of host memory"
        what += _how(memory.by, memory.why, memory.note)
        if memory.peak:
            what += f", peak {size_text(memory.peak, memory.asked)} of it, page cache included"
        texts.append(what)
    if gpu := limits.gpu_memory:
        texts.append(f"{size_text(gpu.asked)} of GPU memory, each rank{_how(gpu.by)}")
    if limits.gpus is not None:
        names = limits.gpus.asked
        texts.append((f"GPU {', '.join(names)}" if names else "no GPU") + _how(limits.gpus.by))
    return texts


def _how(*words: str) -> str:
    known = "; ".join(filter(None, words))
    return f" ({known})" if known else ""


def _with_interval(rate: float, interval: Interval | None) -> str:
    if interval is None:
        return rate_text(rate)
    half = share_text((interval.high - rate) / rate)
    low, high = rate_text(interval.low), rate_text(interval.high)
    return f"{rate_text(rate)} ± {half}  ({low} to {high}, {share_text(interval.confidence)} sure)"


def _noise_text(noise: ProcessNoise) -> str:
    trials = count_text(noise.trials)
    if noise.source == "learnt":
        source = f"learnt from {trials} trials"
    elif noise.source == "others" and noise.assumed is None:
        source = "as the noisier of other workloads here: this one was not repeated"
    elif not noise.trials:
        source = "assumed: no repeats were seen here"
    elif noise.assumed is None:
        source = f"from {trials} repeats and an assumption"
    else:
        source = f"from {trials} repeats and an assumed {share_text(noise.assumed)}"
    return f"processes differ by {share_text(noise.cv)} ({source})"


def _short(seconds: float | None) -> str:
    """A step may take microseconds or minutes: three digits of it."""
    if seconds is None or seconds >= 0.9995:
        return seconds_text(seconds)
    small = 0 < seconds < 1e-4
    return f"{significant(seconds * (1e6 if small else 1e3))} {'µs' if small else 'ms'}"


def _others_text(view: TrialView) -> str:
    seen = view.measured.interference
    return f"other processes used {seen.other_cores:.1f} of {seen.machine_cores:g} CPUs"


def _number(view: TrialView) -> str:
    return count_text(view.record.trial.repeat)
