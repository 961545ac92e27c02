"""Reads what the monitored processes wrote of themselves, `events/<pid>.bin`: as a whole, or as the
files grow."""

from __future__ import annotations

import contextlib
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt

from stepscope.analysis.run.passes import RECORD, Records
from stepscope.inject import events as written

_VALUE_SHAPE = 15

_Kinds = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class ProcessEvents:
    """What one process reported. `names` gives the texts that the records mean by id."""

    pid: int
    rank: int | None
    records: Records
    names: dict[int, str]
    dropped: int = 0

    def of(self, *kinds: int) -> Records:
        """The records of these kinds, in the order they were written."""
        wanted = self._kinds == kinds[0]
        for kind in kinds[1:]:
            wanted |= self._kinds == kind
        return self.records.take(np.flatnonzero(wanted))

    @cached_property
    def _kinds(self) -> _Kinds:
        return kinds_of(self.records)

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
    records = read_records(path)
    starts = np.flatnonzero(kinds_of(records) == written.START)
    edges = [*starts.tolist(), len(records)]
    pieces = [records[a:b] for a, b in zip(edges, edges[1:], strict=False)]
    if len(records) and (not starts.size or starts[0] > 0):
        pieces.insert(0, records[: edges[0]])
    found = [_one_process(int(path.stem), piece) for piece in pieces]
    return [process for process in found if len(process.records)]


def read_records(path: Path) -> Records:
    """The records of a file. numpy reads into large pages, which takes half the time."""
    return _plausible(np.fromfile(path, RECORD))


def parse(data: bytes) -> Records:
    """Whole, plausible records; a torn or zero-filled tail is left out."""
    return _plausible(np.frombuffer(data, RECORD, len(data) // written.SIZE))


def _plausible(records: Records) -> Records:
    kinds = records["kind"]
    return _those(records, (kinds > 0) & (kinds <= written.LAST_KIND) & (records["t"] > 0))


def kinds_of(records: Records) -> _Kinds:
    """The kinds side by side: looking for one in whole records goes through all of the memory."""
    return records["kind"].astype(np.uint8)


def _those(records: Records, wanted: npt.NDArray[np.bool_]) -> Records:
    """By their places: numpy takes five times as long to pick records by a mask."""
    return records if wanted.all() else records.take(np.flatnonzero(wanted))


def in_time(records: Records) -> Records:
    """In the order of time, which they are written in but for a few."""
    t = np.ascontiguousarray(records["t"])
    if (t[1:] >= t[:-1]).all():
        return records
    return records.take(np.argsort(t, kind="stable"))


def _one_process(pid: int, records: Records) -> ProcessEvents:
    kinds = kinds_of(records)
    names = Names(records[kinds == written.NAME])
    ranks = records[(kinds == written.START) | (kinds == written.RANK)]["a"]
    rank = int(ranks[-1]) if ranks.size and ranks[-1] >= 0 else None
    dropped = int(records[kinds == written.DROPPED]["a"].sum())
    return ProcessEvents(pid, rank, _those(records, kinds != written.NAME), names, dropped)


class Names(dict[int, str]):
    """Texts by id, put together from NAME records; one that was cut short is left out."""

    def __init__(self, records: Iterable[np.void] = ()) -> None:
        super().__init__()
        self._pieces: dict[int, dict[int, bytes]] = defaultdict(dict)
        self.add(records)

    def add(self, records: Iterable[np.void]) -> None:
        for record in records:
            ident, _, index, length, piece = written.NAME_RECORD.unpack(record.tobytes())
            pieces = self._pieces[ident]
            pieces[index] = piece
            if len(pieces) * len(piece) >= length:
                data = b"".join(pieces[index] for index in sorted(pieces))
                self[ident] = data[:length].decode("utf-8", "replace")
                del self._pieces[ident]


class GrowingEvents:
    """Every `events/<pid>.bin` as it appears and grows."""

    def __init__(self, folder: Path, first_bytes: int | None = None) -> None:
        """Of what a file has when it is first seen, the last `first_bytes` are read."""
        self.names: dict[int, Names] = defaultdict(Names)
        """The texts that each process told, by its pid."""
        self._folder = folder
        self._first_bytes = first_bytes
        self._offsets: dict[int, int] = {}

    def poll(self) -> Iterator[tuple[int, Records]]:
        """What each process reported since the last time, by its pid, without the texts."""
        with contextlib.suppress(OSError), os.scandir(self._folder) as entries:
            for entry in entries:
                stem, _, suffix = entry.name.rpartition(".")
                if suffix == "bin" and stem.isdigit():
                    pid, size = int(stem), entry.stat().st_size // written.SIZE * written.SIZE
                    data = self._read_on(pid, entry.path, size)
                    if data:
                        records = parse(data)
                        is_name = records["kind"] == written.NAME
                        if is_name.any():
                            self.names[pid].add(records[is_name])
                            records = records[~is_name]
                        yield pid, records

    def _read_on(self, pid: int, path: str, size: int) -> bytes:
        skipped = 0 if self._first_bytes is None else max(0, size - self._first_bytes)
        offset = self._offsets.get(pid, skipped)
        if size <= offset:
            return b""
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)  # half the price of `open`
            try:
                data = os.pread(descriptor, size - offset, offset)
            finally:
                os.close(descriptor)
        except OSError:
            return b""
        self._offsets[pid] = offset + len(data) // written.SIZE * written.SIZE
        return data
