"""A probe of host memory: a trial of one batch, in fresh processes within the limit."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from stepscope.advice.hostsearch import PRESSED
from stepscope.advice.scratch import swept_folder
from stepscope.errors import CannotTry
from stepscope.records import Ending, Outcome
from stepscope.runs.paths import RunPaths
from stepscope.trials.limits import Limits
from stepscope.trials.prepare import TrialPlan
from stepscope.trials.pulse import Progress
from stepscope.trials.repeats import run_repeats
from stepscope.trials.runner import Tried
from stepscope.trials.turns import lock_of_this_machine, turn
from stepscope.workloads.probing import Kind, Parts, Told
from stepscope.workloads.spec import Workload

_INTERVAL_S = 0.25
"""Only the limit matters here, and that is the kernel's."""
_PAGE_TABLES = 1 / 512
"""What the kernel itself holds for each byte of a process."""
_KINDS: dict[Outcome, Kind] = {
    Outcome.OK: "ok",
    Outcome.HOST_OOM: "host_oom",
    Outcome.SHM_FULL: "host_oom",
    Outcome.TIMEOUT: "timeout",
}
_IN_WORDS = {
    "start": "before PyTorch was there",
    "import": "while PyTorch was imported",
    "data": "while the data set was made",
    "build": "while the model was built",
    "evaluation": "in the evaluation",
    "smaller batch": "in a smaller batch after the evaluation",
    "again": "in a step after the evaluation",
}


@dataclass(frozen=True)
class HostTold:
    """How one batch went, and what the process knew of itself."""

    told: Told
    """`reserved_peak` is what could not be taken back, of all processes; 0 where it is unknown."""
    before: int = 0
    """Bytes held before the first step: framework, data set and model."""
    samples: int | None = None
    """How many the data set has."""
    data_bytes: int = 0
    """Of a data set that is held in memory."""
    parameters: int = 0
    sample_bytes: int = 0
    by: str = ""
    """What enforces the limit: "cgroup v1", "soft"."""
    versions: Mapping[str, str | None] | None = None
    reached: str = ""
    """The phase in which it ended."""
    environment: Mapping[str, Any] | None = None


class HostProbes(Protocol):
    """Whoever can tell how a batch goes: real trials, or a model of memory in a test."""

    def __call__(self, batch: int, steps: int = 3, memory: int | None = None) -> HostTold:
        """`memory`: another limit than the usual one."""
        ...


class TrialProbes:
    """`with TrialProbes(workload, limits) as probe`: each call is a trial, of which nothing stays.

    They take turns with the trials of studies on this machine.
    """

    def __init__(
        self,
        workload: Workload,
        limits: Limits,
        tell: Callable[[str], None],
        show: Callable[[str], None],
    ) -> None:
        self._workload = workload
        self._limits = limits
        self._tell = tell
        self._show = show

    def __enter__(self) -> TrialProbes:
        self._folder = swept_folder("stepscope-fit-")
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def __call__(self, batch: int, steps: int = 3, memory: int | None = None) -> HostTold:
        workload = replace(self._workload, batch_size=batch, steps=steps, epochs=None, seconds=None)
        limits = self._limits if memory is None else replace(self._limits, memory=memory)
        plan = TrialPlan(workload, limits, self._folder, interval_s=_INTERVAL_S, cycle=True)

        def shown(number: int, progress: Progress) -> None:
            self._show(f"batch {batch:,}: {progress.phase}")

        with turn(self._tell, lock_of_this_machine()):
            tried = list(run_repeats(plan, 1, self._tell, shown))[-1]
        if tried.asked_to_end:
            raise KeyboardInterrupt
        if tried.left:
            raise CannotTry(
                f"No other batch was tried: {'; '.join(tried.left)} is left of batch {batch:,}",
                "End it, then try again",
            )
        told = read_probe(tried, workload)
        shutil.rmtree(tried.paths.folder, ignore_errors=True)
        return told


def read_probe(tried: Tried, workload: Workload) -> HostTold:
    """What a trial left, as far as it came."""
    ranks = [_read(tried.paths.trial_rank(rank)) for rank in range(workload.ranks)]
    first, run = ranks[0], _read(tried.paths.run_json)
    memory = (run.get("limits") or {}).get("memory") or {}
    parts, data = first.get("parts") or {}, first.get("data") or {}
    inputs = int(parts.get("inputs") or 0)
    return HostTold(
        replace(
            _told(tried, workload, first),
            reserved_peak=_peak(ranks, memory, workload),
            parts=Parts(**{key: int(value) for key, value in parts.items()}),
        ),
        before=sum(_of_memory(rank, "before") for rank in ranks),
        samples=data.get("samples"),
        data_bytes=int(data.get("bytes") or 0) if data.get("source") == "memory" else 0,
        parameters=int((first.get("model") or {}).get("parameters") or 0),
        sample_bytes=inputs // workload.batch_size,
        by=str(memory.get("by") or ""),
        versions=first.get("versions"),
        reached=str(first.get("phase") or "start"),
        environment=run.get("environment"),
    )


def _told(tried: Tried, workload: Workload, first: Mapping[str, Any]) -> Told:
    error, ending = first.get("error") or {}, tried.ending
    memory = first.get("host_memory") or {}
    steps = _step_seconds(tried.paths)
    passed = ending.outcome is Outcome.OK
    place = f" ({error['where']})" if error.get("where") else ""
    return Told(
        workload.batch_size,
        _KINDS.get(ending.outcome, "error"),
        phase="" if passed else _where(ending, str(first.get("phase") or "start"), len(steps)),
        step_s=tuple(steps),
        kept=tuple(memory.get("kept") or ()),
        message="" if passed else f"{ending.reason}{place}",
        hint=str(error.get("hint") or ""),
        notes=(first["note"],) if first.get("note") else (),
    )


def _where(ending: Ending, phase: str, steps: int) -> str:
    if ending.outcome is Outcome.SHM_FULL:
        return "in /dev/shm"
    if phase in ("first step", "training"):
        return f"in step {steps + 1}"
    return _IN_WORDS.get(phase, "")


def _peak(ranks: list[dict[str, Any]], memory: Mapping[str, Any], workload: Workload) -> int:
    """Where one process does everything, it knows best, since a group counts cached files too. Of
    several, with those that they start, only the group knows the peak."""
    of_group = int(memory.get("peak") or 0)
    own = sum(_of_memory(rank, "peak") for rank in ranks)
    own += int(own * _PAGE_TABLES)
    if of_group and of_group >= memory["asked"] - PRESSED:
        return 0
    several = workload.ranks > 1 or workload.workers > 0
    return of_group if several and of_group else own


def _of_memory(rank: Mapping[str, Any], name: str) -> int:
    return int((rank.get("host_memory") or {}).get(name) or 0)


def _step_seconds(paths: RunPaths) -> list[float]:
    """Each step of the first rank, from the end of the one before it. The first has none."""
    from stepscope.runs.trial import read_steps

    steps = read_steps(paths.trial_steps(0))
    spent = steps["wait_ns"] + steps["copy_ns"].clip(0) + steps["compute_ns"].clip(0)
    return [float(ns) / 1e9 for ns in spent]


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
