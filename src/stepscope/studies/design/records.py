"""The records of a design: what a study runs, and which combinations it skips."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from stepscope.analysis.study.records import Factor, Level
from stepscope.studies.design.rules import Rule
from stepscope.studies.trial_spec import TrialSpec


@dataclass(frozen=True)
class Budget:
    """The total time and trials of a study, over all of its runs; None is unlimited."""

    seconds: float | None = None
    trials: int | None = None


@dataclass(frozen=True)
class Design:
    """A study as its design file describes it. `read_design` returns one."""

    name: str
    fixed: Mapping[str, Level]
    """Settings of all trials; they include `model` unless it is a factor."""
    factors: tuple[Factor, ...]
    rules: tuple[Rule, ...] = ()
    repeats: int = 1
    seed: int = 0
    sample: int | None = None
    """Number of combinations to draw at random; None is all."""
    budget: Budget = Budget()
    block: int = 8
    """Trials between two reference trials."""
    reference: Mapping[str, Level] | None = None
    """Settings of the reference trial, if the design sets any."""
    with_reference: bool = True
    reruns: int = 1
    """How often a block is rerun because of interference."""
    skip_dominated: bool = True
    """Whether to skip trials that need more memory than a trial that ran out of it."""
    tested_share: float = 0.1
    """Share of those trials that is run nevertheless."""
    file: Path | None = None
    text: str = ""

    @property
    def base(self) -> Path:
        """The folder that paths in the design are relative to."""
        return self.file.parent if self.file else Path()


@dataclass(frozen=True)
class SkippedPoint:
    """A combination that is not run, with the reason."""

    levels: Mapping[str, Level]
    why: str


@dataclass(frozen=True)
class DesignPoints:
    """The combinations of a design."""

    chosen: tuple[TrialSpec, ...]
    """In the order of the design, the last factor varying fastest."""
    skipped: tuple[SkippedPoint, ...] = ()
    """Skipped by a rule, or because they are not a valid workload."""
    combinations: int = 0
    """Number of all combinations, including the skipped ones."""
    not_chosen: int = 0
    """Number of combinations that the random sample leaves out."""
    remarks: tuple[str, ...] = field(default=())
