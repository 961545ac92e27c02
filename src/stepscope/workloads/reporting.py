"""What a rank says of itself while it trains: one small JSON file, replaced atomically, so that a
trial that is killed at any moment leaves all that was known until then."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from stepscope import marks
from stepscope.runs.paths import replace_atomically

FailureKind = Literal["workload", "gpu_oom", "host_oom", "error"]
_LONGEST_MESSAGE = 4000
_GPU_NAMES = ("CUDA", "CUBLAS", "CUDNN")
_NO_GPU_MEMORY = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")
_NO_HOST_MEMORY = ("DefaultCPUAllocator: ", "Cannot allocate memory", "Caught MemoryError")
_NO_ENGINE = "unable to find an engine to execute this computation"
"""What cuDNN's front end says when it has tried all algorithms, also if each ran out of memory."""


@dataclass(frozen=True)
class Place:
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
    """The facts of one rank; `write` after every news."""

    place: Place
    facts: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.facts = {
            "rank": self.place.rank,
            "pid": os.getpid(),
            "phases": {},
            "error": None,
            "done": False,
            **self.facts,
        }

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
        self.facts["phases"][phase] = self.facts["phases"].get(phase, 0.0) + seconds

    def tell(self, **facts: Any) -> None:
        """Add facts, and write them down."""
        self.facts.update(facts)
        self.write()

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

    def write(self) -> None:
        replace_atomically(self.place.facts, json.dumps(self.facts, indent=1, default=str) + "\n")


def failure_kind(error: BaseException, ooms: int = 0) -> FailureKind:
    """Memory may also end in libraries, which have words of their own for it. `ooms` is how often
    the allocator of the device could not give any."""
    text = str(error)
    if isinstance(error, MemoryError) or any(words in text for words in _NO_HOST_MEMORY):
        return "host_oom"
    of_gpu = type(error).__name__ == "OutOfMemoryError" or any(name in text for name in _GPU_NAMES)
    if of_gpu and any(words in text for words in _NO_GPU_MEMORY):
        return "gpu_oom"
    return "gpu_oom" if ooms and _NO_ENGINE in text else "error"


def _in_one_line(kind: str, message: str) -> str:
    """What a person reads first. An error of a loader's worker comes with all of its traceback, and
    what it is stands in the first line after that which is not indented."""
    lines = [line.rstrip() for line in message.splitlines() if line.strip()]
    if not lines:
        return kind
    if not (lines[0].startswith("Caught ") and "worker process" in lines[0]):
        return f"{kind}: {lines[0]}"
    own = [line for line in lines[1:] if not line[0].isspace() and not _TRACE.match(line)]
    return f"{own[0] if own else lines[0]} (in a loader worker)"


_TRACE = re.compile(r"(Original )?Traceback \(|The above exception|During handling of")
