"""Which blocks of a study were disturbed: by their reference trial, and by other processes.

A block begins with a reference trial, whose configuration is the same in all blocks of a machine.
The block is flagged

- if the reference is out of line with the median of all, faster or slower, by more than three
  sigmas (more where there are many blocks: one in twenty quiet studies may have a block flagged)
  and more than 5 %. Sigma comes from the scatter of five or more references (the median of their
  deviations, so that those out of line do not count) and from what is known of the machine; from
  fewer references, from the machine alone. It is at least 2 %: a handful of references can agree
  by chance. Of fewer than three nobody can say which one is out of line;
- if the reference failed, where at least three others did not: one that never runs says nothing;
- if other processes disturbed the reference or one of the trials.

A drift over the whole study puts no block out of line. `trend` tells of it.
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

COMPARED_FROM = 3
SCATTER_FROM = 5
"""References whose own scatter is believed."""
SIGMAS = 3.0
CHANCE = 0.05
"""That a quiet study has a block flagged at all, where it has so many that three sigmas are not
enough."""
LEAST = 0.05
"""A smaller deviation is not worth a block's time."""
_LEAST_CV = 0.02
_MAD_TO_SIGMA = 1.4826
_MAD_EFFICIENCY = 0.37
"""Of a median of deviations, compared with the variance."""
TREND_FROM = 4
"""References that make a line: two degrees of freedom are left."""


@dataclass(frozen=True)
class BlockSeen:
    """What was seen of a block."""

    number: int
    reference_rate: float | None
    reference_failed: bool = False
    noise: Sequence[Sequence[InterferenceReason]] = ()
    """What disturbed it, of every trial (and of the reference) that was disturbed."""
    trials: int = 0


@dataclass(frozen=True)
class Disturbance:
    """One kind of interference with trials of a block."""

    first: InterferenceReason
    disturbed: int
    trials: int


@dataclass(frozen=True)
class BlockJudged:
    """Whether a block is to be believed, and why not."""

    number: int
    relative: float | None = None
    """The throughput of its reference trial over the usual one."""
    usual_rate: float | None = None
    is_out_of_line: bool = False
    reference_failed: bool = False
    disturbances: tuple[Disturbance, ...] = ()

    @property
    def flagged(self) -> bool:
        return self.is_out_of_line or self.reference_failed or bool(self.disturbances)


@dataclass(frozen=True)
class Trend:
    """Reference trials became faster or slower over the study."""

    change: Estimate
    """A ratio, from the first block to the last."""
    first: int
    last: int


def judge_blocks(
    blocks: Sequence[BlockSeen], known: ProcessNoise | None = None
) -> dict[int, BlockJudged]:
    rates = [each.reference_rate for each in blocks if _is_rate(each.reference_rate)]
    usual = float(np.median(rates)) if len(rates) >= COMPARED_FROM else None
    tolerated = _tolerated(np.log(rates), known) if usual else math.inf
    judged = {}
    for block in blocks:
        rate = block.reference_rate
        relative = rate / usual if usual and _is_rate(rate) else None
        judged[block.number] = BlockJudged(
            block.number,
            relative,
            usual,
            is_out_of_line=relative is not None and abs(math.log(relative)) > tolerated,
            reference_failed=usual is not None and block.reference_failed,
            disturbances=_disturbances(block),
        )
    return judged


def trend(blocks: Sequence[BlockSeen]) -> Trend | None:
    """Whether reference trials became slower or faster over the study; None if not."""
    numbers = np.array([b.number for b in blocks if _is_rate(b.reference_rate)], np.float64)
    logarithms = np.log([b.reference_rate for b in blocks if _is_rate(b.reference_rate)])
    if len(numbers) < TREND_FROM or len(set(numbers)) < 3:
        return None
    away = numbers - numbers.mean()
    slope = float(away @ logarithms / (away @ away))
    rest = logarithms - logarithms.mean() - slope * away
    scatter = Scatter(float(rest @ rest), len(numbers) - 2.0)
    noise = Noise(max(scatter.sigma, 1e-9), scatter.dof, "residuals")
    span = float(np.ptp(numbers))
    change = estimate(slope * span, span / math.sqrt(float(away @ away)), noise, "ratio")
    if change.low <= 1 <= change.high or abs(change.value - 1) < LEAST:
        return None
    return Trend(change, int(min(numbers)), int(max(numbers)))


def _tolerated(logarithms: Floats, known: ProcessNoise | None) -> float:
    """How far a reference may be off, as a logarithm."""
    count = len(logarithms)
    known = known or ASSUMED_NOISE["cpu"]
    sigma, sigmas = known.cv, SIGMAS
    if count >= SCATTER_FROM:
        away = np.abs(logarithms - np.median(logarithms))
        seen = _MAD_TO_SIGMA * float(np.median(away))
        worth = _MAD_EFFICIENCY * count
        dof = known.dof + worth
        sigma = math.sqrt((known.dof * known.cv**2 + worth * seen**2) / dof)
        sigmas = max(SIGMAS, t_quantile(1 - CHANCE / (2 * count), dof))
    return max(sigmas * max(sigma, _LEAST_CV), math.log1p(LEAST))


def _disturbances(block: BlockSeen) -> tuple[Disturbance, ...]:
    kinds: dict[tuple[str, str], list[InterferenceReason]] = {}
    for reasons in block.noise:
        for kind, reason in {(reason.kind, reason.text): reason for reason in reasons}.items():
            kinds.setdefault(kind, []).append(reason)
    trials = max(block.trials, len(block.noise))
    return tuple(Disturbance(alike[0], len(alike), trials) for alike in kinds.values())


def _is_rate(rate: float | None) -> TypeGuard[float]:
    return rate is not None and math.isfinite(rate) and rate > 0
