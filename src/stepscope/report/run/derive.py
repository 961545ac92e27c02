"""Writes the derived files of a run: summary, findings and report in `derived/`."""

from __future__ import annotations

from stepscope.analysis.run.data import RunData
from stepscope.report.bottleneck.json import explained_dict
from stepscope.report.kit import html
from stepscope.report.run.document import page_of
from stepscope.report.run.view import RunView, run_view
from stepscope.runs.files import replace_atomically, write_json
from stepscope.runs.reader import Run


def derive(run: Run, data: RunData | None = None) -> RunView:
    """Write all derived files and return their content. Raises OSError if that fails."""
    view = run_view(run, data)
    write_derived(run, view)
    return view


def write_derived(run: Run, view: RunView) -> None:
    page = page_of(view)
    run.paths.derived.mkdir(exist_ok=True)
    findings = explained_dict(run, view.finding) if view.finding else None
    write_json(run.paths.findings_json, findings, root=run.path)
    write_json(run.paths.summary_json, page.data, root=run.path)
    replace_atomically(run.paths.report_html, html.render(page), run.path)
