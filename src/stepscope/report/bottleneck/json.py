"""A diagnosis as JSON: `stepscope explain --json`, `derived/findings.json`, and the summary.

Keys are never renamed, only added. Times are in seconds, shares are fractions of 1, and missing
values are null.
"""

from __future__ import annotations

from typing import Any

from stepscope.records.codec import to_json
from stepscope.report.bottleneck.view import DiagnosisView
from stepscope.runs.reader import Run

FORMAT = 1
_BOUND = "Upper bound of the speed-up if it is fixed, such as 2.1; null if unknown"

KEYS: tuple[tuple[str, str], ...] = (
    ("format", "Schema version"),
    ("run", "Name of the run"),
    ("outcome", "Outcome of the run, such as `ok` or `gpu_oom`"),
    ("cause", "Cause of the first finding; docs/explain.md lists all causes"),
    ("summary", "First finding in a sentence"),
    ("confidence", "Confidence of the first finding: `high`, `medium` or `low`"),
    ("speedup_bound", _BOUND),
    ("healthy", "Whether the hardware is the limit and nothing needs to be fixed"),
    ("findings", "All findings, the most important first, each with the keys of the next table"),
    ("next", "Next bottleneck once the first finding is fixed; null if there is nothing to fix"),
    ("basis", "Steps and duration that the diagnosis is based on"),
    ("window", "Analyzed part of the run: `begin_s` and `end_s`, in seconds since its start"),
    (
        "without_steps",
        "True if no steps were observed; the diagnosis is then based on resource usage only",
    ),
)
FINDING_KEYS: tuple[tuple[str, str, str], ...] = (
    ("cause", "cause", "Cause"),
    ("title", "title", "Title of the cause"),
    ("summary", "summary", "Finding in a sentence with its numbers"),
    ("confidence", "confidence", "Confidence: `high`, `medium` or `low`"),
    ("confidence_reason", "reason", "Reason for the confidence"),
    ("speedup_bound", "speedup_bound", _BOUND),
    ("healthy", "healthy", "Whether nothing needs to be fixed"),
    (
        "evidence",
        "evidence",
        "Measurements, each with `name`, `value`, `unit`, `threshold`, `limit` and `source`",
    ),
    (
        "recommendations",
        "recommendations",
        "Changes to make, each with `change`, `reason`, `location` and `code`",
    ),
)
"""Keys, attributes of FindingView, and descriptions."""

_FIRST = ("cause", "summary", "confidence", "speedup_bound", "healthy")


def explained_dict(run: Run, view: DiagnosisView) -> dict[str, Any]:
    """Return the diagnosis of a run as plain values, with the run itself."""
    return {
        "format": FORMAT,
        "run": run.name,
        "outcome": run.exit_status.outcome.value,
        **diagnosis_dict(view),
    }


def diagnosis_dict(view: DiagnosisView) -> dict[str, Any]:
    """Return a diagnosis as plain values; the first finding is also at the top level."""
    findings = [
        {key: getattr(each, name) for key, name, _ in FINDING_KEYS} for each in view.findings
    ]
    plain: dict[str, Any] = to_json(
        {
            **{key: findings[0][key] for key in _FIRST},
            "findings": findings,
            "next": view.next or None,
            "basis": view.basis,
            "window": {"begin_s": view.begin_s, "end_s": view.end_s},
            "without_steps": view.without_steps,
        }
    )
    return plain
