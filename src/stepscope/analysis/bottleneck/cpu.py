"""CPU cores: too few, held back by a quota, fought for by threads, taken by others, or wasted on
batches too small."""

from __future__ import annotations

import math

from stepscope.analysis.bottleneck.case import Case, finding, measured
from stepscope.analysis.bottleneck.thresholds import limit
from stepscope.analysis.trial.interference import takes_cores
from stepscope.records import Evidence, Finding, Recommendation


def cpu_shortage(case: Case) -> Finding | None:
    """Threads wait for cores; of several reasons the one that explains the others is taken: a
    quota before too many threads, these before too few cores."""
    if case.cores.used is None or case.cores.allowed is None:
        return None
    return _quota(case) or _threads(case) or _few(case)


def small_batch(case: Case) -> Finding | None:
    """A batch so small that a step on the CPU is all overhead."""
    account, batch = case.account, case.account.batch_size
    if case.on_gpu or batch is None or batch > limit("small_batch_cpu"):
        return None
    if account.wait_share >= limit("input_wait_sure") or account.rest > limit("overhead_step"):
        return None
    times = int(limit("safe_growth_cpu"))
    larger = batch * times
    return finding(
        "batch.small",
        "high" if batch == 1 else "medium",
        float(times),
        variant="cpu",
        values={"step_seconds": account.step_seconds, "times": times},
        evidence=[
            measured("batch_size", batch, "count", "small_batch_cpu", "loader"),
            measured("step", account.rest, "s", "overhead_step", "steps"),
        ],
        recommendations=[
            Recommendation("larger_batch_on_cpu", "batch_size", larger, account.loader_location)
        ],
    )


def _faster_with(case: Case, cores: float) -> float:
    """How many times as fast it would be with so many cores, for a tree that keeps all it has busy.

    It gets faster by what its threads wait for, and by no more than the cores are more. On a GPU
    it is the training thread's wait that counts: what it needs of a core stays.
    """
    now = case.cores
    used = now.used or 1.0
    most = cores / used
    if now.wanted is not None:
        most = min(most, now.wanted / used)
    if case.on_gpu and case.lead is not None and now.main is not None:
        alone = 1.0 / max(min(now.main, 1.0), case.device.busy or 0.0, 1e-3)
        return min(most, alone)
    return most


def _waiting(case: Case) -> Evidence | None:
    wanted, used = case.cores.wanted, case.cores.used
    if wanted is None or used is None:
        return None
    return measured("threads_waiting", wanted - used, "cores", source="/proc")


def _used(case: Case) -> Evidence | None:
    cores = case.cores
    share = cores.used / cores.allowed if cores.used is not None and cores.allowed else None
    return measured("allowed_cores_used", share, "share", "cores_saturated", "/proc")


def cpu_interference(case: Case) -> Finding | None:
    cores = case.cores
    others, machine = cores.others or 0.0, cores.machine
    wanted, used = cores.wanted or 0.0, max(cores.used or 0.0, 0.05)
    if not takes_cores(cores.others, others + (cores.used or 0.0), machine):
        return None
    if cores.allowed is None or wanted < used + limit("others_cores"):
        return None
    return finding(
        "interference.cpu",
        "high" if others >= 2 * limit("others_cores") else "medium",
        min(wanted / used, (used + others) / used),
        values={"machine": machine, "waiting": wanted - used},
        evidence=[
            measured("others_cores", others, "cores", "others_cores", "/proc"),
            measured("cores_used_by_run", used, "cores", source="/proc"),
            _waiting(case),
            measured("stolen_cores", case.mean("host_steal", "host"), "cores", source="/proc"),
        ],
        recommendations=["find_processes", "exclusive_cores"],
    )


def _quota(case: Case) -> Finding | None:
    cores = case.cores
    if cores.throttled is None or cores.throttled < limit("throttled"):
        return None
    machine = float(cores.machine or cores.allowed or 1)
    return finding(
        "cpu.quota",
        "high" if cores.saturated else "medium",
        _faster_with(case, machine),
        values={"allowed": cores.allowed, "machine": machine},
        evidence=[
            measured("throttled", cores.throttled, "seconds/s", "throttled", "cgroup"),
            _used(case),
            _waiting(case),
        ],
        recommendations=["raise_quota"],
    )


def _threads(case: Case) -> Finding | None:
    cores, lead = case.cores, case.lead
    if cores.wanted is None or not cores.allowed:
        return None
    crowd = cores.wanted / cores.allowed
    busy_all = (cores.used or 0.0) + (cores.others or 0.0)
    full = cores.saturated or busy_all >= limit("cores_saturated") * (cores.machine or 1e9)
    processes = (case.reading("processes", "worker") or 0.0) + max(1, len(case.ranks))
    few_each = cores.wanted < limit("threads_each") * processes
    if crowd < limit("oversubscribed") or not full or few_each:
        return None
    bound = None
    if lead is not None and len(case.samples):
        # What is left is what the threads compute that prepare and train, spread over the cores:
        # the others of a pool mostly wait for each other, at full speed.
        each = float(case.samples.cpu.mean() + case.collation.cpu.mean())
        prepared = each * len(lead.batches) * max(1, len(case.ranks))
        trained = (cores.main or 0.0) * lead.seconds
        usable = limit("cores_saturated") * cores.allowed
        bound = lead.seconds * usable / max(prepared + trained, 1e-6)
    workers = lead.workers if lead else 0
    threads = max(1, math.floor(cores.allowed / max(1, processes)))
    switches = case.mean("switches_involuntary")
    return finding(
        "cpu.threads",
        "high",
        bound,
        values={
            "wanted": cores.wanted,
            "allowed": cores.allowed,
            "processes": processes,
            "workers": workers,
        },
        evidence=[
            measured("threads_per_core", crowd, "times", "oversubscribed", "/proc"),
            _waiting(case),
            measured("involuntary_switches", switches, "1/s", source="/proc"),
            _used(case),
        ],
        recommendations=[
            Recommendation(
                "threads_of_workers" if workers else "threads_of_processes", "threads", threads
            ),
            Recommendation("threads_of_libraries", "threads", threads),
        ],
    )


def _few(case: Case) -> Finding | None:
    cores = case.cores
    machine, wanted, used = cores.machine, cores.wanted, cores.used or 0.0
    if machine is None or cores.allowed is None or cores.allowed >= machine:
        return None
    if not cores.saturated or (wanted is not None and wanted < limit("worth") * used):
        return None
    enough = max(2, min(math.ceil(wanted or 2 * (used or 1.0)), machine))
    return finding(
        "cpu.cores",
        "high" if wanted is not None else "medium",
        _faster_with(case, float(machine)),
        variant="in_use" if wanted is None else "waiting",
        values={"wanted": wanted or used, "last_core": machine - 1},
        evidence=[
            _used(case),
            measured("cores_allowed", cores.allowed, "cores", source="affinity"),
            measured("cores_of_machine", machine, "cores", source="/proc"),
            _waiting(case),
        ],
        recommendations=[
            Recommendation("more_cores", "cpus", enough),
            "find_affinity",
        ],
    )


def serial_compute(case: Case) -> Finding | None:
    """The model is computed on the CPU by fewer threads than there are cores."""
    lead, idle, allowed = case.account, case.cores.idle, case.cores.allowed
    threads = lead.threads
    if case.on_gpu or len(case.ranks) > 1:
        return None
    if threads is None or idle is None or allowed is None or threads >= allowed:
        return None
    if idle < 2 * limit("idle_cores") or lead.wait_share >= limit("input_wait"):
        return None
    return finding(
        "cpu.serial",
        "low",
        allowed / max(1.0, allowed - idle),
        values={"allowed": allowed},
        evidence=[
            measured("cores_idle", idle, "cores", "idle_cores", "/proc"),
            measured("framework_threads", threads, "count", source="hook"),
        ],
        recommendations=[Recommendation("more_threads", "threads", int(allowed))],
    )
