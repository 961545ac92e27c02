"""Diagnose a run: check all causes and rank their findings.

Pure functions over the recorded data of a run. Each cause returns its own finding, with evidence
and a speed-up bound.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from stepscope.analysis.bottleneck import cpu, gpu, inputs, loop, memory, ranks
from stepscope.analysis.bottleneck.case import Case, finding, measured
from stepscope.analysis.bottleneck.causes import CAUSES
from stepscope.analysis.bottleneck.thresholds import limit
from stepscope.analysis.run.data import RunData
from stepscope.records import Basis, Confidence, Diagnosis, Finding, Recommendation


def _resource_limit(case: Case) -> Finding | None:
    """Find the part of the machine that is closest to its limit, from resource usage only."""
    device, cores = case.device, case.cores
    cause, bound = "", None
    confidence: Confidence = "low"
    busy, waits = device.busy, case.mean("pressure_io", "host") or 0.0
    if case.on_gpu and busy is not None:
        if busy >= limit("gpu_busy"):
            is_bandwidth = (device.dram or 0.0) >= limit("bandwidth_bound")
            cause, confidence = "gpu.bandwidth" if is_bandwidth else "gpu.compute", "medium"
        else:
            cause = "input.preparation" if cores.saturated else "gpu.idle"
            bound = 1.0 / max(busy, 0.02)
    elif not case.on_gpu and cores.saturated:
        cause, confidence = "cpu.compute", "medium"
    elif not case.on_gpu and waits >= limit("data_wait_high"):
        cause, bound = "io.wait", 1.0 / max(1.0 - waits, 0.05)
    if not cause:
        return None
    kernels = measured("kernel_time", busy, "share", "gpu_busy", "GPM, NVML")
    used = measured("cores_used", cores.used, "cores", source="/proc")
    io_pressure = measured("io_pressure", waits, "share", "data_wait_high", "PSI")
    return finding(
        cause,
        confidence,
        bound,
        variant="resources",
        values={"allowed": cores.allowed},
        reasons=["no_steps"],
        evidence=[kernels, used] if case.on_gpu else [used, io_pressure],
        recommendations=["mark_steps"],
    )


_WITH_STEPS: tuple[Callable[[Case], Finding | None], ...] = (
    inputs.data_wait,
    cpu.cpu_interference,
    cpu.cpu_shortage,
    cpu.serial_compute,
    ranks.rank_wait,
    loop.evaluation,
    loop.checkpoints,
    loop.logging,
    loop.sleeping,
    cpu.small_batch,
    gpu.gpu_interference,
    gpu.thermal_throttling,
    gpu.gpu_work,
    gpu.power_throttling,
    memory.host_leak,
    memory.gpu_leak,
    memory.step_drift,
    memory.allocator_retries,
    memory.gpu_memory_full,
    memory.host_memory_full,
    memory.shm_full,
)
"""The checks for runs with steps. To add one, also add its cause to `causes`, its texts to
`report.bottleneck.messages` and a test case to `test_planted.py`."""
_WITHOUT_STEPS: tuple[Callable[[Case], Finding | None], ...] = (
    _resource_limit,
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
    "shm_size", "monitor_cpu", "gpu_utilization", "gpu_active", "gpu_sm",
    "gpu_tensor", "gpu_fp32", "gpu_dram", "gpu_memory", "gpu_memory_run", "gpu_other_processes",
    "gpu_pcie_received", "gpu_nvlink_received", "gpu_power", "gpu_sm_clock",
    "gpu_throttled_power", "gpu_throttled_thermal",
))
# fmt: on
"""All metrics that the checks use: `load(run, METRICS)` is enough to explain a run."""

_CONFIDENCE_RANK = {"high": 2, "medium": 1, "low": 0}


def explain(data: RunData) -> Diagnosis:
    """Return all findings on a run, the most important first."""
    case = Case(data)
    primary, seconds = case.primary, case.window.seconds
    steps = primary.steps if primary else 0
    if seconds < limit("min_seconds") or (steps and steps < limit("min_steps")):
        return _diagnosis(case, [_too_short(case, steps)])
    checks = _WITH_STEPS if steps else _WITHOUT_STEPS
    findings = [found for check in checks if (found := check(case)) is not None]
    consequences = {
        consequence
        for each in findings
        if each.confidence != "low" and _is_limiting(each)
        for consequence in CAUSES[each.cause].explains
    }
    findings = [each for each in findings if each.cause not in consequences]
    if not any(_is_limiting(each) or each.healthy for each in findings):
        findings.append(_fallback(case))
    return _diagnosis(case, sorted(findings, key=_sort_key))


def _diagnosis(case: Case, findings: Sequence[Finding]) -> Diagnosis:
    candidates = [each for each in findings[1:] if _is_limiting(each)]
    candidates += [each for each in findings[1:] if each.healthy]
    begin, primary = case.data.begin_ns, case.primary
    return Diagnosis(
        findings=tuple(findings),
        next=candidates[0] if candidates else None,
        basis=Basis(
            seconds=case.window.seconds,
            steps=(primary.steps or None) if primary else None,
            warmup=primary.warmup if primary else 0,
            ranks=len(case.ranks),
            hook=case.data.facts.hook.reason,
        ),
        begin_s=(case.window.begin_ns - begin) / 1e9,
        end_s=(case.window.end_ns - begin) / 1e9,
    )


def _sort_key(finding: Finding) -> tuple[int, int, float]:
    """Leaks come first because they end the run, then bottlenecks by gain, then healthy states."""
    kind, gain = CAUSES[finding.cause].kind, finding.speedup_bound or 1.0
    if kind == "ends_run" and finding.confidence == "high":
        return 0, 0, 0.0
    if kind == "healthy":
        return 2, 0, 0.0
    if kind == "undecided":
        return 5, 0, 0.0
    if kind == "accepted":
        return 3, 0, -gain
    if _is_limiting(finding):
        return 1, -min(1, _CONFIDENCE_RANK[finding.confidence]), -gain
    return 4, -_CONFIDENCE_RANK[finding.confidence], -gain


def _is_limiting(finding: Finding) -> bool:
    """Whether fixing the finding can make training faster or keeps the run from failing."""
    kind = CAUSES[finding.cause].kind
    if kind == "ends_run":
        return finding.confidence == "high"
    if kind in ("healthy", "accepted"):
        return False
    return finding.speedup_bound is None or finding.speedup_bound >= limit("min_speedup")


def _too_short(case: Case, steps: int) -> Finding:
    seconds, min_steps, min_seconds = case.window.seconds, limit("min_steps"), limit("min_seconds")
    few, brief = 0 < steps < min_steps, seconds < min_seconds
    return finding(
        "too_short",
        "high",
        None,
        values={"min_steps": min_steps, "min_seconds": min_seconds},
        evidence=[
            measured("steps", steps, "count", "min_steps", "steps") if few else None,
            measured("seconds", seconds, "s", "min_seconds", "steps") if brief else None,
        ],
        recommendations=["train_longer"],
    )


def _fallback(case: Case) -> Finding:
    """Return CPU compute-bound if the training process keeps the CPU busy, else unknown."""
    cores, primary = case.cores, case.primary
    wait = primary.wait_share if primary else None
    evidence = [
        measured("data_wait_share", wait, "share", "data_wait_high", "loader"),
        measured("cores_used", cores.used, "cores", source="/proc"),
    ]
    waits = wait is not None and wait >= limit("data_wait_high")
    is_known = cores.training is not None and cores.allowed
    if primary and primary.steps and not case.on_gpu and is_known and not waits:
        allowed = cores.allowed or 0.0
        threads = allowed if primary.threads is None else min(primary.threads, allowed)
        busy = limit("compute_share") * threads * max(1, len(case.ranks))
        if cores.saturated or (cores.training or 0.0) >= busy:
            return finding(
                "cpu.compute",
                "high",
                None,
                values={"allowed": allowed},
                evidence=evidence,
                recommendations=[Recommendation("bf16_on_cpu", "precision", "bf16")],
            )
    return finding(
        "unknown",
        "low",
        None,
        evidence=evidence,
        recommendations=["open_report"],
    )
