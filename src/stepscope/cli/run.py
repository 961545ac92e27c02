"""`stepscope run -- CMD`: watch any command."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from stepscope.cli.options import Interval, Name, Out, Quiet, SummaryAsJson
from stepscope.errors import CannotWatch
from stepscope.runs.paths import DEFAULT_FOLDER


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
    _check_pattern(epoch_pattern)
    from stepscope.capture.spawn import die_like, give_signals_back, take_signals

    signals = take_signals()
    from stepscope.capture.command import watch_command
    from stepscope.capture.session import Plan, check_interval

    check_interval(interval)

    def tell(text: str) -> None:
        if not quiet:
            say(text)

    hint = "use stepscope.mark()" + ("" if epoch_pattern else " or --epoch-pattern")
    plan = Plan(name or name_of(command), command, interval, out, hook=not no_hook, hint=hint)
    watched = watch_command(plan, tell, signals, epoch_pattern, wait_tree)
    show_run(watched.paths.folder, quiet, as_json, lambda: give_signals_back(signals))
    if watched.survivors and not quiet:
        some = ", ".join(watched.survivors[:8]) + (" …" if len(watched.survivors) > 8 else "")
        say(f"still running: {some}; --wait-tree waits for such processes")
    # At once, with the command's code: Python, leaving by itself, would die of a Ctrl-C that was
    # caught (if it came inside of an exec), and takes its time to tear down what is loaded.
    os._exit(die_like(watched.status))


def _check_pattern(pattern: str | None) -> None:
    try:
        re.compile(pattern or "")
    except re.error as error:
        raise CannotWatch(
            f"--epoch-pattern {pattern!r} is no regular expression: {error}",
            r"For example: --epoch-pattern 'Epoch (\d+)'",
        ) from None


def name_of(command: list[str]) -> str:
    """A name for a run that was given none: the script, or the program."""
    for word in command[1:]:
        if word.endswith(".py") and not word.startswith("-"):
            return Path(word).stem
    return Path(command[0]).name


def say(text: str) -> None:
    """One line on standard error; nobody there is no reason to fail."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(f"stepscope: {text}\n")
        sys.stderr.flush()


def near(path: Path) -> Path:
    """A path as a user in this folder would write it."""
    relative = Path(os.path.relpath(path))
    return path if relative.parts[:1] == ("..",) else relative


def show_run(folder: Path, quiet: bool, as_json: bool, begin: Callable[[], None]) -> None:
    """Derive the summary and the report, and show them. Whatever fails, the exit code stays.

    `begin` lets Ctrl-C through: who does not want to wait for a report need not.
    """
    try:
        begin()
        _derive_and_print(folder, quiet, as_json)
    except KeyboardInterrupt:
        say(f"the report was interrupted; later: stepscope report {near(folder)}")
    except (Exception, SystemExit) as error:  # rich leaves the program when nobody reads it
        known = isinstance(error, OSError) and error.strerror
        why = known or f"{type(error).__name__}: {str(error)[:200]}"
        say(f"the report could not be made ({why}); later: stepscope report {near(folder)}")
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def _derive_and_print(folder: Path, quiet: bool, as_json: bool) -> None:
    from stepscope.report.derive import derive
    from stepscope.report.summary import summary_dict
    from stepscope.report.terminal import print_summary
    from stepscope.runs.reader import open_run

    run = open_run(folder)
    view = derive(run)
    if as_json:
        sys.stdout.write(json.dumps(summary_dict(view)) + "\n")
        sys.stdout.flush()
    if not quiet:
        from rich.console import Console

        from stepscope.report.explaintext import print_after_run

        console = Console(stderr=True)
        print_summary(console, view, near(run.paths.report_html))
        if view.finding:
            print_after_run(console, view.finding, near(run.path))
