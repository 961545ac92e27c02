"""What the engine asks of a launcher, and what it gets back.

The engine has claimed a trial before it hands it over, and reads its run folder once the launcher
says that the trial is over. A launcher sees to it that the trial runs once, that its run folder
ends up where the job says, and that nothing of it is left when it is cancelled.
`tests/contract/test_launchers.py` holds every launcher to that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from stepscope.errors import StepscopeError
from stepscope.records.trial import TrialFacts
from stepscope.trials.heartbeat import Progress
from stepscope.trials.limits.spec import Limits
from stepscope.workloads.spec import Workload


@dataclass(frozen=True)
class Job:
    """A trial to run, and where its run folder goes."""

    workload: Workload
    limits: Limits
    folder: Path
    """It does not exist yet."""
    name: str
    facts: TrialFacts = field(default_factory=TrialFacts)
    """What belongs under `trial` in run.json."""
    machine: str = ""
    """One of the launcher's machines."""
    gpu_count: int | None = None
    """Use the first so many GPUs of that machine, whatever `limits` names."""


@dataclass(frozen=True)
class FinishedTrial:
    """A job that is over."""

    job: Job
    error: StepscopeError | None = None
    """Why it was not run at all. How a trial that ran has ended is in its run folder."""
    left: Sequence[str] = ()
    """What of it could not be cleaned up, and is in the way of the next."""
    asked_to_end: bool = False
    """Whether a Ctrl-C came meanwhile: no other should follow."""


Show = Callable[[Job, Progress], None]


class Launcher(Protocol):
    """Starts trials. Used in a `with`, from one thread."""

    machines: Mapping[str, int]
    """How many jobs each machine takes at once. The empty name is the machine of this process."""

    def __enter__(self) -> Launcher: ...

    def __exit__(self, *error: object) -> None:
        """Nothing of its jobs is left running, however it came to this."""
        ...

    def start(self, job: Job) -> None:
        """Take a job for its machine, which has a free slot."""
        ...

    def wait(self, show: Show) -> list[FinishedTrial]:
        """Wait until at least one job is over; `show` hears how far they are meanwhile."""
        ...
