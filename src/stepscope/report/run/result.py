"""The result that a command prints for finished runs: documents, whose data is the JSON output."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from stepscope.report.bottleneck.document import closing_section
from stepscope.report.bottleneck.json import diagnosis_dict
from stepscope.report.kit.document import Document, Paragraph
from stepscope.report.run.document import brief_of, summary_of
from stepscope.report.run.json import summary_dict
from stepscope.report.run.view import RunView
from stepscope.report.trial.document import trials_document
from stepscope.report.trial.json import trial_dict
from stepscope.report.trial.profile import profile_blocks, profile_dict
from stepscope.runs.paths import RunPaths


def run_result(view: RunView, folder: Path, verbose: bool = True) -> list[Document]:
    """Return the documents of a run: its tables, or the few most important lines.

    For a trial, its measurements come first.
    """
    documents, data = [], summary_dict(view)
    if view.trial:
        trial = _trials([view])
        note = Paragraph("The whole run, from the start of its processes to their exit:")
        documents.append(replace(trial, blocks=(*trial.blocks, note)))
        profile = profile_dict(view.profile) if view.profile else None
        data |= {"trial": trial_dict(view.trial), "profile": profile}
    summary = (summary_of if verbose else brief_of)(view, folder)
    return [*documents, replace(summary, data=data)]


def trials_result(views: Sequence[RunView]) -> Document:
    """Return the document of a trial or its repeats, with the bottleneck of the last ok one."""
    findings = [view.finding for view in views if view.trial and view.trial.is_ok]
    finding = findings[-1] if findings else None
    document = _trials(views)
    profiles = [profile_dict(view.profile) for view in views if view.profile]
    return replace(
        document,
        blocks=(*document.blocks, *([closing_section(finding)] if finding else [])),
        data={
            **(document.data or {}),
            **({"profiles": profiles} if profiles else {}),
            "diagnosis": diagnosis_dict(finding) if finding else None,
        },
    )


def _trials(views: Sequence[RunView]) -> Document:
    """Return the measurements and the requested profiles."""
    document = trials_document([view.trial for view in views if view.trial])
    profiled = [(view.profile, view.trial.folder) for view in views if view.profile and view.trial]
    blocks = [b for profile, run in profiled for b in profile_blocks(profile, RunPaths(run).trial)]
    return replace(document, blocks=(*document.blocks, *blocks))
