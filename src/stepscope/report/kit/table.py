"""A table of texts, which every renderer draws in its own way."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

from stepscope.report.kit.format import MISSING
from stepscope.report.kit.outcomes import Tone

_Row = TypeVar("_Row")

_LEAST_SENTENCE = 28  # characters that a sentence needs beside other columns to be read
_GOOD_NAME, _LEAST_NAME = 30, 12
"""Characters of a name that are worth a column, and that the narrowest terminal leaves."""

RowTone = Tone | Literal["weak", ""]


@dataclass(frozen=True)
class Column:
    """A heading. Numbers are aligned to the right and never wrapped."""

    title: str
    number: bool = True
    extra: bool = False  # left out in a terminal
    spare: int = 0  # left out in a terminal that is too narrow, the highest first; 0 always stays
    gpu: bool = False  # whether it is about GPUs, in a table of other things too
    wide: bool = False  # whether it holds sentences, which need some space to be read
    cut: bool = False  # whether it holds long names, of which a narrow terminal shows both ends
    toned: bool = False
    """Whether it takes the tone of its row. Without such a column the whole row does."""


@dataclass(frozen=True)
class Table:
    """Rows of texts under headings; without any title there is no row of headings."""

    columns: tuple[Column, ...]
    rows: tuple[tuple[str, ...], ...]
    tones: tuple[RowTone, ...] = ()  # one for each row, or none at all

    @classmethod
    def of(
        cls, rows: Iterable[_Row], columns: Sequence[tuple[Column, Callable[[_Row], str]]]
    ) -> Table:
        """A row for each record, by columns that each say how a record becomes their text."""
        texts = tuple(tuple(text(row) for _, text in columns) for row in rows)
        return cls(tuple(column for column, _ in columns), texts)

    def without(self, dropped: Iterable[int]) -> Table:
        """The same table less the columns at these positions."""
        gone = set(dropped)
        return replace(
            self,
            columns=tuple(c for i, c in enumerate(self.columns) if i not in gone),
            rows=tuple(tuple(t for i, t in enumerate(row) if i not in gone) for row in self.rows),
        )

    def first(self, count: int) -> Table:
        """The same table with at most `count` rows."""
        return replace(self, rows=self.rows[:count], tones=self.tones[:count])

    def compact(self, width: int) -> Table:
        """The table for a terminal of this width, as far as columns can be spared."""
        table = self.without(i for i, column in enumerate(self.columns) if column.extra)
        while table._least_width > width:
            spares = [column.spare for column in table.columns]
            if not any(spares):
                break
            table = table.without([spares.index(max(spares))])
        for i, column in enumerate(table.columns):
            if column.cut and (excess := table.width - width) > 0:
                most = max(_LEAST_NAME, table._widths[i] - excess)
                rows = ((*row[:i], _both_ends(row[i], most), *row[i + 1 :]) for row in table.rows)
                table = replace(table, rows=tuple(rows))
        return table

    def split_gpus(self) -> tuple[Table, Table]:
        """The columns that are not about GPUs, and those that are; both with the first column."""
        of_gpus = {i for i, column in enumerate(self.columns) if column.gpu}
        others = set(range(1, len(self.columns))) - of_gpus
        return self.without(of_gpus), self.without(others)

    def known(self) -> Table:
        """The table less the columns that have no value in any row."""
        places = range(len(self.columns))
        return self.without(
            i for i in places if self.rows and all(row[i] == MISSING for row in self.rows)
        )

    @property
    def is_headed(self) -> bool:
        return any(column.title for column in self.columns)

    @property
    def width(self) -> int:
        """Characters across, with two blanks between columns."""
        return sum(self._widths) + 2 * (len(self.columns) - 1)

    @property
    def _widths(self) -> list[int]:
        lines = [[column.title for column in self.columns], *self.rows]
        return [max(len(line[i]) for line in lines) for i in range(len(self.columns))]

    @property
    def _least_width(self) -> int:
        """The same where sentences that cannot be spared are wrapped, and long names cut."""
        total = 2 * (len(self.columns) - 1)
        for column, width in zip(self.columns, self._widths, strict=True):
            least = _LEAST_SENTENCE if column.wide and not column.spare else width
            total += min(width, _GOOD_NAME if column.cut else least)
        return total


def _both_ends(name: str, width: int) -> str:
    """Both ends of a name tell: `autograd::engine…ConvolutionBackward0`."""
    begin = (width - 1) // 2
    return name if len(name) <= width else f"{name[:begin]}…{name[begin + 1 - width :]}"
