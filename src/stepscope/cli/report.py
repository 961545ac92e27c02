"""`stepscope report RUN`: show a run again, also one that was killed or is still running."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stepscope.cli.console import OpenReport, near, open_or_latest, open_page, write_json
from stepscope.cli.study import show_study
from stepscope.errors import StepscopeError

if TYPE_CHECKING:
    from stepscope.report.kit.document import Document


def report(
    run: Annotated[
        Path | None,
        typer.Argument(help="Run or study folder (default: the latest run)"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON")] = False,
    output: Annotated[
        str | None,
        typer.Option(
            "--format",
            metavar="NAME",
            help="Print the full report in this format: terminal, html or json",
        ),
    ] = None,
    open_report: OpenReport = False,
) -> None:
    """Show the summary of a run or study and rewrite its report."""
    from stepscope.studies.folder import is_study

    if run is not None and is_study(run):
        if output is None:
            return show_study(run, as_json=as_json, open_report=open_report)
        from stepscope.report.study.document import page_of as study_page_of
        from stepscope.report.study.export import study_dict
        from stepscope.report.study.read import read_view

        study = read_view(run)
        return _write(replace(study_page_of(study), data=study_dict(study)), output)
    from stepscope.report.run.derive import derive
    from stepscope.report.run.document import page_of
    from stepscope.report.run.result import run_result

    opened = open_or_latest(run)
    try:
        view = derive(opened)
    except OSError as error:
        raise StepscopeError(
            f"Cannot write the report to {opened.path}: {error.strerror}",
            "Copy the run folder to a location where you have write permission",
        ) from None
    if output is not None:
        return _write(page_of(view), output)
    show(run_result(view, near(opened.path)), quiet=as_json, as_json=as_json, stderr=False)
    if open_report:
        open_page(opened.paths.report_html)


def show(documents: Sequence[Document], *, quiet: bool, as_json: bool, stderr: bool = True) -> None:
    """Print the result of `run`, `watch`, `trial` and `report` as text or JSON."""
    if as_json:
        write_json(documents[-1].data)
    if not quiet:
        from rich.console import Console

        from stepscope.report.kit.terminal import draw

        console = Console(stderr=stderr)
        for document in documents:
            draw(console, document)


def _write(document: Document, output: str) -> None:
    from stepscope.report.kit.renderers import RENDERERS

    if output not in RENDERERS:
        raise StepscopeError(f"Unknown format {output!r}", f"Valid values: {', '.join(RENDERERS)}")
    sys.stdout.write(RENDERERS[output](document))
