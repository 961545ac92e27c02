"""The configurations of a study as rows: those that trained, and those that did not."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from stepscope.analysis.study.records import THROUGHPUT, Configuration, Level
from stepscope.records import Outcome
from stepscope.report.bottleneck.words import cause_title
from stepscope.report.kit.outcomes import OUTCOMES, Tone
from stepscope.studies.results import MACHINE, Result
from stepscope.studies.trial_spec import setting

STEP = "step_seconds"
_Value = TypeVar("_Value", Outcome, str)


@dataclass(frozen=True)
class ConfigurationRow:
    """One configuration: its levels, and what its trials came to."""

    key: str
    levels: Mapping[str, Level]
    trials: int
    ok: int
    outcome: Outcome
    """Ok where any of them was."""
    outcome_text: str
    tone: Tone
    values: Mapping[str, float]
    low: float | None = None
    high: float | None = None
    cause: str = ""
    """What held it back most often; of one that failed, the reason."""

    @property
    def rate(self) -> float | None:
        return self.values.get(THROUGHPUT)


def ordered(levels: Mapping[str, Level], factors: Iterable[str]) -> dict[str, Level]:
    return {name: levels[name] for name in factors if name in levels}


def level_order(levels: Mapping[str, Level]) -> list[tuple[bool, float, str]]:
    """To sort by: numbers by their size, before texts."""
    return [
        (False, float(level), "") if isinstance(level, int | float) else (True, 0.0, str(level))
        for level in levels.values()
    ]


def levels_of(result: Result, factors: Iterable[str]) -> dict[str, Level]:
    """The levels of a trial, also those that its settings leave as they would be anyway."""
    return {
        name: result.machine if name == MACHINE else setting(result.settings, name)
        for name in factors
    }


def configuration_rows(
    configurations: Sequence[Configuration], results: Sequence[Result], factors: Sequence[str]
) -> tuple[ConfigurationRow, ...]:
    """Those that trained by throughput, the highest first; then those that never did."""
    found: dict[tuple[Level, ...], list[Result]] = defaultdict(list)
    for result in results:
        found[tuple(levels_of(result, factors).values())].append(result)
    trained = []
    for each in configurations:
        own = found.pop(tuple(each.levels.get(name) for name in factors), [])
        trained.append(_row(each, ordered(each.levels, factors), own))
    failed = [_row(None, levels_of(own[0], factors), own) for own in found.values()]
    return (*trained, *sorted(failed, key=lambda row: level_order(row.levels)))


def _row(
    configuration: Configuration | None, levels: Mapping[str, Level], own: Sequence[Result]
) -> ConfigurationRow:
    outcomes = Counter(each.outcome for each in own)
    ok = outcomes[Outcome.OK] if own or configuration is None else configuration.trials
    outcome = Outcome.OK if ok else _most(each.outcome for each in own) or Outcome.SKIPPED
    values = dict(configuration.values) if configuration else {}
    steps = [each.values[STEP] for each in own if each.is_ok and STEP in each.values]
    if steps:  # in whatever order they ran, to the same bit
        values[STEP] = math.fsum(steps) / len(steps)
    told = [each for each in own if each.is_ok == bool(ok)]
    causes = [cause_title(each.cause) if ok else each.reason for each in told]
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
        cause=_most(cause for cause in causes if cause) or "",
    )


def _most(values: Iterable[_Value]) -> _Value | None:
    """The most frequent; of several, the first by name."""
    counts = Counter(values)
    return min(counts, key=lambda value: (-counts[value], str(value)), default=None)
