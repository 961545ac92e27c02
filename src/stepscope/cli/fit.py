"""`stepscope fit MODEL|FILE:FUNC`: find the max and the recommended batch size."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stepscope.cli.console import EXIT_CODES, Quiet, prepare_for_trials, print_message, write_json
from stepscope.cli.workload_options import Model, with_settings
from stepscope.errors import TrialError
from stepscope.records import Outcome
from stepscope.workloads.spec import NOT_FOR_FIT

if TYPE_CHECKING:
    from stepscope.fit.result import FitResult

_memory = functools.partial(typer.Option, rich_help_panel="Memory budget")
_search = functools.partial(typer.Option, rich_help_panel="Search")


@functools.partial(with_settings, rejected=NOT_FOR_FIT)
def fit(
    model: Model,
    gpu_memory: Annotated[
        str | None,
        _memory(
            metavar="SIZE",
            help="GPU memory that the framework may use, for example 15GiB; the CUDA context is "
            "not included (default: all free memory)",
        ),
    ] = None,
    memory: Annotated[
        str | None,
        _memory(
            metavar="SIZE",
            help="Host memory, for example 8GiB (default: 95% of the free memory)",
        ),
    ] = None,
    headroom: Annotated[
        str,
        _memory(
            metavar="SIZE|N%", help=("Memory to keep free: a size, or a percentage of the budget")
        ),
    ] = "0",
    gpus: Annotated[
        str | None,
        _memory(
            metavar="LIST", help="GPUs, one of which is probed (default: the first visible GPU)"
        ),
    ] = None,
    predict_for: Annotated[
        str | None,
        _memory(
            metavar="LIST",
            help="Other GPU memory sizes to predict for, without the CUDA context, for example "
            "10GiB,23GiB (default: GPUs with 11, 16, 24, 40 and 80 GiB)",
        ),
    ] = None,
    method: Annotated[
        str,
        _search(
            metavar="auto|linear2019",
            help="Search method; linear2019 is an estimate from two small batches, as a baseline",
        ),
    ] = "auto",
    verify: Annotated[
        bool,
        _search(
            "--verify",
            help="Verify the max and the recommended batch size in three more processes, 20 steps "
            "each",
        ),
    ] = False,
    estimate: Annotated[
        bool, _search("--estimate", help="Predict from small batches; run nothing near the limit")
    ] = False,
    no_cache: Annotated[bool, _search("--no-cache", help="Ignore cached results")] = False,
    stall_timeout: Annotated[
        float, _search(metavar="S", help="Seconds without progress before a probe is stopped")
    ] = 300.0,
    quiet: Quiet = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the result as JSON to standard output")
    ] = False,
    **settings: Any,
) -> None:
    """Find the max batch size and the recommended batch size.

    The max batch size is the largest that trains within the memory budget; the recommended one is
    the largest without allocator retries and at full speed. Without a GPU, the budget is host
    memory. Probes run in disposable processes. Exit codes: 0 found, or memory sets no limit; 4
    unknown workload or setting, or a step fails for a reason other than memory; 5 limit or GPU not
    available; 10 not even a batch of 1 fits in GPU memory; 11 not even a batch of 1 fits in host
    memory; 14 no result because of a memory leak; 130 interrupted.
    """
    from stepscope.capture.startup import loading

    with loading(TrialError):
        from rich.console import Console

        from stepscope.api import find_batch_size
        from stepscope.cli.progress import FitBar
        from stepscope.fit.request import FitRequest, fit_workload, parse_headroom
        from stepscope.report.fit.view import fit_document
        from stepscope.report.kit.terminal import draw
        from stepscope.trials.limits.spec import Limits, parse_size

    sizes = [size.strip() for size in (predict_for or "").split(",") if size.strip()]
    if predict_for is not None and not sizes:
        raise TrialError(
            f"`--predict-for {predict_for}` contains no size",
            "Pass sizes such as --predict-for 10GiB,23GiB",
        )
    prepare_for_trials()
    headroom_bytes, headroom_share = parse_headroom(headroom)
    request = FitRequest(
        fit_workload(model, settings),
        Limits.of(memory=memory, gpu_memory=gpu_memory, gpus=gpus, stall_timeout=stall_timeout),
        headroom=headroom_bytes,
        headroom_share=headroom_share,
        predict_for=tuple(map(parse_size, sizes)),
        method=method,
        verify=verify,
        estimate=estimate,
        no_cache=no_cache,
    )
    try:
        with FitBar(model.rpartition("/")[2], quiet) as bar:
            result = find_batch_size(request, bar.notify, bar.show)
        document = fit_document(result)
        if not quiet:
            draw(Console(stderr=True), document)
        if as_json:
            write_json(document.data)
    except KeyboardInterrupt:
        print_message("interrupted: there is no result, and no probe is left running")
        raise typer.Exit(EXIT_CODES[Outcome.INTERRUPTED]) from None
    raise typer.Exit(exit_code(result))


def exit_code(result: FitResult) -> int:
    """Return the exit code; if nothing fits, that of a trial that runs out of the same memory."""
    on_gpu = result.budget.device == "gpu"
    outcomes = {
        "fits": Outcome.OK,
        "no_limit": Outcome.OK,
        "does_not_fit": Outcome.GPU_OOM if on_gpu else Outcome.HOST_OOM,
        "unknown": Outcome.CRASHED,
    }
    return EXIT_CODES[outcomes[result.verdict]]
