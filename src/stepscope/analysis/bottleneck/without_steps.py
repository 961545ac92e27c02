"""A finding where steps were not seen: by the use of resources alone, and weaker for it."""

from __future__ import annotations

from stepscope.analysis.bottleneck.case import Case, finding, measured
from stepscope.analysis.bottleneck.thresholds import limit
from stepscope.records import Confidence, Finding, Recommendation


def nearest_limit(case: Case) -> Finding | None:
    """The part of the machine that is nearest to its limit."""
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
        recommendations=[Recommendation("mark_steps")],
    )
