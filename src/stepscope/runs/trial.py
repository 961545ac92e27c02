"""Reads what a trial left in its run folder, however it ended: what is not there is left out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from stepscope.analysis.trial.measurement import RankRecord, Steps, TrialRecord
from stepscope.errors import RunFolderError
from stepscope.records.codec import from_json, salvage
from stepscope.records.profile import Profile, RankProfile
from stepscope.records.trial import RankFacts, TrialSettings
from stepscope.runs.paths import RunPaths
from stepscope.runs.reader import Run
from stepscope.steplog import FIELDS, RECORD

STEP = np.dtype([(field, "<i8") for field in FIELDS])
_MOST_RANKS = 4096


def is_trial(run: Run) -> bool:
    return run.facts.workload is not None


def read_trial(run: Run) -> TrialRecord:
    """What the runner wrote down of a trial, and what each of its ranks left."""
    if not is_trial(run):
        raise RunFolderError(
            f"{run.path} is not a trial", f"Show it with: stepscope report {run.path}"
        )
    settings = salvage(TrialSettings, run.facts.workload)
    return TrialRecord(
        workload=run.facts.workload or {},
        settings=settings,
        limits=run.facts.limits,
        trial=run.facts.trial,
        ranks=tuple(
            RankRecord(rank, read_rank(run.paths, rank), read_steps(run.paths.trial_steps(rank)))
            for rank in range(min(settings.ranks, _MOST_RANKS))
        ),
    )


def read_rank(paths: RunPaths, rank: int) -> RankFacts:
    """What a rank says of itself, as far as it came to it."""
    return salvage(RankFacts, read_json(paths.trial_rank(rank)))


def read_profile(run: Run) -> Profile | None:
    """What the profiler saw of each rank; None where no profile was asked for."""
    ranks: dict[int, RankProfile] = {}
    failed: dict[int, str] = {}
    for rank in range(min(salvage(TrialSettings, run.facts.workload).ranks, _MOST_RANKS)):
        stored = read_json(run.paths.trial_profile(rank))
        if "error" in stored:
            failed[rank] = str(stored["error"])
        elif stored:
            try:
                ranks[rank] = from_json(RankProfile, stored)
            except ValueError as error:
                failed[rank] = f"Its profile cannot be read ({error})"
    return Profile(ranks, failed) if ranks or failed else None


def read_steps(path: Path) -> Steps:
    """The steps of a rank, in order. What comes after a torn record, or after one that does not go
    on from the one before (a disk that lost its power leaves zeros), is dropped."""
    try:
        data = path.read_bytes()
    except OSError:
        data = b""
    records = np.frombuffer(data[: len(data) // RECORD.size * RECORD.size], STEP)
    goes_on = (np.diff(records["end_ns"], prepend=0) > 0) & (
        np.diff(records["step"], prepend=-1) > 0
    )
    return records if goes_on.all() else records[: int(np.argmin(goes_on))]


def read_json(path: Path) -> dict[str, Any]:
    """What is in a file of a rank or of a run; nothing where it is not whole."""
    try:
        plain = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return plain if isinstance(plain, dict) else {}
