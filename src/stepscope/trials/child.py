"""The program of a trial process: `python -m stepscope.trials.child SPEC.json`.

It imports the framework late. With several ranks it executes the launcher of the framework, which
starts this module once per rank. Exit codes: 0 done, 4 invalid workload, 1 any other error; the
file of the rank contains the error.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

from stepscope.errors import WorkloadError
from stepscope.records.codec import loads
from stepscope.runs.paths import RunPaths
from stepscope.trials.processes import stacks, trial_processes
from stepscope.workloads.custom import error_location, hint_for
from stepscope.workloads.frameworks.contract import Framework, check_capabilities, failure_kind
from stepscope.workloads.frameworks.registry import get_framework
from stepscope.workloads.reporting import RankPlacement, RankReport
from stepscope.workloads.spec import Workload

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class ChildSpec:
    workload: Workload
    threads: int | None  # of the framework in each rank; None: its default
    gpu_memory: int | None
    profiled_steps: int
    cycle: bool


def main(spec_file: str) -> int:
    """Run the training of the specification; return the exit code."""
    began = time.monotonic()
    exit_with_parent()
    if trial_processes.runner_is_running(os.environ.get(trial_processes.VARIABLE, "")) is False:
        os.kill(os.getpid(), signal.SIGKILL)  # it was killed before the line above
    spec = loads(ChildSpec, Path(spec_file).read_bytes())
    paths = RunPaths(Path(spec_file).parent.parent)
    stacks.arm(paths.trial_stacks)
    faulthandler.enable()  # a native crash writes its stack to stderr.log
    workload = spec.workload
    rank, local_rank = 0, 0
    if workload.ranks > 1:
        rank, local_rank = (int(os.environ.get(name, "0")) for name in ("RANK", "LOCAL_RANK"))
    place = RankPlacement(
        facts=paths.trial_rank(rank),
        steps=paths.trial_steps(rank),
        profile=paths.trial_profile(rank),
        trace=paths.trial_trace(rank),
        rank=rank,
        local_rank=local_rank,
        ranks=workload.ranks,
        threads=spec.threads,
        gpu_memory=spec.gpu_memory,
        profiled_steps=spec.profiled_steps,
        cycle=spec.cycle,
    )
    report = RankReport(place)
    framework: Framework | None = None
    try:
        if workload.ranks > 1 and "RANK" not in os.environ:
            _become_launcher(workload, spec_file, spec.threads)
        report.update(cpus=sorted(os.sched_getaffinity(0)))
        with report.phase("import"):
            framework = get_framework(workload.framework)
            framework.load()
        report.add_time("start", time.monotonic() - began - report.phases["import"])
        check_capabilities(framework, workload, place)
        framework.train(workload, place, report)
    except WorkloadError as error:
        # An error from a loader worker contains the whole traceback in its message.
        *traceback_lines, last = error.message.strip().splitlines() or [""]
        if traceback_lines:
            error = WorkloadError(last.partition(": ")[2])
        report.fail("workload", error)
        return error.exit_code
    except Exception as error:
        kind = failure_kind(framework, error) if framework else "error"
        report.fail(kind, error, hint_for(error), error_location(error, workload))
        traceback.print_exc()
        return 1
    return 0


def exit_with_parent() -> None:
    """Let the kernel kill this process when its parent exits."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def _become_launcher(workload: Workload, spec_file: str, threads: int | None) -> None:
    """Execute the launcher of the framework, whose default may be one thread per rank."""
    per_rank = threads or max(1, len(os.sched_getaffinity(0)) // workload.ranks)
    os.environ.setdefault("OMP_NUM_THREADS", str(per_rank))
    assert __spec__ is not None  # this module, whose __name__ is __main__ here
    module = __spec__.name
    command = get_framework(workload.framework).launch(workload.ranks, module, [spec_file])
    os.execv(command[0], command)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
