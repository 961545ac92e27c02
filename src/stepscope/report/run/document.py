"""The documents of a run: the whole page, and the summary that ends every command."""

from __future__ import annotations

from pathlib import Path

from stepscope.report.bottleneck.document import diagnosis_section
from stepscope.report.kit.document import (
    Document,
    Facts,
    Listing,
    Paragraph,
    Section,
    SideBySide,
    Tiles,
    Verbatim,
)
from stepscope.report.run import tables
from stepscope.report.run.json import summary_dict
from stepscope.report.run.view import RunView, flattened
from stepscope.report.trial.document import trial_rows

_MOST_COMMAND = 240


def page_of(view: RunView) -> Document:
    """All that is known of a run."""
    epochs, of_gpus = view.ledger.split_gpus()
    gpu_epochs = (of_gpus,) if len(of_gpus.columns) > 1 else ()
    sections = (
        Section("Trial", (Facts(tuple(trial_rows(view.trial) if view.trial else ())),)),
        Section("Epochs", (epochs, Section("On the GPUs of the run", gpu_epochs))),
        Section("GPUs", (view.gpus,)),
        Section("Processes by role", (view.roles,)),
        SideBySide(
            (
                Section("Phases", (view.phase_totals,)),
                Section("What watching cost", (Paragraph(view.overhead and f"{view.overhead}."),)),
            )
        ),
        Section("Notes", (Listing.of(view.notes),)),
        Section("Statistics of every metric", (view.statistics,), folded=True),
        Section("Environment", (Facts(view.environment),), folded=True),
    )
    evidence = Facts(tuple(flattened(view.ending.evidence)))
    return Document(
        name=view.name,
        state=view.outcome,
        tone=view.tone,
        reason=view.ending.reason,
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


def summary_of(view: RunView, report: Path | None = None) -> Document:
    """How a run ended, what it used and what monitoring it cost, on a screen."""
    command = " ".join(view.command.split())
    if len(command) > _MOST_COMMAND:
        command = f"{command[:_MOST_COMMAND]}…"
    remarks = [
        *(("Phase", f"{name}: {n} times, {s} in all") for name, n, s in view.phase_totals.rows),
        *(("Note", note) for note in view.notes),
        *([("Watching", view.overhead)] if view.overhead else []),
    ]
    path = Verbatim("" if report is None else str(report), "Report")
    return Document(
        name=view.name,
        state=view.outcome,
        tone=view.tone,
        reason=view.ending.reason,
        header=(Paragraph(command, "note"),),
        blocks=(
            Tiles(view.headline),
            view.overview,
            # One GPU alone has all it could tell in the other tables.
            *([view.gpus] if len(view.gpus.rows) > 1 else []),
            tables.shortened(view.ledger),
            Section("", (Facts(tuple(remarks)), path)),
        ),
        data=summary_dict(view),
    )
