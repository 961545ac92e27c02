"""`stepscope run -- CMD`: watch any command."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from stepscope.cli.console import (
    Interval,
    Name,
    Out,
    Quiet,
    SummaryAsJson,
    name_of,
    near,
    say,
)
from stepscope.cli.report import show
from stepscope.runs.paths import DEFAULT_FOLDER

_NAMED = 8  # processes that are still running: at most so many are listed


def run(
    command: Annotated[
        list[str], typer.Argument(metavar="-- CMD...", help="The command, after two dashes.")
    ],
    name: Name = None,
    interval: Interval = 0.1,
    out: Out = Path(DEFAULT_FOLDER),
    epoch_pattern: Annotated[
        str | None,
        typer.Option(
            metavar="RE",
            help="A regular expression for the lines of output that tell an epoch; "
            "its first group is the number. Only then is output captured.",
        ),
    ] = None,
    no_hook: Annotated[
        bool, typer.Option("--no-hook", help="Do not look into Python processes.")
    ] = False,
    wait_tree: Annotated[
        bool, typer.Option("--wait-tree", help="Wait for processes that outlive the command.")
    ] = False,
    quiet: Quiet = False,
    as_json: SummaryAsJson = False,
) -> None:
    """Watch a command and all that it starts; end with a summary, a report and what to do next.

    The command runs as if alone: its terminal, signals and exit code are its own. Exit codes 125 to
    127 mean that it was not started (125: stepscope could not begin, 126: the command cannot be
    executed, 127: there is no such command).
    """
    from stepscope.capture.request import RunRequest
    from stepscope.capture.signals import give_signals_back, take_signals

    request = RunRequest(
        name or name_of(command),
        command,
        interval,
        out,
        hook=not no_hook,
        hint="use stepscope.mark()" + ("" if epoch_pattern else " or --epoch-pattern"),
        epoch_pattern=epoch_pattern,
        wait_tree=wait_tree,
    )
    signals = take_signals()
    from stepscope.capture.command import monitor_command
    from stepscope.capture.spawn import die_like

    def tell(text: str) -> None:
        if not quiet:
            say(text)

    finished = monitor_command(request, tell, signals)
    show_run(finished.paths.folder, quiet, as_json, lambda: give_signals_back(signals))
    if finished.survivors:
        tell(f"{still_running(finished.survivors)}; --wait-tree waits for such processes")
    # At once, with the command's code: Python, leaving by itself, would die of a Ctrl-C that was
    # caught (if it came inside of an exec), and takes its time to tear down what is loaded.
    os._exit(die_like(finished.status))


def still_running(survivors: Sequence[str]) -> str:
    more = " …" if len(survivors) > _NAMED else ""
    return f"still running: {', '.join(survivors[:_NAMED])}{more}"


def show_run(folder: Path, quiet: bool, as_json: bool, begin: Callable[[], None]) -> None:
    """Derive the summary and the report, and show them. Whatever fails, the exit code stays.

    `begin` lets Ctrl-C through: who does not want to wait for a report need not.
    """
    try:
        begin()
        from stepscope.report.run.derive import derive
        from stepscope.report.run.result import run_result
        from stepscope.runs.reader import open_run

        show(run_result(derive(open_run(folder)), near(folder)), quiet=quiet, as_json=as_json)
    except KeyboardInterrupt:
        say(f"the report was interrupted; later: stepscope report {near(folder)}")
    except (Exception, SystemExit) as error:  # rich leaves the program when nobody reads it
        known = isinstance(error, OSError) and error.strerror
        why = known or f"{type(error).__name__}: {str(error)[:200]}"
        say(f"the report could not be made ({why}); later: stepscope report {near(folder)}")
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
