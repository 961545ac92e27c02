"""Writes what can be computed of a run at any time: summary, findings and report in `derived/`."""

from __future__ import annotations

from dataclasses import replace

from stepscope.analysis.run.data import RunData
from stepscope.records.codec import dumps
from stepscope.report.bottleneck.json import explained_dict
from stepscope.report.kit import html
from stepscope.report.kit.document import Tile
from stepscope.report.kit.format import rate_text
from stepscope.report.run.document import page_of
from stepscope.report.run.headline import THROUGHPUT
from stepscope.report.run.view import RunView, run_view
from stepscope.report.trial.document import trial_rows
from stepscope.report.trial.view import TrialView, trial_view
from stepscope.runs.load import load
from stepscope.runs.paths import replace_atomically
from stepscope.runs.reader import Run
from stepscope.runs.trial import is_trial


def derive(run: Run, data: RunData | None = None, trial: TrialView | None = None) -> RunView:
    """Make all files anew and return what they show. OSError where they cannot be written.

    The run is read unless its `data`, or the view of the `trial` that it is, are there already.
    """
    data = data or load(run)
    view = run_view(run, data)
    if is_trial(run):
        trial = trial or trial_view(run, data=data)
        view = replace(view, trial=tuple(trial_rows(trial)))
        # The report of a trial shows the rate of its steady steps, not that of all of the run.
        if trial.samples_per_second is not None:
            rate = rate_text(trial.samples_per_second)
            steady = Tile(THROUGHPUT, rate, "over the steady steps")
            tiles = (steady if tile.label == THROUGHPUT else tile for tile in view.headline)
            view = replace(view, headline=tuple(tiles))
    page = page_of(view)
    run.paths.derived.mkdir(exist_ok=True)
    findings = explained_dict(run, view.finding) if view.finding else None
    replace_atomically(run.paths.findings_json, dumps(findings, indent=1) + "\n")
    replace_atomically(run.paths.summary_json, dumps(page.data, indent=1) + "\n")
    replace_atomically(run.paths.report_html, html.render(page))
    return view
