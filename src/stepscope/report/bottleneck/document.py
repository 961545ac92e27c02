"""A diagnosis as document blocks: for the report page, `stepscope explain`, and the end of other
commands."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

from stepscope.records import ExitStatus
from stepscope.report.bottleneck.view import DiagnosisView, FindingView, RecommendationView
from stepscope.report.kit.document import (
    Block,
    Document,
    Item,
    Listing,
    Paragraph,
    Section,
    Verbatim,
)
from stepscope.report.kit.format import plural
from stepscope.report.kit.outcomes import OUTCOMES
from stepscope.report.kit.table import Column, Table

_EVIDENCE = (
    Column("Evidence", number=False),
    Column("Value"),
    Column("Threshold", number=False),
    Column("Source", number=False),
)
_NEXT = "Next bottleneck"
_BASIS = "Based on"


def diagnosis_section(view: DiagnosisView) -> Section:
    """Return the section of the report page: the first finding in full, other findings folded."""
    first, others = view.first, view.others
    count = f"{len(others)} other {plural(len(others), 'finding')}"
    titles = ", ".join(each.title for each in others)
    folded = tuple(
        Section(each.title, (Paragraph(each.summary), _badge(each), *_details(each)))
        for each in others
    )
    return Section(
        first.summary,
        (
            _badge(first),
            *_details(first),
            Paragraph(view.next, label=_NEXT),
            Section(f"{count}: {titles}", folded, folded=True),
            Paragraph(f"{_BASIS}: {view.basis}", "note"),
            Paragraph(view.warning, "warning"),
        ),
        tone=first.tone,
    )


def explained_document(
    name: str, exit_status: ExitStatus, view: DiagnosisView, in_full: bool = False
) -> Document:
    """Return the output of `stepscope explain`: the first finding in full, the other findings
    short or in full."""
    state, tone = OUTCOMES[exit_status.outcome]
    if not view.applies_to(exit_status.outcome):
        text = "The command failed before it completed a step. Fix the error in its output first."
        return Document(name, state, tone, (Paragraph(text),), reason=exit_status.reason)
    blocks: list[Block] = [
        *_finding(view.first.heading, view.first),
        Paragraph(view.next, label=_NEXT),
    ]
    if in_full:
        for other in view.others:
            blocks += _finding(f"Other finding: {other.title}", other)
    else:
        items = (
            Item(other.short_text, "", "", "".join(map(_short, other.recommendations[:1])))
            for other in view.others
        )
        blocks.append(Section("Other findings (details: --all)", (Listing(tuple(items)),)))
    basis = (Paragraph(view.basis, label=_BASIS), Paragraph(view.warning, "warning"))
    blocks.append(Section("", basis))
    return Document(name, state, tone, tuple(blocks), reason=exit_status.reason)


def closing_section(view: DiagnosisView, run: Path | None = None) -> Section:
    """Return the first finding as the last lines of a command.

    For a run, it includes the next bottleneck and the command that shows the details.
    """
    first = view.first
    confidence = f"Confidence: {first.confidence}" if first.is_decided else ""
    gain = f"{first.gain_text}. {confidence}" if first.gain_text else confidence
    changes = tuple(Item(_short(each)) for each in first.recommendations[: 2 if run else 1])
    command = "" if run is None else shlex.join(["stepscope", "explain", str(run)])
    return Section(
        "",
        (
            Paragraph(first.summary, tone=first.tone),
            Paragraph(gain),
            Listing(changes, numbered=True),
            Paragraph(view.next if command else "", label=_NEXT),
            Verbatim(command, "Details"),
        ),
    )


def brief_rows(view: DiagnosisView) -> Iterator[tuple[str, str]]:
    """Yield the first finding as labeled lines: what it is, what it costs and what to change."""
    first = view.first
    yield ("Bottleneck" if first.is_bottleneck else "Finding"), first.summary
    if first.gain:
        yield "Gain", f"{first.gain} ({first.confidence} confidence)"
    for change in first.recommendations[:1]:
        yield "Action", _short(change)


def _finding(heading: str, finding: FindingView) -> Iterator[Block]:
    texts = (Paragraph(finding.gain_text), Paragraph(finding.confidence_text))
    summary = Paragraph(finding.summary, tone=finding.tone)
    yield Section(heading, (summary, *texts))
    yield from _details(finding)


def _badge(finding: FindingView) -> Paragraph:
    return Paragraph(finding.confidence_text, tone=finding.tone, badge=finding.badge)


def _details(finding: FindingView) -> Iterator[Block]:
    yield Table(_EVIDENCE, tuple(row.cells for row in finding.evidence))
    changes = tuple(
        Item(each.change, each.location or "", each.code or "", each.reason)
        for each in finding.recommendations
    )
    yield Section("Recommendations", (Listing(changes, numbered=True),))


def _short(recommendation: RecommendationView) -> str:
    location = f"  ({recommendation.location})" if recommendation.location else ""
    return f"{recommendation.change}{location}"
