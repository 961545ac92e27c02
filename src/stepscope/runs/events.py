"""Read the event files of the monitored processes, `events/<pid>.bin`, at once or as they grow."""

from __future__ import annotations

import contextlib
import os
import re
import struct
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from stepscope.analysis.run.passes import RECORD, Records
from stepscope.inject import events as written
from stepscope.runs.files import EVENTS_LIMIT, entries_in, open_regular

_VALUE_SHAPE = 15
_INT64, _DOUBLE = struct.Struct("<q"), struct.Struct("<d")

_PROCESS_FILE = re.compile(r"([0-9]{1,9})\.bin")
_PART = 1 << 20
"""Number of records that are read at once."""
_MAX_PROCESSES = 64
"""Processes with the same pid. A pid is reused after all others were used."""
_MAX_AMOUNT = 2**53
"""Nanoseconds, bytes, samples or steps: 104 days, or 9 PB."""
_MAX_NUMBER = 1000
"""Loaders and optimizers with higher numbers are unknown, which is number 0: each of them is
compared with all events."""


def _table(*kinds: int) -> npt.NDArray[np.bool_]:
    """Return whether a kind is one of these, by kind."""
    table = np.zeros(2**16, np.bool_)
    table[list(kinds)] = True
    return table


_OF_OBJECT = _table(
    written.LOADER_BEGIN,
    written.BATCH,
    written.LOADER_END,
    written.STEP,
    written.LOADER,
    written.LOADER_MADE,
)
_OF_DEVICE = _table(written.GPU, written.GPU_MEMORY, written.GPU_PEAK, written.GPU_RETRIES)
_TIMED_OR_COUNTED = (
    written.BATCH,
    written.PREPARED,
    written.COLLATED,
    written.DEVICE_STEP,
    written.GPU_MEMORY,
    written.GPU_PEAK,
    written.GPU_RETRIES,
)
_AMOUNT_IN_A = _table(
    *_TIMED_OR_COUNTED,
    written.LOADER_BEGIN,
    written.LOADER_END,
    written.STEP,
    written.DROPPED,
)
_AMOUNT_IN_B = _table(*_TIMED_OR_COUNTED, written.WHERE)


class TimeSpan(NamedTuple):
    """The time of a run, on its clock."""

    first_ns: int = 0
    last_ns: int = 2**62  # 146 years


EVER = TimeSpan()

_Kinds = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class ProcessEvents:
    """The events of one process. `names` maps the ids in the records to texts."""

    pid: int
    rank: int | None
    records: Records
    names: dict[int, str]
    dropped: int = 0
    outside: int = 0
    """Number of records that were dropped because they are not from the time of the run."""

    def of(self, *kinds: int) -> Records:
        """Return the records of these kinds, in the order of time."""
        wanted = self._kinds == kinds[0]
        for kind in kinds[1:]:
            wanted |= self._kinds == kind
        return self.records.take(np.flatnonzero(wanted))

    @cached_property
    def _kinds(self) -> _Kinds:
        return kinds_of(self.records)

    def name(self, ident: int) -> str:
        known = self.names.get(int(ident))
        return f"#{int(ident):x}" if known is None else known

    def value(self, flags: int, b: int) -> float | str | None:
        """Return the value of a mark, from the fields of its record."""
        shape = flags & _VALUE_SHAPE
        if shape == written.VALUE_INT:
            return b
        if shape == written.VALUE_FLOAT:
            return float(_DOUBLE.unpack(_INT64.pack(b))[0])
        if shape == written.VALUE_TEXT:
            return self.name(b)
        return None


def read_folder(folder: Path, span: TimeSpan = EVER) -> list[ProcessEvents]:
    """Return all processes that reported events, sorted by rank and start time."""
    processes: list[ProcessEvents] = []
    for entry in entries_in(folder):
        if _PROCESS_FILE.fullmatch(entry.name):
            processes.extend(read_file(Path(entry.path), span))
    processes.sort(key=lambda p: (p.rank is None, p.rank or 0, *p.records["t"][:1].tolist()))
    return processes


def read_file(path: Path, span: TimeSpan = EVER) -> list[ProcessEvents]:
    """Return the process that wrote a file, or several processes if the pid was reused."""
    records = read_records(path)
    starts = np.flatnonzero(kinds_of(records) == written.START)[:_MAX_PROCESSES]
    edges = [*starts.tolist(), len(records)]
    pieces = [records[a:b] for a, b in zip(edges, edges[1:], strict=False)]
    if len(records) and (not starts.size or starts[0] > 0):
        pieces.insert(0, records[: edges[0]])
    processes = [_one_process(int(path.stem), piece, span) for piece in pieces]
    return [process for process in processes if len(process.records) or process.outside]


def read_records(path: Path) -> Records:
    """Return the valid records of a file, read in parts: a file may consist of zeros.
    `np.fromfile` uses large pages: half the time."""
    with open_regular(path, EVENTS_LIMIT, path.parents[1]) as file:
        parts = [_valid(np.fromfile(file, RECORD, _PART))]
        while file.tell() < EVENTS_LIMIT and len(part := np.fromfile(file, RECORD, _PART)):
            parts.append(_valid(part))
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def parse(data: bytes) -> Records:
    """Return the complete, valid records; a truncated or zero-filled tail is dropped."""
    return _valid(np.frombuffer(data, RECORD, len(data) // written.SIZE))


def _valid(records: Records) -> Records:
    """Return the records without those of unknown kinds and with impossible values."""
    kinds, a, b = records["kind"], records["a"], records["b"]
    valid = (kinds > 0) & (kinds <= written.LAST_KIND) & (records["t"] > 0)
    valid &= ~_AMOUNT_IN_A[kinds] | ((a >= 0) & (a <= _MAX_AMOUNT))
    valid &= ~_AMOUNT_IN_B[kinds] | ((b >= -1) & (b <= _MAX_AMOUNT))
    is_high = records["number"] > _MAX_NUMBER
    if is_high.any():
        valid &= ~(is_high & _OF_DEVICE[kinds])
        records = records.copy()
        records["number"][is_high & _OF_OBJECT[kinds]] = 0
    return _select(records, valid)


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


def within(records: Records, span: TimeSpan) -> Records:
    """Return the records of this time. A command in another time namespace has another clock."""
    return _select(records, (records["t"] >= span.first_ns) & (records["t"] <= span.last_ns))


def _one_process(pid: int, records: Records, span: TimeSpan) -> ProcessEvents:
    kinds = kinds_of(records)
    names = Names(records[kinds == written.NAME])
    ranks = records[(kinds == written.START) | (kinds == written.RANK)]["a"]
    rank = int(ranks[-1]) if ranks.size and 0 <= ranks[-1] < 2**31 else None
    dropped = int(records[kinds == written.DROPPED]["a"].sum())
    timed = _select(records, kinds != written.NAME)
    kept = sorted_by_time(within(timed, span))
    return ProcessEvents(pid, rank, kept, names, dropped, outside=len(timed) - len(kept))


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
                if match := _PROCESS_FILE.fullmatch(entry.name):
                    pid, size = int(match[1]), entry.stat(follow_symlinks=False).st_size
                    data = self._read_new(pid, entry.path, size // written.SIZE * written.SIZE)
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
            # Half the cost of `open`. The folder may belong to another user.
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            descriptor = os.open(path, flags)
            try:
                data = os.pread(descriptor, min(size - offset, _PART * written.SIZE), offset)
            finally:
                os.close(descriptor)
        except OSError:
            return b""
        self._offsets[pid] = offset + len(data) // written.SIZE * written.SIZE
        return data
