"""A batch so small that a step on the CPU is all overhead."""

from __future__ import annotations

from stepscope.analysis.causes.case import Case, finding, number
from stepscope.analysis.causes.thresholds import limit
from stepscope.records import Advice, Finding


def small_findings(case: Case) -> list[Finding]:
    account = case.lead
    if account is None or case.on_gpu:
        return []
    batch = account.batch_size
    waits = account.wait_share >= limit("input_wait_sure")
    if batch is None or batch > limit("small_batch_cpu") or waits:
        return []
    if account.rest > limit("overhead_step"):
        return []
    times = int(limit("safe_growth_cpu"))
    loader = account.loader
    return [
        finding(
            "batch.small",
            f"A batch of {batch} makes every step overhead: {account.step_seconds * 1e3:.1f} ms go "
            "into calling operations, whatever their size.",
            "high" if batch == 1 else "medium",
            "steps this short cost about the same with more samples", float(times),
            [
                number("samples in a batch", batch, "count", "small_batch_cpu", "loader"),
                number("a step takes", account.rest, "s", "overhead_step", "steps"),
            ],
            [Advice(f"batch_size={batch * times}",
                    f"up to {times} times as many samples in nearly the same time; check the "
                    "learning rate",
                    loader.where if loader else None, loader.line if loader else None)],
        )
    ]  # fmt: skip
