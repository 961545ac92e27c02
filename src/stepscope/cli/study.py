"""`stepscope study`: plan, run and report the trials of a design."""

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

from stepscope.cli.console import (
    CommandGroup,
    Interval,
    OpenReport,
    Quiet,
    near,
    open_page,
    prepare_for_trials,
    print_message,
    write_json,
)
from stepscope.errors import StepscopeError, TrialError

if TYPE_CHECKING:
    from rich.console import Console

    from stepscope.report.study.view import StudyView

STUDIES_VARIABLE = "STEPSCOPE_STUDIES"

app = typer.Typer(
    cls=CommandGroup,
    no_args_is_help=True,
    help="Run many trials from one design and report which settings matter.",
)

DesignFile = Annotated[Path, typer.Argument(metavar="FILE", help="Design of the study (YAML)")]
Target = Annotated[
    Path, typer.Argument(metavar="STUDY", help="Folder, name or design file of a study")
]
StudiesOut = Annotated[
    Path, typer.Option("--out", help="Folder for studies", metavar="DIR", envvar=STUDIES_VARIABLE)
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON to standard output")]
_DEFAULT_OUT = Path("studies")
_NUMPY_THREADS = "OPENBLAS_NUM_THREADS"
_STOPPED = {
    "interrupted": "interrupted; run the same command to resume",
    "budget": "the budget is used up, or too little is left for another trial; raise it in the "
    "design to resume",
}


@app.command()
def plan(file: DesignFile, out: StudiesOut = _DEFAULT_OUT, as_json: AsJson = False) -> None:
    """Show the trials of a design, their estimated time, and which combinations are skipped.

    No trial is started. After the first trials, the estimate uses their
    durations.
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
    out: StudiesOut = _DEFAULT_OUT,
    interval: Interval = 0.1,
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Retry trials that crashed or timed out")
    ] = False,
    quiet: Quiet = False,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print the results as JSON to standard output at the end"),
    ] = False,
) -> None:
    """Run each trial of a design once; resume after an interruption.

    Trials run one at a time, in random order, in blocks that each start with
    the reference trial. Exit codes: 0 all trials were run or the budget is
    used up; 4 invalid workload; 5 a trial cannot be started; 6 invalid design; 7
    another process is running the study; 130 interrupted (run the same command to
    resume).
    """
    from stepscope.capture.startup import loading

    with loading(TrialError):
        from stepscope.capture.request import check_interval
        from stepscope.cli.progress import StudyBar
        from stepscope.report.study.export import study_dict
        from stepscope.report.study.read import view_of
        from stepscope.studies.launchers.local import LocalLauncher
        from stepscope.studies.run import run_study
        from stepscope.studies.study import Study

    with _quick_reading():
        check_interval(interval, TrialError)
        study = Study.of(file, out).to_run()
    prepare_for_trials()
    with StudyBar(study.design, quiet) as bar:
        try:
            launcher = LocalLauncher(bar.notify, interval, study.machine)
            ran = run_study(study, study.grid_to_run(), launcher, bar, retry_failed)
        except StepscopeError:
            with contextlib.suppress(StepscopeError):  # a full disk: the first error is more useful
                if bar.study and bar.study.results.results:
                    _write_report(view_of(bar.study))
            raise
    if ran.trials or not quiet or as_json:
        with _quick_reading():
            view = view_of(ran.scanned)
        if ran.trials or not study.paths.report.exists():
            _write_report(view)
        if as_json:
            write_json(study_dict(view))
        if not quiet:
            _draw(view, full=False, stderr=True)
            if ran.stop_reason in _STOPPED:
                print_message(_STOPPED[ran.stop_reason])
            print_message(f"Report: {study.paths.report.absolute().as_uri()}")
    # Exit without the interpreter's teardown, which takes time: everything is on disk.
    os._exit(130 if ran.stop_reason == "interrupted" else 0)


@app.command()
def show(target: Target, out: StudiesOut = _DEFAULT_OUT, as_json: AsJson = False) -> None:
    """Show the progress and the results of a study, even while it is running."""
    show_study(target, out, as_json, full=False)


@app.command()
def report(
    target: Target,
    out: StudiesOut = _DEFAULT_OUT,
    as_json: AsJson = False,
    open_report: OpenReport = False,
) -> None:
    """Write the report of a study and show its tables.

    The report is derived/report.html in the folder of the study. The tables
    are next to it as CSV.
    """
    show_study(target, out, as_json, open_report=open_report)


@app.command()
def merge(
    folders: Annotated[
        list[Path], typer.Argument(metavar="STUDY...", help="Folders of two or more studies")
    ],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder of the merged study")],
) -> None:
    """Merge studies from several machines into one, with the machine as a factor."""
    from stepscope.studies.merge import merge_studies

    machines = merge_studies(folders, out)
    several = f"{len(machines)} machine{'' if len(machines) == 1 else 's'}"
    print_message(f"merged {len(folders)} studies from {several} into {near(out)}:")
    for machine, trials in machines.items():
        print_message(f"  {machine}: {trials} trials")
    print_message(f"next: stepscope study report {near(out)}")


@contextlib.contextmanager
def _quick_reading() -> Iterator[None]:
    """Read thousands of trials quickly: without garbage collection, and with one NumPy thread.

    A running study may use all CPUs; several NumPy threads would wait seconds for each other.
    Trials do not inherit the setting.
    """
    gc.disable()
    try:
        if "numpy" not in sys.modules and _NUMPY_THREADS not in os.environ:
            os.environ[_NUMPY_THREADS] = "1"
            importlib.import_module("numpy")
            del os.environ[_NUMPY_THREADS]
        yield
    finally:
        gc.enable()


@_quick_reading()
def show_study(
    target: Path,
    out: Path = _DEFAULT_OUT,
    as_json: bool = False,
    full: bool = True,
    open_report: bool = False,
) -> None:
    """Show a study; with `full`, also write its report and its tables."""
    from stepscope.report.kit.format import printable_lines
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
            print_message(
                f"{target} has changed since the study ran; these results use the design from "
                "that time"
            )
    page = _write_report(view) if full else None
    if as_json:
        from stepscope.report.study.export import study_dict

        write_json(study_dict(view))
        return
    console = _draw(view, full)
    if page:
        lines = f"\nReport: {page.absolute().as_uri()}\nTables: {near(page.parent)}/*.csv"
        console.print(printable_lines(lines), markup=False, highlight=False, soft_wrap=True)
        if open_report:
            open_page(page)


def _draw(view: StudyView, full: bool, stderr: bool = False) -> Console:
    from rich.console import Console

    from stepscope.report.kit.terminal import draw
    from stepscope.report.study.document import screen_of

    console = Console(stderr=stderr)
    draw(console, screen_of(view, console.width, full))
    return console


def _write_report(view: StudyView) -> Path:
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
            f"Cannot write the report to {folder}: {error.strerror}",
            "Copy the study to a writable folder",
        ) from None
