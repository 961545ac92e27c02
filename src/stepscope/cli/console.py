"""What commands share: options, lines for the user, signals, exit codes, opening a run."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stepscope.records import Outcome
from stepscope.records.codec import dumps
from stepscope.runs.paths import DEFAULT_FOLDER

if TYPE_CHECKING:
    from stepscope.runs.reader import Run

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

EXIT_CODES = {
    Outcome.OK: 0,
    Outcome.GPU_OOM: 10,
    Outcome.HOST_OOM: 11,
    Outcome.SHM_FULL: 12,
    Outcome.TIMEOUT: 13,
    Outcome.CRASHED: 14,
    Outcome.INTERRUPTED: 130,
}
"""An OOM is a result; a script that asked for it can tell it from others by the code."""


def say(text: str) -> None:
    """One line on standard error; nobody there is no reason to fail."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(f"stepscope: {text}\n")
        sys.stderr.flush()


def write_json(data: Any) -> None:
    """One line of JSON on standard output."""
    sys.stdout.write(f"{dumps(data)}\n")
    sys.stdout.flush()


def near(path: Path) -> Path:
    """A path as a user in this folder would write it."""
    relative = Path(os.path.relpath(path))
    return path if relative.parts[:1] == ("..",) else relative


def name_of(command: Sequence[str]) -> str:
    """A name for a run that was given none: the script, or the program."""
    for word in command[1:]:
        if word.endswith(".py") and not word.startswith("-"):
            return Path(word).stem
    return Path(command[0]).name


def end_on_request() -> None:
    """Schedulers ask with SIGTERM, a closed terminal with SIGHUP: both act like Ctrl-C."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, interrupt)


def runs_folder() -> Path:
    return Path(os.environ.get(RUNS_VARIABLE, DEFAULT_FOLDER))


def open_or_latest(folder: Path | None) -> Run:
    """The run that was named, or the latest where runs go."""
    from stepscope.runs.reader import latest_run, open_run

    return open_run(latest_run(runs_folder()) if folder is None else folder)
