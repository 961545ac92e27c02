"""What a report says, without how it is drawn.

A view makes a `Document` of an artefact (run, trial, fit, study); a renderer draws it. Texts are as
they were recorded, so a name may hold anything: every renderer escapes what its format interprets.
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
    """A sentence or more, after a label or a badge if there is one."""

    text: str
    emphasis: Emphasis = ""
    tone: Tone | None = None  # the colour of the badge; without a badge, of the text
    label: str = ""
    badge: str = ""


@dataclass(frozen=True)
class Verbatim:
    """A command or a path, to be copied: it is never wrapped or cut."""

    text: str
    label: str = ""


@dataclass(frozen=True)
class Item:
    """A point of a list; a recommendation also has its place in the code and a reason."""

    text: str
    where: str = ""  # `train.py:41`
    code: str = ""  # what stands there now
    why: str = ""


@dataclass(frozen=True)
class Listing:
    """Points, numbered where their order matters."""

    items: tuple[Item, ...]
    numbered: bool = False

    @classmethod
    def of(cls, texts: Sequence[str]) -> Listing:
        return cls(tuple(map(Item, texts)))


@dataclass(frozen=True)
class Facts:
    """Names with their texts; an empty name continues the one before."""

    rows: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Tile:
    """A number with its name, and a few words on it."""

    label: str
    value: str
    detail: str = ""


@dataclass(frozen=True)
class Tiles:
    """The numbers a reader looks for first."""

    tiles: tuple[Tile, ...]


@dataclass(frozen=True)
class Figure:
    """A static picture. `svg` is markup that `kit.svg` made, with all texts escaped."""

    svg: str
    description: str  # what it shows, for formats without pictures
    title: str = ""
    caption: str = ""


@dataclass(frozen=True)
class PlotLine:
    """One line: `x` in seconds since the run began, `y` in the panel's unit, NaN for a break.

    A point of a long run stands for some time: `y` is the mean then, `low` and `high` the range.
    """

    label: str
    colour: str  # a name of the palette: ink, blue, orange, green, purple, sky, olive, grey
    x: Floats
    y: Floats
    style: LineStyle
    low: Floats | None = None
    high: Floats | None = None
    shown: bool = True  # whether it is drawn before anybody clicks on it


@dataclass(frozen=True)
class Panel:
    """Lines that share a unit."""

    title: str
    unit: str
    lines: tuple[PlotLine, ...]
    detail: str = ""  # what bounds it, in a few words: "limit 4.00 GB"
    whole: float | None = None  # what 100 % is, where the panel has a scale of shares
    top: float | None = None  # where its scale ends; at the highest value if None


@dataclass(frozen=True)
class Charts:
    """Panels on one clock, from 0 to `seconds`, with what happened meanwhile."""

    title: str
    panels: tuple[Panel, ...]
    seconds: float
    epochs: tuple[tuple[float, int], ...] = ()  # when each begins, and its number
    phases: tuple[tuple[str, float, float], ...] = ()  # name, begin, end

    @property
    def phase_names(self) -> list[str]:
        return list(dict.fromkeys(name for name, _, _ in self.phases))


@dataclass(frozen=True)
class Section:
    """Blocks under a heading. One with a tone is a finding, drawn in its colour."""

    title: str
    blocks: tuple[Block, ...]
    tone: Tone | None = None
    folded: bool = False  # whether a page shows it only when asked to


@dataclass(frozen=True)
class SideBySide:
    """Blocks beside each other, where there is space for that."""

    blocks: tuple[Block, ...]


Block: TypeAlias = (
    Paragraph | Verbatim | Listing | Facts | Tiles | Table | Figure | Charts | Section | SideBySide
)


@dataclass(frozen=True)
class Document:
    """All that is shown of one artefact, in the order in which it is read."""

    name: str
    state: str  # how it ended or where it stands, in a word or two: `ok`, `running`
    tone: Tone
    blocks: tuple[Block, ...]
    reason: str = ""
    header: tuple[Block, ...] = ()  # below the name, before anything else
    footer: str = ""
    data: Mapping[str, Any] | None = None  # the same for programs, with keys that never change


def is_empty(block: Block) -> bool:
    """Whether there is nothing to draw, so that not even a heading is."""
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
