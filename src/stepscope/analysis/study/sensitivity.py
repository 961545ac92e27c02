"""Which factors matter, and how much: for all trials, and for each model (or machine)."""

from __future__ import annotations

from collections.abc import Sequence

from stepscope.analysis.study.effects import main_effects
from stepscope.analysis.study.fitted import Fitted, Throughputs, throughputs
from stepscope.analysis.study.records import (
    Factor,
    Level,
    MainEffect,
    Observation,
    Sensitivity,
)
from stepscope.analysis.study.words import Text, is_many, plain, times, times_between
from stepscope.analysis.throughput import Spread

BY = ("model", "machine")
"""What trials are grouped by: the first of them that was varied."""


def sensitivities(
    observations: Sequence[Observation],
    factors: Sequence[Factor],
    known: Spread | None = None,
    by: Sequence[str] = BY,
    text: Text = plain,
) -> tuple[Sensitivity, ...]:
    """All together first, then each level of what they are grouped by."""
    return ranked(throughputs(observations, factors, known), by, text)


def ranked(
    trials: Throughputs, by: Sequence[str] = BY, text: Text = plain
) -> tuple[Sensitivity, ...]:
    if trials.all is None:
        return ()
    told = [_sensitivity(trials.all, {}, text)]
    grouping = trials.varied(by)
    for level in grouping.levels if grouping else ():
        fit = trials.of(grouping.name, level) if grouping else None
        if fit and grouping:
            told.append(_sensitivity(fit, {grouping.name: level}, text))
    return tuple(told)


def _sensitivity(fit: Fitted, group: dict[str, Level], text: Text) -> Sensitivity:
    effects, _ = main_effects(fit, text)
    whom = " and ".join(text(name, level) for name, level in group.items())
    return Sensitivity(group, effects, f"for {whom or 'all trials'} {_matter(effects)}")


def _matter(effects: Sequence[MainEffect]) -> str:
    if not effects:
        return "there is no factor whose effect could be told"
    first, *others = effects
    verb = "matter" if is_many(first.factor) else "matters"
    parts = [f"{first.factor} {verb} {_size(first)}"]
    parts += [f"{each.factor} {_size(each)}" for each in others]
    return ", ".join(parts)


def _size(effect: MainEffect) -> str:
    told = times_between(effect.size)
    return f"{times(effect.size.value)} ({told if effect.is_told else _untold(told)})"


def _untold(between: str) -> str:
    return f"{between}, not told from no effect"
