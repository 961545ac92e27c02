"""What a report shows of a run, made once: documents for page and terminal, and the summary."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from stepscope.analysis.run.data import RunData
from stepscope.analysis.run.epochs import find_phases
from stepscope.analysis.run.gpus import GpuUse
from stepscope.analysis.run.summary import summarise
from stepscope.records import Ending, Summary
from stepscope.records.profile import Profile
from stepscope.report.bottleneck.view import DiagnosisView, explained
from stepscope.report.kit.document import Charts, Tile
from stepscope.report.kit.format import bytes_text, seconds_text, share_text
from stepscope.report.kit.outcomes import OUTCOMES, Tone
from stepscope.report.kit.table import Table
from stepscope.report.run import tables
from stepscope.report.run.headline import headline_of
from stepscope.report.run.notes import notes_of
from stepscope.report.run.panels import panels_of
from stepscope.report.trial.view import TrialView, trial_view
from stepscope.runs.load import load
from stepscope.runs.reader import Run
from stepscope.runs.trial import read_profile


@dataclass(frozen=True)
class RunView:
    """A run, ready to be drawn. Texts are as they were recorded: whoever draws escapes them."""

    name: str
    command: str
    started: str
    ending: Ending
    outcome: str
    tone: Tone
    finding: DiagnosisView | None
    """The bottleneck; None where that could not be found out, and a note says why."""
    headline: tuple[Tile, ...]
    charts: Charts
    ledger: Table
    gpus: Table
    overview: Table
    roles: Table
    phase_totals: Table
    statistics: Table
    environment: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]
    overhead: str
    summary: Summary
    gpu_use: GpuUse
    missing: Mapping[str, str]  # metrics that could not be read here, with the reason
    trial: TrialView | None  # what was measured, where the run is a trial
    profile: Profile | None
    """Of the steps that a trial took under the profiler, where that was asked for."""


def run_view(run: Run, data: RunData | None = None, trial: TrialView | None = None) -> RunView:
    """All that a report shows of a run, which is read unless it was before."""
    recorded = load(run) if data is None else data
    if trial is None and recorded.is_trial:
        trial = trial_view(run, data=recorded)
    summary = summarise(recorded)
    # The clock of the charts ends with the run, or with its samples where those go on a little.
    ends = [recorded.end_ns, *(int(s.t[-1]) for s in recorded.series.values() if len(s))]
    seconds = max((max(ends) - recorded.begin_ns) / 1e9, 1e-3)
    label, tone = OUTCOMES[run.ending.outcome]
    finding, trouble = explained(recorded)
    wall_ns = run.facts.clock.wall_ns
    started = ""
    if wall_ns is not None:
        began = datetime.fromtimestamp(wall_ns / 1e9, timezone.utc)
        started = began.strftime("%Y-%m-%d %H:%M:%S UTC")
    return RunView(
        name=run.name,
        command=shlex.join(run.command),
        started=started,
        ending=run.ending,
        outcome=label,
        tone=tone,
        finding=finding,
        headline=headline_of(
            summary, recorded.gpu_use, trial.samples_per_second if trial else None
        ),
        charts=Charts(
            "Over time",
            panels_of(recorded, seconds),
            seconds,
            epochs=tuple((row.begin_s, row.index) for row in summary.epochs),
            phases=tuple(_phases(recorded)),
        ),
        ledger=tables.ledger(summary.epochs),
        gpus=tables.gpus(recorded.gpu_use.used),
        overview=tables.overview(recorded, summary),
        roles=tables.roles(recorded, summary),
        phase_totals=tables.phases(summary),
        statistics=tables.statistics(summary, {gpu.uuid: gpu.label for gpu in recorded.gpus}),
        environment=tuple(flattened(run.json.get("environment") or {})),
        notes=(*notes_of(recorded, seconds), *([trouble] if trouble else [])),
        overhead=overhead_text(summary.watcher, summary.seconds),
        summary=summary,
        gpu_use=recorded.gpu_use,
        missing=run.facts.sensors.missing,
        trial=trial,
        profile=read_profile(run) if trial else None,
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
        elif isinstance(value, bool):
            rows.append((path, "yes" if value else "no"))
        elif isinstance(value, int | float) and str(key).endswith("bytes"):
            rows.append((path, bytes_text(value)))
        elif value is not None:
            rows.append((path, str(value)))
    return rows


def overhead_text(watcher: Mapping[str, float], seconds: float) -> str:
    """What monitoring cost, in a sentence; empty where it was not measured."""
    parts = []
    if "cores" in watcher:
        spent = seconds_text(watcher["cores"] * seconds)
        parts.append(f"{share_text(watcher['cores'])} of one core ({spent} of CPU time)")
    if "rss_bytes" in watcher:
        parts.append(f"{bytes_text(watcher['rss_bytes'])} of memory")
    if "longest_gap_s" in watcher:
        parts.append(f"longest gap between samples {seconds_text(watcher['longest_gap_s'])}")
    return ", ".join(parts)


def _phases(recorded: RunData) -> Iterator[tuple[str, float, float]]:
    """Phases as the first process that has them saw them: ranks go through them together."""
    first: dict[str, int | None] = {}
    for span in find_phases(recorded.timelines, recorded.end_ns):
        if first.setdefault(span.name, span.pid) == span.pid:
            begin, end = (ns - recorded.begin_ns for ns in (span.begin_ns, span.end_ns))
            yield span.name, begin / 1e9, end / 1e9
