"""Distributed causes: a straggler, and communication between ranks."""

from __future__ import annotations

from collections.abc import Sequence

from stepscope.analysis.bottleneck.breakdown import StepBreakdown
from stepscope.analysis.bottleneck.case import Case, finding, measured
from stepscope.analysis.bottleneck.thresholds import limit
from stepscope.records import Finding, Recommendation

_COLLECTIVE = ("backward", "ranks")
"""Kinds of code in which ranks wait for each other: the backward pass exchanges gradients."""


def rank_wait(case: Case) -> Finding | None:
    """Find why ranks wait for each other."""
    ranks = [breakdown for breakdown in case.ranks if breakdown.sampled_seconds]
    if len(ranks) < 2:
        return None
    return _straggler(ranks) or _communication(case, ranks)


def _straggler(ranks: Sequence[StepBreakdown]) -> Finding | None:
    def own_work(breakdown: StepBreakdown) -> float:
        return 1.0 - breakdown.share(*_COLLECTIVE)

    slowest = max(ranks, key=own_work)
    others = [breakdown for breakdown in ranks if breakdown is not slowest]
    typical = sum(own_work(breakdown) for breakdown in others) / len(others)
    excess = own_work(slowest) - typical
    if excess < limit("straggler"):
        return None

    def excess_of(kind: str) -> float:
        return slowest.share(kind) - sum(each.share(kind) for each in others) / len(others)

    kinds = [kind for kind in slowest.time_by_kind if kind not in _COLLECTIVE]
    kind = max(kinds, key=excess_of, default="other")
    if kind == "loader":  # the loaders of all ranks may be equally slow
        return None
    return finding(
        "ranks.straggler",
        "high" if excess >= 2 * limit("straggler") else "medium",
        1.0 / max(1.0 - excess, 0.02),
        values={
            "rank": slowest.trainer.rank,
            "kind": kind,
            "others": len(others),
        },
        evidence=[
            measured("straggler_time", own_work(slowest), "share", source="stack samples"),
            measured("other_ranks_time", typical, "share", source="stack samples"),
            measured("straggler_wait", excess, "share", "straggler", "stack samples"),
        ],
        recommendations=[Recommendation("balance_ranks", location=slowest.location(kind))],
    )


def _communication(case: Case, ranks: Sequence[StepBreakdown]) -> Finding | None:
    collective = min(breakdown.share(*_COLLECTIVE) for breakdown in ranks)
    forward = max(breakdown.share("forward") for breakdown in ranks)
    share = collective - limit("backward_per_forward") * forward
    traffic = case.highest_mean("loopback", "net_received", "gpu_nvlink_received")
    if share < limit("communication") or traffic is None:
        return None
    parameters = case.breakdown.trainer.settings.parameters
    is_clear = share >= 2 * limit("communication") and traffic >= limit("rank_traffic")
    return finding(
        "ranks.communication",
        "high" if is_clear else "medium",
        1.0 / max(1.0 - share, 0.02),
        values={"ranks": len(ranks), "gradients": parameters * 4 if parameters else None},
        evidence=[
            measured("communication", share, "share", "communication", "stack samples"),
            measured("rank_traffic", traffic, "bytes/s", source="/proc"),
        ],
        recommendations=["accumulate_gradients", "compress_gradients", "larger_batch_per_rank"],
    )
