"""`stepscope doctor`: which sensors work here, what they cost, and whether they tell the truth."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Annotated

import typer

from stepscope.cli.console import EXIT_CODES, near, runs_folder, say, write_json
from stepscope.records import Outcome
from stepscope.records.codec import to_json


def doctor(
    quick: Annotated[
        bool, typer.Option("--quick", help="Without the self-test: about three seconds.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(help="Where to test the disk, and where --keep puts the run.", metavar="DIR"),
    ] = None,
    no_gpu: Annotated[bool, typer.Option("--no-gpu", help="Let the GPU rest.")] = False,
    keep: Annotated[
        bool, typer.Option("--keep", help="Keep the run of the self-test, with its report.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="All of it as one JSON object.")] = False,
) -> None:
    """Say which sensors work here, what each costs, and whether they tell the truth.

    For the last, work of known size is done under watch: CPU time, in a child process too, memory,
    disk, network, and on an NVIDIA GPU copies and matrix products. What the sensors saw is compared
    with what was done. Exit code 1: a sensor does not tell the truth. One that is missing is no
    fault.
    """
    from stepscope.capture.signals import give_signals_back, take_signals

    signals = take_signals()
    from stepscope.doctor.examine import Examination, examine

    if not as_json and sys.stderr.isatty():
        say("looking around …" if quick else "testing for about 10 s, or 30 s with a GPU …")
    asked = Examination(out=out, runs=runs_folder(), quick=quick, gpu=not no_gpu, keep=keep)
    try:
        report = examine(asked, signals)
    except KeyboardInterrupt:
        raise typer.Exit(EXIT_CODES[Outcome.INTERRUPTED]) from None
    give_signals_back(signals)
    with contextlib.suppress(BrokenPipeError, SystemExit):  # nobody reads it (rich leaves then)
        if as_json:
            sensors = [{**to_json(each), "core_share": each.share} for each in report.sensors]
            write_json(
                {
                    "ok": report.truthful,
                    "sensors": sensors,
                    "watcher_cores": report.watcher_cores,
                    "self_test": report.verdicts,
                    "surroundings": report.surroundings,
                    "run": report.run,
                }
            )
        else:
            from rich.console import Console

            from stepscope.doctor.view import blocks_of
            from stepscope.report.kit.terminal import draw_blocks

            draw_blocks(Console(), blocks_of(report, str(near(report.run)) if report.run else ""))
        sys.stdout.flush()
    raise typer.Exit(0 if report.truthful else 1)
