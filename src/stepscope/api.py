"""Trials and studies for programs: `stepscope.trial("resnet18", batch_size=64, cpus=4)`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from stepscope.errors import StepscopeError
from stepscope.report.study import StudyView
from stepscope.report.studyread import read_view, view_of
from stepscope.report.trial import TrialView, trial_view
from stepscope.runs.paths import DEFAULT_FOLDER
from stepscope.studies.engine import Moment, Onlooker
from stepscope.studies.folder import DEFAULT_FOLDER as STUDIES
from stepscope.studies.result import Result
from stepscope.studies.run import run_study
from stepscope.studies.study import Study, find_folder
from stepscope.trials.limits import Limits, parse_size
from stepscope.trials.prepare import TrialPlan, check_interval
from stepscope.trials.pulse import Progress
from stepscope.trials.repeats import learn, run_repeats
from stepscope.trials.runner import Tried
from stepscope.workloads.own import find_own, is_place
from stepscope.workloads.spec import make_workload

PROFILED_STEPS = 5


def trial(
    model: str,
    *,
    cpus: float | None = None,
    memory: int | str | None = None,
    gpu_memory: int | str | None = None,
    gpus: Sequence[str] | None = None,
    timeout: float | None = None,
    hang: float = 300.0,
    repeat: int = 1,
    profile: bool = False,
    name: str | None = None,
    interval: float = 0.1,
    out: str | Path = DEFAULT_FOLDER,
    tell: Callable[[str], None] = lambda text: None,
    show: Callable[[int, Progress], None] = lambda number, progress: None,
    command: Sequence[str] = (),
    **knobs: Any,
) -> list[TrialView]:
    """Train a workload in processes of its own, within limits; one view for each repeat.

    `knobs` are those of `stepscope trial`: batch_size, workers, data, precision and so on. A trial
    that ran out of memory, or failed, is a result too: see `ending` of its view. `tell` gets what
    the user should know meanwhile, `show` which repeat it is and how far. An error in a later
    repeat has the views of those before as `views`.
    """
    if is_place(model):
        find_own(model)
    workload = make_workload(model, knobs)
    limits = Limits(
        cpus,
        None if memory is None else parse_size(memory),
        None if gpu_memory is None else parse_size(gpu_memory),
        None if gpus is None else tuple(gpus),
        timeout,
        hang,
    )
    check_interval(interval)
    facts = {"command": list(command)} if command else {}
    steps = PROFILED_STEPS if profile else 0
    plan = TrialPlan(workload, limits, Path(out), name, interval, steps, facts)
    tried: list[Tried] = []
    try:
        for each in run_repeats(plan, repeat, tell, show):
            tried.append(each)
    except StepscopeError as error:
        error.views = _views(tried)
        raise
    learn(plan, tried, tell)
    views = _views(tried)
    if any(each.asked_to_end for each in tried):
        raise TrialInterrupted(views)
    return views


def study(
    design: str | Path,
    *,
    out: str | Path = STUDIES,
    interval: float = 0.1,
    onlooker: Onlooker | None = None,
) -> StudyView:
    """Run what is missing of a study, by its design file, and return what all of it teaches.

    It goes on where it was, like `stepscope study run`; `onlooker` hears how it goes. `.analysis`
    of the view has effects, knees and fronts as records, `.contents.results` every trial.
    """
    check_interval(interval)
    planned = Study.of(design, out).to_run()
    if run_study(planned, onlooker or _Nobody(), interval).why == "interrupted":
        raise KeyboardInterrupt
    return view_of(planned)


def open_study(folder: str | Path) -> StudyView:
    """What a study tells so far, by its folder or its design file; also while it runs."""
    return read_view(find_folder(folder))


class _Nobody:
    """Looks on, and says nothing."""

    def begins(self, study: Study) -> None: ...

    def tell(self, text: str) -> None: ...

    def show(self, moment: Moment) -> None: ...

    def over(self, result: Result, moment: Moment) -> None: ...


class TrialInterrupted(KeyboardInterrupt):
    """A Ctrl-C while trials ran. They were ended and cleaned up; `views` has those there were."""

    def __init__(self, views: list[TrialView]) -> None:
        super().__init__()
        self.views = views


def _views(tried: Sequence[Tried]) -> list[TrialView]:
    return [trial_view(each.paths.folder, each.ending) for each in tried]
