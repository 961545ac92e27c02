"""CPU cores: too few, held back by a quota, fought for by threads, or taken by others."""

from __future__ import annotations

import math

from stepscope.analysis.causes.case import Case, finding, number
from stepscope.analysis.causes.thresholds import limit
from stepscope.records import Advice, Confidence, Evidence, Finding


def host_findings(case: Case) -> list[Finding]:
    """What is wrong with the cores; of several reasons for the same wait the one that explains
    it is taken: a quota before too few cores, too many threads before both."""
    cores = case.cores
    if cores.used is None or cores.allowed is None:
        return []
    found = [_interference(case), _quota(case) or _threads(case) or _few(case), _serial(case)]
    return [each for each in found if each is not None]


def faster_with_cores(case: Case, cores: float) -> float:
    """How many times as fast it would be with so many cores, for a tree that keeps all it has busy.

    It gets faster by what its threads wait for, and by no more than the cores are more. On a GPU
    it is the training thread's wait that counts: what it needs of a core stays.
    """
    now = case.cores
    used, wanted = now.used or 1.0, now.wanted
    most = cores / used
    if wanted is not None:
        most = min(most, wanted / used)
    if case.on_gpu and case.lead is not None:
        return min(most, _launched_alone(case))
    return most


def _launched_alone(case: Case) -> float:
    """How many times as fast the training thread would be with a core of its own."""
    lead, main = case.lead, case.cores.main
    if lead is None or main is None:
        return math.inf
    busy = case.device.busy
    return 1.0 / max(min(main, 1.0), busy or 0.0, 1e-3)


def _waiting(case: Case) -> Evidence | None:
    wanted, used = case.cores.wanted, case.cores.used
    if wanted is None or used is None:
        return None
    return number("threads ready to run, without a core", wanted - used, "cores", source="/proc")


def _used(case: Case) -> Evidence | None:
    cores = case.cores
    share = cores.used / cores.allowed if cores.used is not None and cores.allowed else None
    return number("of the allowed cores in use", share, "share", "cores_saturated", "/proc")


def _interference(case: Case) -> Finding | None:
    cores = case.cores
    others, machine = cores.others, cores.machine
    if others is None or machine is None or others < limit("others_cores"):
        return None
    busy = others + (cores.used or 0.0) >= limit("cores_saturated") * machine
    wanted, used = cores.wanted or 0.0, max(cores.used or 0.0, 0.05)
    if not busy or wanted < used + limit("others_cores"):
        return None
    ceiling = min(wanted / used, (used + others) / used)
    steals = case.mean("host_steal", "host")
    confidence: Confidence = "high" if others >= 2 * limit("others_cores") else "medium"
    return finding(
        "interference.cpu",
        f"Other processes use {others:.1f} of {machine} cores, and this run's threads wait for "
        f"them: {wanted - used:.1f} are ready at any time and have no core.",
        confidence, "the whole machine's use less that of the run and of the watcher", ceiling,
        [
            number("cores used by others", others, "cores", "others_cores", "/proc"),
            number("cores used by the run", used, "cores", source="/proc"),
            _waiting(case),
            number("taken by the hypervisor", steals, "cores", source="/proc"),
        ],
        [
            Advice("ps -eo pid,pcpu,user,args --sort=-pcpu | head",
                   "tells who they are: stop them, or move one of the two elsewhere"),
            Advice("ask for cores of your own: --exclusive (Slurm), docker --cpuset-cpus on both",
                   "an affinity of yours keeps nobody else out"),
        ],
    )  # fmt: skip


def _quota(case: Case) -> Finding | None:
    cores = case.cores
    if cores.throttled is None or cores.throttled < limit("throttled"):
        return None
    machine = float(cores.machine or cores.allowed or 1)
    ceiling = faster_with_cores(case, machine)
    return finding(
        "cpu.quota",
        f"A CPU quota of {cores.allowed:g} cores stops the run's threads for "
        f"{cores.throttled:.1f} s in every second.",
        "high" if cores.saturated else "medium",
        "the kernel counts how long threads were stopped", ceiling,
        [
            number("stopped by the quota", cores.throttled, "seconds/s", "throttled", "cgroup"),
            _used(case),
            _waiting(case),
        ],
        [Advice("raise the quota of the container (docker --cpus, resources.limits.cpu in "
                "Kubernetes)", f"it is {cores.allowed:g} cores of {machine:g}")],
    )  # fmt: skip


def _threads(case: Case) -> Finding | None:
    cores = case.cores
    if cores.wanted is None or not cores.allowed:
        return None
    crowd = cores.wanted / cores.allowed
    busy_all = (cores.used or 0.0) + (cores.others or 0.0)
    full = cores.saturated or busy_all >= limit("cores_saturated") * (cores.machine or 1e9)
    processes = _processes(case)
    if (
        crowd < limit("oversubscribed")
        or not full
        or cores.wanted < limit("threads_each") * processes
    ):
        return None
    workers = case.lead.loader.workers if case.lead and case.lead.loader else 0
    threads = max(1, math.floor(cores.allowed / max(1, processes)))
    switches = case.mean("switches_involuntary")
    return finding(
        "cpu.threads",
        f"{cores.wanted:.0f} threads want to run on {cores.allowed:g} cores: {processes:.0f} "
        "processes have pools of threads that fight each other.",
        "high", "the scheduler counts how long threads wait for a core",
        _without_fighting(case),
        [
            number("threads per core that want to run", crowd, "times", "oversubscribed", "/proc"),
            _waiting(case),
            number("threads thrown off a core", switches, "1/s", source="/proc"),
            _used(case),
        ],
        [
            Advice(f"torch.set_num_threads({threads})",
                   f"in worker_init_fn: {workers} workers then use {threads} each" if workers
                   else "at the beginning of each process"),
            Advice(f"OMP_NUM_THREADS={threads} MKL_NUM_THREADS={threads} python …",
                   "for NumPy, OpenCV and other libraries with pools of their own"),
        ],
    )  # fmt: skip


def _processes(case: Case) -> float:
    """Processes that compute: training processes and loader workers."""
    count = case.reading("processes", "worker") or 0.0
    return count + max(1, len(case.ranks))


def _without_fighting(case: Case) -> float | None:
    """What is left is what the threads compute that prepare and train, spread over the cores.

    What the others of a pool do beside them is mostly waiting for each other, at full speed.
    """
    cores, lead = case.cores, case.lead
    if lead is None or cores.allowed is None or not len(case.samples):
        return None
    each = float(case.samples.cpu.mean() + case.collation.cpu.mean())
    prepared = each * len(lead.batches) * max(1, len(case.ranks))
    trained = (cores.main or 0.0) * lead.seconds
    usable = limit("cores_saturated") * cores.allowed
    return lead.seconds * usable / max(prepared + trained, 1e-6)


def _few(case: Case) -> Finding | None:
    cores = case.cores
    machine = cores.machine
    if machine is None or cores.allowed is None or cores.allowed >= machine:
        return None
    wanted, used = cores.wanted, cores.used or 0.0
    if not cores.saturated or (wanted is not None and wanted < limit("worth") * used):
        return None
    return finding(
        "cpu.cores",
        f"The run may use {cores.allowed:g} of {machine} cores and has them busy; "
        f"{(wanted or used) - used:.1f} more threads are ready at any time.",
        "high" if wanted is not None else "medium",
        "the scheduler counts how long threads wait for a core" if wanted is not None
        else "all allowed cores are in use",
        faster_with_cores(case, float(machine)),
        [_used(case), number("cores allowed", cores.allowed, "cores", source="affinity"),
         number("cores of the machine", machine, "cores", source="/proc"), _waiting(case)],
        [
            Advice(f"ask for more CPUs: --cpus-per-task={_enough(case)} (Slurm), "
                   f"docker --cpuset-cpus=0-{machine - 1}, or drop the taskset",
                   f"{wanted or used:.1f} threads want to run"),
            Advice("look for os.sched_setaffinity, taskset, numactl and KMP_AFFINITY in the "
                   "script and in what starts it", "one of them narrowed it"),
        ],
    )  # fmt: skip


def _enough(case: Case) -> int:
    wanted = case.cores.wanted or 2 * (case.cores.used or 1.0)
    return max(2, min(math.ceil(wanted), case.cores.machine or 1))


def _serial(case: Case) -> Finding | None:
    """The model is computed on the CPU by fewer threads than there are cores."""
    cores, lead = case.cores, case.lead
    if case.on_gpu or lead is None or len(case.ranks) > 1:
        return None
    threads = lead.trainer.settings.get("threads")
    idle, allowed = cores.idle, cores.allowed
    if not isinstance(threads, int) or idle is None or allowed is None or threads >= allowed:
        return None
    if idle < 2 * limit("idle_cores") or lead.wait_share >= limit("input_wait"):
        return None
    return finding(
        "cpu.serial",
        f"The model is computed by {threads} thread{'s' if threads > 1 else ''} while "
        f"{idle:.1f} of {allowed:g} cores are idle.",
        "low", "how well the model's operations split over threads is not known",
        allowed / max(1.0, allowed - idle),
        [number("cores idle", idle, "cores", "idle_cores", "/proc"),
         number("threads of PyTorch", threads, "count", source="hook")],
        [Advice(f"torch.set_num_threads({int(allowed)})", "or unset OMP_NUM_THREADS")],
    )  # fmt: skip
