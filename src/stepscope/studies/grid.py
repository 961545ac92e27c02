"""The planner of a design: every combination, every repeat, in random order, once.

All combinations come once before any comes again, so that repeats of one lie far apart in time.
What was disturbed comes again at the end; so does what failed for something around it, which others
need not, and what was under way when its runner died more than once: it may be what killed it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence

from stepscope.analysis.study.records import Level
from stepscope.studies.design import Design, Left
from stepscope.studies.dominated import Dominance, observed
from stepscope.studies.known import Known
from stepscope.studies.planner import Wanted
from stepscope.studies.spec import Spec

_LOST_OFTEN = 2


class Grid:
    """Wants all points of a design."""

    def __init__(
        self,
        design: Design,
        points: Sequence[Spec],
        lacks: Callable[[Spec], str] = lambda spec: "",
    ) -> None:
        """`lacks` says what of a trial cannot be had here."""
        self._design = design
        self._specs = {spec.key: spec for spec in points}
        self.unavailable = {spec.key: why for spec in points if (why := lacks(spec))}
        self._observed: tuple[Known, int, Dominance] = Known(), 0, Dominance({}, 0.0, 0)
        self._order = [
            (spec, repeat)
            for repeat in range(1, design.repeats + 1)
            for spec in _shuffled(points, design.seed, repeat)
            if spec.key not in self.unavailable
        ]

    @property
    def planned(self) -> int:
        """Trials of the design that can be had here."""
        return len(self._order)

    @property
    def order(self) -> Sequence[tuple[Spec, int]]:
        return self._order

    def next(self, known: Known) -> Iterator[Wanted]:
        dominance = self._dominance(known)
        later: list[Wanted] = []
        for spec, repeat in self._order:
            if not self._is_open(known, dominance, spec, repeat):
                continue
            wanted = Wanted(spec, repeat)
            if _is_for_later(known, spec.key, repeat):
                later.append(wanted)
            else:
                yield wanted
        yield from later

    def skipped(self, known: Known) -> list[Left]:
        """Combinations that are not tried for what was found out meanwhile, and why."""
        dominance = self._dominance(known)
        found = []
        for spec in self._specs.values():
            why = self.unavailable.get(spec.key) or known.refused.get(spec.key)
            if not why and not any(self._answered(known, spec)):
                why = dominance.reason(spec)
            if why:
                found.append(Left(self._levels(spec), why))
        return found

    def _levels(self, spec: Spec) -> Mapping[str, Level]:
        return {factor.name: spec.get(factor.name) for factor in self._design.factors}

    def _answered(self, known: Known, spec: Spec) -> Iterator[bool]:
        for repeat in range(1, self._design.repeats + 1):
            yield known.best_known(spec.key, repeat) is not None

    def _dominance(self, known: Known) -> Dominance:
        """Asked for several times a trial: it is found out once for so many results."""
        share, seed = self._design.tested_share, self._design.seed
        if not self._design.skip_dominated:
            return Dominance({}, share, seed)
        before, count, dominance = self._observed
        if known is not before or len(known.results) != count:
            calm = [result for result in known.results if not known.is_disturbed(result)]
            dominance = observed(calm, self._specs, share, seed)
            self._observed = known, len(known.results), dominance
        return dominance

    def _is_open(self, known: Known, dominance: Dominance, spec: Spec, repeat: int) -> bool:
        if spec.key in known.refused or (spec.key, repeat) in known.elsewhere:
            return False
        return known.answer(spec.key, repeat) is None and not dominance.reason(spec)


def _is_for_later(known: Known, key: str, repeat: int) -> bool:
    if known.was_disturbed(key, repeat) or known.has_failed(key, repeat):
        return True
    return known.lost(key, repeat) >= _LOST_OFTEN


def _shuffled(points: Sequence[Spec], seed: int, repeat: int) -> list[Spec]:
    """The same for the same design: a study that goes on goes on where it was."""
    shuffled = list(points)
    random.Random(f"{seed} {repeat}").shuffle(shuffled)
    return shuffled
