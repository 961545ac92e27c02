"""The documents of a run: the full page, and the summary printed at the end of a command."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

from stepscope.records import Outcome
from stepscope.report.bottleneck.document import brief_rows, closing_section, diagnosis_section
from stepscope.report.kit.document import (
    Block,
    Document,
    Facts,
    Listing,
    Paragraph,
    Section,
    SideBySide,
    Tiles,
    Verbatim,
)
from stepscope.report.kit.format import is_known, seconds_text, share_text
from stepscope.report.run import tables
from stepscope.report.run.headline import resource_facts, training_facts
from stepscope.report.run.json import summary_dict
from stepscope.report.run.view import RunView, flattened
from stepscope.report.trial.document import trial_rows
from stepscope.runs.paths import RunPaths

_MAX_COMMAND = 240
_MAX_WARNINGS = 3


def page_of(view: RunView) -> Document:
    """Return the full report of a run."""
    epochs, gpu_table = view.epochs_table.split_gpus()
    gpu_epochs = (gpu_table,) if len(gpu_table.columns) > 1 else ()
    sections = (
        Section("Trial", (Facts(tuple(trial_rows(view.trial) if view.trial else ())),)),
        Section("Epochs", (epochs, Section("GPU metrics", gpu_epochs))),
        Section("GPUs", (view.gpus,)),
        Section("Processes by role", (view.roles,)),
        SideBySide(
            (
                Section("Phases", (view.phase_totals,)),
                Section("Monitoring overhead", (Paragraph(view.overhead),)),
            )
        ),
        Section("Notes", (Listing.of(view.notes),)),
        Section("All metrics", (view.statistics,), folded=True),
        Section("Environment", (Facts(view.environment),), folded=True),
    )
    evidence = Facts(tuple(flattened(view.exit_status.evidence)))
    return Document(
        name=view.name,
        state=view.outcome,
        tone=view.tone,
        reason=view.exit_status.reason,
        header=(
            Verbatim(view.command),
            Paragraph(f"Started {view.started}" if view.started else "", "note"),
            Section("Evidence", (evidence,), folded=True),
        ),
        blocks=(
            *([diagnosis_section(view.finding)] if view.finding else []),
            Tiles(view.headline),
            view.charts,
            *sections,
        ),
        data=summary_dict(view),
    )


def brief_of(view: RunView, folder: Path) -> Document:
    """Return the few lines that end `run` and `watch`, the bottleneck first."""
    summary, finding = view.summary, view.finding
    rows = [("Duration", seconds_text(summary.seconds))]
    command, cores = "", summary.monitor.get("cores")
    wait_is_shown = finding is not None and finding.first.cause.startswith("input.")
    if summary.steps or view.exit_status.outcome is Outcome.OK:  # else it failed at once
        rows = [
            *(brief_rows(finding) if finding and (summary.steps or finding.is_decided) else ()),
            ("Training", ", ".join(training_facts(summary, wait_is_shown))),
            ("Resources", ", ".join(resource_facts(summary, view.gpu_use))),
            *(("Warning", text) for text in view.warnings[:_MAX_WARNINGS]),
            ("Overhead", f"{share_text(cores)} of one core" if is_known(cores) else ""),
        ]
        command = shlex.join(["stepscope", "explain", str(folder)])
    facts = Facts(tuple((label, text) for label, text in rows if text))
    report = Verbatim(RunPaths(folder).report_html.absolute().as_uri(), "Report")
    block = Section("", (facts, report, Verbatim(command, "Details")))
    return _terminal_document(view, (block,))


def summary_of(view: RunView, folder: Path) -> Document:
    """Return the tables of a run for one terminal screen."""
    remarks = [
        *(
            ("Phase", f"{name}: {'once' if n == '1' else f'{n} times'}, {s} total")
            for name, n, s in view.phase_totals.rows
        ),
        *(("Note", note) for note in view.notes),
        *([("Overhead", view.overhead)] if view.overhead else []),
    ]
    report = Verbatim(RunPaths(folder).report_html.absolute().as_uri(), "Report")
    blocks: tuple[Block, ...] = (
        Tiles(view.headline),
        view.overview,
        # A single GPU is covered by the other tables.
        *([view.gpus] if len(view.gpus.rows) > 1 else []),
        tables.shortened(view.epochs_table),
        Section("", (Facts(tuple(remarks)), report)),
        *([closing_section(view.finding, folder)] if view.finding else []),
    )
    command = " ".join(view.command.split())
    if len(command) > _MAX_COMMAND:
        command = f"{command[:_MAX_COMMAND]}…"
    return replace(_terminal_document(view, blocks), header=(Paragraph(command, "note"),))


def _terminal_document(view: RunView, blocks: tuple[Block, ...]) -> Document:
    return Document(
        name=view.name,
        state=view.outcome,
        tone=view.tone,
        reason=view.exit_status.reason,
        blocks=blocks,
        data=summary_dict(view),
    )
