"""Trials on this machine, one at a time: trials that run at once disturb each other.

That goes for several studies on one machine, too: each waits for its turn (`trials/state.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from stepscope.errors import StepscopeError
from stepscope.studies.launchers.contract import FinishedTrial, Job, Show
from stepscope.studies.machine import MachineInfo
from stepscope.trials.processes import trial_processes
from stepscope.trials.processes.guard import Guard
from stepscope.trials.request import TrialRequest
from stepscope.trials.runner import run_trial
from stepscope.trials.state import machine_lock, machine_turn


class LocalLauncher:
    """Runs each job to its end in `wait`."""

    machines: Mapping[str, int] = {"": 1}

    def __init__(
        self,
        tell: Callable[[str], None],
        interval_s: float = 0.1,
        machine: MachineInfo | None = None,
        turns: Path | None = None,
    ) -> None:
        self._tell = tell
        self._interval_s = interval_s
        self._machine = machine
        self._turns = turns or machine_lock()
        self._series = trial_processes.new_token()
        self._started = 0
        self._job: Job | None = None
        self._guard: Guard | None = None
        self._over: Callable[[], None] = lambda: None

    def __enter__(self) -> LocalLauncher:
        self._guard = Guard.start(self._series)
        self._over = self._guard.dismiss
        return self

    def __exit__(self, *error: object) -> None:
        self._over()
        self._guard = None

    def start(self, job: Job) -> None:
        assert self._job is None
        self._job = job

    def wait(self, show: Show) -> list[FinishedTrial]:
        job, guard = self._job, self._guard
        if job is None:
            return []
        assert guard is not None
        self._job = None
        self._started += 1
        limits = job.limits
        if job.gpu_count is not None:
            limits = (self._machine or MachineInfo.look()).limits(limits, job.gpu_count)
        request = TrialRequest(
            job.workload,
            limits,
            name=job.name,
            interval=self._interval_s,
            out=job.folder.parent,
            folder=job.folder,
            facts=job.facts,
        )
        token = f"{self._series}.{self._started}"
        self._over = guard.leave  # until the trial was cleaned up after, it is the guard's turn
        try:
            with machine_turn(self._tell, self._turns):
                tried = run_trial(request, token, guard, self._tell, partial(show, job))
        except StepscopeError as error:
            self._over = guard.dismiss
            return [FinishedTrial(job, error)]
        self._over = guard.dismiss
        return [FinishedTrial(job, None, tuple(tried.leftovers), tried.asked_to_end)]
