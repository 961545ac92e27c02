"""Planners decide which trials to run next, from the results so far.

The engine runs what a planner proposes, each once, and asks again after every result. `GridPlanner`
is the planner of a design.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

from stepscope.records import Outcome
from stepscope.studies.design.records import Design, SkippedPoint
from stepscope.studies.dominated import Dominance, observed
from stepscope.studies.results import Results
from stepscope.studies.trial_spec import TrialSpec

_LOST_OFTEN = 2


class ProposedTrial(NamedTuple):
    """A trial that is worth running."""

    spec: TrialSpec
    repeat: int = 1


class Planner(Protocol):
    """Proposes trials. It keeps nothing that a restart would lose: it decides by results alone."""

    def next(self, results: Results) -> Iterable[ProposedTrial]:
        """What to run now, the most wanted first; nothing when the study is done.

        What has an answer (`results.answer`) is not proposed again. What is running may be
        proposed: the engine leaves it out.
        """
        ...

    def to_come(self, results: Results) -> Sequence[ProposedTrial] | None:
        """All that is still to run, for the progress display; None if later results decide that."""
        return None


class GridPlanner(Planner):
    """All points of a design, every repeat, in random order.

    All combinations come once before any comes again, so that the repeats of one lie far apart in
    time. Three kinds come last: what was disturbed, what failed for something around it (others
    may not), and what was running when its runner died more than once (it may be the reason).
    """

    def __init__(
        self,
        design: Design,
        points: Sequence[TrialSpec],
        lacks: Callable[[TrialSpec], str] = lambda spec: "",
    ) -> None:
        """`lacks` says what a trial needs that this machine does not have."""
        self._design = design
        self._specs = {spec.key: spec for spec in points}
        self.unavailable = {spec.key: why for spec in points if (why := lacks(spec))}
        self._seen: tuple[Results, int] | None = None
        self._observed = Dominance({}, 0.0, 0)
        self.order: list[ProposedTrial] = []
        """Every trial that this machine can run."""
        for repeat in range(1, design.repeats + 1):
            # Seeded: a study that is resumed goes on where it was.
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
            tries = results.tries(key, repeat)
            lost = sum(result.outcome is Outcome.LOST for result in tries)
            if lost >= _LOST_OFTEN or any(r.is_result or r.infrastructure for r in tries):
                last.append(trial)
            else:
                yield trial
        yield from last

    def to_come(self, results: Results) -> list[ProposedTrial]:
        return list(self.next(results))

    def skipped(self, results: Results) -> list[SkippedPoint]:
        """Combinations that results or the machine rule out, and why."""
        dominance = self._dominance(results)
        repeats = range(1, self._design.repeats + 1)
        found = []
        for spec in self._specs.values():
            why = self.unavailable.get(spec.key) or results.refused.get(spec.key)
            if not why and not any(results.best_known(spec.key, repeat) for repeat in repeats):
                why = dominance.reason(spec)
            if why:
                levels = {factor.name: spec.get(factor.name) for factor in self._design.factors}
                found.append(SkippedPoint(levels, why))
        return found

    def _dominance(self, results: Results) -> Dominance:
        """Computed once per number of results: it is asked for several times a trial."""
        design, seen = self._design, (results, len(results.results))
        if design.skip_dominated and seen != self._seen:
            calm = [each for each in results.results if not results.is_disturbed(each)]
            self._observed = observed(calm, self._specs, design.tested_share, design.seed)
            self._seen = seen
        return self._observed
