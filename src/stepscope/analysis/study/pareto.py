"""Configurations that no other beats in two responses at once."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import groupby

from stepscope.analysis.study.records import (
    ENERGY,
    MEMORY,
    RESPONSES,
    THROUGHPUT,
    Configuration,
    Front,
    Level,
)

Choice = str | tuple[str, ...]
"""A response, or several of which one is taken."""
PAIRS: tuple[tuple[Choice, Choice], ...] = ((THROUGHPUT, MEMORY), (THROUGHPUT, ENERGY))


def fronts(
    configurations: Sequence[Configuration],
    pairs: Sequence[tuple[Choice, Choice]] = PAIRS,
    by: str = "model",
) -> tuple[Front, ...]:
    """One for each pair that something was measured of, for each model; who has no such value is
    left out."""
    models = list(dict.fromkeys(each.levels.get(by) for each in configurations))
    if len(models) < 2:
        return _fronts(configurations, pairs, {})
    told: tuple[Front, ...] = ()
    for model in sorted(models, key=str):
        own = [each for each in configurations if each.levels.get(by) == model]
        told += _fronts(own, pairs, {by: model})
    return told


def _fronts(
    configurations: Sequence[Configuration],
    pairs: Sequence[tuple[Choice, Choice]],
    group: Mapping[str, Level],
) -> tuple[Front, ...]:
    told = []
    for one, other in pairs:
        keys = _chosen(one, configurations), _chosen(other, configurations)
        measured = [each for each in configurations if all(_has(each, key) for key in keys)]
        if measured:
            best = _unbeaten(measured, *keys)
            told.append(Front(keys, tuple(best), len(measured) - len(best), group))
    return tuple(told)


def _chosen(choice: Choice, configurations: Sequence[Configuration]) -> str:
    """The one that most configurations have, else the first: bytes of a GPU and of the host are
    not compared with each other."""
    if isinstance(choice, str):
        return choice
    return max(choice, key=lambda key: sum(_has(each, key) for each in configurations))


def _has(configuration: Configuration, key: str) -> bool:
    return math.isfinite(configuration.values.get(key, math.nan))


def _cost(configuration: Configuration, key: str) -> float:
    """Less of it is better."""
    value = configuration.values[key]
    return -value if RESPONSES[key].better == "more" else value


def _unbeaten(measured: Sequence[Configuration], one: str, other: str) -> list[Configuration]:
    """From the best in one response to the worst, those that are better in the other than all
    before them; equals stand or fall together."""

    def costs(each: Configuration) -> tuple[float, float]:
        return _cost(each, one), _cost(each, other)

    best: list[Configuration] = []
    least = math.inf
    by_cost = sorted(measured, key=lambda each: (*costs(each), each.name, str(each.levels)))
    for (_, cost), equals in groupby(by_cost, costs):
        if cost < least:
            least = cost
            best += equals
    return best
