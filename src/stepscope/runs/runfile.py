"""`run.json`: the facts of a run. Written first, replaced atomically, readable at any moment."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import time
from enum import Enum
from pathlib import Path
from typing import Any

from stepscope.errors import RunFolderError
from stepscope.records import Ending, Outcome
from stepscope.runs.paths import FORMAT, RunPaths, replace_atomically

_SILENCE_S = 30.0
"""A watcher writes about every second: one that has not for so long is gone."""


def write_facts(paths: RunPaths, facts: dict[str, Any]) -> None:
    """Replace `run.json`."""
    replace_atomically(paths.run_json, json.dumps(facts, indent=1, default=_plain) + "\n")


def read_facts(folder: Path) -> dict[str, Any]:
    """The facts of a run, or an error that says what is wrong with the folder."""
    path = RunPaths(folder).run_json
    if not folder.is_dir():
        raise RunFolderError(f"There is no run folder {folder}", "List them with: ls runs/")
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
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
    _check_format(path, facts)
    return dict(facts)


def _check_format(path: Path, facts: Any) -> None:
    if not isinstance(facts, dict) or not isinstance(facts.get("format"), int):
        raise RunFolderError(f"{path} does not describe a run", "The folder is damaged")
    if facts["format"] > FORMAT:
        raise RunFolderError(
            f"{path} has format {facts['format']}, and this stepscope reads up to {FORMAT}",
            "Upgrade with: pip install -U stepscope",
        )
    missing = [
        key for key in ("clock", "watcher", "ending") if not isinstance(facts.get(key), dict)
    ]
    if missing:
        raise RunFolderError(f"{path} lacks {', '.join(missing)}", "The folder is damaged")


def ending_of(facts: dict[str, Any], folder: Path) -> Ending:
    """How the run ended; `lost` where it is said to be running but its watcher is gone."""
    stored = facts["ending"]
    try:
        outcome = Outcome(stored.get("outcome", "running"))
    except ValueError:
        outcome = Outcome.CRASHED
    ending = Ending(
        outcome,
        str(stored.get("reason", "")),
        stored.get("exit_code"),
        stored.get("signal"),
        dict(stored.get("evidence") or {}),
    )
    if outcome is Outcome.RUNNING and not watcher_lives(facts["watcher"], folder):
        return Ending(
            Outcome.LOST,
            "the watcher was killed, or its machine went down, before the command ended",
        )
    return ending


def identity(pid: int) -> dict[str, Any]:
    """What tells one process from any other, on this machine and later."""
    return {
        "pid": pid,
        "started_ticks": start_ticks(pid),
        "boot_id": boot_id(),
        "host": socket.gethostname(),
    }


def identity_of_self() -> dict[str, Any]:
    """The identity of the process that calls."""
    return identity(os.getpid())


def watcher_lives(watcher: dict[str, Any], folder: Path) -> bool:
    """Whether the process that was writing this run still is.

    On another machine (the folder may be on a shared file system) only its traces tell.
    """
    if watcher.get("boot_id") != boot_id():
        return _seconds_since_written(folder) < _SILENCE_S
    ticks = start_ticks(int(watcher.get("pid", -1)))
    return ticks is not None and ticks == watcher.get("started_ticks")


def _seconds_since_written(folder: Path) -> float:
    times = [path.stat().st_mtime for path in folder.glob("*.arrows")]
    return time.time() - max(times, default=0.0)


def boot_id() -> str | None:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None


def start_ticks(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; None if there is none (or a zombie)."""
    try:
        data = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    fields = data[data.rindex(b")") + 2 :].split()
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    if isinstance(value, Enum):
        return value.value
    return str(value)
