"""Read and write `run.json`. It is written first and replaced atomically."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from stepscope.errors import RunFolderError
from stepscope.inject.masking import mask_values
from stepscope.records import ExitStatus, Outcome
from stepscope.records.codec import from_json, salvage, to_json
from stepscope.records.facts import ProcessIdentity, RunFacts
from stepscope.records.trial import LimitFacts, TrialFacts
from stepscope.runs.events import EVER, TimeSpan
from stepscope.runs.files import read_json, write_json
from stepscope.runs.paths import FORMAT, RunPaths
from stepscope.sensors import procfs

_SILENCE_S = 30.0
"""A monitor writes about every second. After this time without a write it is considered gone."""
_SECOND = 1_000_000_000
_MAX_CV, _MAX_DOF = 10.0, 1e6
"""Of the noise of a trial. Others are errors, whose powers would overflow."""
_DAMAGED_HINT = "The run folder is damaged: copy it again, or run the command again"


def write_facts(paths: RunPaths, facts: RunFacts) -> None:
    """Replace `run.json`, with credentials masked. Unknown values, and the keys of trials in other
    runs, are omitted."""
    trial_defaults = {"limits": LimitFacts(), "trial": TrialFacts()}
    plain = to_json(facts)
    known = {k: v for k, v in plain.items() if getattr(facts, k) != trial_defaults.get(k)}
    write_json(paths.run_json, mask_values(known))


def read_run_json(folder: Path) -> dict[str, Any]:
    """Return the contents of `run.json`. Raises RunFolderError if it is missing or damaged."""
    path = RunPaths(folder).run_json
    if not folder.is_dir():
        raise RunFolderError(
            f"No such run folder: {folder}", "List the run folders with `ls runs/`"
        )
    try:
        plain = read_json(path)
    except FileNotFoundError:
        raise RunFolderError(
            f"{folder} is not a run folder: it has no run.json",
            "Pass the folder that `stepscope run` printed",
        ) from None
    except (OSError, ValueError) as error:
        raise RunFolderError(
            f"{path} cannot be read: {error}",
            _DAMAGED_HINT,
        ) from None
    if not isinstance(plain, dict) or not isinstance(plain.get("format"), int):
        raise RunFolderError(f"{path} is not a valid run.json", _DAMAGED_HINT)
    if plain["format"] > FORMAT:
        raise RunFolderError(
            f"{path} has format {plain['format']}, but this version of stepscope reads formats up "
            f"to {FORMAT}",
            "Install a newer version of stepscope",
        )
    required = ("clock", "monitor", "exit_status")
    missing = [key for key in required if not isinstance(plain.get(key), dict)]
    if missing:
        raise RunFolderError(
            f"{path} is missing {', '.join(f'`{key}`' for key in missing)}", _DAMAGED_HINT
        )
    return plain


def parse_facts(plain: Mapping[str, Any], folder: Path) -> RunFacts:
    """Return the validated facts of a run. Invalid values of a trial's keys are dropped."""
    of_run = {key: each for key, each in plain.items() if key not in ("limits", "trial")}
    try:
        facts = from_json(RunFacts, _without_nulls(of_run))
    except ValueError as error:
        raise RunFolderError(
            f"{RunPaths(folder).run_json} is invalid: {error}",
            _DAMAGED_HINT,
        ) from None
    times = (facts.clock.monotonic_ns, facts.exit_status.monotonic_ns or 0)
    if not all(0 <= each < EVER.last_ns for each in times):
        raise RunFolderError(f"{RunPaths(folder).run_json} contains invalid times", _DAMAGED_HINT)
    trial = salvage(TrialFacts, plain.get("trial"))
    if trial.noise and not (0 <= trial.noise.cv <= _MAX_CV and 0 < trial.noise.dof <= _MAX_DOF):
        trial = replace(trial, noise=None)
    return replace(
        facts,
        workload=plain.get("workload"),
        limits=salvage(LimitFacts, plain.get("limits")),
        trial=trial,
    )


def read_facts(folder: Path) -> RunFacts:
    return parse_facts(read_run_json(folder), folder)


def _without_nulls(value: Any) -> Any:
    """Remove null values, so that they get their defaults."""
    if isinstance(value, dict):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value


def exit_status_of(facts: RunFacts, folder: Path) -> ExitStatus:
    """Return the exit status of a run: `lost` if it is marked running but its monitor is gone."""
    stored = facts.exit_status
    known = stored.outcome in Outcome.__members__.values()
    outcome = Outcome(stored.outcome) if known else Outcome.CRASHED
    if outcome is Outcome.RUNNING and not is_alive(facts.monitor, folder):
        return ExitStatus(
            Outcome.LOST,
            "the monitor was killed or the machine went down before the command exited",
        )
    return ExitStatus(outcome, stored.reason, stored.exit_code, stored.signal, stored.evidence)


def event_span(facts: RunFacts) -> TimeSpan:
    """Return the time in which the processes of a run can report events."""
    first_ns, end_ns = facts.clock.monotonic_ns - _SECOND, facts.exit_status.monotonic_ns
    if end_ns is not None and facts.exit_status.outcome != Outcome.RUNNING and not facts.survivors:
        return TimeSpan(first_ns, end_ns + 60 * _SECOND)
    if facts.monitor.boot_id == procfs.boot_id():
        return TimeSpan(first_ns, time.monotonic_ns() + _SECOND)
    return TimeSpan(first_ns)


def identity(pid: int) -> ProcessIdentity:
    return ProcessIdentity(
        pid=pid,
        started_ticks=procfs.start_ticks(pid),
        boot_id=procfs.boot_id(),
        host=socket.gethostname(),
        pid_namespace=procfs.pid_namespace(),
    )


def identity_of_self() -> ProcessIdentity:
    return identity(os.getpid())


def is_alive(monitor: ProcessIdentity, folder: Path) -> bool:
    """Return whether the monitor of a run is still running.

    On another machine (with a shared file system) and in another container, this is decided by the
    time of the last write.
    """
    same_namespace = monitor.pid_namespace in (None, procfs.pid_namespace())
    if monitor.boot_id == procfs.boot_id() and same_namespace:
        ticks = procfs.start_ticks(monitor.pid)
        return ticks is not None and ticks == monitor.started_ticks
    last_written = 0.0
    for path in folder.glob("*.arrows"):
        with contextlib.suppress(OSError):  # closed or converted in the meantime
            last_written = max(last_written, path.stat().st_mtime)
    return time.time() - last_written < _SILENCE_S
