"""What is known of a study's trials: from its ledger, and from run folders that are not in it."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepscope.errors import StepscopeError
from stepscope.records import Outcome
from stepscope.records.codec import from_json, loads
from stepscope.runs.facts import ending_of, is_alive, read_facts
from stepscope.runs.paths import RunPaths
from stepscope.studies.folder import Claim, StudyPaths
from stepscope.studies.results import REFERENCE, Attempt, Result, Role

_KEY = re.compile(r"[0-9a-f]{12}")
_PLACE = re.compile(r"([rs])(\d+)a(\d+)(\.claim)?")
_LEDGER_LINE = re.compile(rb"[^\n]+\n")
DAMAGED = (StepscopeError, OSError, EOFError, ValueError)
"""What reading a run comes to where its files do not hold what they must."""


@dataclass
class StudyScan:
    """What a look at a study's folder found."""

    results: list[Result]
    """By the ledger, or from run folders that it does not have."""
    unwritten: list[Result]
    """Those of them that belong into the ledger."""
    attempts: set[Attempt]
    running: list[Attempt]
    remarks: list[str]


def look(paths: StudyPaths, measure: Callable[[Path, Result], Result]) -> StudyScan:
    """All that is known of a study's trials.

    `measure` reads the run folder of a trial that is over; it is given what is known of it without.
    """
    attempts, folders = _attempts(paths.folder)
    told, remarks = _read_ledger(paths.ledger)
    results: dict[Attempt, Result] = {}
    written: set[Attempt] = set()
    for result in sorted(told, key=lambda result: result.began):  # the later one of two counts
        attempt = Attempt(result.key, result.role, result.repeat, result.attempt)
        written.add(attempt)
        if attempt in folders or not result.is_result:
            results[attempt] = result
    unwritten, running = [], []
    deleted = written - folders
    for attempt in sorted(attempts - results.keys() - deleted):
        seen = _recover(paths, attempt, measure, remarks)
        if seen is None:
            running.append(attempt)
        else:
            results[attempt] = seen
            unwritten.append(seen)
    # The number of one that was deleted is not used again: its line would speak for the new one.
    return StudyScan(list(results.values()), unwritten, attempts | written, running, remarks)


def _attempts(folder: Path) -> tuple[set[Attempt], set[Attempt]]:
    """Every attempt that left a claim or a folder, and those that left a folder."""
    every: set[Attempt] = set()
    folders: set[Attempt] = set()
    for entry in os.scandir(folder):
        if not _KEY.fullmatch(entry.name) or not entry.is_dir():
            continue
        for inside in os.scandir(entry.path):
            named = _PLACE.fullmatch(inside.name)
            if named is None:
                continue
            role: Role = REFERENCE if named[1] == "s" else "trial"
            attempt = Attempt(entry.name, role, int(named[2]), int(named[3]))
            every.add(attempt)
            if not named[4]:
                folders.add(attempt)
    return every, folders


def _read_ledger(folder: Path) -> tuple[list[Result], list[str]]:
    """The lines of all runners. One that is torn or no result is left out: it is made again."""
    results, damaged = [], 0
    for path in sorted(folder.glob("*.jsonl")):
        for line in _LEDGER_LINE.findall(path.read_bytes()):
            try:
                results.append(_read_line(line))
            except (ValueError, TypeError, AttributeError):
                damaged += 1
    several = "1 line" if damaged == 1 else f"{damaged} lines"
    told = f"{several} of the ledger cannot be read: the run folders tell instead"
    return results, [told] if damaged else []


def _read_line(line: bytes) -> Result:
    try:
        return loads(Result, line)
    except ValueError:  # or of an older stepscope, which kept noise in words
        plain = json.loads(line)
        noise = [
            {"kind": "other", "text": each} if isinstance(each, str) else each
            for each in plain.get("noise", ())
        ]
        return from_json(Result, {**plain, "noise": noise})


def _recover(
    paths: StudyPaths,
    attempt: Attempt,
    measure: Callable[[Path, Result], Result],
    remarks: list[str],
) -> Result | None:
    """What became of an attempt that the ledger does not have; None while its runner lives."""
    folder, claim = paths.run(attempt.place), paths.claim(attempt.place)
    began = _last_changed(claim) or _last_changed(folder)
    last_written = 0.0
    with contextlib.suppress(OSError):
        last_written = max(
            (_last_changed(Path(entry)) for entry in os.scandir(folder)), default=0.0
        )
    settings: Mapping[str, Any] = {}
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        settings = dict(json.loads(paths.spec(attempt.key).read_bytes())["settings"])
    lost = Result(
        key=attempt.key,
        settings=settings,
        role=attempt.role,
        repeat=attempt.repeat,
        attempt=attempt.number,
        block=0,
        outcome=Outcome.LOST,
        reason="who ran it was killed, or the machine went down, before it was over",
        began=began,
        seconds=max(0.0, last_written - began),
    )
    if not folder.is_dir():
        return None if _owner_lives(claim, folder) else lost
    try:
        ending = ending_of(read_facts(folder), folder)
        if ending.outcome is Outcome.RUNNING:
            return None
        return lost if ending.outcome is Outcome.LOST else measure(folder, lost)
    except DAMAGED as error:
        if _owner_lives(claim, folder):
            return None
        if RunPaths(folder).run_json.exists():
            said = getattr(error, "message", f"{folder} cannot be understood: {error}")
            remarks.append(f"{said}: the trial counts as lost, and is tried again")
        return lost


def _last_changed(path: Path) -> float:
    with contextlib.suppress(OSError):
        return path.stat().st_mtime
    return 0.0


def _owner_lives(claim: Path, folder: Path) -> bool:
    try:
        return is_alive(loads(Claim, claim.read_bytes()), folder)
    except (OSError, ValueError):
        return False
