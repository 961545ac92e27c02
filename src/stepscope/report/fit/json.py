"""A fit for programs. The keys of its records are these, whatever their fields are called."""

from __future__ import annotations

import dataclasses
from typing import Any

from stepscope.fit.answer import (
    Batch,
    CardPrediction,
    ChosenGpu,
    Composition,
    Fit,
    Linear2019,
    LoaderMemory,
    MemoryBudget,
    TriedBatch,
    WhatIf,
)
from stepscope.records.codec import to_json
from stepscope.report.fit import sentences
from stepscope.workloads.probing import ProbeResult

FORMAT = 1
# fmt: off
_KEYS: dict[type, dict[str, str]] = {
    Fit: {"summary": "says", "settings": "knobs", "budget": "room", "max_batch": "largest",
          "recommended_batch": "fast", "minimum": "need", "comfortable": "ease",
          "what_ifs": "what_if", "loader": "host"},
    MemoryBudget: {"requested": "asked", "other_processes": "tenants"},
    ChosenGpu: {"other_processes": "tenants"},
    Batch: {"free_bytes": "leaves", "retried": "thrashes"},
    TriedBatch: {"retried": "thrashes"},
    CardPrediction: {"max_batch": "largest", "recommended_batch": "fast"},
    WhatIf: {"max_batch": "largest"},
    LoaderMemory: {"max_batch": "largest"},
}
_LEFT_OUT: dict[type, tuple[str, ...]] = {
    Fit: ("gpu", "leak", "misfit", "data_batch"),
    Batch: ("failure_above", "attempts_above"),
    Composition: ("dominant", "peak", "data_bytes"),
    WhatIf: ("settings",),
    ProbeResult: ("layers",),
}
# fmt: on


def fit_dict(fit: Fit) -> dict[str, Any]:
    def plain(value: Any) -> Any:
        if isinstance(value, tuple):
            return [plain(each) for each in value]
        if not dataclasses.is_dataclass(value):
            return to_json(value)
        kind = type(value)
        keys, left_out = _KEYS.get(kind, {}), _LEFT_OUT.get(kind, ())
        plain_fields = {
            keys.get(field.name, field.name): plain(getattr(value, field.name))
            for field in dataclasses.fields(value)
            if field.name not in left_out
        }
        return plain_fields | worded(value)

    def worded(value: Any) -> dict[str, Any]:
        match value:
            case Fit():
                environment = {"gpu": plain(fit.gpu)}
                return {
                    "says": sentences.summary(fit),
                    "notes": sentences.notes(fit),
                    "environment": environment,
                }
            case MemoryBudget() | ChosenGpu():
                return {
                    "tenants": [
                        sentences.other_process_text(each) for each in value.other_processes
                    ]
                }
            case Batch():
                above = value.failure_above
                where = sentences.failure_text(above, fit.budget.device) if above else ""
                why = (sentences.often_text(value), where)
                return {
                    "above": above.batch if above else None,
                    "misses": above.missing if above else None,
                    "why_above": ", ".join(filter(None, why)),
                }
            case Composition():
                return {"attack": sentences.advice(value, fit.budget)}
            case WhatIf():
                return {
                    "change": sentences.change_text(value),
                    "why": sentences.reason_text(value, fit),
                }
            case Linear2019():
                return {"note": sentences.linear_note(value)}
        return {}

    return {"format": FORMAT, "batch_size": fit.batch_size, **plain(fit)}
