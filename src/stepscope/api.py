"""Trials, studies and fits for programs: `stepscope.trial("resnet18", batch_size=64, cpus=4)`."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from stepscope.advice.answer import Fit
from stepscope.advice.fitting import Asked, fit_workload
from stepscope.advice.notasked import NOT_ASKED
from stepscope.errors import BadWorkload, CannotTry, StepscopeError
from stepscope.report.study import StudyView
from stepscope.report.studyread import read_view, view_of
from stepscope.report.trial import TrialView, trial_view
from stepscope.runs.paths import DEFAULT_FOLDER
from stepscope.studies.engine import Moment, Onlooker
from stepscope.studies.folder import DEFAULT_FOLDER as STUDIES
from stepscope.studies.result import Result
from stepscope.studies.run import run_study
from stepscope.studies.study import Study, find_folder
from stepscope.trials.limits import Limits, Room, check_limits, parse_size
from stepscope.trials.prepare import TrialPlan, check_interval
from stepscope.trials.pulse import Progress
from stepscope.trials.repeats import learn, run_repeats
from stepscope.trials.runner import Tried
from stepscope.workloads.own import find_own, is_place
from stepscope.workloads.spec import make_workload, option_name

PROFILED_STEPS = 5
_PERCENTAGE = re.compile(r"([0-9]+(\.[0-9]*)?|\.[0-9]+)\s*%")


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


def fit(
    model: str | Callable[..., Any],
    *,
    gpu_memory: int | str | None = None,
    memory: int | str | None = None,
    headroom: int | str = 0,
    gpus: Sequence[str] | None = None,
    cards: Sequence[int | str] = (),
    method: str = "auto",
    prove: bool = False,
    estimate: bool = False,
    fresh: bool = False,
    hang: float = 300.0,
    tell: Callable[[str], None] = lambda text: None,
    show: Callable[[str], None] = lambda text: None,
    **knobs: Any,
) -> Fit:
    """The largest batch that fits, and the largest that is still fast: `.batch_size` to use.

    `model` is a name or `FILE.py:FUNCTION`, as everywhere, or the function itself: its file is
    imported by the probes, which are processes of their own. `gpu_memory` is what the framework
    may take there; without a GPU the batch is fitted into host memory, of which `memory` is the
    limit. `headroom` is a size, or a percentage of the one that is fitted into. Whatever is found
    is a result: see `.verdict` and `.says`.
    """
    for name in NOT_ASKED:
        if name in knobs:
            raise BadWorkload(f"{option_name(name)} is not for a fit to be told", "Leave it out")
    place = model if isinstance(model, str) else _place_of(model)
    if is_place(place):
        find_own(place)
    workload = make_workload(place, knobs)
    limits = Limits(
        memory=None if memory is None else parse_size(memory),
        gpu_memory=None if gpu_memory is None else parse_size(gpu_memory),
        gpus=None if gpus is None else tuple(gpus),
        hang_s=hang,
    )
    check_limits(limits, Room.here())
    free, share = _headroom(headroom)
    asked = Asked(
        gpu_memory=limits.gpu_memory,
        memory=limits.memory,
        headroom=free,
        headroom_share=share,
        gpus=limits.gpus,
        cards=tuple(parse_size(card) for card in cards),
        method=method,
        prove=prove,
        estimate=estimate,
        fresh=fresh,
        hang_s=hang,
    )
    return fit_workload(workload, asked, tell, show)


def _headroom(given: int | str) -> tuple[int, float]:
    """What to leave free: bytes, and a part of what there is to fit into. One of them is 0."""
    text = str(given).strip()
    if not text.endswith("%"):
        return parse_size(given), 0.0
    if not _PERCENTAGE.fullmatch(text):
        raise CannotTry(f"--headroom {text} is no percentage", "For example: 5%")
    share = float(text[:-1]) / 100
    if share >= 1:
        raise CannotTry(f"--headroom {text} leaves nothing to fit into", "Give less than 100%")
    return 0, share


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
