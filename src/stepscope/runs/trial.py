"""Reads what a trial left in its run folder, however it ended: what is not there is left out."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from stepscope.analysis.throughput import Spread, SpreadSource
from stepscope.analysis.trial import RankRecord, Steps, TrialRecord, number
from stepscope.errors import RunFolderError
from stepscope.runs.reader import Run
from stepscope.steplog import FIELDS, RECORD

STEP = np.dtype([(field, "<i8") for field in FIELDS])
_MOST_RANKS = 4096


def is_trial(run: Run) -> bool:
    """Whether a run was made by `stepscope trial`."""
    return isinstance(run.facts.get("workload"), dict)


def read_trial(run: Run) -> TrialRecord:
    """What the runner wrote down of a trial, and what each of its ranks left."""
    if not is_trial(run):
        raise RunFolderError(
            f"{run.path} is not a trial", f"Show it with: stepscope report {run.path}"
        )
    workload = _mapping(run.facts.get("workload"))
    asked = int(number(workload, "ranks") or 1)
    return TrialRecord(
        workload=workload,
        limits=_mapping(run.facts.get("limits")),
        trial=_mapping(run.facts.get("trial")),
        ranks=tuple(_read_rank(run, rank) for rank in range(min(asked, _MOST_RANKS))),
    )


def read_profiles(run: Run) -> dict[int, Mapping[str, Any]]:
    """What each rank's profiler told, by rank; nothing where none was asked for."""
    asked = int(number(_mapping(run.facts.get("workload")), "ranks") or 1)
    found = {
        rank: _read_json(run.paths.trial_profile(rank)) for rank in range(min(asked, _MOST_RANKS))
    }
    return {rank: told for rank, told in found.items() if told}


def known_spread(record: TrialRecord) -> Spread | None:
    """The spread between processes as it was known when the trial ran, so that what is reported of
    it does not change as more is learnt."""
    cv, dof = number(record.trial, "spread", "cv"), number(record.trial, "spread", "dof")
    if cv is None or dof is None or cv < 0 or dof <= 0:
        return None
    told = record.trial["spread"].get("source")
    source: SpreadSource = told if told in ("learnt", "others") else "assumed"
    trials = int(number(record.trial, "spread", "trials") or 0)
    assumed = number(record.trial, "spread", "assumed")
    return Spread(cv, dof, source, trials, assumed)


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


def _read_rank(run: Run, rank: int) -> RankRecord:
    told = _read_json(run.paths.trial_rank(rank))
    return RankRecord(rank, told, read_steps(run.paths.trial_steps(rank)))


def _read_json(path: Path) -> Mapping[str, Any]:
    try:
        return _mapping(json.loads(path.read_bytes()))
    except (OSError, ValueError):
        return {}


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}
