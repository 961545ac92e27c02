"""`stepscope fit MODEL|FILE:FUNC`: the largest batch that fits, and the largest that is fast."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stepscope.cli.console import EXIT_CODES, Quiet, end_on_request, say, write_json
from stepscope.cli.workload_options import Model, with_settings
from stepscope.errors import CannotTry
from stepscope.records import Outcome
from stepscope.workloads.spec import NOT_FOR_FIT

if TYPE_CHECKING:
    from stepscope.fit.answer import Fit

_memory = functools.partial(typer.Option, rich_help_panel="What it is to fit into")
_how = functools.partial(typer.Option, rich_help_panel="How it is found")


@functools.partial(with_settings, without=NOT_FOR_FIT)
def fit(
    model: Model,
    gpu_memory: Annotated[
        str | None,
        _memory(
            metavar="SIZE",
            help="What the framework may take on the GPU, say 15GiB; its context comes on top. "
            "Unsaid: what is free.",
        ),
    ] = None,
    memory: Annotated[str | None, _memory(metavar="SIZE", help="Host memory, say 8GiB.")] = None,
    headroom: Annotated[
        str,
        _memory(
            metavar="SIZE|N%", help="Leave so much of it free; a percentage is one of the limit."
        ),
    ] = "0",
    gpus: Annotated[
        str | None, _memory(metavar="LIST", help="Which GPU: the first of the list.")
    ] = None,
    cards: Annotated[
        str | None,
        _memory(
            metavar="LIST",
            help="Predict for these too: what the framework may take there, say 10GiB,23GiB. "
            "Unsaid: cards of 11, 16, 24, 40 and 80 GiB.",
        ),
    ] = None,
    method: Annotated[
        str,
        _how(
            metavar="auto|linear2019",
            help="linear2019 is the estimate from two small batches, as a baseline.",
        ),
    ] = "auto",
    prove: Annotated[
        bool,
        _how("--prove", help="Train both answers in three more fresh processes, 20 steps each."),
    ] = False,
    estimate: Annotated[
        bool, _how("--estimate", help="Predict from small batches; run nothing near the limit.")
    ] = False,
    fresh: Annotated[bool, _how("--fresh", help="Measure again, also what is known.")] = False,
    hang: Annotated[
        float, _how(metavar="S", help="End a probe of which nothing was heard for so long.")
    ] = 300.0,
    quiet: Quiet = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="End with the answer as JSON on standard output.")
    ] = False,
    **settings: Any,
) -> None:
    """Find the largest batch that trains within memory, and the largest that is still fast.

    It is tried in processes that are thrown away; without a GPU, within host memory. Exit codes: 0
    there is an answer (also that memory sets no limit), 4 no such workload or setting, or a step
    that fails for another reason than memory, 5 a limit that cannot be had, 10 not even a batch of
    1 fits the GPU, 11 nor the host, 14 there is no telling, since it leaks, 130 interrupted.
    """
    from rich.console import Console

    from stepscope.api import find_batch_size
    from stepscope.cli.progress import FitBar
    from stepscope.fit.request import FitRequest, parse_headroom
    from stepscope.report.fit.view import fit_document
    from stepscope.report.kit.terminal import draw
    from stepscope.trials.limits.spec import Limits, parse_size
    from stepscope.trials.request import workload_of

    listed_cards = [card.strip() for card in (cards or "").split(",") if card.strip()]
    if cards is not None and not listed_cards:
        raise CannotTry(f"--cards {cards} names no size", "For example: --cards 10GiB,23GiB")
    end_on_request()
    headroom_bytes, headroom_share = parse_headroom(headroom)
    request = FitRequest(
        workload_of(model, settings),
        Limits.of(memory=memory, gpu_memory=gpu_memory, gpus=gpus, stall_timeout=hang),
        headroom=headroom_bytes,
        headroom_share=headroom_share,
        cards=tuple(parse_size(card) for card in listed_cards),
        method=method,
        prove=prove,
        estimate=estimate,
        fresh=fresh,
    )
    try:
        with FitBar(model.rpartition("/")[2], quiet) as bar:
            found = find_batch_size(request, bar.tell, bar.show)
        document = fit_document(found)
        if not quiet:
            draw(Console(stderr=True), document)
        if as_json:
            write_json(document.data)
    except KeyboardInterrupt:
        say("interrupted: there is no answer, and no probe is left running")
        raise typer.Exit(EXIT_CODES[Outcome.INTERRUPTED]) from None
    raise typer.Exit(exit_code(found))


def exit_code(found: Fit) -> int:
    """That nothing fits has the code of the trial that would have shown it."""
    outcomes = {
        "fits": Outcome.OK,
        "no limit": Outcome.OK,
        "does not fit": Outcome.GPU_OOM if found.budget.device == "gpu" else Outcome.HOST_OOM,
        "cannot tell": Outcome.CRASHED,
    }
    return EXIT_CODES[outcomes[found.verdict]]
