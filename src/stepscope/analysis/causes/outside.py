"""What the training thread does besides training: evaluation, checkpoints, logs."""

from __future__ import annotations

import numpy as np

from stepscope.analysis.causes.account import Account, Spent
from stepscope.analysis.causes.case import Case, finding, number, pct
from stepscope.analysis.causes.thresholds import limit
from stepscope.records import Advice, Finding


def outside_findings(case: Case) -> list[Finding]:
    account = case.lead
    if account is None or not account.seconds:
        return []
    found = [_evaluation(account), _checkpoint(account), _logging(account), _sleeping(case)]
    return [each for each in found if each is not None]


def gaps(account: Account) -> float:
    """Seconds that some steps took beyond what steps usually take, waits and evaluation aside."""
    usual = float(np.median(account.own))
    excess = float((account.own[account.own > limit("far_longer") * usual] - usual).sum())
    return max(0.0, excess - account.evaluated)


def _line(spent: Spent | None, change: str, why: str) -> Advice:
    return Advice(change, why, spent.where if spent else None, spent.line if spent else None)


def _ceiling(account: Account, seconds: float) -> float:
    return account.seconds / max(account.seconds - seconds, 1e-2 * account.seconds)


def _evaluation(account: Account) -> Finding | None:
    share = account.evaluated / account.seconds
    if share < limit("outside_share"):
        return None
    return finding(
        "outside.evaluation",
        f"{pct(share)} of the time goes to evaluation: {account.evaluated:.1f} s of "
        f"{account.seconds:.1f} s, in passes over loaders without a single optimizer step.",
        "high", "each pass was timed", _ceiling(account, account.evaluated),
        [number("spent in evaluation", share, "share", "outside_share", "loader")],
        [
            Advice("evaluate less often, or on a part of the validation set",
                   "every 10th time costs a tenth"),
            Advice("a larger batch_size for the validation loader, under torch.inference_mode()",
                   "nothing is kept for a backward pass"),
        ],
    )  # fmt: skip


def _checkpoint(account: Account) -> Finding | None:
    looked = account.share("save")
    if looked < limit("outside_share") / 2:
        return None
    seconds = max(looked * account.seconds, min(gaps(account), 2 * looked * account.seconds))
    share = seconds / account.seconds
    if share < limit("outside_share"):
        return None
    spent = account.spent.get("save")
    return finding(
        "outside.checkpoint",
        f"{pct(share)} of the time goes to saving checkpoints: training stands still for "
        f"{seconds:.1f} s of {account.seconds:.1f} s.",
        "high", "stack samples of the training thread, and steps that take far longer",
        _ceiling(account, seconds),
        [
            number("saving", share, "share", "outside_share", "stack samples, steps"),
            number("steps beyond twice the median, in excess", gaps(account), "s", source="steps"),
        ],
        [
            _line(spent, "save less often: every N minutes instead of every N steps",
                  "what a checkpoint protects is time"),
            _line(spent, "torch.distributed.checkpoint.async_save, or copy the state to the host "
                  "and write it in a thread", "training goes on while it is written"),
        ],
    )  # fmt: skip


def _logging(account: Account) -> Finding | None:
    share = account.share("logging")
    if share < limit("logging_share"):
        return None
    spent = account.spent.get("logging")
    return finding(
        "sync.logging",
        f"{pct(share)} of the training thread's time goes to logging"
        + (f", most of it at {spent.where}." if spent and spent.where else "."),
        "high" if account.looked > limit("least_seconds") else "medium",
        "stack samples of the training thread", _ceiling(account, share * account.seconds),
        [number("logging", share, "share", "logging_share", "stack samples")],
        [_line(spent, "log every 50 steps (if step % 50 == 0:), and let a thread write",
               "nothing is computed while it formats and writes")],
    )  # fmt: skip


def _sleeping(case: Case) -> Finding | None:
    """The training thread sleeps; where ranks do, that is a straggler."""
    account = case.lead
    if account is None or len(case.ranks) > 1:
        return None
    share = account.share("sleep")
    if share < limit("outside_share"):
        return None
    spent = account.spent.get("sleep")
    return finding(
        "outside.other",
        f"The training thread sleeps {pct(share)} of the time.",
        "high", "stack samples of the training thread", _ceiling(account, share * account.seconds),
        [number("sleeping", share, "share", "outside_share", "stack samples")],
        [_line(spent, "remove the sleep", "nothing else runs meanwhile")],
    )  # fmt: skip
