"""`stepscope explain RUN`: what holds a run back, and what to do about it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from stepscope.cli.report import DAMAGED, not_understood, open_or_latest


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
    opened = open_or_latest(run)
    try:
        verdict = opened.explained()
    except DAMAGED as error:
        raise not_understood(opened, error) from None
    if as_json:
        from stepscope.report.explainjson import explained_dict

        sys.stdout.write(json.dumps(explained_dict(opened, verdict), allow_nan=False) + "\n")
        return
    from rich.console import Console

    from stepscope.report.explain import verdict_view
    from stepscope.report.explaintext import print_explained

    print_explained(Console(), opened.name, opened.ending, verdict_view(verdict), in_full)
