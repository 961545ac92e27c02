"""The tasks of the self-test and how they are recorded.

Each task is a phase of the run; its amount and other facts are marks named `<task>.<fact>`. The run
folder therefore contains both the work as the load counts it and the readings of the sensors. Few
imports, because the load imports this module.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stepscope.analysis.run.passes import MarkEvent

IDLE = "idle"
BURN = "burn"
WRITE = "write"
MEMORY = "memory"
WORKER = "worker"
READ = "read"
LOOPBACK = "loopback"
SHM = "shm"
GPU_IDLE = "gpu_idle"
GPU_MEMORY = "gpu_memory"
GPU_COPY_IN = "gpu_copy_in"
GPU_COPY_OUT = "gpu_copy_out"
GPU_COPY_INSIDE = "gpu_copy_inside"
GPU_MATRIX = "gpu_matrix"
GPU_TINY = "gpu_tiny"

GPU_COPIES = (GPU_COPY_IN, GPU_COPY_OUT, GPU_COPY_INSIDE)
GPU_TASKS = (GPU_IDLE, GPU_MEMORY, *GPU_COPIES, GPU_MATRIX, GPU_TINY)

LOAD = "load"
"""The load as a whole: it writes the mark `load.tasks` at the end."""

MarkValue = float | str | None


@dataclass(frozen=True)
class Task:
    """A task that was done or skipped, with its time and the facts that the load reports."""

    name: str
    begin_ns: int
    end_ns: int
    amount: float = 0.0  # core-seconds, bytes or launches
    skipped: str | None = None  # the reason
    uuid: str | None = None  # of the tested GPU
    place: str | None = None  # the file system of the disk tasks
    tasks: int | None = None  # expected number of phases

    @property
    def was_done(self) -> bool:
        return self.end_ns > self.begin_ns


def tasks_of(marks: Iterable[MarkEvent]) -> dict[str, Task]:
    """Return the tasks by name, without unfinished ones."""
    begins: dict[str, int] = {}
    ends: dict[str, int] = {}
    facts: dict[str, dict[str, Any]] = {}
    for mark in marks:
        if mark.edge == "begin":
            begins[mark.name] = mark.t
        elif mark.edge == "end":
            ends[mark.name] = mark.t
        else:
            task, _, fact = mark.name.partition(".")
            facts.setdefault(task, {})[fact] = mark.value
            if task not in begins:
                begins[task] = ends[task] = mark.t
    return {
        name: Task(name, begins[name], end, **facts.get(name, {})) for name, end in ends.items()
    }
