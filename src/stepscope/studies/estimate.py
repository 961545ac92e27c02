"""How long what is left of a study will take: by what trials like it took."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from stepscope.studies.results import Result
from stepscope.studies.trial_spec import TrialSpec
from stepscope.workloads.spec import DEFAULT_SECONDS

_START_S = 8.0
"""What a trial takes before its first step, until one was seen: imports, data, the model."""


class TrialDurations:
    """Seconds that trials took, by how alike they are."""

    def __init__(self, results: Iterable[Result] = ()) -> None:
        self._seen: dict[object, tuple[float, int]] = defaultdict(lambda: (0.0, 0))
        """Seconds in all, and of how many."""
        for result in results:
            self.add(result)

    def add(self, result: Result) -> None:
        if result.is_result and result.seconds:
            for like in (result.key, ("model", result.settings.get("model")), None):
                total, count = self._seen[like]
                self._seen[like] = total + result.seconds, count + 1

    @property
    def is_measured(self) -> bool:
        return None in self._seen

    def of(self, spec: TrialSpec) -> float | None:
        """As the same configuration took, else the same model, else any; else what it is told to
        take; None where nobody knows how long its steps are."""
        for like in (spec.key, ("model", spec.workload.model), None):
            if like in self._seen:
                total, count = self._seen[like]
                return total / count
        workload = spec.workload
        if workload.steps is not None or workload.epochs is not None:
            return None
        return _START_S + (workload.seconds or DEFAULT_SECONDS)

    def total(self, specs: Iterable[TrialSpec]) -> float | None:
        each = [self.of(spec) for spec in specs]
        known = [seconds for seconds in each if seconds is not None]
        if not known:
            return None if each else 0.0
        return sum(known) + (len(each) - len(known)) * sum(known) / len(known)
