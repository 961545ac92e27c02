"""The content of a report, independent of the output format.

A view builds a `Document` for a run, trial, fit or study; a renderer draws it. Texts are unescaped
and may contain anything, so every renderer escapes what its format interprets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from stepscope.report.kit.outcomes import Tone
from stepscope.report.kit.table import Table

if TYPE_CHECKING:
    from stepscope.analysis.run.series import Floats

Emphasis = Literal["", "lead", "strong", "note", "warning"]
LineStyle = Literal["bold", "thin", "dashed", "level"]


@dataclass(frozen=True)
class Paragraph:
    """One or more sentences, after an optional label or badge."""

    text: str
    emphasis: Emphasis = ""
    tone: Tone | None = None  # the color of the badge; without a badge, of the text
    label: str = ""
    badge: str = ""


@dataclass(frozen=True)
class Verbatim:
    """A command or path that users copy: never wrapped or shortened."""

    text: str
    label: str = ""


@dataclass(frozen=True)
class Item:
    """A list item. A recommendation also has a code location and a reason."""

    text: str
    where: str = ""  # `train.py:41`
    code: str = ""  # the current code at that location
    why: str = ""


@dataclass(frozen=True)
class Listing:
    """A list, numbered if the order matters."""

    items: tuple[Item, ...]
    numbered: bool = False

    @classmethod
    def of(cls, texts: Sequence[str]) -> Listing:
        return cls(tuple(map(Item, texts)))


@dataclass(frozen=True)
class Facts:
    """Name and text pairs; an empty name continues the previous one."""

    rows: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Tile:
    """A labeled number with a short detail."""

    label: str
    value: str
    detail: str = ""


@dataclass(frozen=True)
class Tiles:
    """The key numbers of a report."""

    tiles: tuple[Tile, ...]


@dataclass(frozen=True)
class Figure:
    """A static plot. `svg` is markup from `kit.svg`, with all texts escaped."""

    svg: str
    description: str  # alternative text, for formats without images
    title: str = ""
    caption: str = ""


@dataclass(frozen=True)
class PlotLine:
    """One line: `x` in seconds since the run started, `y` in the panel's unit, NaN for a gap.

    In a long run each point covers a time bucket: `y` is its mean, `low` and `high` its range.
    """

    label: str
    color: str  # a palette name: ink, blue, orange, green, purple, sky, olive, gray
    x: Floats
    y: Floats
    style: LineStyle
    low: Floats | None = None
    high: Floats | None = None
    shown: bool = True  # whether it is visible initially


@dataclass(frozen=True)
class Panel:
    """Lines with a common unit."""

    title: str
    unit: str
    lines: tuple[PlotLine, ...]
    detail: str = ""  # shown after the unit: "limit 4.00 GiB"
    full_scale: float | None = None  # the value of 100% on the right axis; None: no right axis
    top: float | None = None  # upper end of the axis; None: the highest value


@dataclass(frozen=True)
class Charts:
    """Panels with a shared time axis from 0 to `seconds`, with epochs and phases."""

    title: str
    panels: tuple[Panel, ...]
    seconds: float
    epochs: tuple[tuple[float, int], ...] = ()  # start and number of each
    phases: tuple[tuple[str, float, float], ...] = ()  # name, begin, end

    @property
    def phase_names(self) -> list[str]:
        return list(dict.fromkeys(name for name, _, _ in self.phases))


@dataclass(frozen=True)
class Section:
    """Blocks under a heading. A section with a tone is a finding, drawn in its color."""

    title: str
    blocks: tuple[Block, ...]
    tone: Tone | None = None
    folded: bool = False  # whether it is collapsed initially


@dataclass(frozen=True)
class SideBySide:
    """Blocks next to each other, if there is space."""

    blocks: tuple[Block, ...]


Block: TypeAlias = (
    Paragraph | Verbatim | Listing | Facts | Tiles | Table | Figure | Charts | Section | SideBySide
)


@dataclass(frozen=True)
class Document:
    """A whole report, in reading order."""

    name: str
    state: str  # one or two words: `ok`, `running`
    tone: Tone
    blocks: tuple[Block, ...]
    reason: str = ""
    header: tuple[Block, ...] = ()  # below the name, before the blocks
    footer: str = ""
    data: Mapping[str, Any] | None = None  # the content as JSON, with stable keys


def is_empty(block: Block) -> bool:
    """Return whether a block has no content, so that its heading is omitted too."""
    match block:
        case Paragraph() | Verbatim():
            return not block.text
        case Listing():
            return not block.items
        case Facts() | Table():
            return not block.rows
        case Tiles():
            return not block.tiles
        case Section() | SideBySide():
            return all(map(is_empty, block.blocks))
        case _:
            return False
