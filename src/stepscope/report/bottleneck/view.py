"""The bottleneck of a run in words: a diagnosis worded once, for terminal, page and JSON.

Nothing of the report is imported here: `stepscope explain` has to be quick.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from stepscope.analysis.bottleneck.causes import CAUSES
from stepscope.analysis.bottleneck.explain import explain
from stepscope.analysis.run.data import RunData
from stepscope.records import (
    Basis,
    Diagnosis,
    Finding,
    FindingValue,
    Recommendation,
)
from stepscope.report.bottleneck.actions import ACTIONS
from stepscope.report.bottleneck.words import CAUSE_WORDS, EVIDENCE, REASONS, Sentence, fill
from stepscope.report.kit.format import (
    MISSING,
    is_known,
    seconds_text,
    share_text,
    significant,
    value_text,
)
from stepscope.report.kit.outcomes import Tone

_LEAST_GAIN = 1.05
"""A bound up to this is no speed worth naming: repeats of one run differ by as much."""
_TONES: dict[str, Tone] = {"healthy": "good", "undecided": "neutral"}
_WEAK = (
    "Without steps, this goes by the use of resources alone. To be told more, call "
    'stepscope.mark("step") once a step, or train in a loop that the hook sees: a PyTorch '
    "DataLoader with an optimizer, Lightning, or Keras"
)


@dataclass(frozen=True)
class EvidenceRow:
    """A number that a finding rests on."""

    what: str
    value: float
    unit: str
    threshold: str | None
    limit: float | None
    source: str

    @property
    def cells(self) -> tuple[str, str, str, str]:
        """What it is, the value, on which side of which threshold, and what measured it."""
        threshold = self.threshold or ""
        if is_known(self.limit) and is_known(self.value):
            side = "at" if self.value == self.limit else "above"
            side = "below" if self.value < self.limit else side
            named = f" ({threshold})" if threshold else ""
            threshold = f"{side} {quantity_text(self.limit, self.unit)}{named}"
        return self.what, quantity_text(self.value, self.unit), threshold, self.source


@dataclass(frozen=True)
class RecommendationView:
    """A recommendation in words."""

    change: str  # the new code, setting or command: "num_workers=8"
    why: str = ""
    where: str | None = None  # "train.py:41", where it is known
    line: str | None = None  # the code that is there now


@dataclass(frozen=True)
class FindingView:
    """One finding, ready to be drawn. Texts are as they were recorded: whoever draws escapes."""

    cause: str
    title: str
    summary: str  # one sentence with the numbers
    tone: Tone
    confidence: str  # "high"
    reason: str  # why that sure
    speedup_bound: float | None
    evidence: tuple[EvidenceRow, ...] = ()
    recommendations: tuple[RecommendationView, ...] = ()

    @property
    def healthy(self) -> bool:
        return self.tone == "good"

    @property
    def bound(self) -> str:
        """ "at most 1.8×"; empty where that is not known, or too little to be worth it."""
        bound = self.speedup_bound
        if not is_known(bound) or bound <= _LEAST_GAIN:
            return ""
        return f"at most {bound:.2f}×" if bound < 1.2 else f"at most {significant(bound, 2)}×"

    @property
    def gain(self) -> str:
        """What fixing it gives, in a sentence; empty where nothing can be claimed."""
        if self.bound:
            return f"Fixing this gives {self.bound}"
        # Where it is known that there is none, a reader must not hope for any.
        known = is_known(self.speedup_bound) and not self.healthy
        return "No speed to gain, but better fixed" if known else ""

    @property
    def sure(self) -> str:
        """How sure it is, and why."""
        confidence = f"{self.confidence.capitalize()} confidence"
        return f"{confidence}: {self.reason}" if self.reason else confidence

    @property
    def brief(self) -> str:
        """Confidence and bound in a few words."""
        confidence = f"{self.confidence} confidence"
        return f"{confidence}, {self.bound}" if self.bound else confidence


@dataclass(frozen=True)
class DiagnosisView:
    """All findings on a run, what matters most first."""

    findings: tuple[FindingView, ...]
    next: str
    basis: str
    begin_s: float
    end_s: float
    weak: bool

    @property
    def first(self) -> FindingView:
        return self.findings[0]

    @property
    def others(self) -> tuple[FindingView, ...]:
        return self.findings[1:]

    @property
    def weakness(self) -> str:
        """Why it is no more than a guess, and what would help; empty where it is more."""
        return _WEAK if self.weak else ""


def explained(data: RunData) -> tuple[DiagnosisView | None, str]:
    """The diagnosis of a run; or nothing, and a note why: a report must not fail for it."""
    try:
        return explained_view(data), ""
    except Exception as error:
        why = f"{type(error).__name__}: {str(error)[:200]}"
        return None, f"What holds this run back could not be found out ({why})"


def explained_view(data: RunData) -> DiagnosisView:
    return diagnosis_view(explain(data), for_trial=data.is_trial)


def diagnosis_view(diagnosis: Diagnosis, *, for_trial: bool = False) -> DiagnosisView:
    """A diagnosis in words. A trial has options, where a script has lines of code."""
    return DiagnosisView(
        findings=tuple(_finding(each, diagnosis.basis, for_trial) for each in diagnosis.findings),
        next=_next(diagnosis),
        basis=_basis(diagnosis.basis),
        begin_s=diagnosis.begin_s,
        end_s=diagnosis.end_s,
        weak=diagnosis.weak,
    )


def _finding(finding: Finding, basis: Basis, for_trial: bool) -> FindingView:
    words = CAUSE_WORDS[finding.cause]
    locations = (each.location.where for each in finding.recommendations if each.location)
    values: dict[str, FindingValue] = {
        "steps": basis.steps,
        "seconds": basis.seconds,
        "where": next(locations, None) or None,
        **{each.metric: each.value for each in finding.evidence},
        **finding.values,
    }
    reasons = [REASONS[key] for key in finding.reasons] or [_variant(words.reason, finding)]
    return FindingView(
        cause=finding.cause,
        title=words.title,
        summary=fill(_variant(words.finding, finding), values),
        tone=_TONES.get(CAUSES[finding.cause].kind, "warning"),
        confidence=finding.confidence,
        reason="; ".join(fill(reason, values) for reason in reasons),
        speedup_bound=finding.speedup_bound,
        evidence=tuple(
            EvidenceRow(
                what=fill(EVIDENCE[each.metric], values),
                value=each.value,
                unit=each.unit,
                threshold=each.threshold,
                limit=each.limit,
                source=each.source,
            )
            for each in finding.evidence
        ),
        recommendations=tuple(
            _recommendation(each, values, for_trial) for each in finding.recommendations
        ),
    )


def _variant(sentence: Sentence, finding: Finding) -> str:
    return sentence if isinstance(sentence, str) else sentence[finding.variant]


def _recommendation(
    recommendation: Recommendation, values: Mapping[str, FindingValue], for_trial: bool
) -> RecommendationView:
    words = ACTIONS[recommendation.action]
    values = {**values, "value": recommendation.value}
    why = fill(words.why, values)
    if for_trial and words.option:
        return RecommendationView(fill(words.option, values), why)
    change, location = fill(words.change, values), recommendation.location
    if location is None:
        return RecommendationView(change, why)
    return RecommendationView(change, why, location.where or None, location.code or None)


def _next(diagnosis: Diagnosis) -> str:
    """What limits the run once the first is fixed; empty where there is nothing to fix."""
    if CAUSES[diagnosis.first.cause].kind in ("healthy", "undecided"):
        return ""
    after = diagnosis.next
    if after is None:
        return "once that is fixed, nothing else stands out."
    title = CAUSE_WORDS[after.cause].title
    if after.healthy:
        return f"once that is fixed, {title}: that is how it should be."
    gain = f" ({after.speedup_bound:.1f}× at most)" if after.speedup_bound else ""
    return f"once that is fixed, {title}{gain}."


def _basis(basis: Basis) -> str:
    """Which steps of which stretch were judged, and what was not known."""
    if basis.steps is None:
        why = f" ({basis.hook})" if basis.hook else ""
        return f"{basis.seconds:.0f} s of the whole run; no steps were seen{why}"
    ranks = f" of each of {basis.ranks} ranks" if basis.ranks > 1 else ""
    after = f", after {basis.warmup} of warm-up" if basis.warmup else ""
    return f"{basis.steps} steps{ranks} in {basis.seconds:.1f} s{after}"


def quantity_text(value: float | None, unit: str) -> str:
    """A value of a finding, by its unit. What happens in a step may take microseconds."""
    if not is_known(value):
        return MISSING
    if unit == "s" and 0 < value < 0.9995:
        small = value < 9.995e-4
        return f"{significant(value * (1e6 if small else 1e3))} {'µs' if small else 'ms'}"
    if unit == "s":
        return seconds_text(value)
    if unit == "times":
        return f"{significant(value)}×"
    if unit == "seconds/s":
        return share_text(value)
    if unit == "count" and value != round(value):
        return significant(value, 2)
    text = value_text(value, unit)
    return f"{text} cores" if unit == "cores" else text
