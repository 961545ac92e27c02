"""`stepscope trial MODEL|FILE:FUNC`: one workload, isolated, limited, timed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stepscope.cli.knobs import with_knobs
from stepscope.cli.options import Interval, Name, Out, Quiet
from stepscope.cli.run import near, say
from stepscope.errors import StepscopeError
from stepscope.records import Outcome
from stepscope.runs.paths import DEFAULT_FOLDER

if TYPE_CHECKING:
    from stepscope.report.explain import VerdictView
    from stepscope.report.trial import TrialView
    from stepscope.runs.reader import Run

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
_LIMITS = "What it may use"


@with_knobs
def trial(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL|FILE:FUNC",
            help="cnn, lstm, a torchvision model (resnet50, vit_b_16, r3d_18 …), or a function of "
            "yours: train.py:workload, package.module:workload.",
        ),
    ],
    cpus: Annotated[
        float | None,
        typer.Option(metavar="N", help="How many CPUs; 1.5 is possible.", rich_help_panel=_LIMITS),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Host memory, say 8GiB.", rich_help_panel=_LIMITS),
    ] = None,
    gpu_memory: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="GPU memory, say 16GiB.", rich_help_panel=_LIMITS),
    ] = None,
    gpus: Annotated[
        str | None,
        typer.Option(metavar="LIST", help="Which GPUs, say 0,1.", rich_help_panel=_LIMITS),
    ] = None,
    timeout: Annotated[
        float | None,
        typer.Option(metavar="S", help="End it after so many seconds.", rich_help_panel=_LIMITS),
    ] = None,
    hang: Annotated[
        float,
        typer.Option(
            metavar="S",
            help="End it when nothing was heard of it for so long, from its start on; "
            "keeps a dump of all stacks.",
            rich_help_panel=_LIMITS,
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
    **knobs: Any,
) -> None:
    """Train a workload once, in its own processes, within limits, watched; say how fast it was.

    Exit codes: 0 it trained to its end, 4 no such workload or knob, 5 it was not started, 10
    gpu_oom, 11 host_oom, 12 shm_full, 13 timeout, 14 crashed, 130 interrupted. With --repeat, that
    of the first that was not ok.
    """
    from stepscope import api
    from stepscope.cli.trialbar import TrialBar
    from stepscope.runs.masking import mask_command

    end_on_request()
    with TrialBar(name or model.rpartition("/")[2], repeat, quiet) as bar, _kept() as kept:
        kept.views = api.trial(
            model,
            cpus=cpus,
            memory=memory,
            gpu_memory=gpu_memory,
            gpus=None if gpus is None else [name for name in gpus.split(",") if name],
            timeout=timeout,
            hang=hang,
            repeat=repeat,
            profile=profile,
            name=name,
            interval=interval,
            out=out,
            tell=bar.tell,
            show=bar.show,
            command=mask_command(["stepscope", *sys.argv[1:]]),
            **knobs,
        )
    views = [replace(view, folder=near(view.folder)) for view in kept.views]
    if views:
        _show(views, quiet, as_json)
    if kept.error:
        raise kept.error
    # At once: what the trials left is on disk, and tearing down what is loaded takes its time.
    usual = EXIT_CODES[Outcome.INTERRUPTED if kept.interrupted else Outcome.OK]
    os._exit(next((EXIT_CODES.get(v.ending.outcome, 1) for v in views if not v.is_ok), usual))


@dataclass
class _Kept:
    """What trials there were, also where the last of them was interrupted or not started."""

    views: Sequence[TrialView] = ()
    error: StepscopeError | None = None
    interrupted: bool = False


@contextlib.contextmanager
def _kept() -> Iterator[_Kept]:
    from stepscope.api import TrialInterrupted

    kept = _Kept()
    try:
        yield kept
    except TrialInterrupted as interrupt:
        kept.views, kept.interrupted = interrupt.views, True
    except StepscopeError as error:
        kept.views, kept.error = error.views, error


def end_on_request() -> None:
    """Schedulers ask with SIGTERM, a closed terminal with SIGHUP: as good as a Ctrl-C."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, interrupt)


def _show(views: Sequence[TrialView], quiet: bool, as_json: bool) -> None:
    """The table and the finding for people, the JSON for programs, and the report of each run."""
    from rich.console import Console

    from stepscope.report.explainjson import verdict_dict
    from stepscope.report.explaintext import print_after_trial
    from stepscope.report.profiles import print_profile_of, profile_dict_of
    from stepscope.report.trialjson import trials_dict
    from stepscope.report.trialtable import print_trial
    from stepscope.runs.reader import open_run

    runs = [open_run(view.folder) for view in views]
    findings = [_derived(run) for run in runs]
    # Repeats are held back by the same, and what failed has been told its cause.
    good = [each for view, each in zip(views, findings, strict=True) if view.is_ok]
    finding = good[-1] if good else None
    if as_json:
        told = trials_dict(views)
        profiles = [profile for run in runs if (profile := profile_dict_of(run))]
        if profiles:
            told["profiles"] = profiles
        told["explained"] = verdict_dict(finding.verdict) if finding else None
        sys.stdout.write(json.dumps(told) + "\n")
        sys.stdout.flush()
    if not quiet:
        console = Console(stderr=True)
        print_trial(console, views)
        for run in runs:
            print_profile_of(console, run)
        if finding:
            print_after_trial(console, finding)


def _derived(run: Run) -> VerdictView | None:
    """Write the report of a run; what holds it back is shown with all others."""
    from stepscope.report.derive import derive

    try:
        return derive(run).finding
    except OSError as error:
        say(f"the report could not be written: {error.strerror}; later: stepscope report")
        return None
