"""The configurations of a study as lines of a table: those that trained, and those that did not."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from stepscope.analysis.study.records import THROUGHPUT, Configuration, Level
from stepscope.records import Outcome
from stepscope.report.outcomes import OUTCOMES, Tone
from stepscope.studies.result import MACHINE, Result
from stepscope.workloads.spec import KNOBS, knob_default

STEP = "step_seconds"
_USUAL: dict[str, Level] = {name: knob_default(name) for name in KNOBS}
_Value = TypeVar("_Value", Outcome, str)


@dataclass(frozen=True)
class Point:
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
    """Levels in the order of the design."""
    return {name: levels[name] for name in factors if name in levels}


def level_order(levels: Mapping[str, Level]) -> list[tuple[bool, float, str]]:
    """To sort by: numbers by their size, before texts."""
    return [
        (False, float(level), "") if isinstance(level, int | float) else (True, 0.0, str(level))
        for level in levels.values()
    ]


def levels_of(result: Result, factors: Iterable[str]) -> dict[str, Level]:
    """The levels of a trial, also those that its settings leave as they would be anyway."""
    return {name: _setting(result, name) for name in factors}


def _setting(result: Result, name: str) -> Level:
    if name in result.settings:
        return result.settings[name]
    return result.machine if name == MACHINE else _USUAL.get(name)


def points_of(
    configurations: Sequence[Configuration], results: Sequence[Result], factors: Sequence[str]
) -> tuple[Point, ...]:
    """Those that trained by throughput, the highest first; then those that never did."""
    found: dict[tuple[Level, ...], list[Result]] = defaultdict(list)
    for result in results:
        found[tuple(levels_of(result, factors).values())].append(result)
    trained = []
    for each in configurations:
        place = tuple(each.levels.get(name) for name in factors)
        trained.append(_point(each, ordered(each.levels, factors), found.pop(place, [])))
    failed = [_point(None, levels_of(own[0], factors), own) for own in found.values()]
    return (*trained, *sorted(failed, key=lambda point: level_order(point.levels)))


def _point(
    configuration: Configuration | None, levels: Mapping[str, Level], own: Sequence[Result]
) -> Point:
    outcomes = Counter(each.outcome for each in own)
    ok = outcomes[Outcome.OK] if own or configuration is None else configuration.trials
    outcome = Outcome.OK if ok else _most(each.outcome for each in own) or Outcome.SKIPPED
    values = dict(configuration.values) if configuration else {}
    steps = [each.values[STEP] for each in own if each.is_ok and STEP in each.values]
    if steps:  # in whatever order they ran, to the same bit
        values[STEP] = math.fsum(steps) / len(steps)
    causes = [each.cause if ok else each.reason for each in own if each.is_ok == bool(ok)]
    return Point(
        key=min((each.key for each in own), default=configuration.name if configuration else ""),
        levels=levels,
        trials=len(own) or ok,
        ok=ok,
        outcome=outcome,
        outcome_text=_outcome_text(outcomes) or OUTCOMES[outcome][0],
        tone=OUTCOMES[outcome][1] if len(outcomes) < 2 else "warning",
        values=values,
        low=configuration.low if configuration else None,
        high=configuration.high if configuration else None,
        cause=_most(cause for cause in causes if cause) or "",
    )


def _outcome_text(outcomes: Counter[Outcome]) -> str:
    """`ok`, `out of memory`, `2 ok, 1 crashed`."""
    told = sorted(outcomes.items(), key=lambda each: list(Outcome).index(each[0]))
    if len(told) == 1:
        return OUTCOMES[told[0][0]][0]
    return ", ".join(f"{count} {OUTCOMES[outcome][0]}" for outcome, count in told)


def _most(values: Iterable[_Value]) -> _Value | None:
    """The most frequent; of several, the first by name."""
    counts = Counter(values)
    return min(counts, key=lambda value: (-counts[value], str(value)), default=None)
