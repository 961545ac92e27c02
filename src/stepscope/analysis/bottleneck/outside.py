"""What the training thread does besides training: evaluation, checkpoints, logs."""

from __future__ import annotations

import numpy as np

from stepscope.analysis.bottleneck.account import Account
from stepscope.analysis.bottleneck.case import Case, finding, measured
from stepscope.analysis.bottleneck.thresholds import limit
from stepscope.records import Finding, Recommendation


def _without(account: Account, seconds: float) -> float:
    return account.seconds / max(account.seconds - seconds, 1e-2 * account.seconds)


def evaluation(case: Case) -> Finding | None:
    account = case.account
    share = account.evaluated / account.seconds
    if share < limit("outside_share"):
        return None
    return finding(
        "outside.evaluation",
        "high",
        _without(account, account.evaluated),
        values={"evaluated": account.evaluated},
        evidence=[measured("evaluation", share, "share", "outside_share", "loader")],
        recommendations=["evaluate_less_often", "larger_validation_batch"],
    )


def checkpoints(case: Case) -> Finding | None:
    account = case.account
    sampled = account.share("save")
    # Samples every few seconds miss short saves: steps far longer than usual have them all, but
    # may have other work too, so they count up to twice what the samples say.
    usual = float(np.median(account.own))
    excess = float((account.own[account.own > limit("far_longer") * usual] - usual).sum())
    gaps = max(0.0, excess - account.evaluated)
    seconds = max(sampled * account.seconds, min(gaps, 2 * sampled * account.seconds))
    share = seconds / account.seconds
    if share < limit("outside_share"):
        return None
    location = account.location("save")
    return finding(
        "outside.checkpoint",
        "high",
        _without(account, seconds),
        values={"saved": seconds},
        evidence=[
            measured("saving", share, "share", "outside_share", "stack samples, steps"),
            measured("long_steps", gaps, "s", source="steps"),
        ],
        recommendations=[
            Recommendation("save_less_often", location=location),
            Recommendation("save_in_background", location=location),
        ],
    )


def logging(case: Case) -> Finding | None:
    account = case.account
    share = account.share("logging")
    if share < limit("logging_share"):
        return None
    return finding(
        "sync.logging",
        "high" if account.sampled > limit("least_seconds") else "medium",
        _without(account, share * account.seconds),
        evidence=[measured("logging", share, "share", "logging_share", "stack samples")],
        recommendations=[Recommendation("log_less_often", location=account.location("logging"))],
    )


def sleeping(case: Case) -> Finding | None:
    account = case.account
    share = account.share("sleep")
    if share < limit("outside_share") or len(case.ranks) > 1:  # a rank that sleeps is a straggler
        return None
    return finding(
        "outside.other",
        "high",
        _without(account, share * account.seconds),
        evidence=[measured("sleeping", share, "share", "outside_share", "stack samples")],
        recommendations=[Recommendation("remove_sleep", location=account.location("sleep"))],
    )
