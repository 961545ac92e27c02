"""The training waits for batches: why they come late."""

from __future__ import annotations

import math

from stepscope.analysis.bottleneck.account import Account
from stepscope.analysis.bottleneck.case import Case, finding, measured
from stepscope.analysis.bottleneck.thresholds import limit
from stepscope.records import Confidence, Evidence, Finding, Recommendation


class Batches:
    """How batches of a run are made: seconds per batch, means over those that were timed."""

    def __init__(self, case: Case, account: Account) -> None:
        samples, collation, count = case.samples, case.collation, len(case.samples)
        trained = max(account.seconds - account.evaluated, 1e-6)
        self.workers = account.workers
        self.samples, self.collation = float(samples.wall.mean()), float(collation.wall.mean())
        self.whole = self.samples + self.collation
        self.cpu = float((samples.cpu.sum() + collation.cpu.sum()) / count)
        self.blocked = float((samples.blocked.sum() + collation.blocked.sum()) / count)
        # Share of the workers' time in which they prepared anything.
        busy = self.whole * len(account.batches) / (max(1, self.workers) * trained)
        self.busy = min(1.0, busy)

    def share(self, part: float) -> float:
        return part / self.whole if self.whole else 0.0


def data_wait(case: Case) -> Finding | None:
    """The reason why batches are waited for."""
    account = case.account
    if account.wait_share < limit("input_wait"):
        return None
    if not len(case.samples):
        return _unseen(case, account)
    batches, most = Batches(case, account), limit("most_of_it")
    workers = batches.workers
    stay = account.loader is not None and account.loader.persists
    if account.starting > most * account.waited and account.passes and workers and not stay:
        return _startup(account)
    if workers and batches.busy < most:
        return _handover(case, account, batches)
    if batches.share(batches.collation) > most:
        return _collation(case, account, batches)
    idle = case.cores.idle
    room = idle is None or (idle >= limit("idle_cores") and not case.cores.saturated)
    if workers == 0 and room:
        return _workers(case, account, batches)
    if workers and batches.share(batches.blocked) > most:
        return _fetch(case, account, batches)
    if room and _missing_workers(account, batches) > 0:
        return _workers(case, account, batches)
    return _preparation(case, account, batches)


def without_waiting(case: Case, account: Account) -> float:
    """How many times as fast it would be if batches were always there.

    On a GPU the wait is lost only as far as the device stood still for it: what it takes from a
    batch to the end of the step stays.
    """
    seconds = account.seconds - account.evaluated
    left = seconds - account.waited
    span = case.device.span if case.on_gpu else None
    if span is not None:
        left = max(left, min(seconds, span * account.steps))
    return account.seconds / max(left + account.evaluated, 1e-3 * account.seconds)


def _without_waiting_on_these_cores(case: Case, account: Account) -> float:
    """No faster than the cores allow, at the CPU time that a step takes now."""
    used, allowed = case.cores.used, case.cores.allowed
    return min(without_waiting(case, account), allowed / used if used and allowed else math.inf)


def _without_preparing(case: Case, account: Account) -> float:
    """Without the work of preparing: the wait is gone, and the cores are free for training.

    What stays is what the training thread computes, and what the GPU does.
    """
    main = case.cores.main or 0.0
    if case.on_gpu:
        left = account.seconds - account.waited
        stays = max(min(main, 1.0), case.device.busy or 0.0)
    else:
        left = account.seconds / without_waiting(case, account)
        threads = account.threads
        stays = main / max(1.0, threads if threads is not None else case.cores.allowed or 1.0)
    left -= (case.cores.wait_main or 0.0) * account.seconds
    return account.seconds / max(left, stays * account.seconds, 1e-2)


def _sure(account: Account) -> tuple[Confidence, str]:
    sure = account.wait_share >= limit("input_wait_sure")
    return ("high", "wait_measured") if sure else ("medium", "wait_is_small")


def _waited(account: Account) -> Evidence | None:
    return measured("data_wait", account.wait_share, "share", "input_wait", "loader")


def _missing_workers(account: Account, batches: Batches) -> int:
    """Workers that it takes to have a batch ready for every step, beyond those that there are."""
    per_step = len(account.batches) / max(1, account.steps)
    rest = max(account.rest, 1e-6) / max(per_step, 1e-6)
    return max(0, math.ceil(batches.whole / rest) - batches.workers)


def _workers(case: Case, account: Account, batches: Batches) -> Finding:
    idle, workers = case.cores.idle, batches.workers
    enough = workers + max(1, _missing_workers(account, batches))
    if idle is not None:
        enough = min(enough, workers + max(1, math.ceil(idle)))
    confidence, reason = _sure(account)
    return finding(
        "input.workers",
        confidence,
        _without_waiting_on_these_cores(case, account),
        variant="few" if workers else "none",
        values={"workers": workers},
        reasons=[reason],
        evidence=[
            _waited(account),
            measured("batch_preparation", batches.whole, "s", source="workers"),
            measured("step_besides", account.rest, "s", source="steps"),
            measured("cores_idle", idle, "cores", "idle_cores", "/proc"),
        ],
        recommendations=[
            Recommendation("enough_workers", "workers", max(1, enough), account.loader_location)
        ],
    )


def _preparation(case: Case, account: Account, batches: Batches) -> Finding:
    confidence, reason = _sure(account)
    on_cpu = batches.share(batches.cpu)
    return finding(
        "input.preparation",
        confidence,
        _without_preparing(case, account),
        values={"workers": batches.workers, "rest": account.rest},
        reasons=[reason],
        evidence=[
            _waited(account),
            measured("batch_cpu", batches.cpu, "s", source="workers"),
            measured("batch_cpu_share", on_cpu, "share", "most_of_it", "workers"),
            measured("workers_busy", batches.busy, "share", source="workers"),
            measured("cores_used", case.cores.used, "cores", source="/proc"),
        ],
        recommendations=["cheaper_transform", "prepare_data_once"],
    )


def _fetch(case: Case, account: Account, batches: Batches) -> Finding:
    confidence, reason = _sure(account)
    reasons = [reason]
    disk = case.mean("read")
    # Where ranks talk to each other over loopback, it says nothing of data.
    network = case.highest_mean("net_received", *([] if len(case.ranks) > 1 else ["loopback"]))
    from_disk, from_network = disk or 0.0, network or 0.0
    source = "either"
    if max(from_disk, from_network) < limit("fetch_rate"):
        source = "unknown"
        if confidence == "high":
            confidence, reasons = "medium", [reason, "source_unknown"]
    elif from_disk > 2 * from_network:
        source = "storage"
    elif from_network > 2 * from_disk:
        source = "network"
    blocked = batches.share(batches.blocked)
    return finding(
        "input.fetch",
        confidence,
        _without_waiting_on_these_cores(case, account),
        variant=source,
        values={"rate": max(from_disk, from_network)},
        reasons=reasons,
        evidence=[
            _waited(account),
            measured("batch_blocked", blocked, "share", "most_of_it", "workers"),
            measured("batch_cpu", batches.cpu, "s", source="workers"),
            measured("storage_read", disk, "bytes/s", source="/proc"),
            measured("network_received", network, "bytes/s", source="/proc"),
        ],
        recommendations=[
            "copy_data_near",
            Recommendation(
                "more_reads_at_once",
                "workers",
                max(2, batches.workers * 2),
                account.loader_location,
            ),
            "larger_files",
        ],
    )


def _collation(case: Case, account: Account, batches: Batches) -> Finding:
    confidence, reason = _sure(account)
    collation = batches.share(batches.collation)
    read = batches.samples / max(1, batches.workers) * len(account.batches)
    return finding(
        "input.collation",
        confidence,
        min(_without_preparing(case, account), account.seconds / max(read, 1e-6)),
        reasons=[reason],
        evidence=[
            _waited(account),
            measured("collation_share", collation, "share", "most_of_it", "workers"),
            measured("batch_collation", batches.collation, "s", source="workers"),
            measured("batch_samples", batches.samples, "s", source="workers"),
        ],
        recommendations=[Recommendation("collate_without_loops", location=account.loader_location)],
    )


def _handover(case: Case, account: Account, batches: Batches) -> Finding:
    confidence, reason = _sure(account)
    prefetch = max(4, 2 * account.loader.prefetch) if account.loader else 4
    return finding(
        "input.handover",
        "medium" if confidence == "high" else "low",
        _without_waiting_on_these_cores(case, account),
        reasons=[reason, "handover_unseen"],
        evidence=[
            _waited(account),
            measured("workers_busy", batches.busy, "share", "most_of_it", "workers"),
        ],
        recommendations=[
            Recommendation("prefetch_more", "prefetch", prefetch, account.loader_location),
            Recommendation("fewer_tensors", location=account.loader_location),
        ],
    )


def _startup(account: Account) -> Finding:
    epochs = len(account.passes)
    share, of_all = account.starting / account.seconds, account.starting / account.waited
    return finding(
        "input.startup",
        "high" if share >= limit("input_wait_sure") and epochs > 1 else "medium",
        account.seconds / max(account.seconds - account.starting, 1e-6),
        values={"each": account.starting / max(1, epochs)},
        evidence=[
            measured("startup_wait", share, "share", "input_wait", "loader"),
            measured("startup_share", of_all, "share", "most_of_it", "loader"),
            measured("epochs_begun", epochs, "count", source="loader"),
        ],
        recommendations=[
            Recommendation("keep_workers", "persistent", True, account.loader_location)
        ],
    )


def _unseen(case: Case, account: Account) -> Finding:
    """Batches are waited for, and nobody told how they are made (an iterator of the user's)."""
    more = account.workers + max(1, math.ceil(case.cores.idle or 1))
    return finding(
        "input.preparation",
        "low",
        without_waiting(case, account),
        variant="unseen",
        evidence=[_waited(account)],
        recommendations=[Recommendation("more_workers", "workers", more, account.loader_location)],
    )
