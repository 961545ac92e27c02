"""Studies whose truth is known."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np

from stepscope.analysis.study import effects as of_fits
from stepscope.analysis.study import scaling
from stepscope.analysis.study.fitted import Throughputs, fitted
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
    """Trials of a workload that has this rate, but for noise."""
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
    """A rate to which every level has its own factor."""

    def rate(**levels: Level) -> float:
        return 100.0 * float(np.prod([effects[name][levels[name]] for name in effects]))

    return rate


def effects(
    observations: Sequence[Observation],
    factors: Sequence[Factor],
    response: Response,
    known: ProcessNoise | None = None,
) -> Effects | None:
    fits = fitted(table_of(observations, factors), [response], known)
    return of_fits.effects_of(fits[response.key]) if fits else None


def sensitivities(
    observations: Sequence[Observation], factors: Sequence[Factor]
) -> tuple[Sensitivity, ...]:
    return of_fits.sensitivities(_throughputs(observations, factors))


def curves(
    observations: Sequence[Observation], factors: Sequence[Factor]
) -> tuple[ScalingCurve, ...]:
    return scaling.curves(_throughputs(observations, factors))


def _throughputs(observations: Sequence[Observation], factors: Sequence[Factor]) -> Throughputs:
    table = table_of(observations, factors)
    fits = fitted(table, [RESPONSES[THROUGHPUT]])
    return Throughputs(table, None, fits.get(THROUGHPUT))
