"""The throughput of a trial and its confidence interval.

The standard error within a process comes from batch means, because consecutive steps are
correlated. Noise between processes is far larger, and only repeats can show it. It is therefore an
input, `ProcessNoise`, and counts in full in the interval of a single trial. The interval uses
Student's t distribution: the fewer repeats, the wider.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from stepscope.analysis.statistics import t_quantile
from stepscope.analysis.trial.steady import batch_means
from stepscope.records.trial import ProcessNoise

CONFIDENCE = 0.9
_BATCHES = 20
MIN_NOISE_DOF = 4
"""Degrees of freedom (five repeats have four) from which measured noise replaces the assumption."""
ASSUMED_NOISE: dict[Literal["cpu", "gpu"], ProcessNoise] = {
    "cpu": ProcessNoise(0.08, 4, "assumed"),
    "gpu": ProcessNoise(0.02, 4, "assumed"),
}
"""Measured on two shared CPU cores (6 to 9.5%) and on a GPU without other processes."""


@dataclass(frozen=True)
class Rate:
    """Samples per second of one process, with the standard error from its own steps only."""

    per_second: float
    relative_error: float
    dof: float


@dataclass(frozen=True)
class Interval:
    """A confidence interval of a rate."""

    low: float
    high: float
    confidence: float = CONFIDENCE


@dataclass(frozen=True)
class Combined:
    """The mean rate of repeats, its interval, and the noise that it is based on."""

    mean: float
    interval: Interval
    noise: ProcessNoise


def throughput(seconds: npt.ArrayLike, samples_per_step: float) -> Rate:
    """Return the rate of steady steps: all samples over the total time, slow steps included."""
    steps = np.asarray(seconds, np.float64)
    means = batch_means(steps, _BATCHES)
    mean = float(steps.mean())
    error = float(means.std(ddof=1)) / math.sqrt(len(means)) if len(means) > 1 else 0.0
    return Rate(samples_per_step / mean, error / mean, max(1.0, len(means) - 1.0))


def interval(rate: Rate, noise: ProcessNoise) -> Interval:
    """Return the interval of the mean rate of trials like this one."""
    within, between = rate.relative_error**2, noise.cv**2
    total = within + between
    # Welch-Satterthwaite degrees of freedom of a sum of variances.
    parts = within**2 / rate.dof + between**2 / noise.dof
    return _around(rate.per_second, math.sqrt(total), total**2 / parts if parts else math.inf)


def combined(rates: Sequence[float], known: ProcessNoise) -> Combined:
    """Return the mean of repeats of one trial; `known` is the noise known before them.

    If the repeats vary more than expected, their own variation counts: this workload may be noisier
    than other workloads.
    """
    mean = sum(rates) / len(rates)
    squares, dof = scatter(rates)
    noise = with_evidence(known, squares, dof, len(rates))
    cv = max(noise.cv, math.sqrt(squares / dof)) if dof else noise.cv
    noise = replace(noise, cv=cv)
    return Combined(mean, _around(mean, cv / math.sqrt(len(rates)), noise.dof), noise)


def scatter(rates: Sequence[float]) -> tuple[float, float]:
    """Return the sum of squared relative deviations of repeats, and its degrees of freedom."""
    logarithms = [math.log(rate) for rate in rates]
    mean = math.fsum(logarithms) / len(logarithms)
    return math.fsum((each - mean) ** 2 for each in logarithms), len(rates) - 1.0


def with_evidence(known: ProcessNoise, squares: float, dof: float, trials: int) -> ProcessNoise:
    """Update the noise with the variation of more repeats.

    An assumption is weighted by its degrees of freedom until enough repeats replace it.
    """
    if known.source != "learned" and dof >= MIN_NOISE_DOF:
        return ProcessNoise(cv=math.sqrt(squares / dof), dof=dof, source="learned", trials=trials)
    total = known.dof + dof
    cv = math.sqrt((known.cv**2 * known.dof + squares) / total)
    is_assumed = known.source != "learned" and dof > 0
    assumed = None
    if is_assumed:
        assumed = known.cv if known.assumed is None else known.assumed
    return ProcessNoise(
        cv=cv, dof=total, source=known.source, trials=known.trials + trials, assumed=assumed
    )


def students_t(dof: float) -> float:
    """Return the half-width of a 90% interval in standard errors."""
    return t_quantile((1 + CONFIDENCE) / 2, max(dof, 1.0))


def _around(rate: float, error: float, dof: float) -> Interval:
    half = students_t(dof) * error
    return Interval(rate * max(0.0, 1 - half), rate * (1 + half))
