"""Several ranks: one that keeps the others waiting, or all that wait for each other's gradients."""

from __future__ import annotations

from collections.abc import Sequence

from stepscope.analysis.bottleneck.account import Account
from stepscope.analysis.bottleneck.case import Case, finding, measured
from stepscope.analysis.bottleneck.thresholds import limit
from stepscope.records import Finding, Recommendation

_TOGETHER = ("backward", "ranks")
"""Where ranks wait for each other: gradients are exchanged in the backward pass."""


def rank_wait(case: Case) -> Finding | None:
    """The reason why ranks wait for each other."""
    ranks = [account for account in case.ranks if account.sampled]
    if len(ranks) < 2:
        return None
    return _straggler(ranks) or _communication(case, ranks)


def _straggler(ranks: Sequence[Account]) -> Finding | None:
    def alone(account: Account) -> float:
        return 1.0 - account.share(*_TOGETHER)

    slowest = max(ranks, key=alone)
    others = [account for account in ranks if account is not slowest]
    usual = sum(alone(account) for account in others) / len(others)
    excess = alone(slowest) - usual
    if excess < limit("straggler"):
        return None

    def more(kind: str) -> float:
        return slowest.share(kind) - sum(each.share(kind) for each in others) / len(others)

    kinds = [kind for kind in slowest.spent if kind not in _TOGETHER]
    kind = max(kinds, key=more, default="other")
    if kind == "loader":  # the others' loaders may be as slow: the first rank waits for them all
        return None
    return finding(
        "ranks.straggler",
        "high" if excess >= 2 * limit("straggler") else "medium",
        1.0 / max(1.0 - excess, 0.02),
        values={
            "rank": slowest.trainer.rank,
            "kind": kind,
            "others": len(others),
            "ranks": len(ranks),
        },
        evidence=[
            measured("straggler_alone", alone(slowest), "share", source="stack samples"),
            measured("others_alone", usual, "share", source="stack samples"),
            measured("straggler_wait", excess, "share", "straggler", "stack samples"),
        ],
        recommendations=[Recommendation("look_at_straggler", location=slowest.location(kind))],
    )


def _communication(case: Case, ranks: Sequence[Account]) -> Finding | None:
    together = min(account.share(*_TOGETHER) for account in ranks)
    forward = max(account.share("forward") for account in ranks)
    share = together - limit("backward_per_forward") * forward
    moved = case.highest_mean("loopback", "net_received", "gpu_nvlink_received")
    if share < limit("communication") or moved is None:
        return None
    parameters = case.account.trainer.settings.parameters
    sure = share >= 2 * limit("communication") and moved >= limit("rank_traffic")
    return finding(
        "ranks.communication",
        "high" if sure else "medium",
        1.0 / max(1.0 - share, 0.02),
        values={"ranks": len(ranks), "gradients": parameters * 4 if parameters else None},
        evidence=[
            measured("communication", share, "share", "communication", "stack samples"),
            measured("rank_traffic", moved, "bytes/s", source="/proc"),
        ],
        recommendations=["accumulate_gradients", "compress_gradients", "larger_batch_per_rank"],
    )
