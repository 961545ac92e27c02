"""Writes what can be computed of a run at any time: `derived/summary.json` and `report.html`."""

from __future__ import annotations

import json

from stepscope.report.html import html_of
from stepscope.report.summary import summary_dict
from stepscope.report.view import View, view_of
from stepscope.runs.paths import replace_atomically
from stepscope.runs.reader import Run


def derive(run: Run) -> View:
    """Make both files anew and return what they show. OSError where they cannot be written."""
    view = view_of(run)
    run.paths.derived.mkdir(exist_ok=True)
    text = json.dumps(summary_dict(view), indent=1, allow_nan=False) + "\n"
    replace_atomically(run.paths.summary_json, text)
    replace_atomically(run.paths.report_html, html_of(view))
    return view
