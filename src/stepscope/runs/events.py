"""Read the event files of the monitored processes, `events/<pid>.bin`, at once or as they grow."""

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
    """The events of one process. `names` maps the ids in the records to texts."""

    pid: int
    rank: int | None
    records: Records
    names: dict[int, str]
    dropped: int = 0

    def of(self, *kinds: int) -> Records:
        """Return the records of these kinds, in the order of writing."""
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
        """Return the value of a mark."""
        shape = int(record["flags"]) & _VALUE_SHAPE
        if shape == written.VALUE_INT:
            return int(record["b"])
        if shape == written.VALUE_FLOAT:
            return float(np.int64(record["b"]).view(np.float64))
        if shape == written.VALUE_TEXT:
            return self.name(record["b"])
        return None


def read_folder(folder: Path) -> list[ProcessEvents]:
    """Return all processes that reported events, sorted by rank and start time."""
    processes: list[ProcessEvents] = []
    if folder.is_dir():
        for path in folder.glob("*.bin"):
            if path.stem.isdigit() and path.is_file():
                processes.extend(read_file(path))
    processes.sort(key=lambda p: (p.rank is None, p.rank or 0, p.records["t"][0]))
    return processes


def read_file(path: Path) -> list[ProcessEvents]:
    """Return the process that wrote a file, or several processes if the pid was reused."""
    records = read_records(path)
    starts = np.flatnonzero(kinds_of(records) == written.START)
    edges = [*starts.tolist(), len(records)]
    pieces = [records[a:b] for a, b in zip(edges, edges[1:], strict=False)]
    if len(records) and (not starts.size or starts[0] > 0):
        pieces.insert(0, records[: edges[0]])
    processes = [_one_process(int(path.stem), piece) for piece in pieces]
    return [process for process in processes if len(process.records)]


def read_records(path: Path) -> Records:
    """Return the valid records of a file. `np.fromfile` uses large pages: half the time."""
    return _valid(np.fromfile(path, RECORD))


def parse(data: bytes) -> Records:
    """Return the complete, valid records; a truncated or zero-filled tail is dropped."""
    return _valid(np.frombuffer(data, RECORD, len(data) // written.SIZE))


def _valid(records: Records) -> Records:
    kinds = records["kind"]
    return _select(records, (kinds > 0) & (kinds <= written.LAST_KIND) & (records["t"] > 0))


def kinds_of(records: Records) -> _Kinds:
    """Return the kinds as a contiguous array, which is much faster to search than the records."""
    return records["kind"].astype(np.uint8)


def _select(records: Records, mask: npt.NDArray[np.bool_]) -> Records:
    # Selecting by index is five times as fast in numpy as selecting by mask.
    return records if mask.all() else records.take(np.flatnonzero(mask))


def sorted_by_time(records: Records) -> Records:
    """Return the records in the order of time. Most of them are written in this order."""
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
    return ProcessEvents(pid, rank, _select(records, kinds != written.NAME), names, dropped)


class Names(dict[int, str]):
    """Texts by id, assembled from NAME records. Incomplete texts are dropped."""

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
    """Follows all files `events/<pid>.bin` as they appear and grow."""

    def __init__(self, folder: Path, first_bytes: int | None = None) -> None:
        """Only the last `first_bytes` of a file are read when it is first seen."""
        self.names: dict[int, Names] = defaultdict(Names)
        """The texts of each process, by pid."""
        self._folder = folder
        self._first_bytes = first_bytes
        self._offsets: dict[int, int] = {}

    def poll(self) -> Iterator[tuple[int, Records]]:
        """Yield the pid and the new records, without texts, of each process with new records."""
        with contextlib.suppress(OSError), os.scandir(self._folder) as entries:
            for entry in entries:
                stem, _, suffix = entry.name.rpartition(".")
                if suffix == "bin" and stem.isdigit():
                    pid, size = int(stem), entry.stat().st_size // written.SIZE * written.SIZE
                    data = self._read_new(pid, entry.path, size)
                    if data:
                        records = parse(data)
                        is_name = records["kind"] == written.NAME
                        if is_name.any():
                            self.names[pid].add(records[is_name])
                            records = records[~is_name]
                        yield pid, records

    def _read_new(self, pid: int, path: str, size: int) -> bytes:
        skipped = 0 if self._first_bytes is None else max(0, size - self._first_bytes)
        offset = self._offsets.get(pid, skipped)
        if size <= offset:
            return b""
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)  # half the cost of `open`
            try:
                data = os.pread(descriptor, size - offset, offset)
            finally:
                os.close(descriptor)
        except OSError:
            return b""
        self._offsets[pid] = offset + len(data) // written.SIZE * written.SIZE
        return data
