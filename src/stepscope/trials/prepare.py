"""What a trial needs before it begins: a plan, its data, a run folder that says what to do."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stepscope.capture.session import Plan, prepare_folder
from stepscope.capture.session import check_interval as check_pace
from stepscope.errors import CannotTry, CannotWatch
from stepscope.runs.paths import RunPaths, replace_atomically
from stepscope.trials import child
from stepscope.trials.fence import Fence
from stepscope.trials.limits import Limits
from stepscope.workloads.datasets.locate import locate
from stepscope.workloads.spec import Workload

_WORTH_TELLING_S = 2.0
_MEMORY_BURST_S = 0.5
"""The peak of host memory is a result here: what it takes to add it up rightly may cost more."""


@dataclass(frozen=True)
class TrialPlan:
    """What to try, within which limits, and where its run folder goes."""

    workload: Workload
    limits: Limits
    out: Path
    name: str | None = None
    interval_s: float = 0.1
    profiled_steps: int = 0
    facts: dict[str, Any] = field(default_factory=dict)
    """What else belongs under `trial` in run.json: which repeat, the machine's spread."""
    folder: Path | None = None
    """The run folder itself, where it is not to be a new one in `out`."""
    cycle: bool = False
    """Whether to go through a whole cycle: after the steps an evaluation, a smaller batch, and
    steps again."""

    @property
    def teaches(self) -> dict[str, Any]:
        """What repeats must share to tell how much they differ."""
        return {**self.workload.as_dict(), "cpus": self.limits.cpus, "memory": self.limits.memory}


def check_interval(seconds: float) -> None:
    """CannotTry unless one can sample at this pace."""
    try:
        check_pace(seconds)
    except CannotWatch as error:
        raise CannotTry(error.message, error.hint) from None


def make_data(workload: Workload, tell: Callable[[str], None]) -> None:
    """Now, where it is made at all: it is no part of the trial."""
    if workload.is_own:
        return
    began = time.monotonic()
    place = locate(workload)
    took = time.monotonic() - began
    if place is not None and place.generated and took > _WORTH_TELLING_S:
        tell(f"{workload.data_name} data was generated in {took:.0f} s, and will be used again")


def prepare(plan: TrialPlan, watch: Plan, fence: Fence) -> RunPaths:
    """The run folder with what the trial's processes are told, or nothing at all."""
    try:
        paths = prepare_folder(watch)
    except CannotWatch as error:
        raise CannotTry(error.message, error.hint) from None
    try:
        _write_spec(plan, fence, paths)
    except OSError as error:
        shutil.rmtree(paths.folder, ignore_errors=True)
        raise CannotTry(
            f"The run folder cannot be written in {plan.out}: {error.strerror}",
            "Choose another place with --out DIR",
        ) from None
    return paths


def watch_plan(plan: TrialPlan, started_ns: int) -> Plan:
    facts: dict[str, Any] = {
        "workload": plan.workload.as_dict(),
        "limits": {},
        "trial": {**plan.facts, "started_ns": started_ns},
    }
    if "command" in plan.facts:  # what the user typed says more than what we start
        facts["command"] = plan.facts["command"]
    name = plan.name or plan.workload.short_name
    command = [sys.executable, "-m", child.MODULE]
    return Plan(
        name,
        command,
        plan.interval_s,
        plan.out,
        facts=facts,
        memory_burst_s=_MEMORY_BURST_S,
        folder=plan.folder,
    )


def _write_spec(plan: TrialPlan, fence: Fence, paths: RunPaths) -> None:
    paths.trial.mkdir()
    spec = {
        "workload": plan.workload.as_dict(),
        "threads": fence.threads,
        "gpu_memory": plan.limits.gpu_memory,
        "profiled_steps": plan.profiled_steps,
        "cycle": plan.cycle,
    }
    replace_atomically(paths.trial_spec, json.dumps(spec, indent=1) + "\n")
