"""The JSON output of a fit."""

from __future__ import annotations

import dataclasses
from typing import Any

from stepscope.fit.result import Batch, FitResult, Linear2019, MemoryBreakdown, WhatIf
from stepscope.records.codec import to_json
from stepscope.report.fit import messages
from stepscope.workloads.probing import ProbeResult

FORMAT = 1
# fmt: off
OMITTED: dict[type, tuple[str, ...]] = {
    FitResult: ("gpu", "leak", "failure", "data_set_limit"),
    Batch: ("failure_above", "attempts_above"),
    MemoryBreakdown: ("dominant", "allocated_peak_bytes", "data_bytes"),
    WhatIf: ("settings",),
    ProbeResult: ("layers",),
}
# fmt: on


def fit_dict(fit: FitResult) -> dict[str, Any]:
    def plain(value: Any) -> Any:
        if isinstance(value, tuple):
            return [plain(each) for each in value]
        if not dataclasses.is_dataclass(value):
            return to_json(value)
        plain_fields = {
            field.name: plain(getattr(value, field.name))
            for field in dataclasses.fields(value)
            if field.name not in OMITTED.get(type(value), ())
        }
        return plain_fields | derived(value)

    def derived(value: Any) -> dict[str, Any]:
        """Return the keys that are computed from a record, mostly texts."""
        match value:
            case FitResult():
                return {
                    "summary": messages.summary(fit),
                    "notes": messages.notes(fit),
                    "environment": {"gpu": plain(fit.gpu)},  # the GPU that probes ran on
                }
            case Batch():
                above = value.failure_above
                reasons = (
                    messages.attempts_text(value),
                    messages.failure_text(above) if above else "",
                )
                return {
                    "batch_above": above.batch if above else None,  # the next larger failure
                    "shortfall_bytes": above.shortfall_bytes if above else None,  # missing there
                    "failure_above": ", ".join(filter(None, reasons)),  # how it failed
                }
            case MemoryBreakdown():
                return {"recommendation": messages.recommendation(value, fit.budget)}
            case WhatIf():
                return {
                    "change": messages.change_text(value),
                    "reason": messages.reason_text(value, fit),
                }
            case Linear2019():
                return {"note": messages.linear_note(value)}
        return {}

    return {"format": FORMAT, "batch_size": fit.batch_size, **plain(fit)}
