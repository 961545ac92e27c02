"""What is asked of a trial: one record, which the command line, the API, studies and fit build."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stepscope.capture.request import check_interval
from stepscope.errors import CannotTry
from stepscope.records.codec import to_json
from stepscope.records.trial import TrialFacts
from stepscope.runs.paths import DEFAULT_FOLDER
from stepscope.trials.limits.spec import Limits
from stepscope.workloads.code_place import is_place
from stepscope.workloads.own import find_own
from stepscope.workloads.spec import Workload, make_workload


@dataclass(frozen=True)
class TrialRequest:
    """A workload to train, within limits, once or several times in fresh processes."""

    workload: Workload
    limits: Limits = field(default_factory=Limits)  # with the timeout and the stall timeout
    repeats: int = 1
    profile: bool = False
    """Whether to take a few more steps under the framework's profiler, after the measured ones."""
    name: str | None = None
    interval: float = 0.1  # seconds between samples
    out: Path = Path(DEFAULT_FOLDER)  # where run folders go
    folder: Path | None = None
    """The run folder itself, where it is not to be a new one in `out`. It must not exist."""
    cycle: bool = False
    """Whether the steps are followed by an evaluation, a smaller batch, and steps again: what a
    whole training would need memory for."""
    facts: TrialFacts = field(default_factory=TrialFacts)
    """What run.json says under `trial` from the start: the user's command, the place in a study."""

    def __post_init__(self) -> None:
        check_interval(self.interval, CannotTry)

    @property
    def noise_key(self) -> dict[str, Any]:
        return {**to_json(self.workload), "cpus": self.limits.cpus, "memory": self.limits.memory}


def workload_of(model: str, settings: Mapping[str, Any]) -> Workload:
    """A checked workload. A user's file comes first: its errors say more than those of settings."""
    if is_place(model):
        find_own(model)
    return make_workload(model, settings)
