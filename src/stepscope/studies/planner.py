"""Planners choose the next trials from the results so far.

The engine runs each proposed trial once and asks the planner again after every result.
`GridPlanner` is the planner of a design.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

from stepscope.records import Outcome
from stepscope.studies.design.records import Design, SkippedPoint
from stepscope.studies.dominated import Dominance, find_dominance
from stepscope.studies.results import Results
from stepscope.studies.trial_spec import TrialSpec

_MANY_LOST = 2


class ProposedTrial(NamedTuple):
    """A trial that a planner proposes to run."""

    spec: TrialSpec
    repeat: int = 1


class Planner(Protocol):
    """Proposes trials. It has no state of its own: it decides from the results alone."""

    def next(self, results: Results) -> Iterable[ProposedTrial]:
        """Return the trials to run, the most important first; none when the study is done.

        Trials that have an answer (`results.answer`) are not proposed. Running trials may be
        proposed: the engine ignores them.
        """
        ...

    def remaining(self, results: Results) -> Sequence[ProposedTrial] | None:
        """Return all trials that remain, for the progress display; None if that is not known."""
        return None


class GridPlanner(Planner):
    """All combinations of a design with all repeats, in random order.

    Every combination runs once before any is repeated, so that the repeats of one are far apart in
    time. Three kinds of trials come last: those with interference, those whose infrastructure
    failed, and those that were lost more than once (they may have killed the runner).
    """

    def __init__(
        self,
        design: Design,
        points: Sequence[TrialSpec],
        unavailable_reason: Callable[[TrialSpec], str] = lambda spec: "",
    ) -> None:
        """`unavailable_reason` returns why this machine cannot run a trial, or nothing."""
        self._design = design
        self._specs = {spec.key: spec for spec in points}
        self.unavailable = {spec.key: why for spec in points if (why := unavailable_reason(spec))}
        self._cached_for: tuple[Results, int] | None = None
        self._cached_dominance = Dominance({}, 0.0, 0)
        self.order: list[ProposedTrial] = []
        """All trials that this machine can run."""
        for repeat in range(1, design.repeats + 1):
            # Seeded, so that a study resumes in the same order.
            shuffled = list(points)
            random.Random(f"{design.seed} {repeat}").shuffle(shuffled)
            self.order += [
                ProposedTrial(spec, repeat) for spec in shuffled if spec.key not in self.unavailable
            ]

    @property
    def planned(self) -> int:
        return len(self.order)

    def next(self, results: Results) -> Iterator[ProposedTrial]:
        dominance = self._dominance(results)
        last: list[ProposedTrial] = []
        for trial in self.order:
            key, repeat = trial.spec.key, trial.repeat
            if key in results.refused or (key, repeat) in results.claimed_by_others:
                continue
            if results.answer(key, repeat) is not None or dominance.reason(trial.spec):
                continue
            attempts = results.attempts(key, repeat)
            lost = sum(result.outcome is Outcome.LOST for result in attempts)
            if lost >= _MANY_LOST or any(r.is_result or r.infrastructure for r in attempts):
                last.append(trial)
            else:
                yield trial
        yield from last

    def remaining(self, results: Results) -> list[ProposedTrial]:
        return list(self.next(results))

    def skipped(self, results: Results) -> list[SkippedPoint]:
        """Return the combinations that the results or the machine exclude, with reasons."""
        dominance = self._dominance(results)
        repeats = range(1, self._design.repeats + 1)
        points = []
        for spec in self._specs.values():
            why = self.unavailable.get(spec.key) or results.refused.get(spec.key)
            if not why and not any(results.best_known(spec.key, repeat) for repeat in repeats):
                why = dominance.reason(spec)
            if why:
                levels = {factor.name: spec.get(factor.name) for factor in self._design.factors}
                points.append(SkippedPoint(levels, why))
        return points

    def _dominance(self, results: Results) -> Dominance:
        """Return the dominance, cached because it is needed several times per trial."""
        design, current = self._design, (results, len(results.results))
        if design.skip_dominated and current != self._cached_for:
            clean = [each for each in results.results if not results.has_interference(each)]
            self._cached_dominance = find_dominance(
                clean, self._specs, design.tested_share, design.seed
            )
            self._cached_for = current
        return self._cached_dominance
