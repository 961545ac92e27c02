"""The batches that were tried, as a curve in a table: how fast, how much memory, what befell."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from stepscope.advice.answer import Fit, Point
from stepscope.report.fitparts import Section, batch_text, memory_text, retries_text
from stepscope.report.format import MISSING, rate_text
from stepscope.report.tables import Column, Table

_MOST_POINTS = 12
"""Rows. The answers, and what failed around them, are always among them."""


def curve_section(fit: Fit) -> Section | None:
    """Every batch that was tried, or the most telling of them."""
    if not fit.curve:
        return None
    points = sorted(fit.curve, key=lambda point: point.batch)
    telling = {batch for batch, _ in fit.holes}
    for answer in (fit.largest, fit.fast):
        telling |= {answer.size, answer.above or answer.size} if answer else set()
    shown = [points[place] for place in _thinned([p.batch in telling for p in points])]
    rows = tuple(
        (
            batch_text(point.batch),
            rate_text(point.samples_per_second or None),
            memory_text(point.reserved) if point.reserved > 0 else MISSING,
            ", ".join(_remarks(point, fit)),
        )
        for point in shown
    )
    columns = Column("Batch"), Column("Samples/s"), Column("Held"), Column("", number=False)
    left_out = len(points) - len(shown)
    title = "Batches tried" + (f" ({left_out} more are in the JSON)" if left_out else "")
    holes = tuple(f"{batch_text(a)} fails although {batch_text(b)} fits" for a, b in fit.holes)
    return Section(title, holes, Table(columns, rows).known())


def _remarks(point: Point, fit: Fit) -> Iterator[str]:
    if fit.fast and point.batch == fit.fast.size:
        yield "use"
    if fit.largest and point.batch == fit.largest.size:
        yield "largest"
    if not point.passed:
        yield "a hole" if any(point.batch == batch for batch, _ in fit.holes) else "fails"
    elif point.thrashes:
        yield retries_text(point.retries)


def _thinned(telling: Sequence[bool]) -> list[int]:
    """Places of what is telling, and of others evenly between, as long as there is room."""
    places = [place for place, tells in enumerate(telling) if tells]
    others = [place for place, tells in enumerate(telling) if not tells]
    room = max(0, _MOST_POINTS - len(places))
    if len(others) > room:
        others = [others[len(others) * n // room] for n in range(room)]
    return sorted([*places, *others])
