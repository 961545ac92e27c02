"""Runs trials on this machine, one at a time, because concurrent trials slow each other down.

Several studies on one machine also take turns (`trials/locks.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from stepscope.errors import StepscopeError
from stepscope.studies.launchers.contract import FinishedTrial, Job, Show
from stepscope.studies.machine import MachineInfo
from stepscope.trials.locks import machine_lock, machine_turn
from stepscope.trials.request import TrialRequest
from stepscope.trials.runner import TrialSeries


class LocalLauncher:
    """Runs each job to completion in `wait`."""

    machines: Mapping[str, int] = {"": 1}

    def __init__(
        self,
        notify: Callable[[str], None],
        interval_s: float = 0.1,
        machine: MachineInfo | None = None,
        turns: Path | None = None,
    ) -> None:
        self._notify = notify
        self._interval_s = interval_s
        self._machine = machine
        self._turns = turns or machine_lock()
        self._trials = TrialSeries()
        self._job: Job | None = None

    def __enter__(self) -> LocalLauncher:
        self._trials.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._trials.__exit__()

    def start(self, job: Job) -> None:
        assert self._job is None
        self._job = job

    def wait(self, show: Show) -> list[FinishedTrial]:
        job, self._job = self._job, None
        if job is None:
            return []
        limits = job.limits
        if job.gpu_count is not None:
            limits = (self._machine or MachineInfo.detect()).limits(limits, job.gpu_count)
        request = TrialRequest(
            job.workload,
            limits,
            name=job.name,
            interval=self._interval_s,
            out=job.folder.parent,
            folder=job.folder,
            facts=job.facts,
        )
        try:
            with machine_turn(self._notify, self._turns, "study"):
                completed = self._trials.run(request, self._notify, partial(show, job))
        except StepscopeError as error:
            return [FinishedTrial(job, error)]
        return [
            FinishedTrial(job, None, tuple(completed.leftovers), completed.termination_requested)
        ]
