"""Estimates the remaining time of a study from the durations of similar trials."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from stepscope.studies.results import Result
from stepscope.studies.trial_spec import TrialSpec
from stepscope.workloads.spec import DEFAULT_SECONDS

_START_S = 8.0
"""Assumed time before the first step (imports, data, model) until a trial was measured."""


class TrialDurations:
    """Durations of trials, by configuration and by model."""

    def __init__(self, results: Iterable[Result] = ()) -> None:
        self._seen: dict[object, tuple[float, int]] = defaultdict(lambda: (0.0, 0))
        """Total seconds and number of trials."""
        for result in results:
            self.add(result)

    def add(self, result: Result) -> None:
        if result.is_result and result.seconds:
            for group in (result.key, ("model", result.settings.get("model")), None):
                total, count = self._seen[group]
                self._seen[group] = total + result.seconds, count + 1

    @property
    def is_measured(self) -> bool:
        return None in self._seen

    def of(self, spec: TrialSpec) -> float | None:
        """Return the expected seconds of a trial; None if they are unknown.

        They are the mean of the same configuration, else of the same model, else of all trials.
        Without any measurement they follow from the `seconds` setting.
        """
        for group in (spec.key, ("model", spec.workload.model), None):
            if group in self._seen:
                total, count = self._seen[group]
                return total / count
        workload = spec.workload
        if workload.steps is not None or workload.epochs is not None:
            return None
        return _START_S + (workload.seconds or DEFAULT_SECONDS)

    def total(self, specs: Iterable[TrialSpec]) -> float | None:
        """Return the expected seconds of several trials; None if all of them are unknown."""
        expected = [self.of(spec) for spec in specs]
        known = [seconds for seconds in expected if seconds is not None]
        if not known:
            return None if expected else 0.0
        return sum(known) + (len(expected) - len(known)) * sum(known) / len(known)
