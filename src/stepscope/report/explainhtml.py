"""What holds a run back, as the first card of the page."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from stepscope.records import Advice
from stepscope.report.explain import EvidenceRow, FindingView, VerdictView

_HEADINGS = ("Evidence", "Value", "Threshold", "Measured by")


def finding_card(view: VerdictView) -> str:
    """The first finding with all that it rests on; the others are folded."""
    first = view.first
    parts = (
        f"<h2>{escape(first.says)}</h2>",
        *_parts(first),
        f'<p class="next"><strong>Next:</strong> {escape(view.next)}</p>' if view.next else "",
        _others(view.others),
        _paragraph("basis", f"Judged: {view.basis}"),
        _paragraph("weakness", view.weakness),
    )
    label = 'aria-label="What holds this run back"'
    return f'<section class="card finding {first.tone}" {label}>{"".join(parts)}</section>'


def _parts(finding: FindingView) -> tuple[str, ...]:
    return (_worth(finding), _evidence(finding.evidence), _advice(finding.advice))


def _worth(finding: FindingView) -> str:
    text = finding.gain or ("Healthy" if finding.tone == "good" else "")
    badge = f'<span class="badge {finding.tone}">{escape(text)}</span>' if text else ""
    return f'<p class="worth">{badge}<span>{escape(finding.sure)}</span></p>'


def _evidence(rows: Sequence[EvidenceRow]) -> str:
    if not rows:
        return ""
    marks = ("", ' class="number"', "", "")
    head = (f"<th{mark}>{title}</th>" for mark, title in zip(marks, _HEADINGS, strict=True))
    body = (
        "".join(
            f"<td{mark}>{escape(text)}</td>"
            for mark, text in zip(
                marks, (row.what, row.value, row.threshold, row.source), strict=True
            )
        )
        for row in rows
    )
    lines = "".join(f"<tr>{line}</tr>" for line in body)
    return (
        f'<div class="scroll"><table class="data evidence-of"><thead><tr>{"".join(head)}</tr>'
        f"</thead><tbody>{lines}</tbody></table></div>"
    )


def _advice(advice: Sequence[Advice]) -> str:
    if not advice:
        return ""
    items = "".join(f"<li>{_change(each)}</li>" for each in advice)
    return f'<h3>What to do</h3><ol class="advice">{items}</ol>'


def _change(advice: Advice) -> str:
    where = f'<span class="where">{escape(advice.where)}</span>' if advice.where else ""
    line = f"<code>{escape(advice.line.strip())}</code>" if advice.line else ""
    place = f'<p class="place">{where}{line}</p>' if where or line else ""
    return _paragraph("change", advice.change) + place + _paragraph("why", advice.why)


def _others(others: Sequence[FindingView]) -> str:
    if not others:
        return ""
    told = "".join(
        f'<div class="other"><h3>{escape(each.title)}</h3><p>{escape(each.says)}</p>'
        f"{''.join(_parts(each))}</div>"
        for each in others
    )
    count = "1 other finding" if len(others) == 1 else f"{len(others)} other findings"
    names = escape(", ".join(each.title for each in others))
    return f"<details><summary>{count}: {names}</summary>{told}</details>"


def _paragraph(kind: str, text: str) -> str:
    return f'<p class="{kind}">{escape(text)}</p>' if text else ""
