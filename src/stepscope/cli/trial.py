"""`stepscope trial MODEL|FILE:FUNC`: one workload, isolated, limited, timed."""

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
    end_on_request,
    near,
    say,
)
from stepscope.cli.report import show
from stepscope.cli.workload_options import Model, with_settings
from stepscope.records import Outcome
from stepscope.runs.paths import DEFAULT_FOLDER

if TYPE_CHECKING:
    from stepscope.report.trial.view import TrialView

_limit = functools.partial(typer.Option, rich_help_panel="What it may use")


@with_settings
def trial(
    model: Model,
    cpus: Annotated[
        float | None, _limit(metavar="N", help="How many CPUs; 1.5 is possible.")
    ] = None,
    memory: Annotated[str | None, _limit(metavar="SIZE", help="Host memory, say 8GiB.")] = None,
    gpu_memory: Annotated[str | None, _limit(metavar="SIZE", help="GPU memory, say 16GiB.")] = None,
    gpus: Annotated[str | None, _limit(metavar="LIST", help="Which GPUs, say 0,1.")] = None,
    timeout: Annotated[
        float | None, _limit(metavar="S", help="End it after so many seconds.")
    ] = None,
    hang: Annotated[
        float,
        _limit(
            metavar="S",
            help="End it when nothing was heard of it for so long, from its start on; "
            "keeps a dump of all stacks.",
        ),
    ] = 300.0,
    repeat: Annotated[
        int, typer.Option(metavar="N", min=1, help="Try it N times, in fresh processes.")
    ] = 1,
    profile: Annotated[
        bool,
        typer.Option(
            "--profile", help="Take some more steps under PyTorch's profiler; keeps its trace."
        ),
    ] = False,
    name: Name = None,
    interval: Interval = 0.1,
    out: Out = Path(DEFAULT_FOLDER),
    quiet: Quiet = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="End with the result as JSON on standard output.")
    ] = False,
    **settings: Any,
) -> None:
    """Train a workload once, in its own processes, within limits, watched; say how fast it was.

    Exit codes: 0 it trained to its end, 4 no such workload or setting, 5 it was not started, 10
    gpu_oom, 11 host_oom, 12 shm_full, 13 timeout, 14 crashed, 130 interrupted. With --repeat, that
    of the first that was not ok.
    """
    end_on_request()
    from stepscope.api import run_trials
    from stepscope.cli.progress import TrialBar
    from stepscope.records.trial import TrialFacts
    from stepscope.runs.masking import mask_command
    from stepscope.trials.limits.spec import Limits
    from stepscope.trials.request import TrialRequest, workload_of

    request = TrialRequest(
        workload_of(model, settings),
        Limits.of(cpus, memory, gpu_memory, gpus, timeout, hang),
        repeats=repeat,
        profile=profile,
        name=name,
        interval=interval,
        out=out,
        facts=TrialFacts(command=tuple(mask_command(["stepscope", *sys.argv[1:]]))),
    )
    with TrialBar(name or model.rpartition("/")[2], repeat, quiet) as bar:
        results = run_trials(request, bar.tell, bar.show)
    views = [replace(view, folder=near(view.folder)) for view in results.views]
    if views:
        _show(views, quiet, as_json)
    if results.error:
        raise results.error
    # At once: what the trials left is on disk, and tearing down what is loaded takes its time.
    usual = EXIT_CODES[Outcome.INTERRUPTED if results.interrupted else Outcome.OK]
    os._exit(next((EXIT_CODES.get(v.ending.outcome, 1) for v in views if not v.is_ok), usual))


def _show(views: Sequence[TrialView], quiet: bool, as_json: bool) -> None:
    """Write the report of each run; show the trials and their bottleneck."""
    from stepscope.report.run.derive import write_derived
    from stepscope.report.run.result import trials_result
    from stepscope.report.run.view import run_view

    results = []
    for view in views:
        results.append(run_view(view.run, view.data, view))
        try:
            write_derived(view.run, results[-1])
        except OSError as error:
            say(f"the report could not be written: {error.strerror}; later: stepscope report")
    show([trials_result(results)], quiet=quiet, as_json=as_json)
