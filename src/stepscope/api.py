"""Trials, studies and fits for programs: `stepscope.trial("resnet18", batch_size=64, cpus=4)`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from stepscope.capture.request import check_interval
from stepscope.errors import BadWorkload, CannotTry, StepscopeError
from stepscope.fit.answer import Fit
from stepscope.fit.request import FitListener, FitRequest, parse_headroom
from stepscope.fit.run import run_fit
from stepscope.report.fit.sentences import summary, tried_text
from stepscope.report.study.read import read_view, view_of
from stepscope.report.study.view import StudyView
from stepscope.report.trial.view import TrialView, trial_view
from stepscope.runs.paths import DEFAULT_FOLDER
from stepscope.studies.engine import ProgressListener, SilentListener
from stepscope.studies.folder import DEFAULT_FOLDER as STUDIES
from stepscope.studies.launchers.local import LocalLauncher
from stepscope.studies.run import run_study
from stepscope.studies.study import Study, find_folder
from stepscope.trials.heartbeat import Progress
from stepscope.trials.limits.spec import Limits, parse_size
from stepscope.trials.noise import MachineKind, NoiseStore, device_kind
from stepscope.trials.request import TrialRequest, workload_of
from stepscope.trials.runner import CompletedTrial, run_repeats
from stepscope.workloads.spec import NOT_FOR_FIT, option_name


def trial(
    model: str,
    *,
    cpus: float | None = None,
    memory: int | str | None = None,
    gpu_memory: int | str | None = None,
    gpus: str | Sequence[str] | None = None,
    timeout: float | None = None,
    hang: float = 300.0,
    repeat: int = 1,
    profile: bool = False,
    name: str | None = None,
    interval: float = 0.1,
    out: str | Path = DEFAULT_FOLDER,
    tell: Callable[[str], None] = lambda text: None,
    show: Callable[[int, Progress], None] = lambda number, progress: None,
    **settings: Any,
) -> list[TrialView]:
    """Train a workload in processes of its own, within limits; one view for each repeat.

    `settings` are those of `stepscope trial`: batch_size, workers, data, precision and so on. A
    trial that ran out of memory, or failed, is a result too: see `ending` of its view. `tell` gets
    what the user should know meanwhile, `show` which repeat it is and how far. An error in a later
    repeat raises TrialsFailed, which has the views of those before.
    """
    request = TrialRequest(
        workload_of(model, settings),
        Limits.of(cpus, memory, gpu_memory, gpus, timeout, hang),
        repeats=repeat,
        profile=profile,
        name=name,
        interval=interval,
        out=Path(out),
    )
    results = run_trials(request, tell, show)
    if results.error and results.views:
        raise TrialsFailed(results.error, results.views) from results.error
    if results.error:
        raise results.error
    if results.interrupted:
        raise TrialInterrupted(results.views)
    return results.views


@dataclass(frozen=True)
class TrialResults:
    """The trials there were, and what kept further repeats from running."""

    views: list[TrialView]
    error: StepscopeError | None = None
    interrupted: bool = False


def run_trials(
    request: TrialRequest,
    tell: Callable[[str], None] = lambda text: None,
    show: Callable[[int, Progress], None] = lambda number, progress: None,
) -> TrialResults:
    """Run a trial with all its repeats, and keep what they teach about noise."""
    trials: list[CompletedTrial] = []
    error = None
    try:
        for trial in run_repeats(request, tell, show):
            trials.append(trial)
    except StepscopeError as stopped_by:
        error = stopped_by
    views = [trial_view(trial.paths.folder, trial.ending) for trial in trials]
    usable = [view for view in views if view.is_ok and not view.measured.is_disturbed]
    rates = [view.samples_per_second for view in usable if view.samples_per_second]
    if len(rates) > 1 and error is None:
        last = usable[-1]
        machine = MachineKind.of(
            last.data.facts.environment, device_kind(last.record.first), request.noise_key
        )
        NoiseStore(tell=tell).learn(machine, rates)
    return TrialResults(views, error, any(trial.asked_to_end for trial in trials))


def fit(
    model: str | Callable[..., Any],
    *,
    gpu_memory: int | str | None = None,
    memory: int | str | None = None,
    headroom: int | str = 0,
    gpus: str | Sequence[str] | None = None,
    cards: Sequence[int | str] = (),
    method: str = "auto",
    prove: bool = False,
    estimate: bool = False,
    fresh: bool = False,
    hang: float = 300.0,
    tell: Callable[[str], None] = lambda text: None,
    show: Callable[[str], None] = lambda text: None,
    **settings: Any,
) -> Fit:
    """The max batch size, and the recommended one: `.batch_size` to use.

    `model` is a name or `FILE.py:FUNCTION`, as everywhere, or the function itself: its file is
    imported by the probes, which are processes of their own. `gpu_memory` is what the framework
    may take there; without a GPU the batch is fitted into host memory, of which `memory` is the
    limit. `headroom` is a size, or a percentage of the one that is fitted into. Whatever is found
    is a result: see `.verdict` and `.summary`.
    """
    for name in NOT_FOR_FIT:
        if name in settings:
            raise BadWorkload(f"{option_name(name)} is not for a fit to be told", "Leave it out")
    free, share = parse_headroom(headroom)
    request = FitRequest(
        workload_of(model if isinstance(model, str) else _place_of(model), settings),
        Limits.of(memory=memory, gpu_memory=gpu_memory, gpus=gpus, stall_timeout=hang),
        headroom=free,
        headroom_share=share,
        cards=tuple(parse_size(card) for card in cards),
        method=method,
        prove=prove,
        estimate=estimate,
        fresh=fresh,
    )
    return find_batch_size(request, tell, show)


def find_batch_size(
    request: FitRequest,
    tell: Callable[[str], None] = lambda text: None,
    show: Callable[[str], None] = lambda text: None,
) -> Fit:
    """Run a fit, and put what it found in words."""
    found = run_fit(request, FitListener(tell, show, lambda result: tell(tried_text(result))))
    return replace(found, summary=summary(found))


def _place_of(function: Callable[..., Any]) -> str:
    """`FILE.py:FUNCTION` of a function, such as other processes can find."""
    function = inspect.unwrap(function)
    name = getattr(function, "__qualname__", "")
    if not inspect.isfunction(function) or not name.isidentifier():
        raise BadWorkload(
            f"{name or type(function).__name__} cannot be found by another process",
            "Give a function that stands at the top of a file, neither a lambda nor within "
            'another one; or its place: "train.py:workload"',
        )
    file = Path(inspect.getsourcefile(function) or "")
    if not file.is_file():
        raise BadWorkload(
            f"{name} was typed in, and is in no file",
            "The probes are processes of their own, which import it: put it into a .py file",
        )
    return f"{file}:{name}"


def study(
    design: str | Path,
    *,
    out: str | Path = STUDIES,
    interval: float = 0.1,
    listener: ProgressListener | None = None,
) -> StudyView:
    """Run what is missing of a study, by its design file, and return what all of it teaches.

    It goes on where it was, like `stepscope study run`; `listener` hears how it goes. `.analysis`
    of the view has effects, knees and fronts as records, `.results` every trial.
    """
    check_interval(interval, CannotTry)
    planned = Study.of(design, out).to_run()
    listener = listener or SilentListener()
    launcher = LocalLauncher(listener.tell, interval, planned.machine)
    ran = run_study(planned, planned.grid_to_run(), launcher, listener)
    if ran.stop_reason == "interrupted":
        raise KeyboardInterrupt
    return view_of(ran.scanned)


def open_study(folder: str | Path) -> StudyView:
    """What a study tells so far, by its folder or its design file; also while it runs."""
    return read_view(find_folder(folder))


class TrialsFailed(StepscopeError):
    """A repeat could not be run: `views` has the trials before it, the cause is the error."""

    def __init__(self, error: StepscopeError, views: list[TrialView]) -> None:
        super().__init__(error.message, error.hint)
        self.exit_code = error.exit_code
        self.views = views


class TrialInterrupted(KeyboardInterrupt):
    """A Ctrl-C while trials ran. They were ended and cleaned up; `views` has those there were."""

    def __init__(self, views: list[TrialView]) -> None:
        super().__init__()
        self.views = views
