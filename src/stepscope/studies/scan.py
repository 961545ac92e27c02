"""Reads the results of a study from its ledger, and from run folders that the ledger misses."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepscope.errors import StepscopeError
from stepscope.records import Outcome
from stepscope.records.codec import loads
from stepscope.runs.facts import exit_status_of, is_alive, read_facts
from stepscope.runs.files import (
    JSON_LIMIT,
    LINES_LIMIT,
    UnsafeFile,
    entries_in,
    open_regular,
    read_json,
    read_regular,
    refuse_link,
)
from stepscope.runs.paths import RunPaths
from stepscope.studies.folder import Claim, StudyPaths
from stepscope.studies.results import REFERENCE, Attempt, Result, Role

_KEY = re.compile(r"[0-9a-f]{12}")
_PLACE = re.compile(r"([rs])([0-9]{1,9})a([0-9]{1,9})(\.claim)?")
_MAX_LINE_BYTES = 1 << 20
_MAX_DAMAGED_LINES = 1000
"""The rest of a ledger is ignored: its results are read from the run folders."""
_LAST_TIME = 253_402_300_800
"""The year 10000, in seconds since 1970."""
DAMAGED = (StepscopeError, OSError, EOFError, ValueError)
"""Errors while reading a run whose files are damaged."""


@dataclass
class StudyScan:
    """The contents of a study's folder."""

    results: list[Result]
    """From the ledger, or from run folders that it misses."""
    unwritten: list[Result]
    """The results that are missing in the ledger."""
    attempts: set[Attempt]
    running: list[Attempt]
    remarks: list[str]


def scan_folder(paths: StudyPaths, measure: Callable[[Path, Result], Result]) -> StudyScan:
    """Read all results of a study.

    `measure` reads the run folder of a finished trial into the result that it is given.
    """
    attempts, folders = _attempts(paths.folder)
    recorded, remarks = _read_ledger(paths.ledger)
    results: dict[Attempt, Result] = {}
    written: set[Attempt] = set()
    for result in sorted(recorded, key=lambda result: result.started):  # the later of two counts
        attempt = Attempt(result.key, result.role, result.repeat, result.attempt)
        written.add(attempt)
        if attempt in folders or not result.is_result:
            results[attempt] = result
    unwritten, running = [], []
    deleted = written - folders
    for attempt in sorted(attempts - results.keys() - deleted):
        recovered = _recover(paths, attempt, measure, remarks)
        if recovered is None:
            running.append(attempt)
        else:
            results[attempt] = recovered
            unwritten.append(recovered)
    # The number of a deleted attempt stays reserved: its line would be taken for a new attempt's.
    return StudyScan(list(results.values()), unwritten, attempts | written, running, remarks)


def _attempts(folder: Path) -> tuple[set[Attempt], set[Attempt]]:
    """Return all attempts with a claim or a run folder, and those with a run folder."""
    attempts: set[Attempt] = set()
    folders: set[Attempt] = set()
    for entry in entries_in(folder):
        if not _KEY.fullmatch(entry.name):
            continue
        refuse_link(Path(entry.path))
        if not entry.is_dir():
            continue
        for child in entries_in(Path(entry.path)):
            match = _PLACE.fullmatch(child.name)
            if match is None:
                continue
            if child.is_symlink():
                refuse_link(Path(child.path))
            role: Role = REFERENCE if match[1] == "s" else "trial"
            attempt = Attempt(entry.name, role, int(match[2]), int(match[3]))
            attempts.add(attempt)
            if not match[4]:
                folders.add(attempt)
    return attempts, folders


def _read_ledger(folder: Path) -> tuple[list[Result], list[str]]:
    """Return the results of all runners; invalid lines are skipped and counted in a remark."""
    results, damaged = [], 0
    for entry in entries_in(folder):
        if not entry.name.endswith(".jsonl"):
            continue
        with open_regular(Path(entry.path), LINES_LIMIT, folder.parent) as lines:
            for line in lines:
                if line == b"\n" or not line.endswith(b"\n"):  # the last line may be incomplete
                    continue
                try:
                    results.append(_parse(line))
                except ValueError:
                    damaged += 1
                    if damaged > _MAX_DAMAGED_LINES:
                        break
    if not damaged:
        return results, []
    count = "1 line" if damaged == 1 else f"{damaged} lines"
    if damaged > _MAX_DAMAGED_LINES:
        count = f"more than {_MAX_DAMAGED_LINES} lines"
    files = f"{folder.name}/*.jsonl"
    remark = f"{count} of the list of results ({files}) cannot be read"
    return results, [f"{remark}: the run folders are read instead"]


def _parse(line: bytes) -> Result:
    """Return the result in a line of the ledger; raises ValueError if it is not possible."""
    if len(line) > _MAX_LINE_BYTES:
        raise ValueError("too long")
    result = loads(Result, line)
    numbers = (result.repeat, result.attempt, result.block)
    is_possible = all(0 <= each < 10**9 for each in numbers) and 0 <= result.started < _LAST_TIME
    if not is_possible or not _KEY.fullmatch(result.key):
        raise ValueError("not a trial")
    return result


def _recover(
    paths: StudyPaths,
    attempt: Attempt,
    measure: Callable[[Path, Result], Result],
    remarks: list[str],
) -> Result | None:
    """Return the result of an attempt that the ledger misses; None while it is running."""
    folder, claim = paths.run(attempt.place), paths.claim(attempt.place)
    started = _last_changed(claim) or _last_changed(folder)
    last_written = 0.0
    with contextlib.suppress(OSError):
        last_written = max(
            (_last_changed(Path(entry)) for entry in os.scandir(folder)), default=0.0
        )
    settings: Mapping[str, Any] = {}
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        settings = dict(read_json(paths.spec(attempt.key), paths.folder)["settings"])
    lost = Result(
        key=attempt.key,
        settings=settings,
        role=attempt.role,
        repeat=attempt.repeat,
        attempt=attempt.number,
        block=0,
        outcome=Outcome.LOST,
        reason="the runner was killed or the machine went down before the trial finished",
        started=started,
        seconds=max(0.0, last_written - started),
    )
    if not folder.is_dir():
        return None if _is_claimed(claim, folder) else lost
    try:
        exit_status = exit_status_of(read_facts(folder), folder)
        if exit_status.outcome is Outcome.RUNNING:
            return None
        return lost if exit_status.outcome is Outcome.LOST else measure(folder, lost)
    except DAMAGED as error:
        if _is_claimed(claim, folder):
            return None
        if isinstance(error, UnsafeFile) or RunPaths(folder).run_json.exists():
            problem = getattr(error, "message", f"Cannot read {folder}: {error}")
            remarks.append(f"{problem}: the trial counts as lost and is retried")
        return lost


def _last_changed(path: Path) -> float:
    with contextlib.suppress(OSError):
        return path.stat().st_mtime
    return 0.0


def _is_claimed(claim: Path, folder: Path) -> bool:
    """Return whether the process that made a claim is still running."""
    try:
        return is_alive(loads(Claim, read_regular(claim, JSON_LIMIT)), folder)
    except (OSError, ValueError):
        return False
