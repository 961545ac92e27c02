"""A launcher with two machines: on each, a process of its own runs one trial at a time.

Both are this computer; machine b trains at a third of the speed of a. It is what a launcher for a
cluster would be, without the network.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

from stepscope.errors import CannotTry
from stepscope.studies.launchers.contract import FinishedTrial, Job, Show
from stepscope.studies.launchers.local import LocalLauncher
from stepscope.trials.heartbeat import Progress
from stepscope.trials.processes import trial_processes
from stepscope.trials.state import machine_lock

_FORMULA = "PLANTED_FORMULA"
_FORK = multiprocessing.get_context("fork")


class TwoMachines:
    machines: Mapping[str, int] = {"a": 1, "b": 1}

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._running: dict[Connection, tuple[Job, BaseProcess]] = {}

    def __enter__(self) -> TwoMachines:
        return self

    def __exit__(self, *error: object) -> None:
        for _, process in self._running.values():
            assert process.pid is not None
            os.kill(process.pid, signal.SIGINT)
        for _, process in self._running.values():
            process.join()

    def start(self, job: Job) -> None:
        assert job.machine in self.machines
        assert all(other.machine != job.machine for other, _ in self._running.values())
        ours, theirs = _FORK.Pipe(duplex=False)
        process = _FORK.Process(target=_work, args=(theirs, job, trial_processes.new_token()))
        process.start()
        theirs.close()
        self._running[ours] = job, process

    def wait(self, show: Show) -> list[FinishedTrial]:
        over: list[FinishedTrial] = []
        while self._running and not over:
            for pipe in wait(list(self._running)):
                assert isinstance(pipe, Connection)
                job, process = self._running[pipe]
                try:
                    said = pipe.recv()
                except EOFError:
                    said = FinishedTrial(job, CannotTry(f"machine {job.machine} went down"))
                if isinstance(said, Progress):
                    show(job, said)
                elif isinstance(said, str):
                    self._tell(said)
                else:
                    del self._running[pipe]
                    process.join()
                    over.append(replace(said, job=job))
        return over


def _work(pipe: Connection, job: Job, token: str) -> None:
    """A machine, while it runs one job."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # the machine goes down with who uses it
    if job.machine == "b" and _FORMULA in os.environ:
        os.environ[_FORMULA] = f"({os.environ[_FORMULA]}) / 3"
    lock = machine_lock()
    launcher = LocalLauncher(pipe.send, turns=lock.with_name(f"{job.machine}-{lock.name}"))
    launcher._trials.token = token  # what names the process that uses us, not this one
    try:
        with launcher:
            launcher.start(job)
            (over,) = launcher.wait(lambda job, progress: pipe.send(progress))
        pipe.send(over)
    except (KeyboardInterrupt, OSError):
        os._exit(1)
    os._exit(0)
