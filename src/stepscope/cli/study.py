"""`stepscope study`: many trials of one design, each once, and what they teach."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stepscope.cli.console import Interval, Quiet, end_on_request, near, say, write_json
from stepscope.errors import CannotTry, StepscopeError

if TYPE_CHECKING:
    from rich.console import Console

    from stepscope.report.study.view import StudyView

STUDIES_VARIABLE = "STEPSCOPE_STUDIES"

app = typer.Typer(no_args_is_help=True, help="Many trials of one design, and what they teach.")

DesignFile = Annotated[Path, typer.Argument(metavar="FILE", help="The design, a YAML file.")]
Target = Annotated[
    Path, typer.Argument(metavar="STUDY", help="The folder of a study, or its design file.")
]
StudiesOut = Annotated[
    Path, typer.Option("--out", help="Where studies go.", metavar="DIR", envvar=STUDIES_VARIABLE)
]
AsJson = Annotated[bool, typer.Option("--json", help="As JSON on standard output.")]
_USUAL = Path("studies")
_THREADS = "OPENBLAS_NUM_THREADS"
_ENDED = {
    "interrupted": "interrupted: the same command goes on from here",
    "budget": "the budget is used up, or too little is left for another trial: raise it in the "
    "design to go on from here",
}


@app.command()
def plan(file: DesignFile, out: StudiesOut = _USUAL, as_json: AsJson = False) -> None:
    """Say what a design comes to: how many trials, how long, what is skipped and why.

    Nothing is started. Once trials have finished, the time is by what they took.
    """
    with _quick_reading():
        from stepscope.report.study.plan import plan_dict, plan_document, plan_view
        from stepscope.studies.study import Study

        view = plan_view(Study.of(file, out).scan())
    if as_json:
        write_json(plan_dict(view))
        return
    from rich.console import Console

    from stepscope.report.kit.terminal import draw

    draw(Console(), plan_document(view))


@app.command()
def run(
    file: DesignFile,
    out: StudiesOut = _USUAL,
    interval: Interval = 0.1,
    again: Annotated[
        bool, typer.Option("--again", help="Try again what crashed or took too long before.")
    ] = False,
    quiet: Quiet = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="End with what the study teaches as JSON.")
    ] = False,
) -> None:
    """Run all trials of a design, each once; go on where it was interrupted or killed.

    Trials run one after the other, in random blocks that begin with the sentinel configuration.
    Exit codes: 0 all was run, or the budget is used up; 4 to 6 it could not be run; 7 somebody else
    runs it; 130 interrupted: run the same command to go on.
    """
    with _quick_reading():
        from stepscope.capture.request import check_interval
        from stepscope.cli.progress import StudyBar
        from stepscope.report.study.export import study_dict
        from stepscope.report.study.read import view_of
        from stepscope.studies.launchers.local import LocalLauncher
        from stepscope.studies.run import run_study
        from stepscope.studies.study import Study

        check_interval(interval, CannotTry)
        study = Study.of(file, out).to_run()
    end_on_request()
    with StudyBar(study.design, quiet) as bar:
        try:
            launcher = LocalLauncher(bar.tell, interval, study.machine)
            ran = run_study(study, study.grid_to_run(), launcher, bar, again)
        except StepscopeError:
            with contextlib.suppress(StepscopeError):  # a full disk: the first error says more
                if bar.begun and bar.begun.results.results:
                    _derive(view_of(bar.begun))
            raise
    if ran.trials or not quiet or as_json:
        with _quick_reading():
            view = view_of(ran.scanned)
        if ran.trials or not study.paths.report.exists():
            _derive(view)
        if as_json:
            write_json(study_dict(view))
        if not quiet:
            _draw(view, full=False, stderr=True)
            if ran.stop_reason in _ENDED:
                say(_ENDED[ran.stop_reason])
            say(f"report: {near(study.paths.report)}")
    os._exit(130 if ran.stop_reason == "interrupted" else 0)  # at once: all is on disk


@app.command()
def show(target: Target, out: StudiesOut = _USUAL, as_json: AsJson = False) -> None:
    """Show how far a study is and what it tells so far, also while it runs."""
    show_study(target, out, as_json, full=False)


@app.command()
def report(target: Target, out: StudiesOut = _USUAL, as_json: AsJson = False) -> None:
    """Write the report of a study with its tables and plots, and show them.

    It makes derived/report.html in the study's folder, and the tables beside it as CSV.
    """
    show_study(target, out, as_json, full=True)


@app.command()
def merge(
    folders: Annotated[
        list[Path], typer.Argument(metavar="STUDY...", help="The folders of two or more studies.")
    ],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="The folder to make.")],
) -> None:
    """Join the studies of several machines into one, in which the machine is a factor."""
    from stepscope.studies.merge import merge_studies

    machines = merge_studies(folders, out)
    say(f"{near(out)} has {len(folders)} studies of {len(machines)} machines:")
    for machine, trials in machines.items():
        say(f"  {machine}: {trials} trials")
    say(f"next: stepscope study report {near(out)}")


@contextlib.contextmanager
def _quick_reading() -> Iterator[None]:
    """Read thousands of trials without a pause to look for garbage.

    NumPy gets one thread for our few sums: a study may be using all CPUs now, and threads that wait
    for each other would take seconds. Trials do not inherit it.
    """
    gc.disable()
    try:
        if "numpy" not in sys.modules and _THREADS not in os.environ:
            os.environ[_THREADS] = "1"
            importlib.import_module("numpy")
            del os.environ[_THREADS]
        yield
    finally:
        gc.enable()


@_quick_reading()
def show_study(target: Path, out: Path = _USUAL, as_json: bool = False, full: bool = True) -> None:
    """What a study tells; `full` also writes its page and its tables."""
    from stepscope.report.study.read import read_view
    from stepscope.studies.design.file import read_design, trials_text
    from stepscope.studies.folder import StudyPaths
    from stepscope.studies.study import find_folder

    folder = find_folder(target, out)
    view = read_view(folder)
    kept = StudyPaths(folder).design
    if target.is_file() and kept.is_file():
        now, then = read_design(target), read_design(kept, is_kept=True)
        if (trials_text(now), now.repeats) != (trials_text(then), then.repeats):
            as_then = "this is by the design as it was then"
            say(f"{target} was changed since the study was run: {as_then}")
    page = _derive(view) if full else None
    if as_json:
        from stepscope.report.study.export import study_dict

        write_json(study_dict(view))
        return
    console = _draw(view, full)
    if page:
        console.print(f"\nReport: {near(page)}", markup=False, highlight=False)
        console.print(f"Tables: {near(page.parent)}/*.csv", markup=False, highlight=False)


def _draw(view: StudyView, full: bool, stderr: bool = False) -> Console:
    from rich.console import Console

    from stepscope.report.kit.terminal import draw
    from stepscope.report.study.document import screen_of

    console = Console(stderr=stderr)
    draw(console, screen_of(view, console.width, full))
    return console


def _derive(view: StudyView) -> Path:
    from stepscope.report.study.document import write_report
    from stepscope.report.study.export import write_tables
    from stepscope.studies.folder import StudyPaths

    folder = StudyPaths(view.folder).report.parent
    try:
        folder.mkdir(exist_ok=True)
        write_tables(view, folder)
        return write_report(view, folder)
    except OSError as error:
        raise StepscopeError(
            f"The report cannot be written in {folder}: {error.strerror}",
            "Copy the study to a place you can write",
        ) from None
