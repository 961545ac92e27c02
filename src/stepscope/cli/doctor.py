"""`stepscope doctor`: which sensors work, what they cost, and whether they are correct."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Annotated

import typer

from stepscope.cli.console import EXIT_CODES, near, print_message, runs_folder, write_json
from stepscope.records import Outcome
from stepscope.records.codec import to_json


def doctor(
    quick: Annotated[
        bool, typer.Option("--quick", help="Skip the self-test; the rest takes about 3 s")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for the disk test and for --keep", metavar="DIR"),
    ] = None,
    no_gpu: Annotated[bool, typer.Option("--no-gpu", help="Skip the GPU tests")] = False,
    keep: Annotated[
        bool, typer.Option("--keep", help="Keep the run of the self-test with its report")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the result as a JSON object")
    ] = False,
) -> None:
    """Check which sensors work, what they cost, and whether they are correct.

    The self-test monitors work of known size: CPU time (including in a child process), memory,
    disk, network and, on an NVIDIA GPU, copies and matrix multiplications. It compares the readings
    with the work. The exit code is 1 if a sensor is wrong. A missing sensor is not an error.
    """
    from stepscope.capture.signals import intercept_signals, restore_signals

    signals = intercept_signals()
    from stepscope.doctor.run import DoctorRequest, examine

    if not as_json and sys.stderr.isatty():
        print_message(
            "checking sensors …" if quick else "testing for about 10 s, or 30 s with a GPU …"
        )
    request = DoctorRequest(out=out, runs=runs_folder(), quick=quick, gpu=not no_gpu, keep=keep)
    try:
        report = examine(request, signals)
    except KeyboardInterrupt:
        raise typer.Exit(EXIT_CODES[Outcome.INTERRUPTED]) from None
    restore_signals(signals)
    with contextlib.suppress(
        BrokenPipeError, SystemExit
    ):  # the reader has closed the pipe; rich exits then
        if as_json:
            sensors = [{**to_json(each), "core_share": each.share} for each in report.sensors]
            write_json(
                {
                    "format": 1,  # schema version
                    "ok": report.passed,  # true if all tested sensors are correct
                    "sensors": sensors,
                    "monitor_cores": report.monitor_cores,
                    "self_test": report.self_test,
                    "machine": report.machine,
                    "run": report.run,
                }
            )
        else:
            from rich.console import Console

            from stepscope.doctor.view import blocks_of
            from stepscope.report.kit.terminal import draw_blocks

            draw_blocks(Console(), blocks_of(report, str(near(report.run)) if report.run else ""))
        sys.stdout.flush()
    raise typer.Exit(0 if report.passed else 1)
