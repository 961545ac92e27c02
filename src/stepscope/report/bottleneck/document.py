"""A diagnosis as blocks of the kit: the card of the page, `stepscope explain`, and what ends other
commands."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

from stepscope.records import Ending
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
    Column("Measured by", number=False),
)


def diagnosis_section(view: DiagnosisView) -> Section:
    """The first finding with all that it rests on; the others are folded."""
    first, others = view.first, view.others
    count = f"{len(others)} other {plural(len(others), 'finding')}"
    names = ", ".join(each.title for each in others)
    folded = tuple(
        Section(each.title, (Paragraph(each.summary), _badge(each), *_support(each)))
        for each in others
    )
    return Section(
        first.summary,
        (
            _badge(first),
            *_support(first),
            Paragraph(view.next, label="Next"),
            Section(f"{count}: {names}", folded, folded=True),
            Paragraph(f"Judged: {view.basis}", "note"),
            Paragraph(view.weakness, "warning"),
        ),
        tone=first.tone,
    )


def explained_document(
    name: str, ending: Ending, view: DiagnosisView, in_full: bool = False
) -> Document:
    """The first finding with all that it rests on, and the others shorter or in full."""
    state, tone = OUTCOMES[ending.outcome]
    blocks: list[Block] = [*_finding(view.first), Paragraph(view.next, label="Next")]
    if in_full:
        for other in view.others:
            blocks += [Paragraph(f"Also: {other.title}", "note"), *_finding(other)]
    else:
        also = (
            Item(
                f"{other.title}  {other.brief}", why="".join(map(_brief, other.recommendations[:1]))
            )
            for other in view.others
        )
        blocks.append(Section("Also found (all of it with --all)", (Listing(tuple(also)),)))
    judged = (Paragraph(view.basis, label="Judged"), Paragraph(view.weakness, "warning"))
    blocks.append(Section("", judged))
    return Document(name, state, tone, tuple(blocks), reason=ending.reason)


def closing_section(view: DiagnosisView, run: Path | None = None) -> Section:
    """What ends a command: the first finding, what it is worth, and what to do about it. That of a
    run also tells what comes next and how to see more; trials have figures of their own."""
    first = view.first
    confidence = f"{first.confidence} confidence"
    worth = f"{first.gain} ({confidence})" if first.gain else confidence.capitalize()
    changes = tuple(Item(_brief(each)) for each in first.recommendations[: 2 if run else 1])
    command = "" if run is None else shlex.join(["stepscope", "explain", str(run)])
    return Section(
        "",
        (
            Paragraph(first.summary, tone=first.tone),
            Paragraph(worth),
            Listing(changes, numbered=True),
            Paragraph(view.next if command else "", label="Next"),
            Verbatim(command, "More"),
        ),
    )


def _finding(finding: FindingView) -> Iterator[Block]:
    lines = (Paragraph(finding.gain), Paragraph(finding.sure))
    yield Section("", (Paragraph(finding.summary, tone=finding.tone), *lines))
    yield from _support(finding)


def _badge(finding: FindingView) -> Paragraph:
    badge = finding.gain or ("Healthy" if finding.healthy else "")
    return Paragraph(finding.sure, tone=finding.tone, badge=badge)


def _support(finding: FindingView) -> Iterator[Block]:
    yield Table(_EVIDENCE, tuple(row.cells for row in finding.evidence))
    changes = tuple(
        Item(each.change, each.where or "", each.line or "", each.why)
        for each in finding.recommendations
    )
    yield Section("What to do", (Listing(changes, numbered=True),))


def _brief(recommendation: RecommendationView) -> str:
    where = f"  ({recommendation.where})" if recommendation.where else ""
    return f"{recommendation.change}{where}"
