"""Report epochs, steps and phases from a training script.

    import stepscope

    for epoch in range(10):
        stepscope.mark("epoch", epoch)
        ...
        with stepscope.phase("eval"):
            ...

Outside of a monitored run these functions do nothing. Standard library only.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import stepscope.inject.events  # noqa: F401  (registers the event writer of this process)

_events: Any = sys.modules["_stepscope_events"]


def mark(name: str, value: float | str | None = None) -> None:
    """Report an event at the current time, for example `mark("epoch", 3)`.

    Marks named "epoch" divide the run into epochs. Set them at the start of every epoch or at the
    end of every epoch; stepscope detects which. A mark named "step" counts as one training step.
    `stepscope.open_run(...).marks()` returns all marks of a run.

    Does nothing if the process is not monitored, and never raises.
    """
    writer = _events.current
    if writer is not None:
        writer.mark(_events.MARK, name, value)


@contextmanager
def phase(name: str, value: float | str | None = None) -> Iterator[None]:
    """Report the block as a named time span: `with phase("eval"):` or `with phase("epoch", 3):`.

    Does nothing if the process is not monitored.
    """
    writer = _events.current
    if writer is None:
        yield
        return
    writer.mark(_events.PHASE_BEGIN, name, value)
    try:
        yield
    finally:
        writer.mark(_events.PHASE_END, name, value)
