"""Finds the epochs and phases of a run in the events of its processes.

The first source that has epochs is used: marks of the script, a pattern in the output, Keras, then
passes over data loaders. A pass with optimizer steps is an epoch, a pass without is an evaluation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from stepscope.analysis.run.passes import MarkEvent, Pass, Source, Timeline, find_passes
from stepscope.records import Span

_SAME_PASS = 0.5
"""Passes that overlap by more than this share are one epoch (`zip(loader_a, loader_b)`)."""
_EPOCH_NAMES = ("epoch", "epochs")
_ZERO_BASED = {"lightning", "pytorch_lightning"}
"""Frameworks that print their first epoch as 0. Everything else is numbered from 1."""


@dataclass(frozen=True)
class _Training:
    """When the run trained, over all processes: a pattern is reported by one that does not."""

    begin_ns: int
    end_ns: int
    steps: npt.NDArray[np.int64]

    @classmethod
    def of(cls, timelines: Sequence[Timeline], begin_ns: int, end_ns: int) -> _Training:
        firsts = [int(r["t"][0]) for t in timelines for r in (t.loader_begins, t.steps) if len(r)]
        steps = next((t.steps["t"] for t in timelines if len(t.steps)), np.empty(0, np.int64))
        return cls(min(firsts, default=begin_ns), end_ns, steps)


def find_epochs(
    timelines: Sequence[Timeline], begin_ns: int, end_ns: int
) -> tuple[Source | None, list[Span]]:
    """Return the epochs of a run and their source.

    Processes that train at the same time share their epochs; the epochs of processes that train
    one after another are concatenated and numbered consecutively. Otherwise the numbers are those
    that the script or its framework prints.
    """
    training = _Training.of(timelines, begin_ns, end_ns)
    finders: tuple[tuple[Source, Any], ...] = (
        ("marks", _epochs_from_marks),
        ("pattern", _epochs_from_marks),
        ("fit", _epochs_from_marks),
        ("loader", _epochs_from_loaders),
    )
    for source, finder in finders:
        per_process = [finder(timeline, source, training) for timeline in timelines]
        spans = _concatenated([spans for spans in per_process if spans])
        if spans:
            first = 0 if any(t.frameworks & _ZERO_BASED for t in timelines) else 1
            return source, _numbered(spans, source, first)
    return None, []


def epochs_of(timeline: Timeline, source: Source | None) -> list[Span]:
    """Return the epochs of one process if `source` is its data loaders."""
    return _epochs_from_loaders(timeline, source) if source == "loader" else []


def _concatenated(per_process: list[list[Span]]) -> list[Span]:
    """Return the epochs of the first process, and those of others that do not overlap them."""
    kept: list[list[Span]] = []
    for spans in per_process:
        if all(
            spans[0].begin_ns >= k[-1].end_ns or spans[-1].end_ns <= k[0].begin_ns for k in kept
        ):
            kept.append(spans)
    kept.sort(key=lambda spans: spans[0].begin_ns)
    together = [span for spans in kept for span in spans]
    first = together[0].index if len(kept) > 1 else None
    if first is None:
        return together
    return [replace(span, index=first + i) for i, span in enumerate(together)]


def find_phases(timelines: Sequence[Timeline], end_ns: int) -> list[Span]:
    """Return all phases except epochs: those of the script, and evaluations."""
    found = []
    for timeline in timelines:
        found += [span for span in phase_spans(timeline, end_ns) if span.name not in _EPOCH_NAMES]
        if len(timeline.steps):
            found += [
                Span("evaluation", p.begin_ns, p.end_ns, None, timeline.pid, "loader")
                for p in find_passes(timeline)
                if not p.trains
            ]
    return sorted(found, key=lambda span: span.begin_ns)


def phase_spans(timeline: Timeline, end_ns: int) -> list[Span]:
    """Return the phases of one process; a phase that was never closed lasts to the end."""
    open_phases: dict[tuple[str, object], list[MarkEvent]] = {}
    spans = []
    for mark in timeline.marks:
        key = (mark.name, mark.value)
        if mark.edge == "begin":
            open_phases.setdefault(key, []).append(mark)
        elif mark.edge == "end" and open_phases.get(key):
            spans.append(_phase(open_phases[key].pop(), mark.t, timeline.pid))
    for unclosed in open_phases.values():
        spans += [_phase(mark, end_ns, timeline.pid, complete=False) for mark in unclosed]
    return sorted(spans, key=lambda span: span.begin_ns)


def _phase(begin: MarkEvent, end_ns: int, pid: int, complete: bool = True) -> Span:
    return Span(begin.name, begin.t, end_ns, _as_index(begin.value), pid, begin.source, complete)


def _epochs_from_marks(timeline: Timeline, source: Source, training: _Training) -> list[Span]:
    spans = [
        span
        for span in phase_spans(timeline, training.end_ns)
        if span.name in _EPOCH_NAMES and span.source == source
    ]
    if spans:
        return spans
    marks: list[MarkEvent] = []
    for mark in timeline.marks:
        is_epoch = mark.edge is None and mark.name in _EPOCH_NAMES and mark.source == source
        # A progress bar prints the same epoch many times: only the first one counts.
        if is_epoch and (not marks or mark.value is None or mark.value != marks[-1].value):
            marks.append(mark)
    if not marks:
        return []
    # A script sets its marks either at the start or at the end of each epoch.
    times = [mark.t for mark in marks]
    if _marks_are_ends(times, training):
        edges = [min(training.begin_ns, times[0]), *times]
    else:
        edges = [*times, training.end_ns]
    return [
        Span("epoch", a, b, _as_index(mark.value), timeline.pid, mark.source)
        for a, b, mark in zip(edges[:-1], edges[1:], marks, strict=True)
    ]


def _marks_are_ends(times: list[int], training: _Training) -> bool:
    """Compare the steps before the first mark and after the last; without steps, the time."""
    steps = training.steps
    if len(steps):
        return bool((steps < times[0]).sum() > (steps > times[-1]).sum())
    lead, tail = times[0] - training.begin_ns, training.end_ns - times[-1]
    usual = float(np.median(np.diff(times))) if len(times) > 1 else float(max(lead, tail))
    return tail < usual / 2 <= lead


def _epochs_from_loaders(
    timeline: Timeline, source: Source, _: _Training | None = None
) -> list[Span]:
    passes = find_passes(timeline)
    training = [p for p in passes if p.trains] if len(timeline.steps) else passes
    spans: list[Span] = []
    for p in training:
        if spans and _overlap(spans[-1], p) > _SAME_PASS:
            continue
        spans.append(Span("epoch", p.begin_ns, p.end_ns, None, timeline.pid, source, p.complete))
    return spans


def _overlap(span: Span, other: Pass) -> float:
    shared = min(span.end_ns, other.end_ns) - max(span.begin_ns, other.begin_ns)
    return shared / max(1, min(span.end_ns - span.begin_ns, other.end_ns - other.begin_ns))


def _numbered(spans: list[Span], source: Source, first: int) -> list[Span]:
    """Keep the reported numbers if all epochs have one, otherwise count from `first`."""
    reported = [span.index for span in spans if span.index is not None]
    if len(reported) < len(spans):
        reported = list(range(first, first + len(spans)))
    elif source == "fit":  # Keras passes 0 to its callbacks and prints "Epoch 1/10"
        reported = [index + 1 for index in reported]
    return [replace(span, index=index) for span, index in zip(spans, reported, strict=True)]


def _as_index(value: float | str | None) -> int | None:
    """Return the value of a mark as an epoch number, or None if it is not one."""
    if isinstance(value, str):
        value = value.strip()
        return int(value) if value.isdecimal() and len(value) < 18 else None
    if value is None or not math.isfinite(value) or value != int(value) or abs(value) >= 1e18:
        return None
    return int(value)
