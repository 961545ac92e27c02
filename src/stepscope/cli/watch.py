"""`stepscope watch PID`: monitor a process that is already running."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

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
    print_message,
)
from stepscope.cli.run import Shown, show_run, still_running
from stepscope.runs.paths import DEFAULT_FOLDER


def watch(
    pid: Annotated[int, typer.Argument(metavar="PID", help="Process ID", min=1)],
    name: Name = None,
    interval: Interval = 0.1,
    out: Out = Path(DEFAULT_FOLDER),
    duration: Annotated[
        float | None,
        typer.Option(
            help="Maximum duration in seconds (default: until the process exits)",
            metavar="S",
            min=0.1,
        ),
    ] = None,
    verbose: Verbose = False,
    open_report: OpenReport = False,
    quiet: Quiet = False,
    as_json: SummaryAsJson = False,
) -> None:
    """Monitor a running process and its process tree, then print a summary with the bottleneck.

    Monitoring ends when the process exits. Ctrl-C, SIGTERM and --duration end only the monitoring,
    not the process. Epochs and steps are not tracked, because the import hook cannot be injected
    into a running process. The outcome of the process is reported if it can be determined; the exit
    code is 0 even if the process failed.
    """
    from stepscope.capture.startup import loading

    with loading():
        from stepscope.capture.attach import monitor_process
        from stepscope.capture.request import RunRequest, check_interval
        from stepscope.capture.target import find_target

    def notify(text: str) -> None:
        if not quiet:
            print_message(text)

    check_interval(interval)
    target = find_target(pid)
    try:
        notify(f"monitoring {target.name} (PID {pid}); Ctrl-C ends monitoring, not the process")
        if target.owner:
            hint = "" if os.geteuid() == 0 else ". Use sudo to read all metrics"
            notify(f"the process belongs to {target.owner}; some metrics cannot be read{hint}")
        # A process may have written all its arguments, including secrets, into its name.
        plain = target.command and " " not in target.command[0]
        title = name or (name_of(target.command) if plain else target.name)
        request = RunRequest(
            title,
            target.command,
            interval,
            out,
            cwd=target.cwd,
            hook=False,
            duration_s=duration,
        )
        finished = monitor_process(request, target, notify)
    finally:
        target.close()
    shown = Shown(verbose, quiet, as_json, open_report)
    show_run(finished.paths.folder, shown, lambda: None)
    if finished.survivors:
        notify(still_running(finished.survivors))
