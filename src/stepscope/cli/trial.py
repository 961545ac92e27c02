"""`stepscope trial MODEL|FILE:FUNC`: train one workload in isolation and measure it."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stepscope.cli.console import (
    EXIT_CODES,
    Interval,
    Name,
    Out,
    Quiet,
    near,
    prepare_for_trials,
    print_message,
)
from stepscope.cli.report import show
from stepscope.cli.workload_options import Model, with_settings
from stepscope.errors import TrialError
from stepscope.records import Outcome
from stepscope.runs.paths import DEFAULT_FOLDER

if TYPE_CHECKING:
    from stepscope.report.trial.view import TrialView

_limit = functools.partial(typer.Option, rich_help_panel="Limits")


@with_settings
def trial(
    model: Model,
    cpus: Annotated[
        float | None, _limit(metavar="N", help="Number of CPUs, for example 1.5")
    ] = None,
    memory: Annotated[
        str | None, _limit(metavar="SIZE", help="Host memory, for example 8GiB")
    ] = None,
    gpu_memory: Annotated[
        str | None, _limit(metavar="SIZE", help="GPU memory, for example 16GiB")
    ] = None,
    gpus: Annotated[str | None, _limit(metavar="LIST", help="GPUs, for example 0,1")] = None,
    timeout: Annotated[
        float | None, _limit(metavar="S", help="Maximum duration of a trial in seconds")
    ] = None,
    stall_timeout: Annotated[
        float,
        _limit(
            metavar="S",
            help="Seconds without progress before a trial is stopped; the stacks of all threads "
            "are saved",
        ),
    ] = 300.0,
    repeat: Annotated[
        int, typer.Option(metavar="N", min=1, help="Number of trials, each in new processes")
    ] = 1,
    profile: Annotated[
        bool,
        typer.Option(
            "--profile", help="Run extra steps under the PyTorch profiler and save a trace"
        ),
    ] = False,
    name: Name = None,
    interval: Interval = 0.1,
    out: Out = Path(DEFAULT_FOLDER),
    quiet: Quiet = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the result as JSON to standard output")
    ] = False,
    **settings: Any,
) -> None:
    """Train a workload once in isolated, monitored processes and report its throughput.

    Exit codes: 0 ok, 4 invalid workload or setting, 5 not started, 10 gpu_oom, 11 host_oom, 12
    shm_full, 13 timeout, 14 crashed, 130 interrupted. With --repeat, the exit code is
    that of the first trial that is not ok.
    """
    prepare_for_trials()
    from stepscope.capture.startup import loading

    with loading(TrialError):
        from stepscope.api import run_trials
        from stepscope.cli.progress import TrialBar
        from stepscope.inject.masking import mask_command
        from stepscope.records.trial import TrialFacts
        from stepscope.trials.limits.spec import Limits
        from stepscope.trials.request import TrialRequest, workload_of

    request = TrialRequest(
        workload_of(model, settings),
        Limits.of(cpus, memory, gpu_memory, gpus, timeout, stall_timeout),
        repeats=repeat,
        profile=profile,
        name=name,
        interval=interval,
        out=out,
        facts=TrialFacts(command=tuple(mask_command(["stepscope", *sys.argv[1:]]))),
    )
    with TrialBar(name or model.rpartition("/")[2], repeat, quiet) as bar:
        results = run_trials(request, bar.notify, bar.show)
    views = [replace(view, folder=near(view.folder)) for view in results.views]
    if views:
        _show(views, quiet, as_json)
    if results.error:
        raise results.error
    # Everything is on disk, and a regular interpreter exit takes time.
    default = EXIT_CODES[Outcome.INTERRUPTED if results.interrupted else Outcome.OK]
    os._exit(
        next((EXIT_CODES.get(v.exit_status.outcome, 1) for v in views if not v.is_ok), default)
    )


def _show(views: Sequence[TrialView], quiet: bool, as_json: bool) -> None:
    """Write the report of each run, and show the trials with their bottleneck."""
    from stepscope.report.run.derive import write_derived
    from stepscope.report.run.result import trials_result
    from stepscope.report.run.view import run_view

    results = []
    for view in views:
        results.append(run_view(view.run, view.data, view))
        try:
            write_derived(view.run, results[-1])
        except OSError as error:
            print_message(
                f"cannot write the report: {error.strerror}; run `stepscope report` later"
            )
    show([trials_result(results)], quiet=quiet, as_json=as_json)
