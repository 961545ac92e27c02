"""Read the files of a trial, which may be incomplete, from its run folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from stepscope.analysis.trial.measurement import RankRecord, Steps, TrialRecord
from stepscope.errors import RunFolderError
from stepscope.records.codec import from_json, salvage
from stepscope.records.profile import Profile, RankProfile
from stepscope.records.trial import RankFacts, TrialSettings
from stepscope.runs import files
from stepscope.runs.files import STEPS_LIMIT, read_regular
from stepscope.runs.paths import RunPaths
from stepscope.runs.reader import Run
from stepscope.steplog import FIELDS, RECORD

STEP = np.dtype([(field, "<i8") for field in FIELDS])
_MAX_RANKS = 4096


def is_trial(run: Run) -> bool:
    return run.facts.workload is not None


def read_trial(run: Run) -> TrialRecord:
    """Return the facts of a trial and of each of its ranks."""
    if not is_trial(run):
        raise RunFolderError(
            f"{run.path} is a run but not a trial", f"Show it with `stepscope report {run.path}`"
        )
    settings = salvage(TrialSettings, run.facts.workload)
    ranks, limit = [], STEPS_LIMIT
    for rank in range(min(settings.ranks, _MAX_RANKS)):
        steps = read_steps(run.paths.trial_steps(rank), limit)
        ranks.append(RankRecord(rank, read_rank(run.paths, rank), steps))
        limit -= steps.nbytes
    return TrialRecord(
        workload=run.facts.workload or {},
        settings=settings,
        limits=run.facts.limits,
        trial=run.facts.trial,
        ranks=tuple(ranks),
    )


def read_rank(paths: RunPaths, rank: int) -> RankFacts:
    """Return the facts of a rank, as far as it wrote them."""
    return salvage(RankFacts, read_json(paths.trial_rank(rank)))


def read_profile(run: Run) -> Profile | None:
    """Return the profile of each rank, or None if the trial was not profiled."""
    ranks: dict[int, RankProfile] = {}
    failed: dict[int, str] = {}
    for rank in range(min(salvage(TrialSettings, run.facts.workload).ranks, _MAX_RANKS)):
        stored = read_json(run.paths.trial_profile(rank))
        if "error" in stored:
            failed[rank] = str(stored["error"])
        elif stored:
            try:
                ranks[rank] = from_json(RankProfile, stored)
            except ValueError as error:
                failed[rank] = f"The profile cannot be read ({error})"
    return Profile(ranks, failed) if ranks or failed else None


def read_steps(path: Path, limit: int = STEPS_LIMIT) -> Steps:
    """Return the steps of a rank, from a file of at most `limit` bytes. Records after a truncated
    record, or after one that does not follow its predecessor (zeros after a power failure), are
    dropped."""
    try:
        data = read_regular(path, limit, path.parents[1])
    except OSError:
        data = b""
    records = np.frombuffer(data[: len(data) // RECORD.size * RECORD.size], STEP)
    follows = (np.diff(records["end_ns"], prepend=0) > 0) & (
        np.diff(records["step"], prepend=-1) > 0
    )
    return records if follows.all() else records[: int(np.argmin(follows))]


def read_json(path: Path) -> dict[str, Any]:
    """Return the contents of a JSON file, or an empty dictionary if it is missing or invalid."""
    try:
        plain = files.read_json(path)
    except (OSError, ValueError):
        return {}
    return plain if isinstance(plain, dict) else {}
