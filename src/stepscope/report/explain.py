"""What holds a run back, in the words that are shown; terminal and page only draw them.

Nothing of the report is imported here: `stepscope explain` has to be quick.
"""

from __future__ import annotations

from dataclasses import dataclass

from stepscope.records import Advice, Evidence, Finding, Verdict
from stepscope.report.format import (
    MISSING,
    is_known,
    seconds_text,
    share_text,
    significant,
    value_text,
)
from stepscope.report.outcomes import Tone
from stepscope.runs.reader import Run

_LEAST_GAIN = 1.05
"""A ceiling up to this is no speed worth naming: repeats of one run differ by as much."""
_UNDECIDED: dict[str, Tone] = {"short": "neutral", "unclear": "neutral"}
"""Causes that blame nothing."""
_WEAK = (
    "Without steps, this goes by the use of resources alone. To be told more, call "
    'stepscope.mark("step") once a step, or train in a loop that the hook sees: a PyTorch '
    "DataLoader with an optimizer, Lightning, or Keras"
)


@dataclass(frozen=True)
class EvidenceRow:
    """A number that a finding rests on, as text."""

    what: str
    value: str
    threshold: str
    """Which side of the threshold it is on, and how that is called: "above 10 % (waiting)"."""
    source: str


@dataclass(frozen=True)
class FindingView:
    """One finding, ready to be drawn. Texts are as they were recorded: whoever draws escapes."""

    title: str
    says: str
    tone: Tone
    confidence: str
    """"high confidence"."""
    because: str
    ceiling: str
    """"at most 1.8×"; empty where that is not known, or too little to be worth it."""
    gain: str
    """What fixing it gives, in a sentence; empty where nothing can be claimed."""
    evidence: tuple[EvidenceRow, ...]
    advice: tuple[Advice, ...]

    @property
    def sure(self) -> str:
        """How sure it is, and why."""
        confidence = self.confidence.capitalize()
        return f"{confidence}: {self.because}" if self.because else confidence

    @property
    def brief(self) -> str:
        """Confidence and ceiling in a few words."""
        return f"{self.confidence}, {self.ceiling}" if self.ceiling else self.confidence


@dataclass(frozen=True)
class VerdictView:
    """All findings on a run, what matters most first."""

    verdict: Verdict
    """As it was found, for programs."""
    first: FindingView
    others: tuple[FindingView, ...]
    next: str
    basis: str
    weakness: str
    """Why it is no more than a guess, and what would help; empty where it is more."""


def explained(run: Run) -> tuple[VerdictView | None, str]:
    """What holds a run back; or nothing, and a note why. Never an error: a report must not fail."""
    try:
        return verdict_view(run.explained()), ""
    except Exception as error:
        why = f"{type(error).__name__}: {str(error)[:200]}"
        return None, f"What holds this run back could not be found out ({why})"


def verdict_view(verdict: Verdict) -> VerdictView:
    """A verdict in words."""
    first, *others = (_finding(each) for each in verdict.findings)
    return VerdictView(
        verdict=verdict,
        first=first,
        others=tuple(others),
        next=verdict.next or "",
        basis=verdict.basis,
        weakness=_WEAK if verdict.weak else "",
    )


def _finding(finding: Finding) -> FindingView:
    ceiling = _ceiling(finding.ceiling)
    return FindingView(
        title=finding.title,
        says=finding.says,
        tone="good" if finding.healthy else _UNDECIDED.get(finding.cause, "warning"),
        confidence=f"{finding.confidence} confidence",
        because=finding.because,
        ceiling=ceiling,
        gain=f"Fixing this gives {ceiling}" if ceiling else _no_gain(finding),
        evidence=tuple(_evidence(each) for each in finding.evidence),
        advice=finding.advice,
    )


def _ceiling(ceiling: float | None) -> str:
    if not is_known(ceiling) or ceiling <= _LEAST_GAIN:
        return ""
    return f"at most {ceiling:.2f}×" if ceiling < 1.2 else f"at most {significant(ceiling, 2)}×"


def _no_gain(finding: Finding) -> str:
    """Where it is known that there is none, a reader must not hope for any."""
    if finding.healthy or not is_known(finding.ceiling):
        return ""
    return "No speed to gain, but better fixed"


def _evidence(evidence: Evidence) -> EvidenceRow:
    return EvidenceRow(
        what=evidence.what,
        value=quantity_text(evidence.value, evidence.unit),
        threshold=_threshold(evidence),
        source=evidence.source,
    )


def _threshold(evidence: Evidence) -> str:
    name = evidence.threshold or ""
    if not is_known(evidence.limit) or not is_known(evidence.value):
        return name
    limit = quantity_text(evidence.limit, evidence.unit)
    side = "at" if evidence.value == evidence.limit else "above"
    side = "below" if evidence.value < evidence.limit else side
    return f"{side} {limit} ({name})" if name else f"{side} {limit}"


def quantity_text(value: float | None, unit: str) -> str:
    """A value of a finding, by its unit. What happens in a step may take microseconds."""
    if not is_known(value):
        return MISSING
    if unit == "s":
        return _short(value)
    if unit == "times":
        return f"{significant(value)}×"
    if unit == "seconds/s":
        return share_text(value)
    if unit == "count" and value != round(value):
        return significant(value, 2)
    text = value_text(value, unit)
    return f"{text} cores" if unit == "cores" else text


def _short(seconds: float) -> str:
    if not 0 < seconds < 0.9995:
        return seconds_text(seconds)
    small = seconds < 9.995e-4
    return f"{significant(seconds * (1e6 if small else 1e3))} {'µs' if small else 'ms'}"


def place_of(advice: Advice) -> str:
    """Where it is and what stands there now: "train.py:41  loader = DataLoader(...)"."""
    line = " ".join((advice.line or "").split())
    return "  ".join(part for part in (advice.where or "", line) if part)
