"""A verdict where steps were not seen: by the use of resources alone, and weaker for it."""

from __future__ import annotations

from stepscope.analysis.causes.case import Case, finding, number, pct
from stepscope.analysis.causes.thresholds import limit
from stepscope.records import Advice, Finding

_MARK = Advice('stepscope.mark("step") at the end of each step',
               "then waits and launches can be told apart")  # fmt: skip
_BECAUSE = "no steps were seen: judged by the use of resources alone"


def resource_findings(case: Case) -> list[Finding]:
    """One finding: the part of the machine that is nearest to its limit."""
    found = _of_gpu(case) if case.on_gpu else _of_cpu(case)
    return [found] if found else []


def _of_gpu(case: Case) -> Finding | None:
    device, cores = case.device, case.cores
    busy = device.busy
    if busy is None:
        return None
    evidence = [number("kernels ran", busy, "share", "gpu_busy", "GPM, NVML"),
                number("cores used", cores.used, "cores", source="/proc")]  # fmt: skip
    if busy >= limit("gpu_busy"):
        kind = "gpu.bandwidth" if (device.dram or 0.0) >= limit("dram_bound") else "gpu.compute"
        return finding(
            kind, f"The GPU seems to be the limit: kernels run {pct(busy)} of the time.",
            "medium", _BECAUSE, None, evidence, [_MARK],
        )  # fmt: skip
    if cores.saturated:
        return finding(
            "input.preparation",
            f"The GPU is idle {pct(1 - busy)} of the time while all {cores.allowed:g} cores are "
            "busy: it seems to wait for data.",
            "low", _BECAUSE, 1.0 / max(busy, 0.02), evidence, [_MARK],
        )  # fmt: skip
    return finding(
        "gpu.idle",
        f"The GPU is idle {pct(1 - busy)} of the time, and the CPUs are not the reason: it waits "
        "for storage, for one thread that launches its kernels, or for copies.",
        "low", _BECAUSE, 1.0 / max(busy, 0.02), evidence, [_MARK],
    )  # fmt: skip


def _of_cpu(case: Case) -> Finding | None:
    cores = case.cores
    waits = case.mean("pressure_io", "host") or 0.0
    evidence = [
        number("cores used", cores.used, "cores", source="/proc"),
        number("some task waited for storage", waits, "share", "input_wait_sure", "PSI"),
    ]
    if cores.saturated:
        return finding(
            "cpu.compute",
            f"All {cores.allowed:g} cores are busy: the CPU seems to be the limit.",
            "medium", _BECAUSE, None, evidence, [_MARK],
        )  # fmt: skip
    if waits >= limit("input_wait_sure"):
        return finding(
            "io.bound", f"Tasks wait for storage {pct(waits)} of the time.",
            "low", _BECAUSE, 1.0 / max(1.0 - waits, 0.05), evidence, [_MARK],
        )  # fmt: skip
    return None
