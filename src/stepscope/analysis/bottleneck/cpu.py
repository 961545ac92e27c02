"""CPU causes: too few cores, a quota, thread oversubscription, other processes, small batches."""

from __future__ import annotations

import math

from stepscope.analysis.bottleneck.case import Case, finding, measured
from stepscope.analysis.bottleneck.thresholds import limit
from stepscope.analysis.trial.interference import has_cpu_interference
from stepscope.records import Evidence, Finding, Recommendation


def cpu_shortage(case: Case) -> Finding | None:
    """Find why threads wait for cores. The most specific cause wins: quota, threads, cores."""
    if case.cores.used is None or case.cores.allowed is None:
        return None
    return _quota(case) or _oversubscription(case) or _too_few_cores(case)


def small_batch(case: Case) -> Finding | None:
    """Find a batch so small that a step on the CPU is mostly overhead."""
    breakdown, batch = case.breakdown, case.breakdown.batch_size
    if case.on_gpu or batch is None or batch > limit("small_batch_cpu"):
        return None
    if breakdown.wait_share >= limit("data_wait_high") or breakdown.step_without_wait > limit(
        "launch_bound_step"
    ):
        return None
    times = int(limit("batch_growth_cpu"))
    larger = batch * times
    return finding(
        "batch.small",
        "high" if batch == 1 else "medium",
        float(times),
        variant="cpu",
        values={"step_seconds": breakdown.step_seconds, "times": times},
        evidence=[
            measured("batch_size", batch, "count", "small_batch_cpu", "loader"),
            measured("step", breakdown.step_without_wait, "s", "launch_bound_step", "steps"),
        ],
        recommendations=[
            Recommendation("larger_batch_on_cpu", "batch_size", larger, breakdown.loader_location)
        ],
    )


def _speedup_with(case: Case, available: float) -> float:
    """Bound the speed-up with more cores, for a run that saturates the cores it has.

    Neither the number of cores nor the number of runnable threads can be exceeded. With a GPU, the
    CPU time of the training thread and the kernel time remain.
    """
    cores = case.cores
    used = cores.used or 1.0
    bound = available / used
    if cores.runnable is not None:
        bound = min(bound, cores.runnable / used)
    if case.on_gpu and case.primary is not None and cores.training is not None:
        bound = min(bound, 1.0 / max(min(cores.training, 1.0), case.device.busy or 0.0, 1e-3))
    return bound


def _threads_waiting(case: Case) -> Evidence | None:
    runnable, used = case.cores.runnable, case.cores.used
    if runnable is None or used is None:
        return None
    return measured("threads_waiting", runnable - used, "count", source="/proc")


def _allowed_cores_used(case: Case) -> Evidence | None:
    cores = case.cores
    share = cores.used / cores.allowed if cores.used is not None and cores.allowed else None
    return measured("allowed_cores_used", share, "share", "cores_saturated", "/proc")


def cpu_interference(case: Case) -> Finding | None:
    cores = case.cores
    other, machine = cores.other_processes or 0.0, cores.machine
    runnable, used = cores.runnable or 0.0, max(cores.used or 0.0, 0.05)
    if not has_cpu_interference(cores.other_processes, other + (cores.used or 0.0), machine):
        return None
    if cores.allowed is None or runnable < used + limit("other_cores"):
        return None
    return finding(
        "interference.cpu",
        "high" if other >= 2 * limit("other_cores") else "medium",
        min(runnable / used, (used + other) / used),
        values={"machine": machine, "waiting": runnable - used},
        evidence=[
            measured("other_cores", other, "cores", "other_cores", "/proc"),
            measured("cores_used_by_run", used, "cores", source="/proc"),
            _threads_waiting(case),
            measured("steal", case.mean("host_steal", "host"), "cores", source="/proc"),
        ],
        recommendations=["find_processes", "exclusive_cores"],
    )


def _quota(case: Case) -> Finding | None:
    cores = case.cores
    if cores.throttled is None or cores.throttled < limit("quota_throttled"):
        return None
    machine = float(cores.machine or cores.allowed or 1)
    return finding(
        "cpu.quota",
        "high" if cores.saturated else "medium",
        _speedup_with(case, machine),
        values={"allowed": cores.allowed, "machine": machine},
        evidence=[
            measured("throttled", cores.throttled, "seconds/s", "quota_throttled", "cgroup"),
            _allowed_cores_used(case),
            _threads_waiting(case),
        ],
        recommendations=["raise_quota"],
    )


def _oversubscription(case: Case) -> Finding | None:
    cores, primary = case.cores, case.primary
    if cores.runnable is None or not cores.allowed:
        return None
    per_core = cores.runnable / cores.allowed
    busy = (cores.used or 0.0) + (cores.other_processes or 0.0)
    saturated = cores.saturated or busy >= limit("cores_saturated") * (cores.machine or 1e9)
    processes = (case.reading("processes", "worker") or 0.0) + max(1, len(case.ranks))
    few_each = cores.runnable < limit("threads_per_process") * processes
    if per_core < limit("oversubscribed") or not saturated or few_each:
        return None
    bound = None
    if primary is not None and len(case.samples):
        # Only the work of the threads that prepare batches and train remains, distributed over the
        # cores: the other threads of a pool mostly spin while they wait for each other.
        cpu_per_batch = float(case.samples.cpu.mean() + case.collation.cpu.mean())
        preparation = cpu_per_batch * len(primary.batches) * max(1, len(case.ranks))
        training = (cores.training or 0.0) * primary.seconds
        usable = limit("cores_saturated") * cores.allowed
        bound = primary.seconds * usable / max(preparation + training, 1e-6)
    workers = primary.workers if primary else 0
    threads = max(1, math.floor(cores.allowed / max(1, processes)))
    switches = case.mean("switches_involuntary")
    return finding(
        "cpu.threads",
        "high",
        bound,
        values={
            "runnable": cores.runnable,
            "allowed": cores.allowed,
            "processes": processes,
        },
        evidence=[
            measured("threads_per_core", per_core, "times", "oversubscribed", "/proc"),
            _threads_waiting(case),
            measured("involuntary_switches", switches, "1/s", source="/proc"),
            _allowed_cores_used(case),
        ],
        recommendations=[
            Recommendation(
                "limit_worker_threads" if workers else "limit_process_threads", "threads", threads
            ),
            Recommendation("limit_library_threads", "threads", threads),
        ],
    )


def _too_few_cores(case: Case) -> Finding | None:
    cores = case.cores
    machine, runnable, used = cores.machine, cores.runnable, cores.used or 0.0
    if machine is None or cores.allowed is None or cores.allowed >= machine:
        return None
    if not cores.saturated or (runnable is not None and runnable < limit("min_speedup") * used):
        return None
    enough = max(2, min(math.ceil(runnable or 2 * (used or 1.0)), machine))
    return finding(
        "cpu.cores",
        "high" if runnable is not None else "medium",
        _speedup_with(case, float(machine)),
        variant="in_use" if runnable is None else "waiting",
        values={"runnable": runnable or used, "last_core": machine - 1},
        evidence=[
            _allowed_cores_used(case),
            measured("cores_allowed", cores.allowed, "cores", source="affinity"),
            measured("machine_cores", machine, "cores", source="/proc"),
            _threads_waiting(case),
        ],
        recommendations=[
            Recommendation("more_cores", "cpus", enough),
            "find_affinity",
        ],
    )


def serial_compute(case: Case) -> Finding | None:
    """Find a model that is computed on the CPU with fewer threads than there are cores."""
    breakdown, idle, allowed = case.breakdown, case.cores.idle, case.cores.allowed
    threads = breakdown.threads
    if case.on_gpu or len(case.ranks) > 1:
        return None
    if threads is None or idle is None or allowed is None or threads >= allowed:
        return None
    if idle < 2 * limit("idle_cores") or breakdown.wait_share >= limit("data_wait"):
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
