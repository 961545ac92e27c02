"""Writes what can be computed of a run at any time: summary, findings and report in `derived/`."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from stepscope.report.explainjson import explained_dict
from stepscope.report.format import rate_text
from stepscope.report.headline import THROUGHPUT, Headline
from stepscope.report.html import html_of
from stepscope.report.summary import summary_dict
from stepscope.report.trial import TrialView, trial_view
from stepscope.report.trialtable import trial_rows
from stepscope.report.view import View, view_of
from stepscope.runs.paths import replace_atomically
from stepscope.runs.reader import Run
from stepscope.runs.trial import is_trial


def _with_trial(view: View, trial: TrialView) -> View:
    """The report of a trial shows the rate of its steady steps, not that of all of the run."""
    rate = trial.samples_per_second
    steady = Headline(THROUGHPUT, rate_text(rate), "over the steady steps")
    headline = tuple(
        steady if rate is not None and each.label == THROUGHPUT else each for each in view.headline
    )
    return replace(view, headline=headline, trial=tuple(trial_rows(trial)))


def derive(run: Run) -> View:
    """Make all files anew and return what they show. OSError where they cannot be written."""
    view = view_of(run)
    if is_trial(run):
        view = _with_trial(view, trial_view(run))
    run.paths.derived.mkdir(exist_ok=True)
    told = explained_dict(run, view.finding.verdict) if view.finding else None
    replace_atomically(run.paths.findings_json, _json(told))
    replace_atomically(run.paths.summary_json, _json(summary_dict(view)))
    replace_atomically(run.paths.report_html, html_of(view))
    return view


def _json(told: dict[str, Any] | None) -> str:
    return json.dumps(told, indent=1, allow_nan=False) + "\n"
