"""Static plots as SVG: scales, ticks, axes, marks and escaped texts.

A plot is `WIDTH` units wide and shown at about that many pixels, a little smaller on a phone.
Colors are classes of `page.css`, so they follow the color scheme of the page.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape

from stepscope.report.kit.document import Figure

WIDTH = 400
SERIES = 6
"""Number of lines that have a distinct color."""
_LETTER = 6.3  # average width of a letter, rounded up
_TEXT_HEIGHT = 14

Texter = Callable[[float], str]


@dataclass(frozen=True)
class Scale:
    """Maps values to coordinates."""

    low: float
    high: float
    start: float
    end: float
    is_log: bool = False

    def at(self, value: float) -> float:
        low, high = self.low, self.high
        if self.is_log:
            low, high, value = math.log(low), math.log(high), math.log(max(value, 1e-300))
        share = (value - low) / (high - low) if high > low else 0.5
        return self.start + min(1.05, max(-0.05, share)) * (self.end - self.start)


def ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Return about `count` round values within a range: 0, 50, 100."""
    if not high > low:
        return [low]
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = max(power * each for each in (1, 2, 2.5, 5, 10) if power * each <= rough * 1.3)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [i * step for i in range(first, last + 1)]


def log_ticks(high: float) -> list[float]:
    """Return ratios from 1 up, few enough to be labeled."""
    ladders = (
        [1, 1.02, 1.05],
        [1, 1.1, 1.2],
        [1, 1.25, 1.5],
        [1, 1.5, 2],
        [1, 2, 3],
        [1, 2, 4],
        [1, 3, 10],
    )
    for ladder in ladders:
        if high <= ladder[-1] * 1.15:
            return [each for each in ladder if each <= high * 1.0001]
    powers = math.ceil(math.log10(high))
    step = max(1, math.ceil(powers / 4))
    return [10.0**power for power in range(0, powers + 1, step) if 10.0**power <= high * 1.0001]


def padded(values: Iterable[float], share: float = 0.08, least: float = 0.0) -> tuple[float, float]:
    """Return a range that holds all values with a margin of `share` on each side.

    Its width is at least `least` times its midpoint.
    """
    known = [value for value in values if math.isfinite(value)]
    if not known:
        return 0.0, 1.0
    low, high = min(known), max(known)
    middle = (low + high) / 2
    half = max((high - low) * (0.5 + share), abs(middle) * least / 2) or abs(middle) or 0.5
    return middle - half, middle + half


def picture(
    kind: str,
    label: str,
    height: float,
    parts: Iterable[str],
    title: str = "",
    caption: str = "",
) -> Figure:
    """Return a complete plot; `label` is its alternative text."""
    alt = escape(label)
    svg = (
        f'<svg class="study-plot {kind}" role="img" aria-label="{alt}" '
        f'viewBox="0 0 {WIDTH} {n(height)}" xmlns="http://www.w3.org/2000/svg">'
        f"<title>{alt}</title>{''.join(parts)}</svg>"
    )
    return Figure(svg, label, title, caption)


def n(value: float) -> str:
    """Format a coordinate."""
    return f"{value:.1f}".removesuffix(".0")


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    mark = f' class="{kind}"' if kind else ""
    place = "" if anchor == "start" else f' text-anchor="{anchor}"'
    return f'<text x="{n(x)}" y="{n(y)}"{mark}{place}>{escape(words)}</text>'


def line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<line x1="{n(x1)}" y1="{n(y1)}" x2="{n(x2)}" y2="{n(y2)}" class="{kind}"/>'


def path(points: Sequence[tuple[float, float]], kind: str) -> str:
    if len(points) < 2:
        return ""
    steps = "L".join(f"{n(x)} {n(y)}" for x, y in points)
    return f'<path d="M{steps}" class="{kind}"/>'


def tipped(drawn: str, tip: str, kind: str = "") -> str:
    """Return a group with a tooltip."""
    mark = f' class="{kind}"' if kind else ""
    return f"<g{mark}><title>{escape(tip)}</title>{drawn}</g>"


def bar(x: float, y: float, width: float, kind: str) -> str:
    """Return a horizontal bar, centered at `y`."""
    box = f'x="{n(x)}" y="{n(y - 8)}" width="{n(width)}" height="16" rx="2"'
    return f'<rect {box} class="{kind}"/>'


def dot(x: float, y: float, radius: float, kind: str) -> str:
    return f'<circle cx="{n(x)}" cy="{n(y)}" r="{n(radius)}" class="{kind}"/>'


def cross(x: float, y: float, size: float, kind: str) -> str:
    d = f"M{n(x - size)} {n(y - size)}L{n(x + size)} {n(y + size)}M{n(x - size)} {n(y + size)}"
    return f'<path d="{d}L{n(x + size)} {n(y - size)}" class="{kind}"/>'


def across(low: float, high: float, y: float, kind: str) -> str:
    """Return a horizontal error bar."""
    ends = (line(x, y - 3, x, y + 3, kind) for x in (low, high))
    return line(low, y, high, y, kind) + "".join(ends)


def upright(x: float, low: float, high: float, kind: str) -> str:
    """Return a vertical error bar."""
    ends = (line(x - 3, y, x + 3, y, kind) for y in (low, high))
    return line(x, low, x, high, kind) + "".join(ends)


def shortened(words: str, width: float) -> str:
    """Shorten a text to this width."""
    letters = max(2, int(width / _LETTER))
    return words if len(words) <= letters else f"{words[: letters - 1]}…"


def width_of(words: str) -> float:
    return len(words) * _LETTER


def bottom_axis(
    scale: Scale, y: float, places: Sequence[tuple[float, str]], top: float | None = None
) -> Iterable[str]:
    """Yield an axis with tick labels below a plot, and grid lines up to `top`.

    Labels that would overlap the previous one are omitted.
    """
    free = -math.inf
    yield line(scale.start, y, scale.end, y, "axis")
    for value, words in places:
        x = scale.at(value)
        if top is not None:
            yield line(x, y, x, top, "grid")
        half = width_of(words) / 2
        at = min(max(x, half), WIDTH - half)
        if at - half > free:
            yield text(at, y + _TEXT_HEIGHT + 1, words, "tick", "middle")
            free = at + half + 8


def left_axis(
    scale: Scale, x: float, right: float, places: Iterable[float], words: Texter
) -> Iterable[str]:
    """Yield tick labels left of a plot, and its grid lines."""
    for value in places:
        y = scale.at(value)
        yield line(x, y, right, y, "grid")
        yield text(x - 6, y + 4, words(value), "tick", "end")


def legend(names: Sequence[str], x: float, y: float) -> tuple[str, float]:
    """Return a legend, wrapped to the width of the plot, and its height."""
    parts, at, row = [], x, y
    for place, name in enumerate(names):
        words = shortened(name, WIDTH - x - 24)
        wide = 18 + width_of(words) + 12
        if at > x and at + wide > WIDTH:
            at, row = x, row + 17
        kind = f"line series-{min(place, SERIES)}"
        parts.append(line(at, row - 4, at + 13, row - 4, kind) + text(at + 18, row, words, "tick"))
        at += wide
    return "".join(parts), row - y + 17
