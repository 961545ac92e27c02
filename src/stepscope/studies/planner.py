"""Who decides what is tried next: from what is known to which trials to run.

A grid is one; `fit`, `tune` and `confirm` are others. The engine runs what a planner wants, exactly
once, and asks again whenever something new is known.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from stepscope.studies.known import Known
from stepscope.studies.spec import Spec


@dataclass(frozen=True)
class Wanted:
    """A trial that is worth running."""

    spec: Spec
    repeat: int = 1


class Planner(Protocol):
    """Proposes trials. It keeps nothing of its own that a restart would lose: all it needs to
    decide is in what is known."""

    def next(self, known: Known) -> Iterable[Wanted]:
        """What to run now, the most wanted first; nothing once all is known.

        What was answered is not wanted again: `known.answer`. What is running may be among it: the
        engine leaves that out.
        """
        ...
