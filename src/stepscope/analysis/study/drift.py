"""Which blocks of a study were disturbed: by their sentinel, and by what was seen of others.

A block begins with the sentinel, a configuration that is the same in all of them. Its block is
flagged

- if its rate is out of line with the median of all, faster or slower, by more than three sigmas
  (more where there are many blocks: one in twenty quiet studies may have a block flagged) and more
  than 5 %. Sigma is what sentinels scatter by (the median of their deviations, so that those out of
  line do not count) where there are five, together with what is known of the machine; of fewer it
  is that alone. It is never taken for less than 2 %: a handful of sentinels can agree by chance. Of
  fewer than three nobody can say which one is out of line;
- if its sentinel failed, where at least three others did not: a sentinel that never runs says
  nothing of a block;
- if others disturbed the sentinel or one of its trials.

A drift that goes on for the whole study puts no block out of line. `trend` tells of it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from stepscope.analysis.study.noise import Scatter, estimate
from stepscope.analysis.study.quantiles import t_quantile
from stepscope.analysis.study.records import Noise
from stepscope.analysis.study.words import percent
from stepscope.analysis.throughput import Spread

COMPARED_FROM = 3
SCATTER_FROM = 5
"""Sentinels whose own scatter is believed."""
SIGMAS = 3.0
CHANCE = 0.05
"""That a quiet study has a block flagged at all, where it has so many that three sigmas are not
enough."""
LEAST = 0.05
"""A smaller deviation is not worth a block's time."""
_LEAST_CV = 0.02
_USUAL = Spread(0.08, 4, "assumed")
"""Of sentinels where nothing is known of the machine yet."""
_MAD_TO_SIGMA = 1.4826
_MAD_EFFICIENCY = 0.37
"""So much of the sentinels is a median of deviations worth, compared with their variance."""
_NUMBERS = re.compile(r"[\d.,]+")
TREND_FROM = 4
"""Sentinels that make a line: two degrees of freedom are left."""


@dataclass(frozen=True)
class BlockSeen:
    """What was seen of a block."""

    number: int
    sentinel: float | None
    """Its samples per second."""
    sentinel_failed: bool = False
    noise: Sequence[Sequence[str]] = ()
    """Who disturbed it, of every trial (and of the sentinel) that was disturbed."""
    trials: int = 0


@dataclass(frozen=True)
class BlockJudged:
    """Whether a block is to be believed."""

    number: int
    flagged: bool
    reasons: tuple[str, ...] = ()
    relative: float | None = None
    """The rate of its sentinel over the usual one."""


def judge_blocks(
    blocks: Sequence[BlockSeen], known: Spread | None = None
) -> dict[int, BlockJudged]:
    """Every block by its number."""
    rates = [each.sentinel for each in blocks if _is_rate(each.sentinel)]
    usual = float(np.median(rates)) if len(rates) >= COMPARED_FROM else None  # type: ignore[arg-type]
    tolerated = _tolerated(np.log([rate for rate in rates if rate]), known) if usual else math.inf
    return {each.number: _judged(each, usual, tolerated) for each in blocks}


def trend(blocks: Sequence[BlockSeen]) -> str:
    """Whether sentinels became slower or faster over the study, in words; nothing if not."""
    told = [(each.number, each.sentinel) for each in blocks if _is_rate(each.sentinel)]
    if len(told) < TREND_FROM or len({number for number, _ in told}) < 3:
        return ""
    numbers = np.array([number for number, _ in told], np.float64)
    logarithms = np.log([rate for _, rate in told if rate])
    away = numbers - numbers.mean()
    slope = float(away @ logarithms / (away @ away))
    rest = logarithms - logarithms.mean() - slope * away
    scatter = Scatter(float(rest @ rest), len(told) - 2.0)
    noise = Noise(max(scatter.sigma, 1e-9), scatter.dof, "residuals")
    span = float(np.ptp(numbers))
    change = estimate(slope * span, span / math.sqrt(float(away @ away)), noise, "ratio")
    if change.low <= 1 <= change.high or abs(change.value - 1) < LEAST:
        return ""
    how = "slower" if change.value < 1 else "faster"
    ends = sorted(abs(end - 1) for end in (change.low, change.high))
    return (
        f"the sentinel became {how} over the study, by {percent(abs(change.value - 1))}"
        f" ({percent(ends[0])} to {percent(ends[1])}) from block {min(numbers):.0f} to"
        f" {max(numbers):.0f}: something drifts, as a machine that gets warm or a disk that fills"
    )


def _judged(block: BlockSeen, usual: float | None, tolerated: float) -> BlockJudged:
    reasons = []
    relative = None
    if usual and block.sentinel_failed:
        reasons.append("its sentinel failed, which others did not")
    if usual and block.sentinel and _is_rate(block.sentinel):
        relative = block.sentinel / usual
        if abs(math.log(relative)) > tolerated:
            reasons.append(
                f"its sentinel ran at {percent(relative)} of the usual rate"
                f" (others: {usual:,.{0 if usual >= 100 else 1}f} samples/s)"
            )
    reasons += _disturbances(block)
    return BlockJudged(block.number, bool(reasons), tuple(reasons), relative)


def _tolerated(
    logarithms: np.ndarray[tuple[int], np.dtype[np.float64]], known: Spread | None
) -> float:
    """How far a sentinel may be off, as a logarithm."""
    count = len(logarithms)
    known = known or _USUAL
    sigma, sigmas = known.cv, SIGMAS
    if count >= SCATTER_FROM:
        away = np.abs(logarithms - np.median(logarithms))
        seen = _MAD_TO_SIGMA * float(np.median(away))
        worth = _MAD_EFFICIENCY * count
        dof = known.dof + worth
        sigma = math.sqrt((known.dof * known.cv**2 + worth * seen**2) / dof)
        sigmas = max(SIGMAS, t_quantile(1 - CHANCE / (2 * count), dof))
    return max(sigmas * max(sigma, _LEAST_CV), math.log1p(LEAST))


def _disturbances(block: BlockSeen) -> list[str]:
    """A reason of each kind: reasons that differ by their numbers only are the same kind."""
    kinds: dict[str, list[str]] = {}
    for reasons in block.noise:
        for kind, reason in {_NUMBERS.sub("", reason): reason for reason in reasons}.items():
            kinds.setdefault(kind, []).append(reason)
    trials = max(block.trials, len(block.noise))
    return [f"{alike[0]}, during {len(alike)} of its {trials} trials" for alike in kinds.values()]


def _is_rate(rate: float | None) -> bool:
    return rate is not None and math.isfinite(rate) and rate > 0
