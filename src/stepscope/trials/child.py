"""What runs in a trial's own process: `python -m stepscope.trials.child SPEC.json`.

Light until the framework is needed. With several ranks it becomes the framework's launcher, which
starts this module again, once for each of them. Exit codes: 0 done, 4 a workload that cannot be
used, 1 anything else; the rank's file says what it was.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import os
import signal
import sys
import time
import traceback
from importlib import import_module
from pathlib import Path
from typing import Any

from stepscope.errors import BadWorkload
from stepscope.runs.paths import RunPaths
from stepscope.trials import stacks
from stepscope.workloads.own import find_own, hint_for, where_in
from stepscope.workloads.reporting import Place, RankReport, failure_kind
from stepscope.workloads.spec import Workload

MODULE = "stepscope.trials.child"
_PR_SET_PDEATHSIG = 1


def main(spec_file: str) -> int:
    """Train as the specification says; 0 if it came to its end."""
    began = time.monotonic()
    die_with_parent()
    spec = json.loads(Path(spec_file).read_text(encoding="utf-8"))
    paths = RunPaths(Path(spec_file).parent.parent)
    stacks.arm(paths.trial_stacks)
    faulthandler.enable()  # a crash in native code leaves its stack at the end of stderr.log
    workload = Workload(**spec["workload"])
    if workload.ranks > 1 and "RANK" not in os.environ:
        _become_launcher(workload, spec_file, spec["threads"])
    report = RankReport(_place(spec, paths, workload))
    report.tell(cpus=sorted(os.sched_getaffinity(0)))
    try:
        with report.phase("import"):
            adapter = _adapter(workload.framework)
        report.took("start", time.monotonic() - began - report.facts["phases"]["import"])
        adapter.train(workload, report.place, report)
    except BadWorkload as error:
        report.fail("workload", _without_traceback(error))
        return error.exit_code
    except Exception as error:
        report.fail(failure_kind(error), error, hint_for(error), _where(workload, error))
        traceback.print_exc()
        return 1
    return 0


def die_with_parent() -> None:
    """Whoever started us dies: so do we, at once."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def _place(spec: dict[str, Any], paths: RunPaths, workload: Workload) -> Place:
    rank = int(os.environ.get("RANK", "0")) if workload.ranks > 1 else 0
    return Place(
        facts=paths.trial_rank(rank),
        steps=paths.trial_steps(rank),
        profile=paths.trial_profile(rank),
        trace=paths.trial_trace(rank),
        rank=rank,
        local_rank=int(os.environ.get("LOCAL_RANK", "0")) if workload.ranks > 1 else 0,
        ranks=workload.ranks,
        threads=spec["threads"],
        gpu_memory=spec["gpu_memory"],
        profiled_steps=spec["profiled_steps"],
        cycle=spec.get("cycle", False),
    )


def _adapter(framework: str) -> Any:
    """The module that trains with a framework: `train(workload, place, report)`."""
    is_own = "." in framework
    try:
        return import_module(
            framework if is_own else f"stepscope.workloads.frameworks.{framework}.loop"
        )
    except ModuleNotFoundError as error:
        if is_own and error.name and f"{framework}.".startswith(f"{error.name}."):
            raise BadWorkload(
                f"There is no module {error.name} to train with", "Name its place in PYTHONPATH"
            ) from None
        if error.name in (framework, "torchvision"):
            raise BadWorkload(
                f"{error.name} is not installed in this Python",
                f'Install it: pip install "stepscope[{framework}]"',
            ) from None
        raise


def _become_launcher(workload: Workload, spec_file: str, threads: int | None) -> None:
    """Exec torch's elastic launcher. It gives each rank one thread unless told otherwise."""
    from stepscope.workloads.frameworks.torch.launcher import launcher_command

    own = threads or max(1, len(os.sched_getaffinity(0)) // workload.ranks)
    os.environ.setdefault("OMP_NUM_THREADS", str(own))
    command = launcher_command(workload.ranks, MODULE, [spec_file])
    os.execv(command[0], command)


def _without_traceback(error: BadWorkload) -> BadWorkload:
    """One that came from a loader's worker has all of its traceback in its message."""
    *others, last = error.message.strip().splitlines() or [""]
    return BadWorkload(last.partition(": ")[2]) if others else error


def _where(workload: Workload, error: BaseException) -> str | None:
    """The line of the user's file at which it happened."""
    return where_in(error, find_own(workload.model).file) if workload.is_own else None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
