"""What a report shows, made once from a run; the terminal and the page only draw it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from stepscope.analysis.epochs import find_phases
from stepscope.analysis.gpus import GpuUse
from stepscope.analysis.summary import Recorded, summarise
from stepscope.records import Ending, Span, Summary
from stepscope.report import tables
from stepscope.report.explain import VerdictView, explained
from stepscope.report.format import bytes_text, seconds_text, share_text
from stepscope.report.headline import Headline, headline_of
from stepscope.report.lines import Panel
from stepscope.report.notes import notes_of
from stepscope.report.outcomes import OUTCOMES, Tone
from stepscope.report.panels import panels_of
from stepscope.report.tables import Table
from stepscope.runs.reader import Run


@dataclass(frozen=True)
class EpochLine:
    """Where an epoch begins on the clock of the panels."""

    seconds: float
    index: int


@dataclass(frozen=True)
class PhaseBand:
    """A stretch of the run with a name, in seconds on the clock of the panels."""

    name: str
    begin: float
    end: float


@dataclass(frozen=True)
class View:
    """A run, ready to be drawn. Texts are as they were recorded: whoever draws escapes them."""

    name: str
    command: str
    started: str
    ending: Ending
    outcome: str
    tone: Tone
    finding: VerdictView | None
    """What holds it back; None where that could not be found out, and a note says why."""
    headline: tuple[Headline, ...]
    seconds: float
    """How far the clock of the panels goes."""
    panels: tuple[Panel, ...]
    epochs: tuple[EpochLine, ...]
    phases: tuple[PhaseBand, ...]
    ledger: Table
    gpus: Table
    overview: Table
    roles: Table
    phase_totals: Table
    statistics: Table
    environment: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]
    watching: str
    """What it cost to watch."""
    summary: Summary
    gpu_use: GpuUse
    missing: Mapping[str, str]
    """Metrics that could not be read here, with the reason."""
    trial: tuple[tuple[str, str], ...] = ()
    """What was measured, where the run is a trial."""


def view_of(run: Run) -> View:
    """Read a run and compute all that a report shows."""
    recorded = run.recorded()
    summary = summarise(recorded)
    seconds = _clock_end(recorded)
    label, tone = OUTCOMES[run.ending.outcome]
    finding, trouble = explained(run)
    return View(
        name=run.name,
        command=shlex.join(run.command),
        started=_when(run.facts["clock"].get("wall_ns")),
        ending=run.ending,
        outcome=label,
        tone=tone,
        finding=finding,
        headline=headline_of(summary, recorded.gpu_use),
        seconds=seconds,
        panels=panels_of(recorded, seconds),
        epochs=tuple(EpochLine(row.begin_s, row.index) for row in summary.epochs),
        phases=_bands(recorded),
        ledger=tables.ledger(summary.epochs),
        gpus=tables.gpus(recorded.gpu_use.used),
        overview=tables.overview(recorded, summary),
        roles=tables.roles(recorded, summary),
        phase_totals=tables.phases(summary),
        statistics=tables.statistics(summary, {gpu.uuid: gpu.label for gpu in recorded.gpus}),
        environment=tuple(flattened(run.facts.get("environment") or {})),
        notes=(*notes_of(run, recorded, seconds), *([trouble] if trouble else [])),
        watching=watching_text(summary.watcher, summary.seconds),
        summary=summary,
        gpu_use=recorded.gpu_use,
        missing=dict((run.facts.get("sensors") or {}).get("missing") or {}),
    )


def flattened(facts: Mapping[Any, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Nested facts as pairs of a path and a text."""
    rows: list[tuple[str, str]] = []
    for key, value in facts.items():
        path = f"{prefix} › {key}" if prefix else str(key)
        if isinstance(value, Mapping):
            rows += flattened(value, path)
        elif isinstance(value, list) and any(isinstance(each, Mapping) for each in value):
            rows += flattened(dict(enumerate(value)), path)
        elif isinstance(value, list):
            rows.append((path, ", ".join(map(str, value)) or "none"))
        elif value is not None:
            rows.append((path, _fact_text(str(key), value)))
    return rows


def _fact_text(key: str, value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float) and key.endswith("bytes"):
        return bytes_text(value)
    return str(value)


def watching_text(watcher: Mapping[str, float], seconds: float) -> str:
    """What watching cost, in a sentence; empty where it was not measured."""
    parts = []
    if "cores" in watcher:
        spent = seconds_text(watcher["cores"] * seconds)
        parts.append(f"{share_text(watcher['cores'])} of one core ({spent} of CPU time)")
    if "rss_bytes" in watcher:
        parts.append(f"{bytes_text(watcher['rss_bytes'])} of memory")
    if "longest_gap_s" in watcher:
        parts.append(f"longest gap between samples {seconds_text(watcher['longest_gap_s'])}")
    return ", ".join(parts)


def _clock_end(recorded: Recorded) -> float:
    """The end of the run, or of its samples where those go on a little longer."""
    ends = [recorded.end_ns, *(int(s.t[-1]) for s in recorded.series.values() if len(s))]
    return max((max(ends) - recorded.begin_ns) / 1e9, 1e-3)


def _bands(recorded: Recorded) -> tuple[PhaseBand, ...]:
    """Phases as the first process that has them saw them: ranks go through them together."""
    spans = find_phases(recorded.timelines, recorded.end_ns)
    teller: dict[str, int | None] = {}
    for span in spans:
        teller.setdefault(span.name, span.pid)
    return tuple(_band(s, recorded.begin_ns) for s in spans if s.pid == teller[s.name])


def _band(span: Span, begin_ns: int) -> PhaseBand:
    return PhaseBand(span.name, (span.begin_ns - begin_ns) / 1e9, (span.end_ns - begin_ns) / 1e9)


def _when(wall_ns: int | None) -> str:
    if wall_ns is None:
        return ""
    return datetime.fromtimestamp(wall_ns / 1e9, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
