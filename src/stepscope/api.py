"""Python functions for trials, fits and studies: `stepscope.trial("resnet18", batch_size=64)`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from stepscope.capture.request import check_interval
from stepscope.errors import StepscopeError, TrialError, WorkloadError
from stepscope.fit.request import FitListener, FitRequest, fit_workload, parse_headroom
from stepscope.fit.result import FitResult
from stepscope.fit.run import run_fit
from stepscope.report.fit.messages import summary, tried_text
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
from stepscope.workloads.spec import SETTINGS, nearest


def trial(
    model: str | Callable[..., Any],
    *,
    cpus: float | None = None,
    memory: int | str | None = None,
    gpu_memory: int | str | None = None,
    gpus: int | str | Sequence[int | str] | None = None,
    timeout: float | None = None,
    stall_timeout: float = 300.0,
    repeat: int = 1,
    profile: bool = False,
    name: str | None = None,
    interval: float = 0.1,
    out: str | Path = DEFAULT_FOLDER,
    notify: Callable[[str], None] = lambda text: None,
    show: Callable[[int, Progress], None] = lambda number, progress: None,
    **settings: Any,
) -> list[TrialView]:
    """Train a workload in isolated, monitored processes and measure it.

    Args:
        model: A model name, `FILE.py:FUNCTION` for a custom workload, or that function itself.
        cpus: Number of CPUs; fractions such as 1.5 are possible.
        memory: Host memory limit, in bytes or as text such as "8GiB".
        gpu_memory: GPU memory limit, in bytes or as text such as "16GiB".
        gpus: GPUs to use, for example "0,1" or [0, 1].
        timeout: Maximum duration in seconds.
        stall_timeout: Seconds without progress after which the trial is stopped.
        repeat: Number of trials, each in fresh processes.
        profile: Whether to run additional steps under the PyTorch profiler.
        name: Name of the run (default: the model).
        interval: Seconds between samples, from 0.02 to 60.
        out: Parent folder of the run folders.
        notify: Called with each message for the user.
        show: Called with the number of the current repeat and its progress.
        settings: Settings of the workload, such as `batch_size`, `workers`, `data` and `precision`.

    Returns:
        One view per repeat. A trial that runs out of memory or crashes is also a result: see
        `.exit_status` of its view.

    Raises:
        WorkloadError: The workload cannot be used.
        TrialError: The trial was not started.
        TrialsFailed: A later repeat was not started; `.views` has the repeats before it.
        TrialInterrupted: Ctrl-C; `.views` has the finished repeats.
    """
    _check_names(trial, settings)
    request = TrialRequest(
        workload_of(_model_name(model), settings),
        Limits.of(cpus, memory, gpu_memory, gpus, timeout, stall_timeout),
        repeats=repeat,
        profile=profile,
        name=name,
        interval=interval,
        out=Path(out),
    )
    results = run_trials(request, notify, show)
    if results.error and results.views:
        raise TrialsFailed(results.error, results.views) from results.error
    if results.error:
        raise results.error
    if results.interrupted:
        raise TrialInterrupted(results.views)
    return results.views


@dataclass(frozen=True)
class TrialResults:
    """The finished repeats of a trial."""

    views: list[TrialView]
    error: StepscopeError | None = None
    """Why the next repeat was not started."""
    interrupted: bool = False


def run_trials(
    request: TrialRequest,
    notify: Callable[[str], None] = lambda text: None,
    show: Callable[[int, Progress], None] = lambda number, progress: None,
) -> TrialResults:
    """Run all repeats of a trial, and add their variation to the noise store."""
    trials: list[CompletedTrial] = []
    error = None
    try:
        for trial in run_repeats(request, notify, show):
            trials.append(trial)
    except StepscopeError as start_error:
        error = start_error
    views = [trial_view(trial.paths.folder, trial.exit_status) for trial in trials]
    usable = [view for view in views if view.is_ok and not view.measured.has_interference]
    rates = [view.samples_per_second for view in usable if view.samples_per_second]
    if len(rates) > 1 and error is None:
        last = usable[-1]
        machine = MachineKind.of(
            last.data.facts.environment, device_kind(last.record.first), request.noise_key
        )
        NoiseStore(notify=notify).learn(machine, rates)
    return TrialResults(views, error, any(trial.termination_requested for trial in trials))


def fit(
    model: str | Callable[..., Any],
    *,
    gpu_memory: int | str | None = None,
    memory: int | str | None = None,
    headroom: int | str = 0,
    gpus: int | str | Sequence[int | str] | None = None,
    predict_for: Sequence[int | str] = (),
    method: str = "auto",
    verify: bool = False,
    estimate: bool = False,
    no_cache: bool = False,
    stall_timeout: float = 300.0,
    notify: Callable[[str], None] = lambda text: None,
    show: Callable[[str], None] = lambda text: None,
    **settings: Any,
) -> FitResult:
    """Find the max batch size and the recommended batch size of a workload.

    Every batch size is probed in a disposable process. Without a GPU the search is limited by host
    memory.

    Args:
        model: A model name, `FILE.py:FUNCTION` for a custom workload, or that function itself.
            The probes import the file that defines it.
        gpu_memory: GPU memory that the framework may use, in bytes or as text such as "15GiB"
            (default: the free memory). The CUDA context is not included.
        memory: Host memory limit, in bytes or as text such as "8GiB".
        headroom: Memory that remains free, as a size or as a percentage of the limit ("5%").
        gpus: GPU to use: the first of the list.
        predict_for: GPU memory sizes to predict the batch size for.
        method: "auto", or "linear2019" for the estimate from two small batches (a baseline).
        verify: Whether to train both batch sizes in three more fresh processes.
        estimate: Whether to predict from small batches only and probe nothing near the limit.
        no_cache: Whether to ignore cached results.
        stall_timeout: Seconds without progress after which a probe is stopped.
        notify: Called with each message for the user.
        show: Called with the current progress as text.
        settings: Settings of the workload, such as `workers`, `data` and `precision`.

    Returns:
        The result. `.batch_size` is the batch size to use (None if there is none); `.verdict` and
        `.summary` say what was found, also if no batch size fits.

    Raises:
        WorkloadError: The workload cannot be used.
        TrialError: A limit is not available.
    """
    _check_names(fit, settings)
    free, share = parse_headroom(headroom)
    request = FitRequest(
        fit_workload(_model_name(model), settings),
        Limits.of(memory=memory, gpu_memory=gpu_memory, gpus=gpus, stall_timeout=stall_timeout),
        headroom=free,
        headroom_share=share,
        predict_for=tuple(parse_size(size) for size in predict_for),
        method=method,
        verify=verify,
        estimate=estimate,
        no_cache=no_cache,
    )
    return find_batch_size(request, notify, show)


def find_batch_size(
    request: FitRequest,
    notify: Callable[[str], None] = lambda text: None,
    show: Callable[[str], None] = lambda text: None,
) -> FitResult:
    """Run a fit and add its summary text."""
    result = run_fit(request, FitListener(notify, show, lambda probe: notify(tried_text(probe))))
    return replace(result, summary=summary(result))


def _check_names(function: Callable[..., Any], settings: Mapping[str, Any]) -> None:
    """Raise WorkloadError for a keyword that is not a setting, nor a parameter of the function."""
    for name in settings:
        if name not in SETTINGS:
            keywords = [p.name for p in inspect.signature(function).parameters.values()]
            raise WorkloadError(f"Unknown setting {name!r}", nearest(name, [*SETTINGS, *keywords]))


def _model_name(model: str | Callable[..., Any]) -> str:
    """Return the name, or `FILE.py:FUNCTION` of a function that another process can import."""
    if isinstance(model, str):
        return model
    function = inspect.unwrap(model)
    name = getattr(function, "__qualname__", "")
    if not inspect.isfunction(function) or not name.isidentifier():
        raise WorkloadError(
            f"{name or type(function).__name__} cannot be imported by another process",
            "Pass a function that is defined at the top level of a file, not a lambda or a nested "
            'function, or pass its location, such as "train.py:workload"',
        )
    file = Path(inspect.getsourcefile(function) or "")
    if not file.is_file():
        raise WorkloadError(
            f"{name} is not defined in a file",
            "The probes import it in separate processes: define it in a .py file",
        )
    return f"{file}:{name}"


def study(
    design: str | Path,
    *,
    out: str | Path = STUDIES,
    interval: float = 0.1,
    listener: ProgressListener | None = None,
) -> StudyView:
    """Run the missing trials of a study and return its results.

    A study that was interrupted continues where it stopped, as with `stepscope study run`.

    Args:
        design: The design file (YAML), or the folder of a study.
        out: Parent folder of the study folder.
        interval: Seconds between samples, from 0.02 to 60.
        listener: Receives the progress of the study.

    Returns:
        A view with the effects, knees and Pareto fronts in `.analysis` and every trial in
        `.results`.

    Raises:
        DesignError: The design is invalid.
        StudyBusy: Another process is running the study.
        TrialError: A trial could not be started.
        KeyboardInterrupt: Ctrl-C; the finished trials are kept.
    """
    check_interval(interval, TrialError)
    planned = Study.of(design, out).to_run()
    listener = listener or SilentListener()
    launcher = LocalLauncher(listener.notify, interval, planned.machine)
    ran = run_study(planned, planned.grid_to_run(), launcher, listener)
    if ran.stop_reason == "interrupted":
        raise KeyboardInterrupt
    return view_of(ran.scanned)


def open_study(folder: str | Path) -> StudyView:
    """Open a study by its folder, its name or its design file, also while it runs.

    Returns a view with the effects, knees and Pareto fronts in `.analysis` and every finished trial
    in `.results`.
    """
    return read_view(find_folder(folder))


class TrialsFailed(StepscopeError):
    """A repeat was not started. `views` has the repeats before it, and `__cause__` is the error."""

    def __init__(self, error: StepscopeError, views: list[TrialView]) -> None:
        super().__init__(error.message, error.hint)
        self.exit_code = error.exit_code
        self.views = views


class TrialInterrupted(KeyboardInterrupt):
    """Trials were interrupted, ended and cleaned up. `views` has the finished repeats."""

    def __init__(self, views: list[TrialView]) -> None:
        super().__init__()
        self.views = views
