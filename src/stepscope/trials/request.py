"""The request for a trial, built by the command line, the API, studies and fit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stepscope.capture.request import check_interval
from stepscope.errors import TrialError
from stepscope.records.codec import to_json
from stepscope.records.trial import TrialFacts
from stepscope.runs.paths import DEFAULT_FOLDER
from stepscope.trials.limits.spec import Limits
from stepscope.workloads.code_reference import is_reference
from stepscope.workloads.custom import find_custom
from stepscope.workloads.spec import Workload, make_workload


@dataclass(frozen=True)
class TrialRequest:
    """A workload to train within limits, once or several times in fresh processes."""

    workload: Workload
    limits: Limits = field(default_factory=Limits)  # with the timeout and the stall timeout
    repeats: int = 1
    profile: bool = False
    """Whether to run a few steps under the profiler of the framework after the measured steps."""
    name: str | None = None
    interval: float = 0.1  # seconds between samples
    out: Path = Path(DEFAULT_FOLDER)  # the folder for run folders
    folder: Path | None = None
    """The run folder, instead of a new one in `out`. It must not exist."""
    cycle: bool = False
    """Whether to run an evaluation, a smaller batch and more steps after the steps, to reach the
    peak memory of a complete training."""
    facts: TrialFacts = field(default_factory=TrialFacts)
    """Initial facts for `trial` in run.json: the command of the user, the place in a study."""

    def __post_init__(self) -> None:
        check_interval(self.interval, TrialError)
        if self.repeats < 1:
            raise TrialError(f"`--repeat` must be at least 1, got {self.repeats}")

    @property
    def noise_key(self) -> dict[str, Any]:
        return {**to_json(self.workload), "cpus": self.limits.cpus, "memory": self.limits.memory}


def workload_of(model: str, settings: Mapping[str, Any]) -> Workload:
    """Return a validated workload. A custom file is loaded first, for more specific errors."""
    if is_reference(model):
        find_custom(model)
    return make_workload(model, settings)
