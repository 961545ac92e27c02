"""`stepscope.open_run`: a run for programs, with its summary and its diagnosis."""

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
    """A run, read when it is first asked for anything; open it again to see it go on."""

    @cached_property
    def data(self) -> RunData:
        """Series, timelines and facts: what the analyses take."""
        from stepscope.runs.load import load

        return load(self)

    def summary(self) -> Summary:
        """What the run consumed so far."""
        from stepscope.analysis.run.summary import summarise

        return summarise(self.data)

    def explained(self) -> DiagnosisView:
        """What limits the throughput of the run: findings with their evidence, in words."""
        from stepscope.report.bottleneck.view import explained_view

        return explained_view(self.data)


def open_run(path: str | Path) -> OpenedRun:
    """Open a run by its folder, or by any file in it; of a folder of runs, the newest."""
    folder = find_run(path)
    return OpenedRun(folder, read_run_json(folder))
