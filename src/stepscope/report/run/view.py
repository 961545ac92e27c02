"""The content of the report of a run, computed once for page, terminal and JSON."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from stepscope.analysis.run.data import RunData
from stepscope.analysis.run.epochs import find_phases
from stepscope.analysis.run.gpus import GpuUse
from stepscope.analysis.run.summary import summarize
from stepscope.records import ExitStatus, Summary
from stepscope.records.profile import Profile
from stepscope.report.bottleneck.view import DiagnosisView, explained
from stepscope.report.kit.document import Charts, Tile
from stepscope.report.kit.format import bytes_text, seconds_text, share_text, upper_first
from stepscope.report.kit.outcomes import OUTCOMES, Tone
from stepscope.report.kit.table import Table
from stepscope.report.run import tables
from stepscope.report.run.headline import headline_of
from stepscope.report.run.notes import notes_of, warnings_of
from stepscope.report.run.panels import panels_of
from stepscope.report.trial.view import TrialView, trial_view
from stepscope.runs.load import load
from stepscope.runs.reader import Run
from stepscope.runs.trial import read_profile


@dataclass(frozen=True)
class RunView:
    """A run, ready to be drawn. Texts are unescaped."""

    name: str
    command: str
    started: str
    exit_status: ExitStatus
    outcome: str
    tone: Tone
    finding: DiagnosisView | None
    """The bottleneck; None if the analysis failed, which a note explains."""
    headline: tuple[Tile, ...]
    charts: Charts
    epochs_table: Table
    gpus: Table
    overview: Table
    roles: Table
    phase_totals: Table
    statistics: Table
    environment: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]
    warnings: tuple[str, ...]  # the notes that matter most
    overhead: str
    summary: Summary
    gpu_use: GpuUse
    missing: Mapping[str, str]  # metrics that could not be read, with the reason
    trial: TrialView | None  # the measurements, if the run is a trial
    profile: Profile | None
    """The profile of a trial, if requested."""


def run_view(run: Run, data: RunData | None = None, trial: TrialView | None = None) -> RunView:
    """Return the content of the report of a run; reads the run unless `data` is given."""
    recorded = load(run) if data is None else data
    if trial is None and recorded.is_trial:
        trial = trial_view(run, data=recorded)
    summary = summarize(recorded)
    # The time axis ends with the run, or with its last sample if that is later.
    ends = [recorded.end_ns, *(int(s.t[-1]) for s in recorded.series.values() if len(s))]
    seconds = max((max(ends) - recorded.begin_ns) / 1e9, 1e-3)
    label, tone = OUTCOMES[run.exit_status.outcome]
    finding, problem = explained(recorded)
    if finding and not finding.applies_to(run.exit_status.outcome):
        finding = None
    wall_ns = run.facts.clock.wall_ns
    started = ""
    if wall_ns is not None:
        began = datetime.fromtimestamp(wall_ns / 1e9, timezone.utc)
        started = began.strftime("%Y-%m-%d %H:%M:%S UTC")
    return RunView(
        name=run.name,
        command=shlex.join(run.command),
        started=started,
        exit_status=run.exit_status,
        outcome=label,
        tone=tone,
        finding=finding,
        headline=headline_of(
            summary, recorded.gpu_use, trial.samples_per_second if trial else None
        ),
        charts=Charts(
            "Timeline",
            panels_of(recorded, seconds),
            seconds,
            epochs=tuple((row.begin_s, row.index) for row in summary.epochs),
            phases=tuple(_phases(recorded)),
        ),
        epochs_table=tables.epochs_table(summary.epochs),
        gpus=tables.gpus(recorded.gpu_use.used),
        overview=tables.overview(recorded, summary),
        roles=tables.roles(recorded, summary),
        phase_totals=tables.phases(summary),
        statistics=tables.statistics(summary, {gpu.uuid: gpu.label for gpu in recorded.gpus}),
        environment=tuple(flattened(run.json.get("environment") or {})),
        notes=tuple(
            map(upper_first, (*notes_of(recorded, seconds), *([problem] if problem else [])))
        ),
        warnings=tuple(map(upper_first, warnings_of(recorded))),
        overhead=overhead_text(summary.monitor, summary.seconds),
        summary=summary,
        gpu_use=recorded.gpu_use,
        missing=run.facts.sensors.missing,
        trial=trial,
        profile=read_profile(run) if trial else None,
    )


def flattened(facts: Mapping[Any, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Flatten nested facts to pairs of path and text."""
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


def overhead_text(monitor: Mapping[str, float], seconds: float) -> str:
    """Describe the monitoring overhead; empty if it was not measured."""
    parts = []
    if "cores" in monitor:
        cpu_time = seconds_text(monitor["cores"] * seconds)
        parts.append(f"{share_text(monitor['cores'])} of one core ({cpu_time} of CPU time)")
    if "rss_bytes" in monitor:
        parts.append(f"{bytes_text(monitor['rss_bytes'])} of memory")
    if "longest_gap_s" in monitor:
        parts.append(f"longest gap between samples {seconds_text(monitor['longest_gap_s'])}")
    return ", ".join(parts)


def _phases(recorded: RunData) -> Iterator[tuple[str, float, float]]:
    """Yield each phase as seen by the first process that has it: ranks share their phases."""
    first: dict[str, int | None] = {}
    for span in find_phases(recorded.timelines, recorded.end_ns):
        if first.setdefault(span.name, span.pid) == span.pid:
            begin, end = (ns - recorded.begin_ns for ns in (span.begin_ns, span.end_ns))
            yield span.name, begin / 1e9, end / 1e9
