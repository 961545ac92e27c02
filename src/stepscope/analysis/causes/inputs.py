"""The training waits for batches: why they come late."""

from __future__ import annotations

import math
from dataclasses import dataclass

from stepscope.analysis.causes.account import Account
from stepscope.analysis.causes.case import Case, finding, number, pct
from stepscope.analysis.causes.thresholds import limit
from stepscope.analysis.observed import Loader
from stepscope.records import Advice, Confidence, Evidence, Finding


@dataclass(frozen=True)
class Batches:
    """How batches of a run are made: seconds per batch, means over those that were timed."""

    workers: int
    samples: float
    collation: float
    cpu: float
    without_cpu: float
    blocked: float
    busy: float
    """Share of the workers' time in which they prepared anything."""

    @property
    def whole(self) -> float:
        return self.samples + self.collation

    def share(self, part: float) -> float:
        return part / self.whole if self.whole else 0.0


def batches_of(case: Case, account: Account) -> Batches | None:
    """What is known of the preparation of batches; None where nobody told."""
    samples, collation = case.samples, case.collation
    count = len(samples)
    if not count:
        return None
    workers = account.loader.workers if account.loader else 0
    whole = float(samples.wall.mean() + collation.wall.mean())
    trained = max(account.seconds - account.evaluated, 1e-6)
    return Batches(
        workers=workers,
        samples=float(samples.wall.mean()),
        collation=float(collation.wall.mean()),
        cpu=float((samples.cpu.sum() + collation.cpu.sum()) / count),
        without_cpu=float((samples.without_cpu.sum() + collation.without_cpu.sum()) / count),
        blocked=float((samples.blocked.sum() + collation.blocked.sum()) / count),
        busy=min(1.0, whole * len(account.batches) / (max(1, workers) * trained)),
    )


def input_findings(case: Case) -> list[Finding]:
    """One finding at most: the reason why batches are waited for."""
    account = case.lead
    if account is None or account.wait_share < limit("input_wait"):
        return []
    batches = batches_of(case, account)
    if batches is None:
        return [_unknown(case, account)]
    starts = account.starting > limit("most_of_it") * account.waited
    stay = account.loader is not None and account.loader.persists
    if starts and account.passes and batches.workers and not stay:
        return [_startup(case, account)]
    if batches.workers and batches.busy < limit("most_of_it"):
        return [_handover(case, account, batches)]
    if batches.share(batches.collation) > limit("most_of_it"):
        return [_collation(case, account, batches)]
    idle = case.cores.idle
    room = idle is None or (idle >= limit("idle_cores") and not case.cores.saturated)
    if batches.workers == 0 and room:
        return [_workers(case, account, batches)]
    if batches.workers and batches.share(batches.blocked) > limit("most_of_it"):
        return [_fetch(case, account, batches)]
    if room and _needed(account, batches) > 0:
        return [_workers(case, account, batches)]
    return [_preparation(case, account, batches)]


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


def by_cores(case: Case) -> float:
    """How many times as fast the cores would let it be, at the CPU time that a step takes now."""
    used, allowed = case.cores.used, case.cores.allowed
    return allowed / used if used and allowed else math.inf


def _sure(account: Account) -> tuple[Confidence, str]:
    share = account.wait_share
    if share >= limit("input_wait_sure"):
        return "high", f"each batch's wait was measured, {account.steps} steps"
    return "medium", "the wait was measured, but it is a small part of the step"


def _waited(account: Account) -> Evidence | None:
    return number("waited for the next batch", account.wait_share, "share", "input_wait", "loader")


def _made_by(loader: Loader | None, change: str, why: str = "") -> Advice:
    """Advice on the line that made the loader."""
    if loader is None:
        return Advice(change, why)
    return Advice(change, why, loader.where, loader.line)


def _needed(account: Account, batches: Batches) -> int:
    """Workers that it takes to have a batch ready for every step, beyond those that there are."""
    per_step = len(account.batches) / max(1, account.steps)
    rest = max(account.rest, 1e-6) / max(per_step, 1e-6)
    return max(0, math.ceil(batches.whole / rest) - batches.workers)


def _workers(case: Case, account: Account, batches: Batches) -> Finding:
    idle = case.cores.idle
    needed = batches.workers + max(1, _needed(account, batches))
    room = batches.workers + max(1, math.ceil(idle)) if idle is not None else needed
    wanted = max(1, min(needed, room))
    ceiling = min(without_waiting(case, account), by_cores(case))
    confidence, because = _sure(account)
    who = (
        "the training process loads its data itself (num_workers=0)"
        if batches.workers == 0
        else f"{batches.workers} worker{'s' if batches.workers > 1 else ''} cannot keep up"
    )
    return finding(
        "input.workers",
        f"Training waits for data {pct(account.wait_share)} of the time: {who}"
        + (f", while {idle:.1f} cores are idle." if idle is not None else "."),
        confidence, because, ceiling,
        [
            _waited(account),
            number("a batch takes to prepare", batches.whole, "s", source="workers"),
            number("a step takes besides", account.rest, "s", source="steps"),
            number("cores idle", idle, "cores", "idle_cores", "/proc"),
        ],
        [_made_by(account.loader, f"num_workers={wanted}",
                  f"a batch takes {batches.whole * 1e3:.0f} ms to prepare and is needed every "
                  f"{account.rest * 1e3:.0f} ms")],
    )  # fmt: skip


def _preparation(case: Case, account: Account, batches: Batches) -> Finding:
    confidence, because = _sure(account)
    cores = case.cores
    return finding(
        "input.preparation",
        f"Training waits for data {pct(account.wait_share)} of the time: preparing a batch takes "
        f"{batches.cpu * 1e3:.0f} ms of CPU, and {_who(batches.workers)} cannot do it faster.",
        confidence, because, _without_preparing(case, account),
        [
            _waited(account),
            number("CPU time to prepare a batch", batches.cpu, "s", source="workers"),
            number("share of it that is CPU", batches.share(batches.cpu), "share", "most_of_it",
                   "workers"),
            number("workers busy", batches.busy, "share", source="workers"),
            number("cores used", cores.used, "cores", source="/proc"),
        ],
        [
            Advice("make the transform cheaper: vectorise it, decode to the size that is needed, "
                   "or move it to the GPU",
                   f"a batch takes {batches.cpu * 1e3:.0f} ms of CPU, and the training needs one "
                   f"every {account.rest * 1e3:.0f} ms"),
            Advice("prepare the data set once and store the result", "every epoch does the same "
                   "work again"),
        ],
    )  # fmt: skip


def _without_preparing(case: Case, account: Account) -> float:
    """Without the work of preparing: the wait is gone, and the cores are free for training.

    What stays is what the training thread computes, and what the GPU does.
    """
    now = case.cores
    left = account.seconds / without_waiting(case, account)
    if case.on_gpu:
        left = account.seconds - account.waited
    left -= (now.wait_main or 0.0) * account.seconds
    return account.seconds / max(left, _stays(case, account) * account.seconds, 1e-2)


def _stays(case: Case, account: Account) -> float:
    """The share of the time in which the training itself computes, whoever prepares its data."""
    main = case.cores.main or 0.0
    if case.on_gpu:
        return max(min(main, 1.0), case.device.busy or 0.0)
    threads = account.trainer.settings.get("threads")
    return main / max(1.0, threads if isinstance(threads, int) else case.cores.allowed or 1.0)


def _fetch(case: Case, account: Account, batches: Batches) -> Finding:
    confidence, because = _sure(account)
    disk, network = case.mean("read"), _network(case)
    source = _source(disk or 0.0, network or 0.0)
    if source is None and confidence == "high":
        confidence, because = "medium", f"{because}; what for does not show in bytes"
    source = source or "storage, the network, a lock or another process"
    return finding(
        "input.fetch",
        f"Training waits for data {pct(account.wait_share)} of the time: preparing a batch is "
        f"standing still for {source}, {pct(batches.share(batches.blocked))} of it.",
        confidence, because, min(without_waiting(case, account), by_cores(case)),
        [
            _waited(account),
            number("of preparing a batch, standing still", batches.share(batches.blocked), "share",
                   "most_of_it", "workers"),
            number("CPU time to prepare a batch", batches.cpu, "s", source="workers"),
            number("read from storage", disk, "bytes/s", source="/proc"),
            number("received over the network", network, "bytes/s", source="/proc"),
        ],
        [
            Advice("copy the data set to a local disk or into memory before training",
                   f"reads come at {_rate(disk, network)}"),
            _made_by(account.loader, f"num_workers={max(2, batches.workers * 2)}",
                     "more reads under way at once help if it is latency that is waited for, not "
                     "if the link is full"),
            Advice("store samples in larger files (tar shards, Parquet, LMDB)",
                   "many small reads pay the latency of each"),
        ],
    )  # fmt: skip


def _who(workers: int) -> str:
    if workers == 0:
        return "the training process"
    return f"{workers} workers" if workers > 1 else "one worker"


def _source(disk: float, network: float) -> str | None:
    """Where the bytes come from, if they do."""
    if max(disk, network) < limit("fetch_rate"):
        return None
    if disk > 2 * network:
        return "storage"
    return "the network" if network > 2 * disk else "storage or the network"


def _network(case: Case) -> float | None:
    """Bytes a second that came in, from other machines or, unless ranks talk there, from this."""
    metrics = ("net_received",) if len(case.ranks) > 1 else ("net_received", "loopback")
    found = [case.mean(metric, entity) for metric, entity in case.recorded.series
             if metric in metrics]  # fmt: skip
    known = [each for each in found if each is not None]
    return max(known) if known else None


def _rate(disk: float | None, network: float | None) -> str:
    return f"{max(disk or 0.0, network or 0.0) / 1e6:.1f} MB/s"


def _collation(case: Case, account: Account, batches: Batches) -> Finding:
    confidence, because = _sure(account)
    read = batches.samples / max(1, batches.workers) * len(account.batches)
    ceiling = min(_without_preparing(case, account), account.seconds / max(read, 1e-6))
    return finding(
        "input.collation",
        f"Training waits for data {pct(account.wait_share)} of the time: putting a batch together "
        f"takes {batches.collation * 1e3:.0f} ms, its samples {batches.samples * 1e3:.0f} ms.",
        confidence, because, ceiling,
        [
            _waited(account),
            number("of preparing a batch, collation", batches.share(batches.collation), "share",
                   "most_of_it", "workers"),
            number("collating a batch", batches.collation, "s", source="workers"),
            number("reading its samples", batches.samples, "s", source="workers"),
        ],
        [_made_by(account.loader, "a collate_fn that allocates once and copies "
                  "(torch.stack(samples, out=…), pad_sequence)",
                  "loops over elements in Python are what takes long")],
    )  # fmt: skip


def _handover(case: Case, account: Account, batches: Batches) -> Finding:
    confidence, because = _sure(account)
    return finding(
        "input.handover",
        f"Training waits for data {pct(account.wait_share)} of the time although the workers are "
        f"busy only {pct(batches.busy)} of theirs: batches are slow to be handed over.",
        "medium" if confidence == "high" else "low",
        because + "; what the hand-over does was not seen",
        min(without_waiting(case, account), by_cores(case)),
        [_waited(account), number("workers busy", batches.busy, "share", "most_of_it", "workers")],
        [
            _made_by(account.loader, f"prefetch_factor={_twice_the_prefetch(account)}",
                     "more batches on their way"),
            _made_by(account.loader, "return one tensor per field from the data set, not many "
                     "small ones", "each tensor is a file descriptor to hand over"),
        ],
    )  # fmt: skip


def _twice_the_prefetch(account: Account) -> int:
    return max(4, 2 * account.loader.prefetch) if account.loader else 4


def _startup(case: Case, account: Account) -> Finding:
    loader = account.loader
    count = len(account.passes)
    share = account.starting / account.seconds
    return finding(
        "input.startup",
        f"Training waits {pct(share)} of the time for loader workers to start: "
        f"{account.starting / max(1, count):.1f} s at each of {count} epochs.",
        "high" if share >= limit("input_wait_sure") and count > 1 else "medium",
        f"the wait for the first batch of {count} epochs was measured",
        account.seconds / max(account.seconds - account.starting, 1e-6),
        [
            number("waited for workers to start", share, "share", "input_wait", "loader"),
            number("of all waiting", account.starting / account.waited, "share", "most_of_it",
                   "loader"),
            number("epochs begun", count, "count", source="loader"),
        ],
        [_made_by(loader, "persistent_workers=True", "workers stay for the next epoch")],
    )  # fmt: skip


def _unknown(case: Case, account: Account) -> Finding:
    """Batches are waited for, and nobody told how they are made (an iterator of the user's)."""
    return finding(
        "input.preparation",
        f"Training waits for data {pct(account.wait_share)} of the time; how batches are made was "
        "not seen.",
        "low", "the preparation itself was not seen", without_waiting(case, account),
        [_waited(account)],
        [_made_by(account.loader, f"num_workers={_one_more(case, account)}")],
    )  # fmt: skip


def _one_more(case: Case, account: Account) -> int:
    """More workers than there are, by what is idle."""
    now = account.loader.workers if account.loader else 0
    return now + max(1, math.ceil(case.cores.idle or 1))
