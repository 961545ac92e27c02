"""`stepscope fit MODEL|FILE:FUNC`: the largest batch that fits, and the largest that is fast."""

from __future__ import annotations

import functools
import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stepscope.advice.notasked import NOT_ASKED
from stepscope.cli.knobs import with_knobs
from stepscope.cli.options import Quiet
from stepscope.cli.run import say
from stepscope.cli.trial import EXIT_CODES, end_on_request
from stepscope.errors import CannotTry
from stepscope.records import Outcome

if TYPE_CHECKING:
    from stepscope.advice.answer import Fit

_ROOM = "What it is to fit into"
_HOW = "How it is found"


@functools.partial(with_knobs, without=NOT_ASKED)
def fit(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL|FILE:FUNC",
            help="cnn, lstm, a torchvision model (resnet50, vit_b_16, r3d_18 …), or a function of "
            "yours: train.py:workload, package.module:workload.",
        ),
    ],
    gpu_memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="What the framework may take on the GPU, say 15GiB; its context comes on top. "
            "Unsaid: what is free.",
            rich_help_panel=_ROOM,
        ),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Host memory, say 8GiB.", rich_help_panel=_ROOM),
    ] = None,
    headroom: Annotated[
        str,
        typer.Option(
            metavar="SIZE|N%",
            help="Leave so much of it free; a percentage is one of the limit.",
            rich_help_panel=_ROOM,
        ),
    ] = "0",
    gpus: Annotated[
        str | None,
        typer.Option(
            metavar="LIST", help="Which GPU: the first of the list.", rich_help_panel=_ROOM
        ),
    ] = None,
    cards: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help="Predict for these too: what the framework may take there, say 10GiB,23GiB. "
            "Unsaid: cards of 11, 16, 24, 40 and 80 GiB.",
            rich_help_panel=_ROOM,
        ),
    ] = None,
    method: Annotated[
        str,
        typer.Option(
            metavar="auto|linear2019",
            help="linear2019 is the estimate from two small batches, as a baseline.",
            rich_help_panel=_HOW,
        ),
    ] = "auto",
    prove: Annotated[
        bool,
        typer.Option(
            "--prove",
            help="Train both answers in three more fresh processes, 20 steps each.",
            rich_help_panel=_HOW,
        ),
    ] = False,
    estimate: Annotated[
        bool,
        typer.Option(
            "--estimate",
            help="Predict from small batches; run nothing near the limit.",
            rich_help_panel=_HOW,
        ),
    ] = False,
    fresh: Annotated[
        bool,
        typer.Option("--fresh", help="Measure again, also what is known.", rich_help_panel=_HOW),
    ] = False,
    hang: Annotated[
        float,
        typer.Option(
            metavar="S",
            help="End a probe of which nothing was heard for so long.",
            rich_help_panel=_HOW,
        ),
    ] = 300.0,
    quiet: Quiet = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="End with the answer as JSON on standard output.")
    ] = False,
    **knobs: Any,
) -> None:
    """Find the largest batch that trains within memory, and the largest that is still fast.

    It is tried in processes that are thrown away; without a GPU, within host memory. Exit codes: 0
    there is an answer (also that memory sets no limit), 4 no such workload or knob, or a step that
    fails for another reason than memory, 5 a limit that cannot be had, 10 not even a batch of 1
    fits the GPU, 11 nor the host, 14 there is no telling, since it leaks, 130 interrupted.
    """
    from stepscope import api
    from stepscope.cli.fitbar import FitBar

    end_on_request()
    try:
        with FitBar(model.rpartition("/")[2], quiet) as bar:
            found = api.fit(
                model,
                gpu_memory=gpu_memory,
                memory=memory,
                headroom=headroom,
                gpus=_listed(gpus),
                cards=_cards(cards),
                method=method,
                prove=prove,
                estimate=estimate,
                fresh=fresh,
                hang=hang,
                tell=bar.tell,
                show=bar.show,
                **knobs,
            )
        _show(found, quiet, as_json)
    except KeyboardInterrupt:
        say("interrupted: there is no answer, and no probe is left running")
        raise typer.Exit(EXIT_CODES[Outcome.INTERRUPTED]) from None
    raise typer.Exit(exit_code(found))


def exit_code(found: Fit) -> int:
    """That nothing fits has the code of the trial that would have shown it."""
    if found.verdict == "does not fit":
        outcome = Outcome.GPU_OOM if found.room.device == "gpu" else Outcome.HOST_OOM
        return EXIT_CODES[outcome]
    return EXIT_CODES[Outcome.CRASHED if found.verdict == "cannot tell" else Outcome.OK]


def _listed(text: str | None) -> list[str] | None:
    return None if text is None else [word.strip() for word in text.split(",") if word.strip()]


def _cards(text: str | None) -> list[str]:
    """An empty list would be taken for none that was given."""
    listed = _listed(text) or []
    if text is not None and not listed:
        raise CannotTry(f"--cards {text} names no size", "For example: --cards 10GiB,23GiB")
    return listed


def _show(found: Fit, quiet: bool, as_json: bool) -> None:
    """The answer for people on standard error, the JSON for programs."""
    if not quiet:
        from rich.console import Console

        from stepscope.report.fit import fit_view
        from stepscope.report.fittext import print_fit

        print_fit(Console(stderr=True), fit_view(found))
    if as_json:
        from stepscope.report.fitjson import fit_dict

        sys.stdout.write(json.dumps(fit_dict(found)) + "\n")
        sys.stdout.flush()
