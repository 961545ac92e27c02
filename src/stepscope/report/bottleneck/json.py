"""A diagnosis for programs: `stepscope explain --json`, `derived/findings.json`, and the summary.

Keys are never renamed, only added. Times are in seconds, shares are parts of 1, missing is null.
"""

from __future__ import annotations

from typing import Any

from stepscope.records.codec import to_json
from stepscope.report.bottleneck.view import DiagnosisView
from stepscope.runs.reader import Run

FORMAT = 1
_CEILING = "how many times as fast it could be at most without it; null where not known"

KEYS: tuple[tuple[str, str], ...] = (
    ("format", "of these keys"),
    ("run", "what the run is called"),
    ("outcome", "how it ended"),
    ("cause", "of the first finding; all causes are listed in docs/explain.md"),
    ("says", "the first finding in a sentence"),
    ("confidence", "in it: high, medium, low"),
    ("ceiling", _CEILING),
    ("healthy", "whether that is how it should be"),
    ("findings", "all of them, what matters most first, each with the keys of the next table"),
    ("next", "what would hold it back once the first is fixed; null where nothing is known"),
    ("basis", "which steps of which stretch were judged, and what was not known"),
    ("window", "that stretch, on the clock of the run: begin_s, end_s"),
    ("weak", "whether no steps were seen, so that it goes by the use of resources alone"),
)
FINDING_KEYS: tuple[tuple[str, str, str], ...] = (
    ("cause", "cause", "one of the causes"),
    ("title", "title", "a few words"),
    ("says", "summary", "one sentence with the numbers"),
    ("confidence", "confidence", "high, medium, low"),
    ("because", "reason", "why that sure"),
    ("ceiling", "speedup_bound", _CEILING),
    ("healthy", "healthy", "whether this is how it should be"),
    ("evidence", "evidence", "numbers, each with what, value, unit, threshold, limit, source"),
    ("advice", "recommendations", "what to change, each with change, why, where, line"),
)
"""Keys, where they stand in the view, and what they mean."""

_FIRST = ("cause", "says", "confidence", "ceiling", "healthy")


def explained_dict(run: Run, view: DiagnosisView) -> dict[str, Any]:
    """A diagnosis with the run that it is on."""
    return {
        "format": FORMAT,
        "run": run.name,
        "outcome": run.ending.outcome.value,
        **diagnosis_dict(view),
    }


def diagnosis_dict(view: DiagnosisView) -> dict[str, Any]:
    """A diagnosis as plain values, the first finding also by itself."""
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
            "weak": view.weak,
        }
    )
    return plain
