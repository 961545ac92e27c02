"""Every point of a design over its repeats, and which of them are as good as the best."""

from __future__ import annotations

import math
from collections.abc import Sequence

from stepscope.analysis.study.fitted import Fitted
from stepscope.analysis.study.noise import Scatter
from stepscope.analysis.study.quantiles import t_quantile
from stepscope.analysis.study.records import (
    RESPONSES,
    THROUGHPUT,
    Configuration,
    Noise,
    Observation,
)
from stepscope.analysis.study.table import level_key
from stepscope.analysis.throughput import (
    CONFIDENCE,
    Interval,
    Spread,
    combined,
    scatter,
    with_evidence,
)


def configurations(
    observations: Sequence[Observation], fit: Fitted | None, known: Spread | None
) -> tuple[Configuration, ...]:
    """By throughput, the highest first; those without it last.

    Where a rate lies is told by what all repeats of the study scatter, and by its own where they
    scatter more; `known` is what was known before. `fit` is that of throughput.
    """
    groups: dict[object, list[Observation]] = {}
    for each in observations:
        key = tuple(sorted((name, level_key(level)) for name, level in each.levels.items()))
        groups.setdefault((each.name, key), []).append(each)
    told = [_configuration(group, fit, known) for group in groups.values()]
    return tuple(sorted(told, key=_order))


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
        if _behind(best, each) <= width * math.sqrt(1 / best.trials + 1 / each.trials)
    )


def _behind(best: Configuration, other: Configuration) -> float:
    return math.log(best.values[THROUGHPUT] / other.values[THROUGHPUT])


def _configuration(
    group: Sequence[Observation], fit: Fitted | None, known: Spread | None
) -> Configuration:
    values = {}
    for key in RESPONSES:
        measured = _measured(group, key)
        if measured:
            values[key] = _mean(measured, key)
    between = _interval(_measured(group, THROUGHPUT), fit, known)
    first = group[0]
    return Configuration(
        first.name,
        dict(first.levels),
        len(group),
        values,
        between.low if between else None,
        between.high if between else None,
    )


def _measured(group: Sequence[Observation], key: str) -> list[float]:
    values = [each.values[key] for each in group if key in each.values]
    is_ratio = RESPONSES[key].scale == "ratio"
    return [each for each in values if math.isfinite(each) and (each > 0 or not is_ratio)]


def _mean(values: Sequence[float], key: str) -> float:
    if RESPONSES[key].scale == "ratio":
        return math.exp(math.fsum(map(math.log, values)) / len(values))
    return math.fsum(values) / len(values)


def _interval(rates: Sequence[float], fit: Fitted | None, known: Spread | None) -> Interval | None:
    if not rates or fit is None:
        return None
    before = _before(Scatter(*scatter(rates)), len(rates), fit, known)
    if before is None:
        return None
    found = combined(rates, before)
    scale = _mean(rates, THROUGHPUT) / found.mean
    return Interval(float(found.interval.low) * scale, float(found.interval.high) * scale)


def _before(own: Scatter, trials: int, fit: Fitted, known: Spread | None) -> Spread | None:
    """What is known of the spread but for these repeats: by all others, and before the study."""
    squares, dof = max(0.0, fit.repeats.squares - own.squares), fit.repeats.dof - own.dof
    if known:
        return with_evidence(known, squares, dof, fit.trials - trials)
    if dof >= 1:
        return Spread(math.sqrt(squares / dof), dof, "learnt", fit.trials - trials)
    noise = fit.noise
    return None if noise.source == "none" else Spread(noise.sigma, noise.dof, "others")


def _order(configuration: Configuration) -> tuple[float, str, str]:
    rate = configuration.values.get(THROUGHPUT, -math.inf)
    return -rate, configuration.name, str(configuration.levels)
