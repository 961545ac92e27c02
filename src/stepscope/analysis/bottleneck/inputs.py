"""Data-loading causes: why training waits for batches."""

from __future__ import annotations

import math

from stepscope.analysis.bottleneck.breakdown import StepBreakdown
from stepscope.analysis.bottleneck.case import Case, finding, measured
from stepscope.analysis.bottleneck.thresholds import limit
from stepscope.records import Confidence, Evidence, Finding, Recommendation


class Batches:
    """Batch preparation: mean seconds per batch over the batches that were timed."""

    def __init__(self, case: Case, breakdown: StepBreakdown) -> None:
        samples, collation, count = case.samples, case.collation, len(case.samples)
        trained = max(breakdown.seconds - breakdown.evaluation_seconds, 1e-6)
        self.workers = breakdown.workers
        self.samples, self.collation = float(samples.wall.mean()), float(collation.wall.mean())
        self.whole = self.samples + self.collation
        self.cpu = float((samples.cpu.sum() + collation.cpu.sum()) / count)
        self.blocked = float((samples.blocked.sum() + collation.blocked.sum()) / count)
        # Share of the time in which the loader workers prepare batches.
        busy = self.whole * len(breakdown.batches) / (max(1, self.workers) * trained)
        self.busy = min(1.0, busy)

    def share(self, part: float) -> float:
        return part / self.whole if self.whole else 0.0


def data_wait(case: Case) -> Finding | None:
    """Find why training waits for batches."""
    breakdown = case.breakdown
    if breakdown.wait_share < limit("data_wait"):
        return None
    if not len(case.samples):
        return _unobserved(case, breakdown)
    batches, majority = Batches(case, breakdown), limit("majority")
    workers = batches.workers
    restarts = workers and breakdown.passes and not (breakdown.loader and breakdown.loader.persists)
    if restarts and breakdown.startup_seconds > majority * breakdown.wait_seconds:
        return _startup(breakdown)
    if workers and batches.busy < majority:
        return _transfer(case, breakdown, batches)
    if batches.share(batches.collation) > majority:
        return _collation(case, breakdown, batches)
    idle = case.cores.idle
    has_idle_cores = idle is None or (idle >= limit("idle_cores") and not case.cores.saturated)
    if workers == 0 and has_idle_cores:
        return _workers(case, breakdown, batches)
    if workers and batches.share(batches.blocked) > majority:
        return _fetch(case, breakdown, batches)
    if has_idle_cores and _missing_workers(breakdown, batches) > 0:
        return _workers(case, breakdown, batches)
    return _preparation(case, breakdown, batches)


def speedup_without_wait(case: Case, breakdown: StepBreakdown) -> float:
    """Return the speed-up if every batch were ready in time.

    With a GPU, the wait only counts while the device is idle: the time on the device from the batch
    to the end of the step remains.
    """
    seconds = breakdown.seconds - breakdown.evaluation_seconds
    remaining = seconds - breakdown.wait_seconds
    span = case.device.step_span if case.on_gpu else None
    if span is not None:
        remaining = max(remaining, min(seconds, span * breakdown.steps))
    remaining += breakdown.evaluation_seconds
    return breakdown.seconds / max(remaining, 1e-3 * breakdown.seconds)


def _speedup_within_cores(case: Case, breakdown: StepBreakdown) -> float:
    """Bound the speed-up by the allowed cores, at the current CPU time per step."""
    used, allowed = case.cores.used, case.cores.allowed
    return min(
        speedup_without_wait(case, breakdown), allowed / used if used and allowed else math.inf
    )


def _speedup_without_preparation(case: Case, breakdown: StepBreakdown) -> float:
    """Return the speed-up if preparing batches took no CPU time.

    The wait disappears and the cores are free for training. The work of the training thread and of
    the GPU remains.
    """
    training = case.cores.training or 0.0
    if case.on_gpu:
        remaining = breakdown.seconds - breakdown.wait_seconds
        needed = max(min(training, 1.0), case.device.busy or 0.0)
    else:
        remaining = breakdown.seconds / speedup_without_wait(case, breakdown)
        threads = breakdown.threads
        needed = training / max(1.0, threads if threads is not None else case.cores.allowed or 1.0)
    remaining -= (case.cores.training_waiting or 0.0) * breakdown.seconds
    return breakdown.seconds / max(remaining, needed * breakdown.seconds, 1e-2)


def _wait_confidence(breakdown: StepBreakdown) -> tuple[Confidence, str]:
    is_high = breakdown.wait_share >= limit("data_wait_high")
    return ("high", "wait_measured") if is_high else ("medium", "wait_is_small")


def _data_wait(breakdown: StepBreakdown) -> Evidence | None:
    return measured("data_wait", breakdown.wait_share, "share", "data_wait", "loader")


def _missing_workers(breakdown: StepBreakdown, batches: Batches) -> int:
    """Return how many more loader workers are needed to have a batch ready for every step."""
    per_step = len(breakdown.batches) / max(1, breakdown.steps)
    batch_period = max(breakdown.step_without_wait, 1e-6) / max(per_step, 1e-6)
    return max(0, math.ceil(batches.whole / batch_period) - batches.workers)


def _workers(case: Case, breakdown: StepBreakdown, batches: Batches) -> Finding:
    idle, workers = case.cores.idle, batches.workers
    enough = workers + max(1, _missing_workers(breakdown, batches))
    if idle is not None:
        enough = min(enough, workers + max(1, math.ceil(idle)))
    confidence, reason = _wait_confidence(breakdown)
    return finding(
        "input.workers",
        confidence,
        _speedup_within_cores(case, breakdown),
        variant="few" if workers else "none",
        values={"workers": workers},
        reasons=[reason],
        evidence=[
            _data_wait(breakdown),
            measured("batch_preparation", batches.whole, "s", source="workers"),
            measured("step_without_wait", breakdown.step_without_wait, "s", source="steps"),
            measured("cores_idle", idle, "cores", "idle_cores", "/proc"),
        ],
        recommendations=[
            Recommendation("enough_workers", "workers", max(1, enough), breakdown.loader_location)
        ],
    )


def _preparation(case: Case, breakdown: StepBreakdown, batches: Batches) -> Finding:
    confidence, reason = _wait_confidence(breakdown)
    on_cpu = batches.share(batches.cpu)
    return finding(
        "input.preparation",
        confidence,
        _speedup_without_preparation(case, breakdown),
        variant="few" if batches.workers else "none",
        values={
            "workers": batches.workers,
            "step_without_wait": breakdown.step_without_wait,
        },
        reasons=[reason],
        evidence=[
            _data_wait(breakdown),
            measured("batch_cpu", batches.cpu, "s", source="workers"),
            measured("batch_cpu_share", on_cpu, "share", "majority", "workers"),
            measured("workers_busy", batches.busy, "share", source="workers"),
            measured("cores_used", case.cores.used, "cores", source="/proc"),
        ],
        recommendations=["cheaper_transform", "prepare_data_once"],
    )


def _fetch(case: Case, breakdown: StepBreakdown, batches: Batches) -> Finding:
    confidence, reason = _wait_confidence(breakdown)
    reasons = [reason]
    disk = case.mean("read")
    # Ranks also communicate over loopback, so it only indicates data traffic with one rank.
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
        _speedup_within_cores(case, breakdown),
        variant=source,
        values={"rate": max(from_disk, from_network)},
        reasons=reasons,
        evidence=[
            _data_wait(breakdown),
            measured("batch_blocked", blocked, "share", "majority", "workers"),
            measured("batch_cpu", batches.cpu, "s", source="workers"),
            measured("storage_read", disk, "bytes/s", source="/proc"),
            measured("network_received", network, "bytes/s", source="/proc"),
        ],
        recommendations=[
            "copy_data_locally",
            Recommendation(
                "more_reads_at_once",
                "workers",
                max(2, batches.workers * 2),
                breakdown.loader_location,
            ),
            "larger_files",
        ],
    )


def _collation(case: Case, breakdown: StepBreakdown, batches: Batches) -> Finding:
    confidence, reason = _wait_confidence(breakdown)
    collation = batches.share(batches.collation)
    read = batches.samples / max(1, batches.workers) * len(breakdown.batches)
    return finding(
        "input.collation",
        confidence,
        min(_speedup_without_preparation(case, breakdown), breakdown.seconds / max(read, 1e-6)),
        reasons=[reason],
        evidence=[
            _data_wait(breakdown),
            measured("collation_share", collation, "share", "majority", "workers"),
            measured("batch_collation", batches.collation, "s", source="workers"),
            measured("batch_samples", batches.samples, "s", source="workers"),
        ],
        recommendations=[Recommendation("vectorize_collation", location=breakdown.loader_location)],
    )


def _transfer(case: Case, breakdown: StepBreakdown, batches: Batches) -> Finding:
    confidence, reason = _wait_confidence(breakdown)
    prefetch = max(4, 2 * breakdown.loader.prefetch) if breakdown.loader else 4
    return finding(
        "input.ipc",
        "medium" if confidence == "high" else "low",
        _speedup_within_cores(case, breakdown),
        reasons=[reason, "transfer_not_measured"],
        evidence=[
            _data_wait(breakdown),
            measured("workers_busy", batches.busy, "share", "majority", "workers"),
        ],
        recommendations=[
            Recommendation("prefetch_more", "prefetch", prefetch, breakdown.loader_location),
            Recommendation("fewer_tensors", location=breakdown.loader_location),
        ],
    )


def _startup(breakdown: StepBreakdown) -> Finding:
    epochs, startup = len(breakdown.passes), breakdown.startup_seconds
    share, wait_share = startup / breakdown.seconds, startup / breakdown.wait_seconds
    return finding(
        "input.worker_startup",
        "high" if share >= limit("data_wait_high") and epochs > 1 else "medium",
        breakdown.seconds / max(breakdown.seconds - startup, 1e-6),
        values={"each": startup / max(1, epochs)},
        evidence=[
            measured("startup_wait", share, "share", "data_wait", "loader"),
            measured("startup_share", wait_share, "share", "majority", "loader"),
            measured("epochs_started", epochs, "count", source="loader"),
        ],
        recommendations=[
            Recommendation("keep_workers", "persistent", True, breakdown.loader_location)
        ],
    )


def _unobserved(case: Case, breakdown: StepBreakdown) -> Finding:
    """Report the data wait of a custom iterator, whose preparation of batches is not observed."""
    more = breakdown.workers + max(1, math.ceil(case.cores.idle or 1))
    return finding(
        "input.preparation",
        "low",
        speedup_without_wait(case, breakdown),
        variant="unobserved",
        evidence=[_data_wait(breakdown)],
        recommendations=[
            Recommendation("more_workers", "workers", more, breakdown.loader_location)
        ],
    )
