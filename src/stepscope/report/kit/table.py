"""A table of text cells, independent of the output format."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

from stepscope.report.kit.format import MISSING
from stepscope.report.kit.outcomes import Tone

_Row = TypeVar("_Row")

_MIN_SENTENCE_WIDTH = 28  # narrowest readable width of a wrapped column
_NAME_WIDTH, _MIN_NAME_WIDTH = 30, 12
"""Width that an elided column gets before others are dropped, and the least it shrinks to."""

RowTone = Tone | Literal["weak", ""]


@dataclass(frozen=True)
class Column:
    """A column header with layout hints. Numbers are right-aligned and never wrapped."""

    title: str
    number: bool = True
    page_only: bool = False  # not shown in a terminal
    drop: int = 0  # dropped in a narrow terminal, highest first; 0: never
    gpu: bool = False  # whether it is a GPU metric
    wrap: bool = False  # holds sentences, which may wrap
    elide: bool = False  # holds long names, shortened in the middle in a narrow terminal
    colored: bool = False
    """Whether it takes the tone of its row. If no column does, the whole row is colored."""


@dataclass(frozen=True)
class Table:
    """Rows of text cells. The header row is omitted if no column has a title."""

    columns: tuple[Column, ...]
    rows: tuple[tuple[str, ...], ...]
    tones: tuple[RowTone, ...] = ()  # one per row, or empty

    @classmethod
    def of(
        cls, rows: Iterable[_Row], columns: Sequence[tuple[Column, Callable[[_Row], str]]]
    ) -> Table:
        """Return one row per record; each column comes with its formatting function."""
        texts = tuple(tuple(text(row) for _, text in columns) for row in rows)
        return cls(tuple(column for column, _ in columns), texts)

    def without(self, dropped: Iterable[int]) -> Table:
        """Return the table without the columns at these positions."""
        dropped = set(dropped)
        return replace(
            self,
            columns=tuple(c for i, c in enumerate(self.columns) if i not in dropped),
            rows=tuple(
                tuple(t for i, t in enumerate(row) if i not in dropped) for row in self.rows
            ),
        )

    def first(self, count: int) -> Table:
        """Return the table with at most `count` rows."""
        return replace(self, rows=self.rows[:count], tones=self.tones[:count])

    def compact(self, width: int) -> Table:
        """Return the table for a terminal of this width, with fewer columns if necessary."""
        table = self.without(i for i, column in enumerate(self.columns) if column.page_only)
        while table._min_width > width:
            priorities = [column.drop for column in table.columns]
            if not any(priorities):
                break
            table = table.without([priorities.index(max(priorities))])
        for i, column in enumerate(table.columns):
            if column.elide and (excess := table.width - width) > 0:
                limit = max(_MIN_NAME_WIDTH, table._widths[i] - excess)
                rows = ((*row[:i], _elided(row[i], limit), *row[i + 1 :]) for row in table.rows)
                table = replace(table, rows=tuple(rows))
        return table

    def split_gpus(self) -> tuple[Table, Table]:
        """Return the table without GPU columns and one with only those; both keep column 0."""
        gpu_columns = {i for i, column in enumerate(self.columns) if column.gpu}
        others = set(range(1, len(self.columns))) - gpu_columns
        return self.without(gpu_columns), self.without(others)

    def without_empty_columns(self) -> Table:
        """Return the table without the columns that have no value in any row."""
        return self.without(
            i
            for i in range(len(self.columns))
            if self.rows and all(row[i] == MISSING for row in self.rows)
        )

    @property
    def has_header(self) -> bool:
        return any(column.title for column in self.columns)

    @property
    def width(self) -> int:
        """Width in characters, with two spaces between columns."""
        return sum(self._widths) + 2 * (len(self.columns) - 1)

    @property
    def _widths(self) -> list[int]:
        lines = [[column.title for column in self.columns], *self.rows]
        return [max(len(line[i]) for line in lines) for i in range(len(self.columns))]

    @property
    def _min_width(self) -> int:
        """Width after wrapping the columns that are never dropped, and eliding names."""
        total = 2 * (len(self.columns) - 1)
        for column, width in zip(self.columns, self._widths, strict=True):
            wraps = column.wrap and not column.drop
            limit = _NAME_WIDTH if column.elide else _MIN_SENTENCE_WIDTH if wraps else width
            total += min(width, limit)
        return total


def _elided(name: str, width: int) -> str:
    """Shorten a name in the middle: `autograd::engine…ConvolutionBackward0`."""
    begin = (width - 1) // 2
    return name if len(name) <= width else f"{name[:begin]}…{name[begin + 1 - width :]}"
