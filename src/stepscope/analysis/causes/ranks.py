"""Several ranks: one that keeps the others waiting, or all that wait for each other's gradients."""

from __future__ import annotations

from collections.abc import Sequence

from stepscope.analysis.causes.account import Account, Spent
from stepscope.analysis.causes.case import Case, finding, number, pct
from stepscope.analysis.causes.thresholds import limit
from stepscope.records import Advice, Finding

_TOGETHER = ("backward", "ranks")
"""Where ranks wait for each other: gradients are exchanged in the backward pass."""


def rank_findings(case: Case) -> list[Finding]:
    ranks = [account for account in case.ranks if account.looked]
    if len(ranks) < 2:
        return []
    straggler = _straggler(ranks)
    return [straggler] if straggler else [f for f in [_communication(case, ranks)] if f]


def _alone(account: Account) -> float:
    """The share of a rank's time that it does not spend where ranks meet."""
    return 1.0 - account.share(*_TOGETHER)


def _straggler(ranks: Sequence[Account]) -> Finding | None:
    slowest = max(ranks, key=_alone)
    others = [account for account in ranks if account is not slowest]
    usual = sum(_alone(account) for account in others) / len(others)
    excess = _alone(slowest) - usual
    if excess < limit("straggler"):
        return None
    kind, spent = _what_differs(slowest, others)
    if kind == "loader":  # the others' loaders may be as slow: the first rank waits for them all
        return None
    where = f", most of it at {spent.where}" if spent.where else ""
    return finding(
        "ranks.straggler",
        f"Rank {slowest.trainer.rank} is slower than the others: it works {pct(excess)} of each "
        f"step longer by itself ({kind}{where}), and {len(others)} of {len(ranks)} ranks wait.",
        "high" if excess >= 2 * limit("straggler") else "medium",
        "stack samples of every rank over the same steps", 1.0 / max(1.0 - excess, 0.02),
        [
            number(f"rank {slowest.trainer.rank}, apart from exchanging gradients",
                   _alone(slowest), "share", source="stack samples"),
            number("the other ranks", usual, "share", source="stack samples"),
            number("waited for by the others", excess, "share", "straggler", "stack samples"),
        ],
        [Advice(f"look at what rank {slowest.trainer.rank} alone does here", _words(kind),
                spent.where, spent.line)],
    )  # fmt: skip


def _words(kind: str) -> str:
    if kind == "loader":
        return "its data comes later: give all ranks equal shards and the same storage"
    return "give the ranks equal work, or let this be done by all of them in turn"


def _what_differs(slowest: Account, others: Sequence[Account]) -> tuple[str, Spent]:
    """What the slowest rank does more of than the others, and where."""

    def more(kind: str) -> float:
        usual = sum(account.share(kind) for account in others) / len(others)
        return slowest.share(kind) - usual

    kinds = [kind for kind in slowest.spent if kind not in _TOGETHER]
    if not kinds:
        return "other", Spent()
    kind = max(kinds, key=more)
    return kind, slowest.spent[kind]


def _communication(case: Case, ranks: Sequence[Account]) -> Finding | None:
    together = min(account.share(*_TOGETHER) for account in ranks)
    forward = max(account.share("forward") for account in ranks)
    share = together - limit("backward_per_forward") * forward
    moved = _moved(case)
    if share < limit("communication") or moved is None or not case.lead:
        return None
    parameters = case.lead.trainer.settings.get("parameters")
    size = f"{parameters * 4 / 1e6:.0f} MB of gradients" if parameters else "gradients"
    return finding(
        "ranks.communication",
        f"{len(ranks)} ranks spend {pct(share)} of each step exchanging {size}.",
        "high" if _sure(share, moved) else "medium",
        "what the backward pass takes beyond twice the forward pass, and bytes between ranks",
        1.0 / max(1.0 - share, 0.02),
        [
            number("exchanging gradients", share, "share", "communication", "stack samples"),
            number("bytes between the ranks", moved, "bytes/s", source="/proc"),
        ],
        [
            Advice("with model.no_sync(): for all but the last of N micro-batches",
                   "gradients are exchanged once in N steps"),
            Advice("model.register_comm_hook(None, default_hooks.bf16_compress_hook)",
                   "half as many bytes"),
            Advice("a larger batch per rank", "as many bytes for more samples"),
        ],
    )  # fmt: skip


def _sure(share: float, moved: float) -> bool:
    return share >= 2 * limit("communication") and moved >= limit("rank_traffic")


def _moved(case: Case) -> float | None:
    """Bytes a second between ranks: over loopback, the network or NVLink."""
    rates = [
        case.mean(metric, entity)
        for metric, entity in case.recorded.series
        if metric in ("loopback", "net_received", "gpu_nvlink_received")
    ]
    known = [rate for rate in rates if rate is not None]
    return max(known) if known else None
