"""What a study will try: factors × levels × repeats, less what is skipped."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from stepscope.analysis.study.records import Factor, Level
from stepscope.studies.design.rules import Rule
from stepscope.studies.trial_spec import TrialSpec


@dataclass(frozen=True)
class Budget:
    """What a study may take in all, over every time it is run; None is no bound."""

    seconds: float | None = None
    trials: int | None = None


@dataclass(frozen=True)
class Design:
    """A study as its file says it. `read_design` is how to get one."""

    name: str
    fixed: Mapping[str, Level]
    """Settings that all trials have, `model` among them unless it is a factor."""
    factors: tuple[Factor, ...]
    rules: tuple[Rule, ...] = ()
    repeats: int = 1
    seed: int = 0
    sample: int | None = None
    """How many combinations are tried, drawn at random; None is all."""
    budget: Budget = Budget()
    block: int = 8
    """Trials between two reference trials."""
    reference: Mapping[str, Level] | None = None
    """Settings of the configuration that every block begins with, where they were said."""
    with_reference: bool = True
    reruns: int = 1
    """How often a block that was disturbed is run again."""
    skip_dominated: bool = True
    """Whether what needs more memory than something that ran out of it is left out."""
    tested_share: float = 0.1
    """Of what would be left out: so much is tried nevertheless."""
    file: Path | None = None
    text: str = ""

    @property
    def base(self) -> Path:
        """The folder that the user's own files are named from."""
        return self.file.parent if self.file else Path()


@dataclass(frozen=True)
class SkippedPoint:
    """A combination that is not tried, and why."""

    levels: Mapping[str, Level]
    why: str


@dataclass(frozen=True)
class DesignPoints:
    """The combinations of a design."""

    chosen: tuple[TrialSpec, ...]
    """In the order of the design, the last factor varying fastest."""
    skipped: tuple[SkippedPoint, ...] = ()
    """By a rule, or since the combination makes no workload."""
    combinations: int = 0
    """Of all levels, before anything was left out."""
    not_chosen: int = 0
    """Left out by the random sample."""
    remarks: tuple[str, ...] = field(default=())
