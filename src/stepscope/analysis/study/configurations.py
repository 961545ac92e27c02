"""Every point of a design over its repeats: which are as good as the best, which no other beats."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby

from stepscope.analysis.statistics import t_quantile
from stepscope.analysis.study.fitted import Fitted
from stepscope.analysis.study.noise import Scatter
from stepscope.analysis.study.records import (
    ENERGY,
    MEMORY,
    RESPONSES,
    THROUGHPUT,
    Configuration,
    Front,
    Level,
    Noise,
    Observation,
)
from stepscope.analysis.study.table import level_key
from stepscope.analysis.trial.throughput import (
    CONFIDENCE,
    Interval,
    combined,
    scatter,
    with_evidence,
)
from stepscope.records.trial import ProcessNoise


def configurations(
    observations: Sequence[Observation], fit: Fitted | None, known: ProcessNoise | None
) -> tuple[Configuration, ...]:
    """By throughput, the highest first; those without it last.

    Where a rate lies is told by what all repeats of the study scatter, and by its own where they
    scatter more; `known` is what was known before. `fit` is that of throughput.
    """
    groups: dict[object, list[Observation]] = {}
    for each in observations:
        key = tuple(sorted((name, level_key(level)) for name, level in each.levels.items()))
        groups.setdefault((each.name, key), []).append(each)
    found = []
    for first, *others in groups.values():
        measured = {key: _measured([first, *others], key) for key in RESPONSES}
        values = {key: _mean(each, key) for key, each in measured.items() if each}
        between = _interval(measured[THROUGHPUT], fit, known)
        low, high = (between.low, between.high) if between else (None, None)
        levels = dict(first.levels)
        found.append(Configuration(first.name, levels, 1 + len(others), values, low, high))

    def order(each: Configuration) -> tuple[float, str, str]:
        return -each.values.get(THROUGHPUT, -math.inf), each.name, str(each.levels)

    return tuple(sorted(found, key=order))


def _measured(group: Sequence[Observation], key: str) -> list[float]:
    values = [each.values[key] for each in group if key in each.values]
    is_ratio = RESPONSES[key].scale == "ratio"
    return [each for each in values if math.isfinite(each) and (each > 0 or not is_ratio)]


def _mean(values: Sequence[float], key: str) -> float:
    if RESPONSES[key].scale == "ratio":
        return math.exp(math.fsum(map(math.log, values)) / len(values))
    return math.fsum(values) / len(values)


def _interval(
    rates: Sequence[float], fit: Fitted | None, known: ProcessNoise | None
) -> Interval | None:
    if not rates or fit is None:
        return None
    # What is known of the noise but for these repeats: by all others, and before the study.
    own, others = Scatter(*scatter(rates)), fit.trials - len(rates)
    squares, dof = max(0.0, fit.repeats.squares - own.squares), fit.repeats.dof - own.dof
    if known:
        before = with_evidence(known, squares, dof, others)
    elif dof >= 1:
        before = ProcessNoise(math.sqrt(squares / dof), dof, "learnt", others)
    elif fit.noise.source == "none":
        return None
    else:
        before = ProcessNoise(fit.noise.sigma, fit.noise.dof, "others")
    found = combined(rates, before)
    scale = _mean(rates, THROUGHPUT) / found.mean
    return Interval(float(found.interval.low) * scale, float(found.interval.high) * scale)


def as_good(found: Sequence[Configuration], noise: Noise | None) -> tuple[str, ...]:
    """Names of those that cannot be told from the best: how far two may be apart by chance, when
    the best of so many was picked (Bonferroni)."""
    rated = [each for each in found if THROUGHPUT in each.values]
    if len(rated) < 2 or noise is None:
        return ()
    best, others = rated[0], rated[1:]
    if noise.source == "none":
        return tuple(each.name for each in others)
    width = t_quantile(1 - (1 - CONFIDENCE) / len(others), noise.dof) * noise.sigma
    return tuple(
        each.name
        for each in others
        if math.log(best.values[THROUGHPUT] / each.values[THROUGHPUT])
        <= width * math.sqrt(1 / best.trials + 1 / each.trials)
    )


def fronts(configurations: Sequence[Configuration]) -> tuple[Front, ...]:
    """Throughput against memory and against energy, for each model, where they were measured."""

    def has(each: Configuration, key: str) -> bool:
        return math.isfinite(each.values.get(key, math.nan))

    models: dict[Level, list[Configuration]] = {}
    for each in configurations:
        models.setdefault(each.levels.get("model"), []).append(each)
    found = []
    for model in sorted(models, key=str):
        own, group = models[model], {"model": model} if len(models) > 1 else {}
        # Bytes of a GPU and of the host are not compared: the memory that most of them have.
        memory = max(MEMORY, key=lambda key: sum(has(each, key) for each in own))
        for other in (memory, ENERGY):
            measured = [each for each in own if has(each, THROUGHPUT) and has(each, other)]
            if measured:
                best = tuple(_unbeaten(measured, other))
                found.append(Front((THROUGHPUT, other), best, len(measured) - len(best), group))
    return tuple(found)


def _unbeaten(measured: Sequence[Configuration], other: str) -> list[Configuration]:
    """From the highest throughput to the lowest, those that have less of the other response than
    all before them; equals stand or fall together."""

    def costs(each: Configuration) -> tuple[float, float]:
        return -each.values[THROUGHPUT], each.values[other]

    best: list[Configuration] = []
    least = math.inf
    by_cost = sorted(measured, key=lambda each: (*costs(each), each.name, str(each.levels)))
    for (_, cost), equals in groupby(by_cost, costs):
        if cost < least:
            least = cost
            best += equals
    return best
