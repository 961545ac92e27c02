"""Synthetic observations with known effects, and shortcuts into the analysis."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np

from stepscope.analysis.study import effects as effects_module
from stepscope.analysis.study import scaling
from stepscope.analysis.study.fitted import ThroughputFits, fitted
from stepscope.analysis.study.records import (
    RESPONSES,
    THROUGHPUT,
    Effects,
    Factor,
    Level,
    Observation,
    Response,
    ScalingCurve,
    Sensitivity,
)
from stepscope.analysis.study.table import table_of
from stepscope.records.trial import ProcessNoise

Rate = Callable[..., float]


def factors_of(**levels: Sequence[Level]) -> tuple[Factor, ...]:
    return tuple(Factor(name, tuple(each)) for name, each in levels.items())


def grid(factors: Iterable[Factor]) -> list[dict[str, Level]]:
    factors = list(factors)
    names = [each.name for each in factors]
    return [dict(zip(names, point, strict=True)) for point in product(*(f.levels for f in factors))]


def observed(
    points: Iterable[Mapping[str, Level]],
    rate: Rate,
    repeats: int = 1,
    noise: float = 0.0,
    random: np.random.Generator | None = None,
    key: str = THROUGHPUT,
) -> list[Observation]:
    """Return trials with this rate times log-normal noise."""
    random = random or np.random.default_rng(0)
    return [
        Observation(
            dict(point),
            {key: rate(**point) * float(np.exp(noise * random.normal()))},
            " ".join(f"{name}={level}" for name, level in point.items()),
        )
        for point in points
        for _ in range(repeats)
    ]


def steps(**effects: Mapping[Any, float]) -> Rate:
    """Return a rate that is the product of one factor per level."""

    def rate(**levels: Level) -> float:
        return 100.0 * float(np.prod([effects[name][levels[name]] for name in effects]))

    return rate


def effects(
    observations: Sequence[Observation],
    factors: Sequence[Factor],
    response: Response,
    prior: ProcessNoise | None = None,
) -> Effects | None:
    fits = fitted(table_of(observations, factors), [response], prior)
    return effects_module.effects_of(fits[response.key]) if fits else None


def sensitivities(
    observations: Sequence[Observation], factors: Sequence[Factor]
) -> tuple[Sensitivity, ...]:
    return effects_module.sensitivities(_throughput_fits(observations, factors))


def curves(
    observations: Sequence[Observation], factors: Sequence[Factor]
) -> tuple[ScalingCurve, ...]:
    return scaling.curves(_throughput_fits(observations, factors))


def _throughput_fits(
    observations: Sequence[Observation], factors: Sequence[Factor]
) -> ThroughputFits:
    table = table_of(observations, factors)
    fits = fitted(table, [RESPONSES[THROUGHPUT]])
    return ThroughputFits(table, None, fits.get(THROUGHPUT))
