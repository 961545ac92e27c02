"""Options that several commands have, said once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

RUNS_VARIABLE = "STEPSCOPE_RUNS"

Name = Annotated[str | None, typer.Option(help="What to call the run.")]
Interval = Annotated[float, typer.Option(help="Seconds between samples, 0.02 to 60.", metavar="S")]
Out = Annotated[
    Path, typer.Option(help="Where run folders go.", metavar="DIR", envvar=RUNS_VARIABLE)
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Say nothing but errors.")]
SummaryAsJson = Annotated[
    bool, typer.Option("--json", help="End with the summary as JSON on standard output.")
]
