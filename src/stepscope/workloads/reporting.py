"""What a rank says of itself while it trains: one small JSON file, replaced atomically, so that a
trial that is killed at any moment leaves all that was known until then."""

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
from stepscope.runs.paths import write_json

FailureKind = Literal["workload", "gpu_oom", "host_oom", "error"]
_LONGEST_MESSAGE = 4000
_WORKER_ERROR = re.compile(r"Caught .*worker process")
_TRACE = re.compile(r"(Original )?Traceback \(|The above exception|During handling of")


@dataclass(frozen=True)
class RankPlacement:
    """Where a rank trains, and where it leaves what it has to say."""

    facts: Path
    steps: Path
    profile: Path
    trace: Path
    rank: int = 0
    local_rank: int = 0
    ranks: int = 1
    threads: int | None = None
    """How many the framework may use; None: as many as it likes."""
    gpu_memory: int | None = None
    """Bytes the framework may allocate on its GPU."""
    profiled_steps: int = 0
    """How many more steps to take under the profiler."""
    cycle: bool = False
    """Whether an evaluation, a smaller batch and steps again follow the steps."""


@dataclass
class RankReport:
    place: RankPlacement
    phases: dict[str, float] = field(default_factory=dict)
    """Seconds of each."""
    _facts: dict[str, object] = field(default_factory=dict)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A stretch of the trial beside its steps: timed here, and marked in the run."""
        began = time.monotonic()
        self.tell(phase=name)
        with marks.phase(name):
            try:
                yield
            finally:
                self.took(name, time.monotonic() - began)

    def took(self, phase: str, seconds: float) -> None:
        self.phases[phase] = self.phases.get(phase, 0.0) + seconds

    def tell(self, **facts: object) -> None:
        """Add facts (those of `RankFacts`, and others for the record), and write them down."""
        self._facts.update(facts)
        known = {"rank": self.place.rank, "pid": os.getpid(), "phases": self.phases}
        write_json(self.place.facts, {**known, "error": None, "done": False, **self._facts})

    def fail(
        self, kind: FailureKind, error: BaseException, hint: str = "", where: str | None = None
    ) -> None:
        message = str(getattr(error, "message", error))[:_LONGEST_MESSAGE]
        self.tell(
            error={
                "kind": kind,
                "type": type(error).__name__,
                "message": message,
                "summary": _in_one_line(type(error).__name__, message),
                "hint": hint or str(getattr(error, "hint", "")),
                "where": where,
                "monotonic_ns": time.monotonic_ns(),
            }
        )


def _in_one_line(kind: str, message: str) -> str:
    """What a person reads first. An error of a loader's worker comes with all of its traceback, and
    what it is stands in the first line after that which is not indented."""
    lines = [line.rstrip() for line in message.splitlines() if line.strip()]
    if not lines:
        return kind
    if not _WORKER_ERROR.match(lines[0]):
        return f"{kind}: {lines[0]}"
    own = [line for line in lines[1:] if not line[0].isspace() and not _TRACE.match(line)]
    return f"{own[0] if own else lines[0]} (in a loader worker)"
