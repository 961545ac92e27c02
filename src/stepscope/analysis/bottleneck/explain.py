"""The bottleneck of a training: all causes are asked, and what they find is ranked.

Pure functions over what a run left. Each cause answers for itself, with its evidence and with the
bound of what its removal can gain; here they are put in order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from stepscope.analysis.bottleneck import cpu, gpu, inputs, memory, outside, ranks
from stepscope.analysis.bottleneck.case import Case, finding, measured
from stepscope.analysis.bottleneck.causes import CAUSES
from stepscope.analysis.bottleneck.thresholds import limit
from stepscope.analysis.run.data import RunData
from stepscope.records import Basis, Confidence, Diagnosis, Finding, Recommendation


def _nearest_limit(case: Case) -> Finding | None:
    """The part of the machine that is nearest to its limit, by the use of resources alone."""
    device, cores = case.device, case.cores
    cause, bound = "", None
    confidence: Confidence = "low"
    busy, waits = device.busy, case.mean("pressure_io", "host") or 0.0
    if case.on_gpu and busy is not None:
        if busy >= limit("gpu_busy"):
            full = (device.dram or 0.0) >= limit("dram_bound")
            cause, confidence = "gpu.bandwidth" if full else "gpu.compute", "medium"
        else:
            cause = "input.preparation" if cores.saturated else "gpu.idle"
            bound = 1.0 / max(busy, 0.02)
    elif not case.on_gpu and cores.saturated:
        cause, confidence = "cpu.compute", "medium"
    elif not case.on_gpu and waits >= limit("input_wait_sure"):
        cause, bound = "io.bound", 1.0 / max(1.0 - waits, 0.05)
    if not cause:
        return None
    ran = measured("kernels_ran", busy, "share", "gpu_busy", "GPM, NVML")
    used = measured("cores_used", cores.used, "cores", source="/proc")
    waited = measured("io_pressure", waits, "share", "input_wait_sure", "PSI")
    return finding(
        cause,
        confidence,
        bound,
        variant="resources",
        values={"allowed": cores.allowed},
        reasons=["no_steps"],
        evidence=[ran, used] if case.on_gpu else [used, waited],
        recommendations=["mark_steps"],
    )


_WITH_STEPS: tuple[Callable[[Case], Finding | None], ...] = (
    inputs.data_wait,
    cpu.cpu_interference,
    cpu.cpu_shortage,
    cpu.serial_compute,
    ranks.rank_wait,
    outside.evaluation,
    outside.checkpoints,
    outside.logging,
    outside.sleeping,
    cpu.small_batch,
    gpu.gpu_interference,
    gpu.gpu_heat,
    gpu.gpu_work,
    gpu.gpu_power,
    memory.host_leak,
    memory.gpu_leak,
    memory.step_drift,
    memory.allocator_retries,
    memory.gpu_memory_full,
    memory.host_memory_full,
    memory.shm_full,
)
"""A cause is a function of the case. To add one, write it, name it here, and give it a row in
`causes`, in `report.bottleneck.words` and in the planted runs of the tests."""
_WITHOUT_STEPS: tuple[Callable[[Case], Finding | None], ...] = (
    _nearest_limit,
    cpu.cpu_interference,
    cpu.cpu_shortage,
    memory.host_leak,
    memory.gpu_leak,
    memory.gpu_memory_full,
    memory.host_memory_full,
    memory.shm_full,
)

# fmt: off
METRICS = frozenset((
    "cpu", "cpu_wait", "memory", "processes", "switches_involuntary", "read", "host_cpu",
    "host_steal", "host_available", "pressure_memory", "pressure_io", "cgroup_throttled",
    "cgroup_memory", "cgroup_memory_limit", "net_received", "loopback", "shm_used",
    "shm_size", "watcher_cpu", "gpu_utilization", "gpu_active", "gpu_sm",
    "gpu_tensor", "gpu_fp32", "gpu_dram", "gpu_memory", "gpu_memory_tree", "gpu_others",
    "gpu_pcie_received", "gpu_nvlink_received", "gpu_power", "gpu_sm_clock",
    "gpu_slowed_power", "gpu_slowed_heat",
))
# fmt: on
"""All metrics that any finding looks at: `load(run, METRICS)` is enough to explain a run."""

_SURENESS = {"high": 2, "medium": 1, "low": 0}


def explain(data: RunData) -> Diagnosis:
    """All findings on a run, what matters most first."""
    case = Case(data)
    lead, seconds = case.lead, case.stretch.seconds
    steps = lead.steps if lead else 0
    if seconds < limit("least_seconds") or (steps and steps < limit("least_steps")):
        return _diagnosis(case, [_short(case, steps)])
    asked = _WITH_STEPS if steps else _WITHOUT_STEPS
    found = [each for cause in asked if (each := cause(case)) is not None]
    consequences = {
        consequence
        for each in found
        if each.confidence != "low" and _limits(each)
        for consequence in CAUSES[each.cause].explains
    }
    found = [each for each in found if each.cause not in consequences]
    if not any(_limits(each) or each.healthy for each in found):
        found.append(_otherwise(case))
    return _diagnosis(case, sorted(found, key=_rank))


def _diagnosis(case: Case, found: Sequence[Finding]) -> Diagnosis:
    others = [each for each in found[1:] if _limits(each)]
    others += [each for each in found[1:] if each.healthy]
    begin, lead = case.data.begin_ns, case.lead
    seen = lead is not None and lead.steps > 0
    return Diagnosis(
        findings=tuple(found),
        next=others[0] if others else None,
        basis=Basis(
            seconds=case.stretch.seconds,
            steps=lead.steps if lead is not None and seen else None,
            warmup=lead.warmup if lead else 0,
            ranks=len(case.ranks),
            hook=case.data.facts.hook.message,
        ),
        begin_s=(case.stretch.begin_ns - begin) / 1e9,
        end_s=(case.stretch.end_ns - begin) / 1e9,
    )


def _rank(found: Finding) -> tuple[int, int, float]:
    """Leaks first: they end the run. Then what costs most, then what is as it should be."""
    kind, gain = CAUSES[found.cause].kind, found.speedup_bound or 1.0
    if kind == "ends_run" and found.confidence == "high":
        return 0, 0, 0.0
    if kind == "healthy":
        return 2, 0, 0.0
    if kind == "undecided":
        return 5, 0, 0.0
    if kind == "accepted":
        return 3, 0, -gain
    if _limits(found):
        return 1, -min(1, _SURENESS[found.confidence]), -gain
    return 4, -_SURENESS[found.confidence], -gain


def _limits(found: Finding) -> bool:
    """Whether there is speed to gain, or the run is at risk."""
    kind = CAUSES[found.cause].kind
    if kind == "ends_run":
        return found.confidence == "high"
    if kind in ("healthy", "accepted"):
        return False
    return found.speedup_bound is None or found.speedup_bound >= limit("worth")


def _short(case: Case, steps: int) -> Finding:
    seconds = case.stretch.seconds
    return finding(
        "short",
        "high",
        None,
        evidence=[
            measured("steps", steps, "count", "least_steps", "steps"),
            measured("seconds", seconds, "s", "least_seconds", "steps"),
        ],
        recommendations=["train_longer"],
    )


def _otherwise(case: Case) -> Finding:
    """Nothing stands out: on a CPU that is busy, it computes, as it should."""
    cores, lead = case.cores, case.lead
    wait = lead.wait_share if lead else None
    evidence = [
        measured("data_wait_share", wait, "share", "input_wait_sure", "loader"),
        measured("cores_used", cores.used, "cores", source="/proc"),
    ]
    waits = wait is not None and wait >= limit("input_wait_sure")
    seen = lead is not None and lead.steps and not case.on_gpu and cores.main is not None
    if lead and seen and cores.allowed and not waits:
        wanted = cores.allowed if lead.threads is None else min(lead.threads, cores.allowed)
        busy = limit("computing") * wanted * max(1, len(case.ranks))
        if cores.saturated or (cores.main or 0.0) >= busy:
            return finding(
                "cpu.compute",
                "high",
                None,
                values={"allowed": cores.allowed},
                evidence=evidence,
                recommendations=[Recommendation("bf16_on_cpu", "precision", "bf16")],
            )
    return finding(
        "unclear",
        "low",
        None,
        evidence=evidence,
        recommendations=["look_at_panels"],
    )
