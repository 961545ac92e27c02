"""`stepscope explain RUN`: what holds a run back, and what to do about it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stepscope.cli.console import open_or_latest, write_json


def explain(
    run: Annotated[
        Path | None, typer.Argument(help="A run folder; without it, the latest one.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The findings as JSON.")] = False,
    in_full: Annotated[
        bool, typer.Option("--all", help="All findings with their evidence, not only the first.")
    ] = False,
) -> None:
    """Say what holds a run back, by which evidence, how much there is to gain, and what to do."""
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

    draw(Console(), explained_document(opened.name, opened.ending, view, in_full))
