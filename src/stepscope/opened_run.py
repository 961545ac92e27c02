"""`stepscope.open_run`: a run folder as a Python object, with its summary and diagnosis."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from stepscope.runs.facts import read_run_json
from stepscope.runs.reader import Run, find_run

if TYPE_CHECKING:
    from stepscope.analysis.run.data import RunData
    from stepscope.records import Summary
    from stepscope.report.bottleneck.view import DiagnosisView


class OpenedRun(Run):
    """A run that is read on first access. Open a run in progress again to see newer data."""

    @cached_property
    def data(self) -> RunData:
        """Time series, timelines and facts: the input of every analysis."""
        from stepscope.runs.load import load

        return load(self)

    def summary(self) -> Summary:
        """Return what the run has consumed so far."""
        from stepscope.analysis.run.summary import summarize

        return summarize(self.data)

    def explain(self) -> DiagnosisView:
        """Return what limits the throughput: findings with evidence and recommendations."""
        from stepscope.report.bottleneck.view import explained_view

        return explained_view(self.data)


def open_run(path: str | Path) -> OpenedRun:
    """Open a run by its folder, by any file in it, or by a folder of runs (the newest run).

    Returns an object with `.name`, `.command`, `.exit_status`, `.summary()` and `.explain()`, and
    with the recorded data as Arrow tables: `.samples(scope)`, `.steps()` and `.marks()`. Raises
    `RunFolderError` if there is no readable run.
    """
    folder = find_run(path)
    return OpenedRun(folder, read_run_json(folder))
