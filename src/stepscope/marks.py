"""How a training script reports epochs, steps and phases. A no-op when nobody watches.

    import stepscope

    for epoch in range(10):
        stepscope.mark("epoch", epoch)
        ...
        with stepscope.phase("eval"):
            ...

Standard library only.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import stepscope.inject.events  # noqa: F401  (it registers the writer of this process)

_events: Any = sys.modules["_stepscope_events"]


def mark(name: str, value: float | str | None = None) -> None:
    """Put an event on the clock of the samples, say `mark("epoch", 3)`.

    A mark named "epoch" divides the run: put it at the start of each epoch or at the end of each,
    stepscope tells which. A mark named "step" counts as a training step.
    """
    writer = _events.current
    if writer is not None:
        writer.mark(_events.MARK, name, value)


@contextmanager
def phase(name: str, value: float | str | None = None) -> Iterator[None]:
    """A stretch of time with a name, say `with phase("eval"):` or `with phase("epoch", 3):`."""
    writer = _events.current
    if writer is None:
        yield
        return
    writer.mark(_events.PHASE_BEGIN, name, value)
    try:
        yield
    finally:
        writer.mark(_events.PHASE_END, name, value)
