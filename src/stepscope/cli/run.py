"""`stepscope run -- CMD`: monitor a command."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from stepscope.cli.console import (
    Interval,
    Name,
    OpenReport,
    Out,
    Quiet,
    SummaryAsJson,
    Verbose,
    name_of,
    near,
    open_page,
    print_message,
)
from stepscope.cli.report import show
from stepscope.errors import StepscopeError
from stepscope.runs.paths import DEFAULT_FOLDER, RunPaths

_MAX_LISTED = 8  # processes that are still running


def run(
    command: Annotated[
        list[str], typer.Argument(metavar="-- CMD...", help="Command to run, after two dashes")
    ],
    name: Name = None,
    interval: Interval = 0.1,
    out: Out = Path(DEFAULT_FOLDER),
    epoch_pattern: Annotated[
        str | None,
        typer.Option(
            metavar="RE",
            help="Regular expression that matches an epoch in the output; its first group is the "
            "epoch number. The output is then captured through a pseudo-terminal or pipe",
        ),
    ] = None,
    no_hook: Annotated[
        bool,
        typer.Option("--no-hook", help="Do not inject the import hook into Python processes"),
    ] = False,
    wait_tree: Annotated[
        bool,
        typer.Option(
            "--wait-tree", help="Wait for processes that are still running after the command exits"
        ),
    ] = False,
    verbose: Verbose = False,
    open_report: OpenReport = False,
    quiet: Quiet = False,
    as_json: SummaryAsJson = False,
) -> None:
    """Monitor a command and its process tree, then print a summary with the bottleneck.

    The command runs as it would without stepscope: it uses the same terminal, receives the same
    signals, and stepscope exits with its exit code. If the command was not started, the
    exit code is 125 (monitoring could not start), 126 (the command cannot be executed) or 127 (the
    command was not found).
    """
    from stepscope.capture.request import RunRequest
    from stepscope.capture.signals import intercept_signals, restore_signals
    from stepscope.capture.startup import loading

    request = RunRequest(
        name or name_of(command),
        command,
        interval,
        out,
        hook=not no_hook,
        epoch_pattern=epoch_pattern,
        wait_tree=wait_tree,
    )
    signals = intercept_signals()
    with loading():
        from stepscope.capture.command import monitor_command
        from stepscope.capture.spawn import exit_like

    def notify(text: str) -> None:
        if not quiet:
            print_message(text)

    finished = monitor_command(request, notify, signals)
    try:
        shown = Shown(verbose, quiet, as_json, open_report)
        show_run(finished.paths.folder, shown, lambda: restore_signals(signals))
        if finished.survivors:
            notify(f"{still_running(finished.survivors)}; use --wait-tree to wait for them")
    finally:
        # `os._exit` skips the teardown of the interpreter, which is slow, and which would end with
        # a Ctrl-C that arrived during an exec instead of the exit code of the command.
        os._exit(exit_like(finished.status))


def still_running(survivors: Sequence[str]) -> str:
    more = " …" if len(survivors) > _MAX_LISTED else ""
    return f"still running: {', '.join(survivors[:_MAX_LISTED])}{more}"


class Shown(NamedTuple):
    """What to show of a run that has ended."""

    verbose: bool
    quiet: bool
    as_json: bool
    open_report: bool


def show_run(folder: Path, shown: Shown, begin: Callable[[], None]) -> None:
    """Derive the summary and the report, and print the summary. Errors do not change the exit code.

    `begin` enables Ctrl-C, so that users can skip the report.
    """
    try:
        begin()
        import pyarrow

        from stepscope.capture.startup import check_threads

        check_threads(pyarrow.cpu_count() + pyarrow.io_thread_count())
        from stepscope.report.run.derive import derive
        from stepscope.report.run.result import run_result
        from stepscope.runs.reader import open_run

        documents = run_result(derive(open_run(folder)), near(folder), shown.verbose)
        show(documents, quiet=shown.quiet, as_json=shown.as_json)
        if shown.open_report:
            open_page(RunPaths(folder).report_html)
    except KeyboardInterrupt:
        print_message(
            f"the report was interrupted. Create it with `stepscope report {near(folder)}`"
        )
    except (Exception, SystemExit) as error:  # rich raises SystemExit if the output is closed
        known = isinstance(error, OSError) and error.strerror
        known = error.message if isinstance(error, StepscopeError) else known
        reason = known or f"{type(error).__name__}: {str(error)[:200]}"
        print_message(
            f"the report could not be created ({reason}). "
            f"Try again with `stepscope report {near(folder)}`"
        )
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
