"""The throughput of a trial, and how sure of it we are.

Steps of one process differ: the scatter of batch means tells what that does to their mean, as steps
next to each other are alike. Processes differ far more, and no number of steps shows it: only
repeats do, so what is known of it comes from outside, as a `ProcessNoise`. It enters the interval
of one trial in full. The interval is Student's: the fewer repeats, the wider.
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
LEARNT_FROM = 4
"""Degrees of freedom (five repeats have four) from which on no assumption is asked any more."""
ASSUMED_NOISE: dict[Literal["cpu", "gpu"], ProcessNoise] = {
    "cpu": ProcessNoise(0.08, 4, "assumed"),
    "gpu": ProcessNoise(0.02, 4, "assumed"),
}
"""Measured on two shared cores (6 to 9.5 %), and on a GPU without other processes."""


@dataclass(frozen=True)
class Rate:
    """Samples per second of one process, with the standard error from its own steps alone."""

    per_second: float
    within: float  # as a part of the rate
    dof: float


@dataclass(frozen=True)
class Interval:
    """Where the true rate lies, with so much confidence."""

    low: float
    high: float
    confidence: float = CONFIDENCE


@dataclass(frozen=True)
class Combined:
    """The mean of repeats, where it lies, and the noise that says so."""

    mean: float
    interval: Interval
    noise: ProcessNoise


def throughput(seconds: npt.ArrayLike, samples_per_step: float) -> Rate:
    """The rate of steady steps of these lengths: all samples over all time, slow steps included."""
    steps = np.asarray(seconds, np.float64)
    means = batch_means(steps, _BATCHES)
    mean = float(steps.mean())
    error = float(means.std(ddof=1)) / math.sqrt(len(means)) if len(means) > 1 else 0.0
    return Rate(samples_per_step / mean, error / mean, max(1.0, len(means) - 1.0))


def interval(rate: Rate, noise: ProcessNoise) -> Interval:
    """Where the mean rate of trials like this one lies."""
    within, between = rate.within**2, noise.cv**2
    both = within + between
    # Welch and Satterthwaite: the sum is known about as well as the part that dominates it.
    parts = within**2 / rate.dof + between**2 / noise.dof
    return _around(rate.per_second, math.sqrt(both), both**2 / parts if parts else math.inf)


def combined(rates: Sequence[float], known: ProcessNoise) -> Combined:
    """The mean of repeats of one trial; `known` is the noise as it was before them.

    Repeats that scatter more than trials usually do here are believed: this workload may be
    noisier than others.
    """
    mean = sum(rates) / len(rates)
    squares, dof = scatter(rates)
    noise = with_evidence(known, squares, dof, len(rates))
    cv = max(noise.cv, math.sqrt(squares / dof)) if dof else noise.cv
    noise = replace(noise, cv=cv)
    return Combined(mean, _around(mean, cv / math.sqrt(len(rates)), noise.dof), noise)


def scatter(rates: Sequence[float]) -> tuple[float, float]:
    """The sum of squared relative deviations of repeats from their mean, and its freedom."""
    logarithms = [math.log(rate) for rate in rates]
    mean = math.fsum(logarithms) / len(logarithms)
    return math.fsum((each - mean) ** 2 for each in logarithms), len(rates) - 1.0


def with_evidence(known: ProcessNoise, squares: float, dof: float, trials: int) -> ProcessNoise:
    """What is known of the noise once the scatter of more repeats is.

    An assumption counts like the repeats that it has degrees of freedom, until enough are seen.
    """
    if known.source != "learnt" and dof >= LEARNT_FROM:
        return ProcessNoise(cv=math.sqrt(squares / dof), dof=dof, source="learnt", trials=trials)
    total = known.dof + dof
    cv = math.sqrt((known.cv**2 * known.dof + squares) / total)
    is_assumed = known.source != "learnt" and dof > 0
    assumed = None
    if is_assumed:
        assumed = known.cv if known.assumed is None else known.assumed
    return ProcessNoise(
        cv=cv, dof=total, source=known.source, trials=known.trials + trials, assumed=assumed
    )


def students_t(dof: float) -> float:
    """The half-width, in standard errors, of an interval with a confidence of 90 %."""
    return t_quantile((1 + CONFIDENCE) / 2, max(dof, 1.0))


def _around(rate: float, error: float, dof: float) -> Interval:
    half = students_t(dof) * error
    return Interval(rate * max(0.0, 1 - half), rate * (1 + half))
