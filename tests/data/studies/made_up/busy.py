"""An adapter whose steps keep all CPUs busy for the seconds of the workload."""

from __future__ import annotations

import hashlib
import os
import time
from concurrent.futures import ThreadPoolExecutor

from made_up.loop import MadeUp, write
from stepscope.steplog import Step, StepLog
from stepscope.workloads.reporting import RankPlacement, RankReport
from stepscope.workloads.spec import Workload

_DATA = bytes(1 << 20)


class Busy(MadeUp):
    def train(self, workload: Workload, placement: RankPlacement, report: RankReport) -> None:
        write("begin")
        report.update(device="cpu", batch={"global": workload.global_batch})
        log, until, step = StepLog(placement.steps), time.monotonic() + (workload.seconds or 1.0), 0
        cores = len(os.sched_getaffinity(0))
        with ThreadPoolExecutor(cores) as threads:
            while time.monotonic() < until:
                list(threads.map(_compute, range(4 * cores)))
                log.add(Step(time.monotonic_ns(), step, 0, 0, 0, 0))
                step += 1
        log.close()
        report.update(done=True, phase="closing")
        write("done")


FRAMEWORK = Busy()


def _compute(_: int) -> None:
    hashlib.sha256(_DATA).digest()
