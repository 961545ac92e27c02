"""`run.json`: the facts of a run. Written first, replaced atomically, readable at any moment."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from stepscope.errors import RunFolderError
from stepscope.records import Ending, Outcome
from stepscope.records.codec import from_json, salvage, to_json
from stepscope.records.facts import ProcessIdentity, RunFacts
from stepscope.records.trial import LimitFacts, TrialFacts
from stepscope.runs.paths import FORMAT, RunPaths, write_json
from stepscope.sensors import procfs

_SILENCE_S = 30.0
"""A monitor writes about every second: one that has not for so long is gone."""


def write_facts(paths: RunPaths, facts: RunFacts) -> None:
    """Replace `run.json`. What is not known yet, or is only of a trial, is left out."""
    of_trials = {"limits": LimitFacts(), "trial": TrialFacts()}
    plain = to_json(facts)
    known = {k: v for k, v in plain.items() if getattr(facts, k) != of_trials.get(k)}
    write_json(paths.run_json, known)


def read_run_json(folder: Path) -> dict[str, Any]:
    """All of `run.json`, or an error that says what is wrong with the folder."""
    path = RunPaths(folder).run_json
    if not folder.is_dir():
        raise RunFolderError(f"There is no run folder {folder}", "List them with: ls runs/")
    try:
        plain = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RunFolderError(
            f"{folder} is not a run folder: it has no run.json",
            "Give the folder that `stepscope run` named at its end",
        ) from None
    except (OSError, ValueError) as error:
        raise RunFolderError(
            f"{path} cannot be read: {error}",
            "The folder is damaged: copy it again, or run the command again",
        ) from None
    if not isinstance(plain, dict) or not isinstance(plain.get("format"), int):
        raise RunFolderError(f"{path} does not describe a run", "The folder is damaged")
    if plain["format"] > FORMAT:
        raise RunFolderError(
            f"{path} has format {plain['format']}, and this stepscope reads up to {FORMAT}",
            "Upgrade with: pip install -U stepscope",
        )
    required = ("clock", "watcher", "ending")
    missing = [key for key in required if not isinstance(plain.get(key), dict)]
    if missing:
        raise RunFolderError(f"{path} lacks {', '.join(missing)}", "The folder is damaged")
    return plain


def parse_facts(plain: Mapping[str, Any], folder: Path) -> RunFacts:
    """The facts in `run.json`, checked. What a trial adds is read as far as it can be."""
    of_run = {key: each for key, each in plain.items() if key not in ("limits", "trial")}
    try:
        facts = from_json(RunFacts, _without_nulls(of_run))
    except ValueError as error:
        raise RunFolderError(
            f"{RunPaths(folder).run_json} cannot be understood: {error}",
            "The folder is damaged: copy it again, or run the command again",
        ) from None
    return replace(
        facts,
        workload=plain.get("workload"),
        limits=salvage(LimitFacts, plain.get("limits")),
        trial=salvage(TrialFacts, plain.get("trial")),
    )


def read_facts(folder: Path) -> RunFacts:
    return parse_facts(read_run_json(folder), folder)


def _without_nulls(value: Any) -> Any:
    """What is null is as good as missing: then it has its default."""
    if isinstance(value, dict):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value


def ending_of(facts: RunFacts, folder: Path) -> Ending:
    """How the run ended; `lost` where it is said to be running but its monitor is gone."""
    stored = facts.ending
    known = stored.outcome in Outcome.__members__.values()
    outcome = Outcome(stored.outcome) if known else Outcome.CRASHED
    if outcome is Outcome.RUNNING and not is_alive(facts.watcher, folder):
        return Ending(
            Outcome.LOST,
            "the watcher was killed, or its machine went down, before the command ended",
        )
    return Ending(outcome, stored.reason, stored.exit_code, stored.signal, stored.evidence)


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
    """Whether the process that was writing this run still is.

    On another machine (the folder may be on a shared file system) and in another container only
    its traces tell.
    """
    same_namespace = monitor.pid_namespace in (None, procfs.pid_namespace())
    if monitor.boot_id == procfs.boot_id() and same_namespace:
        ticks = procfs.start_ticks(monitor.pid)
        return ticks is not None and ticks == monitor.started_ticks
    last_written = 0.0
    for path in folder.glob("*.arrows"):
        with contextlib.suppress(OSError):  # it was rolled or packed meanwhile
            last_written = max(last_written, path.stat().st_mtime)
    return time.time() - last_written < _SILENCE_S
