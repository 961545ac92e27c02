"""Lines and the panels they stand in, whatever they show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from stepscope.analysis.series import Floats, Series
from stepscope.analysis.summary import Recorded

Style = Literal["bold", "thin", "dashed", "level"]

COLOURS = ("blue", "orange", "green", "purple", "sky", "olive")
"""For what is alike and many: ranks, GPUs."""

_DWARFS = 3.0
"""A line of the surroundings this many times higher than the run's own would flatten them: it
starts hidden."""


@dataclass(frozen=True)
class Line:
    """One line: `x` in seconds since the run began, `y` in the panel's unit, NaN for a break.

    A point of a long run stands for some time: `y` is the mean then, `low` and `high` the range.
    """

    label: str
    colour: str
    """A name of the palette: ink, blue, orange, green, purple, sky, olive, grey."""
    x: Floats
    y: Floats
    style: Style
    low: Floats | None = None
    high: Floats | None = None
    shown: bool = True
    """Whether it is drawn before anybody clicks on it."""


@dataclass(frozen=True)
class Panel:
    """Lines that share a unit."""

    title: str
    unit: str
    lines: tuple[Line, ...]
    detail: str = ""
    """What bounds it, in a few words: "limit 4.00 GB"."""
    whole: float | None = None
    """What 100 % is, where the panel has a scale of shares."""
    top: float | None = None
    """Where its scale ends; at the highest value if None."""


def line_of(
    recorded: Recorded, series: Series, label: str, colour: str, style: Style, *, scale: float = 1
) -> list[Line]:
    """The line of a series, or none where nothing was read."""
    if not len(series):
        return []
    series = _without_slivers(series)
    x = (series.t - recorded.begin_ns) / 1e9
    return [Line(label, colour, x, series.value * scale, style)]


def level(label: str, height: float, end: float) -> Line:
    """A straight line at a height that means something."""
    return Line(label, "ink", np.array([0.0, end]), np.full(2, float(height)), "level")


def hidden(lines: Sequence[Line]) -> list[Line]:
    """The same lines, drawn only when somebody asks for them."""
    return [replace(line, shown=False) for line in lines]


def with_surroundings(own: Sequence[Line], around: Sequence[Line]) -> tuple[Line, ...]:
    """The run's own lines, then those around it; one that would flatten them starts hidden."""
    highest = max((float(line.y.max()) for line in own), default=np.inf)
    return (
        *own,
        *(replace(line, shown=float(line.y.max()) <= _DWARFS * highest) for line in around),
    )


def _without_slivers(series: Series) -> Series:
    """A sample right after another one has no rate that could be compared with the rest."""
    keep = series.window >= np.median(series.window) / 2
    return Series(series.t[keep], series.window[keep], series.value[keep])
