"""Trials on this machine, one at a time: trials that run at once disturb each other.

That goes for several studies on one machine, too: each waits for its turn, which a lock in the
state folder gives to one trial at a time.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType

from stepscope.errors import CannotTry, StepscopeError
from stepscope.studies.launchers.contract import Job, Over, Show
from stepscope.trials import kin
from stepscope.trials.guard import Guard
from stepscope.trials.prepare import TrialPlan
from stepscope.trials.pulse import Progress
from stepscope.trials.runner import run_trial
from stepscope.trials.spread import state_folder

_LOOK_S = 0.2
_WORTH_TELLING_S = 1.0


class LocalLauncher:
    """Runs each job to its end in `wait`."""

    slots = 1

    def __init__(
        self, tell: Callable[[str], None], interval_s: float = 0.1, turns: Path | None = None
    ) -> None:
        self._tell = tell
        self._interval_s = interval_s
        self._turns = turns or state_folder() / "machine.lock"
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
            with self._turn():
                tried = run_trial(plan, token, guard, self._tell, shown)
        except StepscopeError as error:
            self._over = guard.dismiss
            return Over(job, error)
        self._over = guard.dismiss
        return Over(job, None, tuple(tried.left), tried.asked_to_end)

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        """Be the only trial of a study on this machine. Who dies lets go of it."""
        try:
            self._turns.parent.mkdir(parents=True, exist_ok=True)
            lock = os.open(self._turns, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise CannotTry(
                f"{self._turns} cannot be written: {error.strerror}",
                "Set STEPSCOPE_STATE to a folder that can be",
            ) from None
        try:
            self._wait_for(lock)
            yield
        finally:
            os.close(lock)

    def _wait_for(self, lock: int) -> None:
        """Who waits in the kernel is next, however soon the other wants its next turn."""
        until = time.monotonic() + _WORTH_TELLING_S
        while time.monotonic() < until:
            try:
                return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(_LOOK_S)
        self._tell("another study runs a trial on this machine: waiting for its turn")
        fcntl.flock(lock, fcntl.LOCK_EX)
