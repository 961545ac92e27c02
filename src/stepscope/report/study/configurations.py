"""The configurations of a study as table rows, including those without a successful trial."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from stepscope.analysis.study.records import THROUGHPUT, Configuration, Level
from stepscope.records import Outcome
from stepscope.report.bottleneck.messages import cause_title
from stepscope.report.kit.outcomes import OUTCOMES, Tone
from stepscope.studies.results import MACHINE, Result
from stepscope.studies.trial_spec import setting

STEP = "step_seconds"
_Value = TypeVar("_Value", Outcome, str)


@dataclass(frozen=True)
class ConfigurationRow:
    """One configuration with the means and the outcome of its trials."""

    key: str  # hash of the settings, and name of the folder
    levels: Mapping[str, Level]  # level by factor
    trials: int  # number of trials
    ok: int  # number of successful trials
    outcome: Outcome  # outcome; `ok` if at least one trial succeeded
    outcome_text: str
    tone: Tone
    values: Mapping[str, float]  # mean by response
    low: float | None = None  # throughput: lower end of the confidence interval
    high: float | None = None  # throughput: upper end of the confidence interval
    cause: str = ""  # the most frequent bottleneck; without a successful trial, the reason

    @property
    def throughput(self) -> float | None:
        return self.values.get(THROUGHPUT)


def ordered(levels: Mapping[str, Level], factors: Iterable[str]) -> dict[str, Level]:
    return {name: levels[name] for name in factors if name in levels}


def level_order(levels: Mapping[str, Level]) -> list[tuple[bool, float, str]]:
    """Return a sort key: numbers by value, before texts."""
    return [
        (False, float(level), "") if isinstance(level, int | float) else (True, 0.0, str(level))
        for level in levels.values()
    ]


def levels_of(result: Result, factors: Iterable[str]) -> dict[str, Level]:
    """Return the levels of a trial, including those that are defaults."""
    return {
        name: result.machine if name == MACHINE else setting(result.settings, name)
        for name in factors
    }


def configuration_rows(
    configurations: Sequence[Configuration], results: Sequence[Result], factors: Sequence[str]
) -> tuple[ConfigurationRow, ...]:
    """Return the rows, the highest throughput first; those without a successful trial last."""
    groups: dict[tuple[Level, ...], list[Result]] = defaultdict(list)
    for result in results:
        groups[tuple(levels_of(result, factors).values())].append(result)
    succeeded = []
    for each in configurations:
        own = groups.pop(tuple(each.levels.get(name) for name in factors), [])
        succeeded.append(_row(each, ordered(each.levels, factors), own))
    failed = [_row(None, levels_of(own[0], factors), own) for own in groups.values()]
    return (*succeeded, *sorted(failed, key=lambda row: level_order(row.levels)))


def _row(
    configuration: Configuration | None, levels: Mapping[str, Level], own: Sequence[Result]
) -> ConfigurationRow:
    outcomes = Counter(each.outcome for each in own)
    ok = outcomes[Outcome.OK] if own or configuration is None else configuration.trials
    outcome = Outcome.OK if ok else _most_common(each.outcome for each in own) or Outcome.SKIPPED
    values = dict(configuration.values) if configuration else {}
    steps = [each.values[STEP] for each in own if each.is_ok and STEP in each.values]
    if steps:  # fsum: the same bits in any order
        values[STEP] = math.fsum(steps) / len(steps)
    relevant = [each for each in own if each.is_ok == bool(ok)]
    causes = [cause_title(each.cause) if ok else each.reason for each in relevant]
    label, tone = OUTCOMES[outcome]
    if len(outcomes) > 1:  # `2 ok, 1 crashed`
        in_order = sorted(outcomes.items(), key=lambda each: list(Outcome).index(each[0]))
        label = ", ".join(f"{count} {OUTCOMES[outcome][0]}" for outcome, count in in_order)
        tone = "warning"
    return ConfigurationRow(
        key=min((each.key for each in own), default=configuration.name if configuration else ""),
        levels=levels,
        trials=len(own) or ok,
        ok=ok,
        outcome=outcome,
        outcome_text=label,
        tone=tone,
        values=values,
        low=configuration.low if configuration else None,
        high=configuration.high if configuration else None,
        cause=_most_common(cause for cause in causes if cause) or "",
    )


def _most_common(values: Iterable[_Value]) -> _Value | None:
    """Return the most frequent value; the first by name among ties."""
    counts = Counter(values)
    return min(counts, key=lambda value: (-counts[value], str(value)), default=None)
