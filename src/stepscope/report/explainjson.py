"""A verdict for programs: `stepscope explain --json`, `derived/findings.json`, and the summary.

Keys are never renamed, only added. Times are in seconds, shares are parts of 1, missing is null.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from stepscope.records import Verdict
from stepscope.runs.reader import Run

FORMAT = 1

KEYS: tuple[tuple[str, str], ...] = (
    ("format", "of these keys"),
    ("run", "what the run is called"),
    ("outcome", "how it ended"),
    ("cause", "of the first finding; all causes are listed in docs/explain.md"),
    ("says", "the first finding in a sentence"),
    ("confidence", "in it: high, medium, low"),
    ("ceiling", "how many times as fast it could be at most without it; null where not known"),
    ("healthy", "whether that is how it should be"),
    ("findings", "all of them, what matters most first, each with the keys of the next table"),
    ("next", "what would hold it back once the first is fixed; null where nothing is known"),
    ("basis", "which steps of which stretch were judged, and what was not known"),
    ("window", "that stretch, on the clock of the run: begin_s, end_s"),
    ("weak", "whether no steps were seen, so that it goes by the use of resources alone"),
)
FINDING_KEYS: tuple[tuple[str, str], ...] = (
    ("cause", "one of the causes"),
    ("title", "a few words"),
    ("says", "one sentence with the numbers"),
    ("confidence", "high, medium, low"),
    ("because", "why that sure"),
    ("ceiling", "how many times as fast it could be at most without it; null where not known"),
    ("healthy", "whether this is how it should be"),
    ("evidence", "numbers, each with what, value, unit, threshold, limit, source"),
    ("advice", "what to change, each with change, why, where, line"),
)


def explained_dict(run: Run, verdict: Verdict) -> dict[str, Any]:
    """A verdict with the run that it is on."""
    return {
        "format": FORMAT,
        "run": run.name,
        "outcome": run.ending.outcome.value,
        **verdict_dict(verdict),
    }


def verdict_dict(verdict: Verdict) -> dict[str, Any]:
    """A verdict as plain values, the first finding also by itself."""
    first = verdict.first
    told = {
        "cause": first.cause,
        "says": first.says,
        "confidence": first.confidence,
        "ceiling": first.ceiling,
        "healthy": first.healthy,
        "findings": [dataclasses.asdict(each) for each in verdict.findings],
        "next": verdict.next,
        "basis": verdict.basis,
        "window": {"begin_s": verdict.begin_s, "end_s": verdict.end_s},
        "weak": verdict.weak,
    }
    return {key: plain(value) for key, value in told.items()}


def plain(value: Any) -> Any:
    """Values that JSON has; what is not a number is null."""
    if isinstance(value, dict):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    value = value.item() if hasattr(value, "item") else value  # numpy's numbers
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, str | int) else str(value)
