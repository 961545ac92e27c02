"""Shared by the commands: options, messages, signals, exit codes, and opening a run."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Sequence
from inspect import cleandoc
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from stepscope.records import Outcome
from stepscope.records.codec import dumps
from stepscope.report.kit.format import printable_lines
from stepscope.runs.paths import DEFAULT_FOLDER

if TYPE_CHECKING:
    from stepscope.runs.reader import Run

RUNS_VARIABLE = "STEPSCOPE_RUNS"

Name = Annotated[
    str | None, typer.Option(help="Name of the run (default: the script, program or model)")
]
Interval = Annotated[
    float, typer.Option(help="Seconds between samples, from 0.02 to 60", metavar="S")
]
Out = Annotated[
    Path,
    typer.Option(help="Parent folder of the run folders", metavar="DIR", envvar=RUNS_VARIABLE),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print only errors")]
Verbose = Annotated[
    bool, typer.Option("--verbose", "-v", help="Print tables of metrics, processes and epochs")
]
OpenReport = Annotated[bool, typer.Option("--open", help="Open the report in a browser")]
SummaryAsJson = Annotated[
    bool, typer.Option("--json", help="Print the summary as JSON to standard output at the end")
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
"""Exit codes of `trial` and `fit`, so that scripts can distinguish the outcomes."""


class CommandGroup(TyperGroup):
    """Commands whose help fits any terminal, with flags that do not look as if they took values."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        command = super().get_command(ctx, cmd_name)
        if command is not None:
            # typer wraps a paragraph only if it has no line breaks.
            paragraphs = cleandoc(command.help or "").split("\n\n")
            command.help = "\n\n".join(" ".join(each.split()) for each in paragraphs)
            _hide_flag_types(command.get_params(ctx))
        return command

    def get_params(self, ctx: Any) -> Any:
        return _hide_flag_types(super().get_params(ctx))


def _hide_flag_types(options: Sequence[Any]) -> Sequence[Any]:
    for option in options:
        if getattr(option, "is_flag", False):
            option.metavar = ""  # instead of `<bool>`
    return options


def print_message(text: str) -> None:
    """Print to standard error, and ignore a closed standard error. Names and texts from files of
    somebody else may contain escape sequences."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(f"stepscope: {printable_lines(text)}\n")
        sys.stderr.flush()


def write_json(data: Any) -> None:
    """Print one line of JSON to standard output."""
    sys.stdout.write(f"{dumps(data)}\n")
    sys.stdout.flush()


def open_page(page: Path) -> None:
    """Open a report in a browser; without one, print where the report is."""
    import webbrowser

    has_display = any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER"))
    # Without a display, `webbrowser` may start a text browser in this terminal.
    if not (has_display and webbrowser.open(page.absolute().as_uri())):
        print_message(f"cannot open a browser here. The report is {page.absolute().as_uri()}")


def near(path: Path) -> Path:
    """Return a path relative to the current folder, if it is inside of it."""
    relative = Path(os.path.relpath(path))
    return path if relative.parts[:1] == ("..",) else relative


def name_of(command: Sequence[str]) -> str:
    """Return the default name of a run: the script, or the program."""
    for word in command[1:]:
        if word.endswith(".py") and not word.startswith("-"):
            return Path(word).stem
    return Path(command[0]).name


def prepare_for_trials() -> None:
    """Treat SIGTERM (schedulers) and SIGHUP (a closed terminal) like Ctrl-C, and let trials end all
    children of this process."""
    from stepscope.trials.processes import trial_processes

    trial_processes.owns_all_children = True

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, interrupt)


def runs_folder() -> Path:
    return Path(os.environ.get(RUNS_VARIABLE, DEFAULT_FOLDER))


def open_or_latest(folder: Path | None) -> Run:
    """Open a run, or the latest run if none is given."""
    from stepscope.runs.reader import latest_run, open_run

    return open_run(latest_run(runs_folder()) if folder is None else folder)
