"""`stepscope report RUN`: look at a run again, also at one that was killed or is running."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stepscope.cli.options import RUNS_VARIABLE
from stepscope.cli.run import near
from stepscope.cli.study import write_report
from stepscope.errors import RunFolderError, StepscopeError
from stepscope.runs.paths import DEFAULT_FOLDER

if TYPE_CHECKING:
    from stepscope.runs.reader import Run

DAMAGED = (AttributeError, IndexError, KeyError, TypeError, ValueError)
"""What reading a run comes to where its files do not hold what they must."""


def report(
    run: Annotated[
        Path | None,
        typer.Argument(help="A run folder, or that of a study; without it, the latest run."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The summary as JSON.")] = False,
) -> None:
    """Show the summary of a run and write its report again."""
    if run is not None and (run / "study.json").exists():
        return write_report(run, as_json=as_json)
    from stepscope.report.derive import derive
    from stepscope.report.explaintext import print_after_run
    from stepscope.report.profiles import print_profile_of, profile_dict_of
    from stepscope.report.summary import summary_dict
    from stepscope.report.terminal import print_summary
    from stepscope.report.trial import trial_view
    from stepscope.report.trialjson import trial_dict
    from stepscope.report.trialtable import print_trial
    from stepscope.runs.trial import is_trial

    opened = open_or_latest(run)
    try:
        view = derive(opened)
    except OSError as error:
        raise StepscopeError(
            f"The report cannot be written in {opened.path}: {error.strerror}",
            "Copy the folder to a place you can write",
        ) from None
    except DAMAGED as error:
        raise not_understood(opened, error) from None
    trial = trial_view(opened) if is_trial(opened) else None
    if as_json:
        told = summary_dict(view)
        if trial:
            told |= {"trial": trial_dict(trial), "profile": profile_dict_of(opened)}
        sys.stdout.write(json.dumps(told) + "\n")
        return
    from rich.console import Console

    console = Console()
    if trial:
        print_trial(console, [trial])
        print_profile_of(console, opened)
        console.print("\nAll of the run, from the start of its processes to their end:")
    print_summary(console, view, near(opened.paths.report_html))
    if view.finding:
        print_after_run(console, view.finding, near(opened.path))


def open_or_latest(run: Path | None) -> Run:
    """The run that was named, or the newest where runs go."""
    from stepscope.runs.reader import latest_run, open_run

    return open_run(
        run if run is not None else latest_run(os.environ.get(RUNS_VARIABLE, DEFAULT_FOLDER))
    )


def not_understood(run: Run, error: Exception) -> RunFolderError:
    return RunFolderError(
        f"{run.path} cannot be understood: {type(error).__name__}: {str(error)[:200]}",
        "The folder is damaged: copy it again, or run the command again",
    )
