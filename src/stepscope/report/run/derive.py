"""Writes the derived files of a run: summary, findings and report in `derived/`."""

from __future__ import annotations

from stepscope.analysis.run.data import RunData
from stepscope.records.codec import dumps
from stepscope.report.bottleneck.json import explained_dict
from stepscope.report.kit import html
from stepscope.report.run.document import page_of
from stepscope.report.run.view import RunView, run_view
from stepscope.runs.paths import replace_atomically
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
    replace_atomically(run.paths.findings_json, dumps(findings, indent=1) + "\n")
    replace_atomically(run.paths.summary_json, dumps(page.data, indent=1) + "\n")
    replace_atomically(run.paths.report_html, html.render(page))
