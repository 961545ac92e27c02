"""`stepscope report RUN`: look at a run again, also at one that was killed or is running."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stepscope.cli.console import near, open_or_latest, write_json
from stepscope.cli.study import show_study
from stepscope.errors import StepscopeError

if TYPE_CHECKING:
    from stepscope.report.kit.document import Document


def report(
    run: Annotated[
        Path | None,
        typer.Argument(help="A run folder, or that of a study; without it, the latest run."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The summary as JSON.")] = False,
    output: Annotated[
        str | None,
        typer.Option(
            "--format",
            metavar="NAME",
            help="The whole report on standard output: terminal, html, json …",
        ),
    ] = None,
) -> None:
    """Show the summary of a run and write its report again."""
    if run is not None and (run / "study.json").exists():
        if output is None:
            return show_study(run, as_json=as_json)
        from stepscope.report.study.document import page_of as study_page_of
        from stepscope.report.study.export import study_dict
        from stepscope.report.study.read import read_view

        study = read_view(run)
        return _write(replace(study_page_of(study), data=study_dict(study)), output)
    from stepscope.report.bottleneck.document import closing_section
    from stepscope.report.kit.terminal import draw, draw_blocks
    from stepscope.report.run.derive import derive
    from stepscope.report.run.document import page_of, summary_of
    from stepscope.report.run.json import summary_dict
    from stepscope.report.trial.document import trials_document
    from stepscope.report.trial.json import trial_dict
    from stepscope.report.trial.profile import print_profile_of, profile_dict_of
    from stepscope.report.trial.view import trial_view
    from stepscope.runs.load import load
    from stepscope.runs.trial import is_trial

    opened = open_or_latest(run)
    try:
        data = load(opened)
        trial = trial_view(opened, data=data) if is_trial(opened) else None
        view = derive(opened, data, trial)
    except OSError as error:
        raise StepscopeError(
            f"The report cannot be written in {opened.path}: {error.strerror}",
            "Copy the folder to a place you can write",
        ) from None
    if output is not None:
        return _write(page_of(view), output)
    if as_json:
        told = summary_dict(view)
        if trial:
            told |= {"trial": trial_dict(trial), "profile": profile_dict_of(opened)}
        return write_json(told)
    from rich.console import Console

    console = Console()
    if trial:
        draw(console, trials_document([trial]))
        print_profile_of(console, opened)
        console.print("\nAll of the run, from the start of its processes to their end:")
    draw(console, summary_of(view, near(opened.paths.report_html)))
    if view.finding:
        draw_blocks(console, [closing_section(view.finding, near(opened.path))])


def _write(document: Document, output: str) -> None:
    from stepscope.report.kit.renderers import RENDERERS

    if output not in RENDERERS:
        raise StepscopeError(f"Unknown format {output!r}", f"Formats: {', '.join(RENDERERS)}")
    sys.stdout.write(RENDERERS[output](document))
