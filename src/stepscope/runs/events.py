"""Reads what the watched processes wrote of themselves: `events/<pid>.bin`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt

from stepscope.inject import events as written

RECORD = np.dtype(
    [("t", "<i8"), ("kind", "<u2"), ("flags", "<u2"), ("number", "<u4"), ("a", "<i8"), ("b", "<i8")]
)
_VALUE_SHAPE = 15

Records = npt.NDArray[np.void]


@dataclass(frozen=True)
class ProcessEvents:
    """What one process reported. `names` gives the texts that the records mean by id."""

    pid: int
    rank: int | None
    python: str | None
    records: Records
    names: dict[int, str]
    dropped: int = 0

    def of(self, *kinds: int) -> Records:
        """The records of these kinds, in the order they were written."""
        places = np.concatenate([self._places(kind) for kind in kinds])
        return self.records.take(places if len(kinds) == 1 else np.sort(places))

    def _places(self, kind: int) -> npt.NDArray[np.int64]:
        order, sorted_kinds = self._by_kind
        return order[slice(*np.searchsorted(sorted_kinds, (kind, kind + 1)))]

    @cached_property
    def _by_kind(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Where the records of every kind are: asked for often, of millions of records."""
        kinds = self.records["kind"].astype(np.int64)
        order = np.argsort(kinds.astype(np.uint16), kind="stable")
        return order, kinds[order]

    def named(self, kind: int) -> list[str]:
        """The texts of all records of a kind, without repetition."""
        return list(dict.fromkeys(self.name(record["a"]) for record in self.of(kind)))

    def name(self, ident: int) -> str:
        return self.names.get(int(ident), f"#{int(ident):x}")

    def value(self, record: np.void) -> float | str | None:
        """The value of a mark, as it was given."""
        shape = int(record["flags"]) & _VALUE_SHAPE
        if shape == written.VALUE_INT:
            return int(record["b"])
        if shape == written.VALUE_FLOAT:
            return float(np.int64(record["b"]).view(np.float64))
        if shape == written.VALUE_TEXT:
            return self.name(record["b"])
        return None


def read_folder(folder: Path) -> list[ProcessEvents]:
    """All processes that reported anything, those with the lowest rank and first start first."""
    found: list[ProcessEvents] = []
    if folder.is_dir():
        for path in folder.glob("*.bin"):
            if path.stem.isdigit() and path.is_file():
                found.extend(read_file(path))
    found.sort(key=lambda p: (p.rank is None, p.rank or 0, p.records["t"][0]))
    return found


def read_file(path: Path) -> list[ProcessEvents]:
    """The process (or, where its number was used again, processes) that wrote one file."""
    records = parse(path.read_bytes())
    starts = np.flatnonzero(records["kind"] == written.START)
    edges = [*starts.tolist(), len(records)]
    pieces = [records[a:b] for a, b in zip(edges, edges[1:], strict=False)]
    if len(records) and (not starts.size or starts[0] > 0):
        pieces.insert(0, records[: edges[0]])
    found = [_one_process(int(path.stem), piece) for piece in pieces]
    return [process for process in found if len(process.records)]


def parse(data: bytes) -> Records:
    """Whole, plausible records; a torn or zero-filled tail is left out."""
    whole = len(data) // written.SIZE * written.SIZE
    records = np.frombuffer(data[:whole], dtype=RECORD)
    return _those(
        records,
        (records["kind"] > 0) & (records["kind"] <= written.LAST_KIND) & (records["t"] > 0),
    )


def _those(records: Records, wanted: npt.NDArray[np.bool_]) -> Records:
    """By their places: numpy takes five times as long to pick records by a mask."""
    return records if wanted.all() else records.take(np.flatnonzero(wanted))


def _one_process(pid: int, records: Records) -> ProcessEvents:
    names = read_names(records[records["kind"] == written.NAME])
    start = records[records["kind"] == written.START][:1]
    ranks = records[np.isin(records["kind"], (written.START, written.RANK))]["a"]
    rank = int(ranks[-1]) if ranks.size and ranks[-1] >= 0 else None
    python = _version(int(start["b"][0])) if start.size else None
    dropped = int(records[records["kind"] == written.DROPPED]["a"].sum())
    return ProcessEvents(
        pid, rank, python, _those(records, records["kind"] != written.NAME), names, dropped
    )


def read_names(records: Iterable[np.void]) -> dict[int, str]:
    """Texts put together from NAME records; one that was cut short is left out."""
    pieces: dict[int, dict[int, bytes]] = {}
    lengths: dict[int, int] = {}
    for record in records:
        ident, _, index, length, piece = written.NAME_RECORD.unpack(record.tobytes())
        pieces.setdefault(ident, {})[index] = piece
        lengths[ident] = length
    names = {}
    for ident, parts in pieces.items():
        data = b"".join(parts[index] for index in sorted(parts))
        if len(data) >= lengths[ident]:
            names[ident] = data[: lengths[ident]].decode("utf-8", "replace")
    return names


def _version(hexversion: int) -> str:
    return f"{hexversion >> 24}.{hexversion >> 16 & 255}.{hexversion >> 8 & 255}"
