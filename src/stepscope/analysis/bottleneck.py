"""What holds a training back: all causes are asked, and what they find is ranked.

Pure functions over what a run left. Each cause (`causes/`) answers for itself, with its evidence
and with the ceiling of what its removal can gain; here they are put in order.
"""

from __future__ import annotations

from collections.abc import Sequence

from stepscope.analysis.causes.case import Case, finding, number, pct
from stepscope.analysis.causes.devices import device_findings
from stepscope.analysis.causes.hosts import host_findings
from stepscope.analysis.causes.inputs import input_findings
from stepscope.analysis.causes.memory import memory_findings
from stepscope.analysis.causes.outside import outside_findings
from stepscope.analysis.causes.ranks import rank_findings
from stepscope.analysis.causes.resources import resource_findings
from stepscope.analysis.causes.small import small_findings
from stepscope.analysis.causes.thresholds import limit
from stepscope.analysis.observed import Observed
from stepscope.records import Advice, Finding, Verdict

_WITH_STEPS = (
    input_findings, host_findings, rank_findings, outside_findings, small_findings, device_findings,
    memory_findings,
)  # fmt: skip
_WITHOUT_STEPS = (resource_findings, host_findings, memory_findings)

_SURENESS = {"high": 2, "medium": 1, "low": 0}
_EXPLAINS: dict[str, tuple[str, ...]] = {
    "cpu.quota": ("input.preparation", "input.workers", "cpu.serial", "launch"),
    "cpu.cores": ("input.preparation", "input.workers", "launch", "cpu.threads"),
    "cpu.threads": ("input.preparation", "input.workers", "input.fetch", "launch"),
    "interference.cpu": (
        "input.preparation", "input.workers", "input.fetch", "cpu.cores", "launch", "drift.steps",
    ),
    "interference.gpu": ("launch", "throttle.power", "gpu.underfilled", "sync"),
    "memory.gpu": ("launch", "sync"),
    "leak.host": ("drift.steps",),
}  # fmt: skip
"""What a cause brings about: a consequence is no finding of its own beside it."""


def explain(observed: Observed) -> Verdict:
    """All that holds a run back, what matters most first."""
    case = Case(observed)
    weak = case.lead is None or not case.lead.steps
    if not weak and _is_short(case):
        return _verdict(case, [_short(case)], weak=False)
    asked = _WITHOUT_STEPS if weak else _WITH_STEPS
    found = [each for cause in asked for each in cause(case)]
    if weak and case.stretch.seconds < limit("least_seconds"):
        found = [_short(case)]
    found = _without_consequences(found)
    if not any(_holds_back(each) or each.healthy for each in found):
        found.append(_otherwise(case, weak))
    return _verdict(case, sorted(found, key=_rank), weak)


def _is_short(case: Case) -> bool:
    lead = case.lead
    assert lead is not None
    return lead.steps < limit("least_steps") or lead.seconds < limit("least_seconds")


def _rank(found: Finding) -> tuple[int, int, float]:
    """Leaks first: they end the run. Then what costs most, then what is as it should be."""
    gain = found.ceiling or 1.0
    if found.cause.startswith("leak.") and found.confidence == "high":
        return 0, 0, 0.0
    if found.healthy:
        return 2, 0, 0.0
    if found.cause == "unclear":
        return 5, 0, 0.0
    if found.cause == "throttle.power":
        return 3, 0, -gain
    if _holds_back(found):
        return 1, -min(1, _SURENESS[found.confidence]), -gain
    return 4, -_SURENESS[found.confidence], -gain


def _holds_back(found: Finding) -> bool:
    """Whether there is speed to gain, or the run is at risk."""
    if found.healthy or found.cause == "throttle.power":
        return False
    if found.cause.startswith("leak."):
        return found.confidence == "high"
    return found.ceiling is None or found.ceiling >= limit("worth")


def _without_consequences(found: Sequence[Finding]) -> list[Finding]:
    """Findings that another one explains are left out."""
    explained = {
        consequence
        for each in found
        if each.confidence != "low" and _holds_back(each)
        for consequence in _EXPLAINS.get(each.cause, ())
    }
    return [each for each in found if each.cause not in explained]


def _verdict(case: Case, found: Sequence[Finding], weak: bool) -> Verdict:
    begin = case.recorded.begin_ns
    return Verdict(
        findings=tuple(found),
        next=_next(found),
        basis=_basis(case, weak),
        begin_s=(case.stretch.begin_ns - begin) / 1e9,
        end_s=(case.stretch.end_ns - begin) / 1e9,
        weak=weak,
    )


def _next(found: Sequence[Finding]) -> str | None:
    """What would hold it back once the first is fixed."""
    first, others = found[0], [each for each in found[1:] if _holds_back(each)]
    if first.healthy or first.cause in ("short", "unclear"):
        return None
    if others:
        gain = f" ({others[0].ceiling:.1f}× at most)" if others[0].ceiling else ""
        return f"once that is fixed, {others[0].title}{gain}."
    healthy = next((each for each in found[1:] if each.healthy), None)
    if healthy is not None:
        return f"once that is fixed, {healthy.title}: that is how it should be."
    return "once that is fixed, nothing else stands out."


def _basis(case: Case, weak: bool) -> str:
    lead = case.lead
    seconds = case.stretch.seconds
    if weak or lead is None:
        why = f" ({case.observed.hook})" if case.observed.hook else ""
        return f"{seconds:.0f} s of the whole run; no steps were seen{why}"
    ranks = f" of each of {len(case.ranks)} ranks" if len(case.ranks) > 1 else ""
    after = f", after {lead.warmup} of warm-up" if lead.warmup else ""
    return f"{lead.steps} steps{ranks} in {seconds:.1f} s{after}"


def _short(case: Case) -> Finding:
    lead = case.lead
    steps = lead.steps if lead else 0
    return finding(
        "short",
        f"Too short to tell: {steps} steps in {case.stretch.seconds:.1f} s after the start.",
        "high", "fewer steps or seconds than a judgement needs", None,
        [number("steps", steps, "count", "least_steps", "steps"),
         number("seconds", case.stretch.seconds, "s", "least_seconds", "steps")],
        [Advice("let it train for half a minute, and for a hundred steps at least",
                "after the warm-up")],
    )  # fmt: skip


def _otherwise(case: Case, weak: bool) -> Finding:
    """Nothing stands out: on a CPU that is busy, it computes, as it should."""
    cores = case.cores
    evidence = [number("of the time, waited for data", case.lead.wait_share if case.lead else None,
                       "share", "input_wait_sure", "loader"),
                number("cores used", cores.used, "cores", source="/proc")]  # fmt: skip
    computes = not case.on_gpu and not weak and _computes(case)
    if computes:
        return finding(
            "cpu.compute",
            f"The CPU is the limit, as it should be: the model is computed on {cores.used:.1f} of "
            f"{cores.allowed:g} cores, and data is waited for {_waits(case)} of the time.",
            "high", "waits were measured, and the cores are busy with the training process", None,
            evidence,
            [Advice("with torch.autocast('cpu', dtype=torch.bfloat16): around the forward pass",
                    "on CPUs with AMX or AVX512-BF16 products take half the time; nothing else in "
                    "the script holds it back")],
        )  # fmt: skip
    return finding(
        "unclear", "Nothing stands out: no part of the machine is near its limit for long.",
        "low", "none of the known causes fits", None, evidence,
        [Advice("look at the panels of the report", "they show what was used over time")],
    )  # fmt: skip


def _waits(case: Case) -> str:
    return pct(case.lead.wait_share if case.lead else None)


def _computes(case: Case) -> bool:
    cores = case.cores
    waits = case.lead is not None and case.lead.wait_share >= limit("input_wait_sure")
    if cores.main is None or not cores.allowed or waits:
        return False
    threads = case.lead.trainer.settings.get("threads") if case.lead else None
    wanted = min(float(threads), cores.allowed) if isinstance(threads, int) else cores.allowed
    return cores.saturated or cores.main >= limit("computing") * wanted * max(1, len(case.ranks))
