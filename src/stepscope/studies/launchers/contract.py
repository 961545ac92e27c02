"""The interface between the engine and a launcher.

The engine claims a trial before it starts the job, and reads the run folder when the launcher
reports the job as finished. A launcher guarantees that the trial runs once, that its run folder is
where the job says, and that no process is left when the job is cancelled.
`tests/contract/test_launchers.py` checks this for every launcher.
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
    """A trial to run, and the path of its run folder."""

    workload: Workload
    limits: Limits
    folder: Path
    """The run folder. It does not exist yet."""
    name: str
    facts: TrialFacts = field(default_factory=TrialFacts)
    """The contents of `trial` in run.json."""
    machine: str = ""
    """One of the launcher's machines."""
    gpu_count: int | None = None
    """Use this number of GPUs of the machine (the first ones) instead of those in `limits`."""


@dataclass(frozen=True)
class FinishedTrial:
    """A finished job."""

    job: Job
    error: StepscopeError | None = None
    """Why the trial was not started. The outcome of a trial that ran is in its run folder."""
    leftovers: Sequence[str] = ()
    """What could not be cleaned up and blocks the next trial."""
    termination_requested: bool = False
    """Whether a signal such as Ctrl-C asked to stop: no further trial is started."""


Show = Callable[[Job, Progress], None]


class Launcher(Protocol):
    """Starts trials. It is a context manager and is used from one thread."""

    machines: Mapping[str, int]
    """Number of concurrent jobs by machine. The empty name is the machine of this process."""

    def __enter__(self) -> Launcher: ...

    def __exit__(self, *error: object) -> None:
        """End all jobs that are still running."""
        ...

    def start(self, job: Job) -> None:
        """Start a job on its machine, which has a free slot."""
        ...

    def wait(self, show: Show) -> list[FinishedTrial]:
        """Wait until at least one job has finished; call `show` with the progress of all jobs."""
        ...
