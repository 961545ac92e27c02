"""Trials on this machine, one at a time: trials that run at once disturb each other.

That goes for several studies on one machine, too: each waits for its turn (`trials/turns.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from stepscope.errors import StepscopeError
from stepscope.studies.launchers.contract import Job, Over, Show
from stepscope.trials import kin
from stepscope.trials.guard import Guard
from stepscope.trials.prepare import TrialPlan
from stepscope.trials.pulse import Progress
from stepscope.trials.runner import run_trial
from stepscope.trials.turns import lock_of_this_machine, turn


class LocalLauncher:
    """Runs each job to its end in `wait`."""

    slots = 1

    def __init__(
        self, tell: Callable[[str], None], interval_s: float = 0.1, turns: Path | None = None
    ) -> None:
        self._tell = tell
        self._interval_s = interval_s
        self._turns = turns or lock_of_this_machine()
        self._series = kin.new_token()
        self._started = 0
        self._waiting: list[Job] = []
        self._guard: Guard | None = None
        self._over: Callable[[], None] = lambda: None

    def __enter__(self) -> LocalLauncher:
        self._guard = Guard.start(self._series)
        self._over = self._guard.dismiss
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over()
        self._guard = None

    def start(self, job: Job) -> None:
        assert len(self._waiting) < self.slots
        self._waiting.append(job)

    def wait(self, show: Show) -> list[Over]:
        return [self._run(self._waiting.pop(0), show)] if self._waiting else []

    def _run(self, job: Job, show: Show) -> Over:
        guard = self._guard
        assert guard is not None
        self._started += 1
        plan = TrialPlan(
            job.workload,
            job.limits,
            job.folder.parent,
            job.name,
            self._interval_s,
            facts=dict(job.facts),
            folder=job.folder,
        )
        token = f"{self._series}.{self._started}"

        def shown(progress: Progress) -> None:
            show(job, progress)

        self._over = guard.leave  # until the trial was cleaned up after, it is the guard's turn
        try:
            with turn(self._tell, self._turns):
                tried = run_trial(plan, token, guard, self._tell, shown)
        except StepscopeError as error:
            self._over = guard.dismiss
            return Over(job, error)
        self._over = guard.dismiss
        return Over(job, None, tuple(tried.left), tried.asked_to_end)
