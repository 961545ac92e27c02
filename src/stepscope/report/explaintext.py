"""What holds a run back, in a terminal: 80 columns are enough, and so is plain text."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.padding import Padding
from rich.table import Table as Grid
from rich.text import Text

from stepscope.records import Advice, Ending
from stepscope.report.explain import EvidenceRow, FindingView, VerdictView, place_of
from stepscope.report.format import TONE_COLOURS, printable
from stepscope.report.outcomes import OUTCOMES

_HEADINGS = ("Evidence", "Value", "Threshold", "Measured by")
_ADVICE_AFTER_RUN = 2
_ADVICE_AFTER_TRIAL = 1
_INDENT = 3


def print_explained(
    console: Console, name: str, ending: Ending, view: VerdictView, in_full: bool = False
) -> None:
    """Write the first finding with all that it rests on, and the others shorter or in full."""
    console.print(_head(name, ending))
    console.print()
    _print_finding(console, view.first)
    if view.next:
        console.print()
        console.print(_named("Next", view.next))
    for other in view.others if in_full else ():
        console.print()
        console.print(_heading(f"Also: {other.title}"))
        console.print()
        _print_finding(console, other)
    if view.others and not in_full:
        _print_others(console, view.others)
    console.print()
    console.print(_named("Judged", view.basis))
    if view.weakness:
        console.print(_text(view.weakness, "yellow"))


def print_after_run(console: Console, view: VerdictView, folder: Path) -> None:
    """What ends every run: the first finding, what it is worth, and what to do about it."""
    _print_briefly(console, view, _ADVICE_AFTER_RUN)
    if view.next:
        console.print(_named("Next", view.next))
    # Not wrapped: it is to be copied.
    command = shlex.join(["stepscope", "explain", printable(str(folder))])
    console.print(_named("More", command), soft_wrap=True)


def print_after_trial(console: Console, view: VerdictView) -> None:
    """The same below the figures of a trial, which have their own advice."""
    _print_briefly(console, view, _ADVICE_AFTER_TRIAL)


def _print_briefly(console: Console, view: VerdictView, most: int) -> None:
    first = view.first
    console.print()
    console.print(_text(first.says, f"bold {TONE_COLOURS[first.tone]}"))
    confidence = first.confidence
    worth = f"{first.gain} ({confidence})" if first.gain else confidence.capitalize()
    console.print(_text(worth))
    if first.advice:
        console.print(_numbered([_advice_briefly(each) for each in first.advice[:most]]))


def _head(name: str, ending: Ending) -> Text:
    outcome, tone = OUTCOMES[ending.outcome]
    head = Text.assemble((printable(name), "bold"), "  ", (outcome, f"bold {TONE_COLOURS[tone]}"))
    if ending.reason:
        head.append(f"  {printable(ending.reason)}")
    return _folded(head)


def _print_finding(console: Console, finding: FindingView) -> None:
    console.print(_text(finding.says, f"bold {TONE_COLOURS[finding.tone]}"))
    for line in (finding.gain, finding.sure):
        if line:
            console.print(_text(line))
    if finding.evidence:
        console.print()
        console.print(_evidence(finding.evidence))
    if finding.advice:
        console.print()
        console.print(_heading("What to do"))
        console.print(_numbered([_advice(each) for each in finding.advice]))


def _evidence(rows: Sequence[EvidenceRow]) -> Grid:
    grid = Grid(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for place, title in enumerate(_HEADINGS):
        grid.add_column(title, justify="right" if place == 1 else "left", overflow="fold")
    for row in rows:
        grid.add_row(*(_text(cell) for cell in (row.what, row.value, row.threshold, row.source)))
    return grid


def _advice(advice: Advice) -> Text:
    lines = [_text(advice.change, "bold")]
    lines += [_text(text, style) for text, style in ((place_of(advice), "cyan"), (advice.why, ""))
              if text]  # fmt: skip
    return _folded(Text("\n").join(lines))


def _advice_briefly(advice: Advice) -> Text:
    text = _text(advice.change)
    if advice.where:
        text.append(f"  ({printable(advice.where)})", style="cyan")
    return text


def _numbered(texts: Sequence[Text]) -> Grid:
    grid = Grid.grid(padding=(0, 1, 0, 0))
    grid.add_column(justify="right", width=_INDENT - 1, no_wrap=True)
    grid.add_column(overflow="fold")
    for number, text in enumerate(texts, 1):
        grid.add_row(f"{number}.", text)
    return grid


def _print_others(console: Console, others: Sequence[FindingView]) -> None:
    console.print()
    console.print(_heading("Also found (all of it with --all)"))
    for other in others:
        line = _text(other.title, "bold")
        line.append(f"  {other.brief}")
        console.print(line)
        for advice in other.advice[:1]:
            console.print(Padding(_advice_briefly(advice), (0, 0, 0, _INDENT)))


def _named(name: str, text: str) -> Text:
    return _folded(Text.assemble((f"{name}: ", "dim"), _text(text)))


def _heading(text: str) -> Text:
    return _text(text, "dim")


def _text(text: str, style: str = "") -> Text:
    """A user's text, which may have lines of its own but cannot steer the terminal."""
    return _folded(Text("\n".join(printable(line) for line in text.splitlines()), style=style))


def _folded(text: Text) -> Text:
    """A word that is longer than a line goes on in the next."""
    text.overflow = "fold"
    return text
