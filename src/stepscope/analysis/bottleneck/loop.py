"""Training-loop causes: evaluation, checkpoints, logging, sleep."""

from __future__ import annotations

import numpy as np

from stepscope.analysis.bottleneck.breakdown import StepBreakdown
from stepscope.analysis.bottleneck.case import Case, finding, measured
from stepscope.analysis.bottleneck.thresholds import limit
from stepscope.records import Finding, Recommendation


def _speedup_without(breakdown: StepBreakdown, seconds: float) -> float:
    return breakdown.seconds / max(breakdown.seconds - seconds, 1e-2 * breakdown.seconds)


def evaluation(case: Case) -> Finding | None:
    breakdown = case.breakdown
    share = breakdown.evaluation_seconds / breakdown.seconds
    if share < limit("loop_share"):
        return None
    return finding(
        "loop.evaluation",
        "high",
        _speedup_without(breakdown, breakdown.evaluation_seconds),
        values={"evaluated": breakdown.evaluation_seconds},
        evidence=[measured("evaluation", share, "share", "loop_share", "loader")],
        recommendations=["evaluate_less_often", "larger_validation_batch"],
    )


def checkpoints(case: Case) -> Finding | None:
    breakdown = case.breakdown
    sampled = breakdown.share("save")
    # Stack samples every few seconds miss short saves. Unusually long steps include all saves, but
    # possibly other work too, so they count for at most twice the sampled time.
    lengths = breakdown.lengths_without_wait
    typical = float(np.median(lengths))
    excess = float((lengths[lengths > limit("long_step") * typical] - typical).sum())
    excess = max(0.0, excess - breakdown.evaluation_seconds)
    seconds = max(sampled * breakdown.seconds, min(excess, 2 * sampled * breakdown.seconds))
    share = seconds / breakdown.seconds
    if share < limit("loop_share"):
        return None
    location = breakdown.location("save")
    return finding(
        "loop.checkpoint",
        "high",
        _speedup_without(breakdown, seconds),
        values={"saved": seconds},
        evidence=[
            measured("checkpointing", share, "share", "loop_share", "stack samples, steps"),
            measured("long_step_excess", excess, "s", source="steps"),
        ],
        recommendations=[
            Recommendation("save_less_often", location=location),
            Recommendation("save_in_background", location=location),
        ],
    )


def logging(case: Case) -> Finding | None:
    breakdown = case.breakdown
    share = breakdown.share("logging")
    if share < limit("logging_share"):
        return None
    return finding(
        "loop.logging",
        "high" if breakdown.sampled_seconds > limit("min_seconds") else "medium",
        _speedup_without(breakdown, share * breakdown.seconds),
        evidence=[measured("logging", share, "share", "logging_share", "stack samples")],
        recommendations=[Recommendation("log_less_often", location=breakdown.location("logging"))],
    )


def sleeping(case: Case) -> Finding | None:
    breakdown = case.breakdown
    share = breakdown.share("sleep")
    if share < limit("loop_share") or len(case.ranks) > 1:  # reported as a straggler
        return None
    return finding(
        "loop.sleep",
        "high",
        _speedup_without(breakdown, share * breakdown.seconds),
        evidence=[measured("sleep", share, "share", "loop_share", "stack samples")],
        recommendations=[Recommendation("remove_sleep", location=breakdown.location("sleep"))],
    )
