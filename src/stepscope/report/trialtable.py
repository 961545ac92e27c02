"""Trials in a terminal: one as a block of facts, repeats as a table with their mean."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

from stepscope.analysis.throughput import Combined, Interval, Spread
from stepscope.analysis.trial import Overhead, Part, number
from stepscope.report.format import (
    MISSING,
    TONE_COLOURS,
    bytes_text,
    count_text,
    joules_text,
    printable,
    rate_text,
    seconds_text,
    share_text,
    significant,
)
from stepscope.report.tables import Column, Table
from stepscope.report.trial import TrialView, advice_of, mean_of
from stepscope.report.triallimits import host_memory_text, limit_texts
from stepscope.runs.paths import RunPaths

_MARGIN = 16
_OVERHEAD: tuple[tuple[str, Callable[[Overhead], float | None]], ...] = (
    ("start", lambda o: o.start),
    ("import", lambda o: o.imports),
    ("data", lambda o: o.data),
    ("model", lambda o: o.build),
    ("first step", lambda o: o.first_step),
    ("warm-up", lambda o: o.warmup),
    ("profile", lambda o: o.profile),
    ("closing", lambda o: o.closing),
    ("other", lambda o: o.other),
    ("clean-up", lambda o: o.cleanup),
)
_LEAST_SHOWN_S = 0.05
"""Parts of the overhead below it are left out."""


def print_trial(console: Console, views: Sequence[TrialView]) -> None:
    """Write what one trial, or repeats of one, came to."""
    if len(views) == 1:
        _print_one(console, views[0])
    elif views:
        _print_repeats(console, views)


def _print_one(console: Console, view: TrialView) -> None:
    console.print(_head(view))
    console.print()
    console.print(_facts(trial_rows(view)))
    _print_path(console, "Run folder", view.folder)
    _print_path(console, "Report", RunPaths(view.folder).report_html)
    _print_advice(console, view.advice, view.is_ok)


def trial_rows(view: TrialView) -> list[tuple[str, str]]:
    """All that is said of a trial: a name and a text; without a name it goes on from before."""
    rows = [*_cause_rows(view), *_measured_rows(view), *_setting_rows(view)]
    return [(name, text) for name, text in rows if text]


def _print_repeats(console: Console, views: Sequence[TrialView]) -> None:
    first, mean = views[0], mean_of(views)
    console.print(_repeats_head(views))
    console.print()
    console.print(_grid(repeats_table(views).known().compact(console.width), views))
    console.print()
    rows = [
        ("Mean samples/s", _mean_text(mean) if mean else ""),
        ("Note", _disturbed_repeats_text(views)),
        *_setting_rows(first),
    ]
    console.print(_facts([(name, text) for name, text in rows if text]))
    for view in views:
        _print_path(console, f"Run folder {_number(view)}", view.folder)
    failed = next((view for view in views if not view.is_ok), None)
    if failed:
        console.print()
        console.print(_facts(list(_failed_rows(failed))))
    _print_advice(console, advice_of(views), failed is None)


def repeats_table(views: Sequence[TrialView]) -> Table:
    """A line per repeat."""
    rows = tuple(tuple(text(view) for _, text in _COLUMNS) for view in views)
    return Table(tuple(column for column, _ in _COLUMNS), rows)


def _head(view: TrialView) -> Text:
    head = Text.assemble(
        (printable(view.name), "bold"), "  ", (view.outcome, f"bold {TONE_COLOURS[view.tone]}")
    )
    if view.ending.reason:
        head.append(f"  {printable(view.ending.reason)}")
    head.append(f"\n{printable(_what(view))}", style="dim")
    return head


def _repeats_head(views: Sequence[TrialView]) -> Text:
    good = sum(view.is_ok for view in views)
    colour = TONE_COLOURS["good" if good == len(views) else "bad"]
    return Text.assemble(
        (printable(views[0].name), "bold"),
        ("  ", ""),
        (f"{good} of {len(views)} trials ok", f"bold {colour}"),
        (f"\n{printable(_what(views[0]))}", "dim"),
    )


def _what(view: TrialView) -> str:
    """Data, device, precision and framework: what a reader needs to know what was measured."""
    told, data = view.told, view.told.get("data") or {}
    name = data.get("name") or view.workload.get("data")
    parts = [
        f"{name} data{' (generated)' if data.get('source') == 'generated' else ''}" if name else "",
        str(told.get("device_name") or told.get("device") or view.workload.get("device") or ""),
        str(view.workload.get("precision") or ""),
        " ".join(next(iter((told.get("versions") or {}).items()), ())),
    ]
    return ", ".join(part for part in parts if part)


def _cause_rows(view: TrialView) -> Iterator[tuple[str, str]]:
    for place, text in enumerate(view.cause):
        yield ("Cause" if place == 0 else "", text)


def _failed_rows(view: TrialView) -> Iterator[tuple[str, str]]:
    """The cause of one among repeats: which it is, and its reason, which no head tells."""
    reason = view.ending.reason
    is_said = any(reason in text for text in view.cause)
    for place, text in enumerate(view.cause if is_said else (reason, *view.cause)):
        yield (f"Cause, trial {_number(view)}" if place == 0 else "", text)


def _measured_rows(view: TrialView) -> Iterator[tuple[str, str]]:
    measured = view.measured
    yield "Samples/s", _rate_text(view)
    yield "", _interval_holds(view)
    yield "Note", _disturbed_text(view)
    yield "Step", _step_text(view)
    yield "", _split_text(view)
    yield "Waiting for data", _wait_text(measured.data_wait_share)
    yield "Warm-up", _warmup_text(view)
    yield "Epoch", _epoch_text(view)
    yield "Ranks", _ranks_text(measured.imbalance)
    yield "Host memory", host_memory_text(measured.host_memory_peak, view.limits)
    yield "GPU memory", _device_text(view)
    yield "Energy", _energy_text(view)
    yield "Overhead", _overhead_text(measured.overhead)


def _setting_rows(view: TrialView) -> Iterator[tuple[str, str]]:
    yield "Global batch", _batch_text(view)
    yield "Optimizer", _optimizer_text(view.workload)
    for place, text in enumerate(_data_notes(view)):
        yield ("Data" if place == 0 else "", text)
    for place, text in enumerate(limit_texts(view.limits)):
        yield ("Limits" if place == 0 else "", text)
    left = view.trial.get("left") or []
    yield "Left behind", ", ".join(map(str, left))


def _rate_text(view: TrialView) -> str:
    measured = view.measured
    if measured.rate is None:
        return f"{MISSING}  {measured.why_no_rate}"
    return _with_interval(measured.rate.per_second, measured.interval)


def _with_interval(rate: float, interval: Interval | None) -> str:
    if interval is None:
        return rate_text(rate)
    half = share_text((interval.high - rate) / rate)
    low, high = rate_text(interval.low), rate_text(interval.high)
    return f"{rate_text(rate)} ± {half}  ({low} to {high}, {share_text(interval.confidence)} sure)"


def _interval_holds(view: TrialView) -> str:
    rate, spread = view.measured.rate, view.measured.spread
    if rate is None or spread is None:
        return ""
    return f"{_spread_text(spread)}, {share_text(rate.within)} within this one"


def _spread_text(spread: Spread) -> str:
    return f"processes differ by {share_text(spread.cv)} ({_spread_source(spread)})"


def _spread_source(spread: Spread) -> str:
    if spread.source == "learnt":
        return f"learnt from {count_text(spread.trials)} trials"
    if spread.source == "others" and spread.assumed is None:
        return "as the noisier of other workloads here: this one was not repeated"
    if not spread.trials:
        return "assumed: no repeats were seen here"
    assumed = "assumption" if spread.assumed is None else f"assumed {share_text(spread.assumed)}"
    return f"from {count_text(spread.trials)} repeats and an {assumed}"


def _mean_text(mean: Combined) -> str:
    return f"{_with_interval(mean.mean, mean.interval)}\n{_spread_text(mean.spread)}"


def _milliseconds(part: Part | None) -> str:
    return MISSING if part is None else _short(part.median)


def _short(seconds: float) -> str:
    """A step may take microseconds or minutes: three digits of it."""
    if seconds >= 0.9995:
        return seconds_text(seconds)
    small = 0 < seconds < 1e-4
    return f"{significant(seconds * (1e6 if small else 1e3))} {'µs' if small else 'ms'}"


def _step_text(view: TrialView) -> str:
    step = view.measured.step
    return f"{_short(step.median)}, p95 {_short(step.p95)}" if step else ""


def _split_text(view: TrialView) -> str:
    measured = view.measured
    parts = (("wait", measured.wait), ("copy", measured.copy), ("compute", measured.compute))
    return ", ".join(f"{name} {_short(part.median)}" for name, part in parts if part)


def _wait_text(share: float | None) -> str:
    return "" if share is None else f"{share_text(share)} of the time"


def _warmup_text(view: TrialView) -> str:
    measured = view.measured
    if not measured.steps:
        return ""
    cut = f"{count_text(view.warmup_steps)} of {count_text(measured.steps)} steps cut"
    return f"{cut}; {measured.steady.reason or 'the rest is steady'}"


def _epoch_text(view: TrialView) -> str:
    seconds = view.measured.epoch_seconds
    how = "measured" if view.measured.epoch_measured else "projected"
    return "" if seconds is None else f"{seconds_text(seconds)}, {how}"


def _ranks_text(imbalance: float | None) -> str:
    return (
        "" if imbalance is None else f"the slowest takes {imbalance:.2f} times the fastest's step"
    )


def _disturbed_text(view: TrialView) -> str:
    if not view.measured.is_disturbed:
        return ""
    return f"{_others_text(view)} meanwhile: this is the rate of a busy machine"


def _disturbed_repeats_text(views: Sequence[TrialView]) -> str:
    disturbed = [view for view in views if view.measured.is_disturbed]
    if not disturbed:
        return ""
    which = ", ".join(_number(view) for view in disturbed)
    most = max(disturbed, key=lambda view: view.measured.others_cores or 0.0)
    trials = f"trial{'s' * (len(disturbed) > 1)} {which}"
    return f"{_others_text(most)} in {trials}: these are the rates of a busy machine"


def _others_text(view: TrialView) -> str:
    others, cpus = view.measured.others_cores, view.measured.host_cpus
    return f"other processes used {others:.1f} of {cpus:g} CPUs"


def _optimizer_text(workload: Mapping[str, Any]) -> str:
    name, lr = str(workload.get("optimizer") or ""), number(workload, "lr")
    return name if not name or lr is None or name == "the user's" else f"{name}, lr {lr:g}"


def _data_notes(view: TrialView) -> list[str]:
    data = view.told.get("data") or {}
    notes = data.get("notes")
    every = [data.get("note"), *(notes if isinstance(notes, list) else [])]
    return list(dict.fromkeys(str(note) for note in every if note))


def _device_peak(view: TrialView) -> float | None:
    memory = view.measured.device_memory
    known = (memory.device, memory.reserved, memory.allocated)
    return next((peak for peak in known if peak is not None), None)


def _device_text(view: TrialView) -> str:
    memory = view.measured.device_memory
    peaks = (
        ("allocated", memory.allocated),
        ("reserved", memory.reserved),
        ("on the device", memory.device),
    )
    texts = [f"{bytes_text(peak)} {what}" for what, peak in peaks if peak is not None]
    if memory.retries:
        texts.append(f"{count_text(memory.retries)} retries of the allocator")
    return ", ".join(texts)


def _energy_text(view: TrialView) -> str:
    joules, each = view.measured.joules, view.measured.samples_per_joule
    if joules is None:
        return ""
    return f"{joules_text(joules)} over the measured steps, {rate_text(each)} samples/J"


def _overhead_text(overhead: Overhead) -> str:
    parts = [
        (name, part)
        for name, get in _OVERHEAD
        if (part := get(overhead)) and part >= _LEAST_SHOWN_S
    ]
    split = ", ".join(f"{name} {seconds_text(part)}" for name, part in parts)
    if overhead.total is None:
        return split
    return f"{seconds_text(overhead.total)} beyond the measured steps ({split})"


def _batch_text(view: TrialView) -> str:
    sizes = [number(view.workload, key) for key in ("batch_size", "accumulate", "ranks")]
    if view.global_batch is None or None in sizes:
        return ""
    each, accumulated, ranks = (count_text(size) for size in sizes)
    return (
        f"{count_text(view.global_batch)}  "
        f"({each} per rank × {accumulated} accumulated × {ranks} rank{'s' * (ranks != '1')})"
    )


def _number(view: TrialView) -> str:
    return count_text(number(view.trial, "repeat"))


_COLUMNS: tuple[tuple[Column, Callable[[TrialView], str]], ...] = (
    (Column("Trial"), _number),
    (Column("Outcome", number=False), lambda view: view.outcome),
    (Column("Samples/s"), lambda view: rate_text(view.samples_per_second)),
    (Column("Step"), lambda view: _milliseconds(view.measured.step)),
    (Column("Data wait"), lambda view: share_text(view.measured.data_wait_share)),
    (Column("Warm-up", spare=3), lambda view: count_text(view.warmup_steps)),
    (Column("Steps", spare=4), lambda view: count_text(view.measured.steady_steps)),
    (
        Column("Steady", spare=1, number=False),
        lambda view: "yes" if view.measured.steady.steady else "no",
    ),
    (Column("Host memory"), lambda view: bytes_text(view.measured.host_memory_peak)),
    (Column("GPU memory", gpu=True), lambda view: bytes_text(_device_peak(view))),
    (Column("Overhead", spare=2), lambda view: seconds_text(view.measured.overhead.total)),
)


def _facts(rows: Sequence[tuple[str, str]]) -> Grid:
    """A word, then a text that wraps beside it."""
    grid = Grid.grid(padding=(0, 1, 0, 0))
    grid.add_column(style="dim", width=_MARGIN + 1)
    grid.add_column(overflow="fold")
    for name, text in rows:
        grid.add_row(name, Text("\n").join(_text(line) for line in text.splitlines()))
    return grid


def _grid(table: Table, views: Sequence[TrialView]) -> Grid:
    grid = Grid(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for column in table.columns:
        grid.add_column(column.title, justify="right" if column.number else "left", no_wrap=True)
    outcome = [column.title for column in table.columns].index("Outcome")
    for row, view in zip(table.rows, views, strict=True):
        styles = [TONE_COLOURS[view.tone] if i == outcome else "" for i in range(len(row))]
        grid.add_row(*(_text(cell, style) for cell, style in zip(row, styles, strict=True)))
    return grid


def _print_path(console: Console, name: str, path: Path) -> None:
    """Not wrapped: a path must be one word to be clicked or copied."""
    words = Text.assemble((name.ljust(_MARGIN + 2), "dim"), printable(str(path)))
    console.print(words, soft_wrap=True)


def _print_advice(console: Console, advice: str, is_ok: bool) -> None:
    """What is to be copied, a command or a path, stands below what is to be read, not wrapped."""
    if not advice:
        return
    words, *copied = advice.splitlines()
    console.print()
    console.print(_text(words, "" if is_ok else "bold"))
    for line in copied:
        console.print(_text(line), soft_wrap=True)


def _text(text: str, style: str = "") -> Text:
    return Text(printable(text), style=style)
