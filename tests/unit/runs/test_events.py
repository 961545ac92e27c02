"""Event files with impossible records."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stepscope.inject import events
from stepscope.runs.events import RECORD, ProcessEvents, Records, TimeSpan, read_folder

RUN = TimeSpan(1000, 2000)


def record(t: int, kind: int, **fields: int) -> Records:
    one = np.zeros(1, RECORD)
    one["t"], one["kind"] = t, kind
    for name, value in fields.items():
        one[name] = value
    return one


def read(folder: Path, *records: Records) -> list[ProcessEvents]:
    np.concatenate(records).tofile(folder / "7.bin")
    return read_folder(folder, RUN)


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (events.BATCH, {"a": -1}),
        (events.BATCH, {"a": 2**60}),
        (events.BATCH, {"b": -2}),
        (events.STEP, {"a": -(2**63)}),
        (events.WHERE, {"a": 2**62, "b": 2**60}),
        (events.GPU_MEMORY, {"number": 2**31, "a": 1}),
        (events.LAST_KIND + 1, {}),
    ],
)
def test_impossible_records_are_dropped(tmp_path: Path, kind: int, fields: Any) -> None:
    possible = record(1500, events.BATCH, number=1, a=10, b=-1)
    (process,) = read(tmp_path, possible, record(1600, kind, **fields))
    assert process.records["t"].tolist() == [1500]


def test_high_numbers_are_unknown(tmp_path: Path) -> None:
    """Each loader is compared with all events."""
    (process,) = read(
        tmp_path, *(record(1500, events.BATCH, number=n) for n in (1, 1000, 1001, 2**32 - 1))
    )
    assert process.records["number"].tolist() == [1, 1000, 0, 0]


def test_records_are_in_the_order_of_time(tmp_path: Path) -> None:
    (process,) = read(tmp_path, *(record(t, events.STEP, a=1) for t in (1700, 1500, 1600)))
    assert process.records["t"].tolist() == [1500, 1600, 1700]


@pytest.mark.parametrize(("rank", "expected"), [(3, 3), (-1, None), (2**31, None)])
def test_rank(tmp_path: Path, rank: int, expected: int | None) -> None:
    (process,) = read(tmp_path, record(1500, events.START, a=rank))
    assert process.rank == expected


def test_a_process_of_another_time_is_counted(tmp_path: Path) -> None:
    (process,) = read(tmp_path, *(record(t, events.STEP, a=1) for t in (10, 5000)))
    assert len(process.records) == 0 and process.outside == 2


def test_a_pid_is_not_reused_without_end(tmp_path: Path) -> None:
    processes = read(tmp_path, *(record(1001 + n, events.START, a=-1) for n in range(900)))
    assert len(processes) == 64
