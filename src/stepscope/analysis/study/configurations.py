"""Means of configurations, those equivalent to the best one, and Pareto fronts."""

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
    observations: Sequence[Observation], fit: Fitted | None, prior: ProcessNoise | None
) -> tuple[Configuration, ...]:
    """Return the mean of each configuration, the highest throughput first.

    The interval of a throughput uses the noise of all repeats of the study, or that of the
    configuration's own repeats if it is larger. `fit` is the fit of throughput; `prior` is the
    noise as it was known before the study.
    """
    groups: dict[object, list[Observation]] = {}
    for each in observations:
        key = tuple(sorted((name, level_key(level)) for name, level in each.levels.items()))
        groups.setdefault((each.name, key), []).append(each)
    means = []
    for repeats in groups.values():
        measured = {key: _measured(repeats, key) for key in RESPONSES}
        values = {key: _mean(each, key) for key, each in measured.items() if each}
        interval = _interval(measured[THROUGHPUT], fit, prior)
        low, high = (interval.low, interval.high) if interval else (None, None)
        name, levels = repeats[0].name, dict(repeats[0].levels)
        means.append(Configuration(name, levels, len(repeats), values, low, high))

    def order(each: Configuration) -> tuple[float, str, str]:
        return -each.values.get(THROUGHPUT, -math.inf), each.name, str(each.levels)

    return tuple(sorted(means, key=order))


def _measured(repeats: Sequence[Observation], key: str) -> list[float]:
    values = [each.values[key] for each in repeats if key in each.values]
    is_ratio = RESPONSES[key].scale == "ratio"
    return [each for each in values if math.isfinite(each) and (each > 0 or not is_ratio)]


def _mean(values: Sequence[float], key: str) -> float:
    if RESPONSES[key].scale == "ratio":
        return math.exp(math.fsum(map(math.log, values)) / len(values))
    return math.fsum(values) / len(values)


def _interval(
    throughputs: Sequence[float], fit: Fitted | None, prior: ProcessNoise | None
) -> Interval | None:
    if not throughputs or fit is None:
        return None
    # The noise without these repeats: from the other repeats of the study, and from the prior.
    own, others = Scatter(*scatter(throughputs)), fit.trials - len(throughputs)
    squares, dof = max(0.0, fit.repeats.squares - own.squares), fit.repeats.dof - own.dof
    if prior:
        known = with_evidence(prior, squares, dof, others)
    elif dof >= 1:
        known = ProcessNoise(math.sqrt(squares / dof), dof, "learned", others)
    elif fit.noise.source == "none":
        return None
    else:
        known = ProcessNoise(fit.noise.sigma, fit.noise.dof, "other_workloads")
    result = combined(throughputs, known)
    scale = _mean(throughputs, THROUGHPUT) / result.mean
    return Interval(float(result.interval.low) * scale, float(result.interval.high) * scale)


def equivalent(means: Sequence[Configuration], noise: Noise | None) -> tuple[str, ...]:
    """Return the names of the configurations that are not significantly slower than the best.

    One-sided, simultaneous for all comparisons with the best (Bonferroni).
    """
    rated = [each for each in means if THROUGHPUT in each.values]
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
    """Return the Pareto fronts of throughput with memory and with energy, for each model."""

    def has(each: Configuration, key: str) -> bool:
        return math.isfinite(each.values.get(key, math.nan))

    models: dict[Level, list[Configuration]] = {}
    for each in configurations:
        models.setdefault(each.levels.get("model"), []).append(each)
    result = []
    for model in sorted(models, key=str):
        own, group = models[model], {"model": model} if len(models) > 1 else {}
        # GPU and host memory are not comparable: use the one that most configurations have.
        memory = max(MEMORY, key=lambda key: sum(has(each, key) for each in own))
        for cost in (memory, ENERGY):
            measured = [each for each in own if has(each, THROUGHPUT) and has(each, cost)]
            if measured:
                front = tuple(_non_dominated(measured, cost))
                dominated = len(measured) - len(front)
                result.append(Front((THROUGHPUT, cost), front, dominated, group))
    return tuple(result)


def _non_dominated(measured: Sequence[Configuration], response: str) -> list[Configuration]:
    """Return the front, the highest throughput first; ties are kept or dropped together."""

    def order(each: Configuration) -> tuple[float, float]:
        return -each.values[THROUGHPUT], each.values[response]

    front: list[Configuration] = []
    lowest = math.inf
    by_throughput = sorted(measured, key=lambda each: (*order(each), each.name, str(each.levels)))
    for (_, cost), ties in groupby(by_throughput, order):
        if cost < lowest:
            lowest = cost
            front += ties
    return front
