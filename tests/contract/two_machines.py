"""A launcher with two machines, which run one trial at a time in a separate process.

Both are this computer; machine b is three times slower than a. It works like a launcher for a
cluster, without the network.
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

from stepscope.errors import TrialError
from stepscope.studies.launchers.contract import FinishedTrial, Job, Show
from stepscope.studies.launchers.local import LocalLauncher
from stepscope.trials.heartbeat import Progress
from stepscope.trials.locks import machine_lock
from stepscope.trials.processes import trial_processes

_FORMULA = "PLANTED_FORMULA"
_FORK = multiprocessing.get_context("fork")


class TwoMachines:
    machines: Mapping[str, int] = {"a": 1, "b": 1}

    def __init__(self, notify: Callable[[str], None]) -> None:
        self._notify = notify
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
        receiver, sender = _FORK.Pipe(duplex=False)
        process = _FORK.Process(target=_work, args=(sender, job, trial_processes.new_token()))
        process.start()
        sender.close()
        self._running[receiver] = job, process

    def wait(self, show: Show) -> list[FinishedTrial]:
        finished: list[FinishedTrial] = []
        while self._running and not finished:
            for pipe in wait(list(self._running)):
                assert isinstance(pipe, Connection)
                job, process = self._running[pipe]
                try:
                    received = pipe.recv()
                except EOFError:
                    received = FinishedTrial(job, TrialError(f"machine {job.machine} went down"))
                if isinstance(received, Progress):
                    show(job, received)
                elif isinstance(received, str):
                    self._notify(received)
                else:
                    del self._running[pipe]
                    process.join()
                    finished.append(replace(received, job=job))
        return finished


def _work(pipe: Connection, job: Job, token: str) -> None:
    """Run one job on a machine."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # exits with its parent
    if job.machine == "b" and _FORMULA in os.environ:
        os.environ[_FORMULA] = f"({os.environ[_FORMULA]}) / 3"
    lock = machine_lock()
    launcher = LocalLauncher(pipe.send, turns=lock.with_name(f"{job.machine}-{lock.name}"))
    launcher._trials.token = token  # names the parent, not this process
    try:
        with launcher:
            launcher.start(job)
            (finished,) = launcher.wait(lambda job, progress: pipe.send(progress))
        pipe.send(finished)
    except (KeyboardInterrupt, OSError):
        os._exit(1)
    os._exit(0)
