"""A diagnosis as texts, for the terminal, the report page and JSON.

Nothing else of the report is imported here, because `stepscope explain` must start fast.
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
    Outcome,
    Recommendation,
)
from stepscope.report.bottleneck.actions import ACTIONS
from stepscope.report.bottleneck.messages import (
    CAUSE_TEXTS,
    EVIDENCE,
    REASONS,
    Template,
    duration_text,
    fill,
)
from stepscope.report.kit.format import (
    MISSING,
    is_known,
    plural,
    share_text,
    significant,
    value_text,
)
from stepscope.report.kit.outcomes import OUTCOMES, Tone
from stepscope.runs.tracking import reason_text

_MIN_GAIN = 1.05
"""A speed-up bound up to this is not shown: identical runs differ by as much."""
_TONES: dict[str, Tone] = {"healthy": "good", "undecided": "neutral"}
_NO_STEPS = (
    "No steps were observed, so this diagnosis is based on resource usage only. For a better one, "
    'call stepscope.mark("step") once per step, or train in a loop that the hook supports: a '
    "PyTorch DataLoader with an optimizer, Lightning, or Keras"
)


@dataclass(frozen=True)
class EvidenceRow:
    """A measurement that supports a finding."""

    name: str
    value: float
    unit: str
    threshold: str | None
    limit: float | None
    source: str

    @property
    def cells(self) -> tuple[str, str, str, str]:
        """Name, value, comparison with the threshold, and source."""
        threshold = self.threshold or ""
        if is_known(self.limit) and is_known(self.value):
            side = "at" if self.value == self.limit else "above"
            side = "below" if self.value < self.limit else side
            named = f" ({threshold})" if threshold else ""
            threshold = f"{side} {quantity_text(self.limit, self.unit)}{named}"
        return self.name, quantity_text(self.value, self.unit), threshold, self.source


@dataclass(frozen=True)
class RecommendationView:
    """A recommendation, ready to be shown."""

    change: str  # "Set num_workers=8"
    reason: str = ""
    location: str | None = None  # "train.py:41"
    code: str | None = None  # the current code at the location


@dataclass(frozen=True)
class FindingView:
    """One finding, ready to be shown. Texts are not escaped: renderers do that."""

    cause: str
    title: str
    summary: str
    tone: Tone
    confidence: str  # "high"
    reason: str  # for the confidence
    speedup_bound: float | None
    evidence: tuple[EvidenceRow, ...] = ()
    recommendations: tuple[RecommendationView, ...] = ()

    @property
    def healthy(self) -> bool:
        return self.tone == "good"

    @property
    def heading(self) -> str:
        """ "Bottleneck: Too few loader workers"."""
        return f"Bottleneck: {self.title}" if self.is_bottleneck else self.title

    @property
    def is_bottleneck(self) -> bool:
        """Whether it limits throughput; a leak or an unknown cause does not."""
        return self.is_decided and not self.ends_run

    @property
    def ends_run(self) -> bool:
        """Whether it may crash the run, such as a memory leak, but does not slow it down."""
        return self.cause.startswith(("leak.", "memory.")) and not self.bound

    @property
    def bound(self) -> str:
        """ "at most 1.8×"; empty if unknown or negligible."""
        bound = self.speedup_bound
        if not is_known(bound) or bound <= _MIN_GAIN:
            return ""
        return f"at most {bound:.2f}×" if bound < 1.2 else f"at most {significant(bound, 2)}×"

    @property
    def gain(self) -> str:
        """What fixing the finding gains; empty if unknown or if there is nothing to fix."""
        if self.bound or self.healthy or not is_known(self.speedup_bound):
            return self.bound
        if self.ends_run:
            return "Fixing this does not make training faster, but prevents a failure"
        return f"at most {_MIN_GAIN}×"

    @property
    def gain_text(self) -> str:
        """The gain as a sentence."""
        return f"Potential speed-up: {self.gain}" if self.gain and not self.ends_run else self.gain

    @property
    def badge(self) -> str:
        """The speed-up bound or the state in short."""
        if self.bound:
            return f"Speed-up: {self.bound}"
        return "Healthy" if self.healthy else "May crash the run" if self.ends_run else ""

    @property
    def confidence_text(self) -> str:
        """Empty without a diagnosis."""
        if not self.is_decided:
            return ""
        confidence = f"Confidence: {self.confidence}"
        return f"{confidence} ({self.reason})" if self.reason else confidence

    @property
    def is_decided(self) -> bool:
        return self.tone != "neutral"

    @property
    def short_text(self) -> str:
        """Title, confidence and speed-up bound in one line."""
        confidence = f"{self.confidence} confidence"
        return f"{self.title}: " + (f"{self.bound}, {confidence}" if self.bound else confidence)


@dataclass(frozen=True)
class DiagnosisView:
    """All findings on a run, the most important first."""

    findings: tuple[FindingView, ...]
    next: str
    basis: str
    begin_s: float
    end_s: float
    without_steps: bool

    @property
    def first(self) -> FindingView:
        return self.findings[0]

    @property
    def others(self) -> tuple[FindingView, ...]:
        return self.findings[1:]

    @property
    def is_decided(self) -> bool:
        return self.first.is_decided

    def applies_to(self, outcome: Outcome) -> bool:
        """Whether there is something to explain: not if the command failed at once."""
        return self.is_decided or not self.without_steps or OUTCOMES[outcome][1] != "bad"

    @property
    def warning(self) -> str:
        """Why the diagnosis is weak and how to improve it; empty if steps were observed."""
        return _NO_STEPS if self.without_steps else ""


def explained(data: RunData) -> tuple[DiagnosisView | None, str]:
    """Return the diagnosis of a run, or None and a note with the error, so that a report of the
    run does not fail."""
    try:
        return explained_view(data), ""
    except Exception as error:
        reason = f"{type(error).__name__}: {str(error)[:200]}"
        return None, f"The bottleneck could not be determined ({reason})"


def explained_view(data: RunData) -> DiagnosisView:
    return diagnosis_view(explain(data), for_trial=data.is_trial)


def diagnosis_view(diagnosis: Diagnosis, *, for_trial: bool = False) -> DiagnosisView:
    """Format a diagnosis. Recommendations for a trial are options instead of code changes."""
    return DiagnosisView(
        findings=tuple(_finding(each, diagnosis.basis, for_trial) for each in diagnosis.findings),
        next=_next(diagnosis),
        basis=_basis(diagnosis.basis),
        begin_s=diagnosis.begin_s,
        end_s=diagnosis.end_s,
        without_steps=diagnosis.without_steps,
    )


def _finding(finding: Finding, basis: Basis, for_trial: bool) -> FindingView:
    texts = CAUSE_TEXTS[finding.cause]
    locations = (each.location.where for each in finding.recommendations if each.location)
    values: dict[str, FindingValue] = {
        "steps": basis.steps,
        "seconds": basis.seconds,
        "location": next(locations, None) or None,
        **{each.metric: each.value for each in finding.evidence},
        **finding.values,
    }
    reasons = [REASONS[key] for key in finding.reasons] or [_variant(texts.reason, finding)]
    return FindingView(
        cause=finding.cause,
        title=texts.title,
        summary=fill(_variant(texts.summary, finding), values),
        tone=_TONES.get(CAUSES[finding.cause].kind, "warning"),
        confidence=finding.confidence,
        reason="; ".join(fill(reason, values) for reason in reasons),
        speedup_bound=finding.speedup_bound,
        evidence=tuple(
            EvidenceRow(
                name=fill(EVIDENCE[each.metric], values),
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


def _variant(template: Template, finding: Finding) -> str:
    return template if isinstance(template, str) else template[finding.variant]


def _recommendation(
    recommendation: Recommendation, values: Mapping[str, FindingValue], for_trial: bool
) -> RecommendationView:
    texts = ACTIONS[recommendation.action]
    values = {**values, "value": recommendation.value}
    reason = fill(texts.reason, values)
    if for_trial and texts.option:
        return RecommendationView(f"Use {fill(texts.option, values)}", reason)
    change, location = fill(texts.change, values), recommendation.location
    if location is None:
        return RecommendationView(change, reason)
    return RecommendationView(change, reason, location.where or None, location.code or None)


def _next(diagnosis: Diagnosis) -> str:
    """Name the bottleneck after the first finding is fixed; empty if there is nothing to fix."""
    if CAUSES[diagnosis.first.cause].kind in ("healthy", "undecided"):
        return ""
    after = diagnosis.next
    if after is None:
        return "none found"
    title = CAUSE_TEXTS[after.cause].title
    if after.healthy:
        return f"{title} (healthy)"
    return f"{title} (at most {after.speedup_bound:.1f}×)" if after.speedup_bound else title


def _basis(basis: Basis) -> str:
    """Describe the steps and the time that the diagnosis is based on."""
    if basis.steps is None:
        text = reason_text(basis.hook)
        reason = f" ({text})" if text else ""
        return f"the whole run, {basis.seconds:.0f} s; no steps were observed{reason}"
    ranks = f" on each of {basis.ranks} ranks" if basis.ranks > 1 else ""
    warmup = f"{basis.warmup:,} warm-up {plural(basis.warmup, 'step')}"
    after = f", after {warmup}" if basis.warmup else ""
    return f"{basis.steps:,} {plural(basis.steps, 'step')}{ranks} in {basis.seconds:.1f} s{after}"


def quantity_text(value: float | None, unit: str) -> str:
    """Format a value by its unit."""
    if not is_known(value):
        return MISSING
    if unit == "s":
        return duration_text(value)
    if unit == "times":
        return f"{significant(value)}×"
    if unit == "seconds/s":
        return share_text(value)
    if unit == "count" and value != round(value):
        return significant(value, 2)
    text = value_text(value, unit)
    return f"{text} cores" if unit == "cores" else text
