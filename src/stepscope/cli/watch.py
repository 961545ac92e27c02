"""`stepscope watch PID`: watch something that is running already."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from stepscope.cli.console import Interval, Name, Out, Quiet, SummaryAsJson, name_of, say
from stepscope.cli.run import show_run, still_running
from stepscope.runs.paths import DEFAULT_FOLDER


def watch(
    pid: Annotated[int, typer.Argument(metavar="PID", help="Its process number.", min=1)],
    name: Name = None,
    interval: Interval = 0.1,
    out: Out = Path(DEFAULT_FOLDER),
    duration: Annotated[
        float | None,
        typer.Option(help="Watch for so many seconds at most.", metavar="S", min=0.1),
    ] = None,
    quiet: Quiet = False,
    as_json: SummaryAsJson = False,
) -> None:
    """Watch a running process and all that it starts; end with a summary, a report and what to do.

    Watching ends with the process. Ctrl-C, SIGTERM or --duration end only the watching: the process
    runs on. Epochs and steps are not seen, since nothing can be put into a process that runs. How
    it ended is told where it can be known; the exit code is 0 however it ended.
    """
    from stepscope.capture.attach import monitor_process
    from stepscope.capture.request import RunRequest, check_interval
    from stepscope.capture.target import find_target

    def tell(text: str) -> None:
        if not quiet:
            say(text)

    check_interval(interval)
    target = find_target(pid)
    try:
        tell(f"watching {target.name} (pid {pid}); Ctrl-C ends the watching, the process runs on")
        if target.owner:
            more = "" if os.geteuid() == 0 else "; sudo would show more"
            tell(f"it belongs to {target.owner}: not all of it can be read{more}")
        # A process may have written all its arguments into its name, secrets too.
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
        finished = monitor_process(request, target, tell)
    finally:
        target.close()
    show_run(finished.paths.folder, quiet, as_json, lambda: None)
    if finished.survivors:
        tell(still_running(finished.survivors))
