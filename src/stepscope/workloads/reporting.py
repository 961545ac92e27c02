"""The report of a rank: a small JSON file that is replaced atomically while the rank trains.

If the trial is killed, the file contains everything that was known up to that moment.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from stepscope import marks
from stepscope.inject.masking import mask_values
from stepscope.records.codec import to_json
from stepscope.runs.files import write_json

FailureKind = Literal["workload", "gpu_oom", "host_oom", "error"]
_MAX_MESSAGE = 4000
_WORKER_ERROR = re.compile(r"Caught .*worker process")
_TRACE = re.compile(r"(Original )?Traceback \(|The above exception|During handling of")


@dataclass(frozen=True)
class RankPlacement:
    """Where a rank trains, and the files that it writes."""

    facts: Path
    steps: Path
    profile: Path
    trace: Path
    rank: int = 0
    local_rank: int = 0
    ranks: int = 1
    threads: int | None = None
    """Threads that the framework may use; None: the framework's default."""
    gpu_memory: int | None = None
    """Bytes that the framework may allocate on its GPU."""
    profiled_steps: int = 0
    """Number of additional steps under the profiler."""
    cycle: bool = False
    """Whether a smaller batch, an evaluation and more steps follow the measured steps."""


@dataclass
class RankReport:
    placement: RankPlacement
    phases: dict[str, float] = field(default_factory=dict)
    """Seconds of each phase."""
    _facts: dict[str, object] = field(default_factory=dict)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a phase of the trial outside its steps, and mark it in the run."""
        start = time.monotonic()
        self.update(phase=name)
        with marks.phase(name):
            try:
                yield
            finally:
                self.add_time(name, time.monotonic() - start)

    def add_time(self, phase: str, seconds: float) -> None:
        self.phases[phase] = self.phases.get(phase, 0.0) + seconds

    def update(self, **facts: object) -> None:
        """Add facts (the fields of `RankFacts`, and others for the record) and write the file."""
        self._facts.update(facts)
        header = {"rank": self.placement.rank, "pid": os.getpid(), "phases": self.phases}
        facts = {**header, "error": None, "done": False, **self._facts}
        write_json(self.placement.facts, mask_values(to_json(facts)))

    def fail(
        self, kind: FailureKind, error: BaseException, hint: str = "", where: str | None = None
    ) -> None:
        message = str(getattr(error, "message", error))[:_MAX_MESSAGE]
        self.update(
            error={
                "kind": kind,
                "type": type(error).__name__,
                "message": message,
                "summary": _summary(type(error).__name__, message),
                "hint": hint or str(getattr(error, "hint", "")),
                "where": where,
                "monotonic_ns": time.monotonic_ns(),
            }
        )


def _summary(kind: str, message: str) -> str:
    """One line for the terminal.

    The message of a loader worker's error contains the traceback of the worker. Its first line that
    is not indented and does not belong to the traceback is the error.
    """
    lines = [line.rstrip() for line in message.splitlines() if line.strip()]
    if not lines:
        return kind
    if not _WORKER_ERROR.match(lines[0]):
        return f"{kind}: {lines[0]}"
    errors = [line for line in lines[1:] if not line[0].isspace() and not _TRACE.match(line)]
    return f"{errors[0] if errors else lines[0]} (in a loader worker)"
