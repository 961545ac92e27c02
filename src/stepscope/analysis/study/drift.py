"""Detection of drift and interference in the blocks of a study.

Every block starts with a reference trial, whose configuration is the same in all blocks of a
machine. A block is flagged

- if the throughput of its reference trial is an outlier: it differs from the median of all blocks
  by more than 5% and by more than three sigmas. With many blocks the limit is higher, so that
  about one in twenty studies without interference has a flagged block. With five or more reference
  trials, sigma combines their median absolute deviation, which is robust against outliers, with
  the prior for the machine; with fewer it is the prior. It is at least 2%, because a handful of
  reference trials can agree by chance. With fewer than three there is no outlier detection;
- if its reference trial failed while at least three others succeeded (a reference trial that never
  succeeds says nothing about a block);
- if other processes interfered with its reference trial or with one of its trials.

A drift over the whole study makes no block an outlier; `trend` detects it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeGuard

import numpy as np

from stepscope.analysis.statistics import t_quantile
from stepscope.analysis.study.noise import Scatter, estimate
from stepscope.analysis.study.records import Estimate, Noise
from stepscope.analysis.study.table import Floats
from stepscope.analysis.trial.throughput import ASSUMED_NOISE
from stepscope.records.trial import InterferenceReason, ProcessNoise

MIN_REFERENCES = 3
MIN_REFERENCES_FOR_SIGMA = 5
MIN_REFERENCES_FOR_TREND = 4
"""A line through four points leaves two degrees of freedom."""
SIGMAS = 3.0
FALSE_ALARM_RATE = 0.05
"""Probability that a study without interference has a flagged block, for many blocks."""
MIN_DEVIATION = 0.05
"""A smaller deviation does not justify a rerun."""
_MIN_CV = 0.02
_MAD_TO_SIGMA = 1.4826
_MAD_EFFICIENCY = 0.37
"""Efficiency of the median absolute deviation relative to the variance."""


@dataclass(frozen=True)
class BlockSeen:
    """The observations of a block."""

    number: int
    reference_throughput: float | None  # samples per second
    reference_failed: bool = False
    interference: Sequence[Sequence[InterferenceReason]] = ()
    """The reasons for each trial of the block, reference trial included."""
    trials: int = 0


@dataclass(frozen=True)
class BlockInterference:
    """One kind of interference with the trials of a block."""

    reason: InterferenceReason
    with_interference: int  # number of trials
    trials: int


@dataclass(frozen=True)
class BlockJudged:
    """Whether a block is flagged, and why."""

    number: int
    relative: float | None = None
    """Throughput of the reference trial divided by the median of all blocks."""
    median_throughput: float | None = None
    is_outlier: bool = False
    reference_failed: bool = False
    interference: tuple[BlockInterference, ...] = ()

    @property
    def flagged(self) -> bool:
        return self.is_outlier or self.reference_failed or bool(self.interference)


@dataclass(frozen=True)
class Trend:
    """A drift of the reference trials over the study."""

    change: Estimate  # throughput in the last block divided by that in the first
    first: int
    last: int


def judge_blocks(
    blocks: Sequence[BlockSeen], prior: ProcessNoise | None = None
) -> dict[int, BlockJudged]:
    """Return the assessment of each block by its number."""
    throughputs = [b.reference_throughput for b in blocks if _is_valid(b.reference_throughput)]
    median = float(np.median(throughputs)) if len(throughputs) >= MIN_REFERENCES else None
    tolerance = _tolerance(np.log(throughputs), prior) if median else math.inf
    judged = {}
    for block in blocks:
        throughput = block.reference_throughput
        relative = throughput / median if median and _is_valid(throughput) else None
        judged[block.number] = BlockJudged(
            block.number,
            relative,
            median,
            is_outlier=relative is not None and abs(math.log(relative)) > tolerance,
            reference_failed=median is not None and block.reference_failed,
            interference=_interference(block),
        )
    return judged


def trend(blocks: Sequence[BlockSeen]) -> Trend | None:
    """Return the significant drift of the reference trials over the study, if there is one."""
    numbers = np.array([b.number for b in blocks if _is_valid(b.reference_throughput)], np.float64)
    logarithms = np.log(
        [b.reference_throughput for b in blocks if _is_valid(b.reference_throughput)]
    )
    if len(numbers) < MIN_REFERENCES_FOR_TREND or len(set(numbers)) < 3:
        return None
    centered = numbers - numbers.mean()
    slope = float(centered @ logarithms / (centered @ centered))
    residuals = logarithms - logarithms.mean() - slope * centered
    scatter = Scatter(float(residuals @ residuals), len(numbers) - 2.0)
    noise = Noise(max(scatter.sigma, 1e-9), scatter.dof, "residuals")
    span = float(np.ptp(numbers))
    change = estimate(slope * span, span / math.sqrt(float(centered @ centered)), noise, "ratio")
    if change.low <= 1 <= change.high or abs(change.value - 1) < MIN_DEVIATION:
        return None
    return Trend(change, int(min(numbers)), int(max(numbers)))


def _tolerance(logarithms: Floats, prior: ProcessNoise | None) -> float:
    """Return the tolerated deviation of a reference trial, as a logarithm."""
    count = len(logarithms)
    prior = prior or ASSUMED_NOISE["cpu"]
    sigma, sigmas = prior.cv, SIGMAS
    if count >= MIN_REFERENCES_FOR_SIGMA:
        deviations = np.abs(logarithms - np.median(logarithms))
        observed = _MAD_TO_SIGMA * float(np.median(deviations))
        observed_dof = _MAD_EFFICIENCY * count
        dof = prior.dof + observed_dof
        sigma = math.sqrt((prior.dof * prior.cv**2 + observed_dof * observed**2) / dof)
        sigmas = max(SIGMAS, t_quantile(1 - FALSE_ALARM_RATE / (2 * count), dof))
    return max(sigmas * max(sigma, _MIN_CV), math.log1p(MIN_DEVIATION))


def _interference(block: BlockSeen) -> tuple[BlockInterference, ...]:
    kinds: dict[tuple[str, str], list[InterferenceReason]] = {}
    for reasons in block.interference:
        for kind, reason in {(reason.kind, reason.text): reason for reason in reasons}.items():
            kinds.setdefault(kind, []).append(reason)
    trials = max(block.trials, len(block.interference))
    return tuple(BlockInterference(same[0], len(same), trials) for same in kinds.values())


def _is_valid(throughput: float | None) -> TypeGuard[float]:
    return throughput is not None and math.isfinite(throughput) and throughput > 0
