"""What the self-test does, and how it tells what it has done.

Each task is a phase of the run, and what it amounted to are marks named `<task>.<what>`. So the run
folder holds both: what was done, by the word of who did it, and what the sensors saw. Light, since
the load imports it.
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
"""Of the load as a whole: `load.tasks`, told at the very end."""

MarkValue = float | str | None


@dataclass(frozen=True)
class Task:
    """One thing that was done (or skipped), when, and what the load told of it."""

    name: str
    begin_ns: int
    end_ns: int
    amount: float = 0.0  # core-seconds, bytes or launches: what the task is about
    skipped: str | None = None  # why it was not done
    uuid: str | None = None  # of the GPU that works
    place: str | None = None  # where it was done: the file system of the disk tasks
    tasks: int | None = None  # how many phases there must be

    @property
    def was_done(self) -> bool:
        return self.end_ns > self.begin_ns


def tasks_of(marks: Iterable[MarkEvent]) -> dict[str, Task]:
    """The tasks by name; one that was begun and not ended is left out."""
    begins: dict[str, int] = {}
    ends: dict[str, int] = {}
    told: dict[str, dict[str, Any]] = {}
    for mark in marks:
        if mark.edge == "begin":
            begins[mark.name] = mark.t
        elif mark.edge == "end":
            ends[mark.name] = mark.t
        else:
            task, _, what = mark.name.partition(".")
            told.setdefault(task, {})[what] = mark.value
            if task not in begins:
                begins[task] = ends[task] = mark.t
    return {name: Task(name, begins[name], end, **told.get(name, {})) for name, end in ends.items()}
