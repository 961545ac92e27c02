"""`stepscope explain RUN`: find the bottleneck of a run and recommend changes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stepscope.cli.console import open_or_latest, write_json


def explain(
    run: Annotated[Path | None, typer.Argument(help="Run folder (default: the latest run)")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON")] = False,
    in_full: Annotated[
        bool,
        typer.Option("--all", help="Show the evidence for all findings, not just the first"),
    ] = False,
) -> None:
    """Find the bottleneck of a run: evidence, speed-up bound and recommendations."""
    from stepscope.analysis.bottleneck.explain import METRICS
    from stepscope.report.bottleneck.view import explained_view
    from stepscope.runs.load import load

    opened = open_or_latest(run)
    view = explained_view(load(opened, METRICS))
    if as_json:
        from stepscope.report.bottleneck.json import explained_dict

        write_json(explained_dict(opened, view))
        return
    from rich.console import Console

    from stepscope.report.bottleneck.document import explained_document
    from stepscope.report.kit.terminal import draw

    draw(Console(), explained_document(opened.name, opened.exit_status, view, in_full))
