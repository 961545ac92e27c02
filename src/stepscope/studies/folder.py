"""The folder of a study: its files, and how they stay consistent when processes are killed.

    <study>/
      design.yaml                 the design as it was when the study was last run
      study.json                  format, name, the machine
      runner.lock                 locked by the process that runs the study; contains its claim
      now.json                    the progress of the running trial, replaced every second
      <key of a spec>/
        spec.json                 its settings
        r<repeat>a<attempt>.claim its claim, created atomically by one process
        r<repeat>a<attempt>/      its run folder; s<number>a<attempt> for reference trials
      ledger/<runner>.jsonl       a line for each finished trial
      derived/                    tables and the report

The run folders are the source of truth. The ledger is a cache that avoids reading thousands of
them: a damaged or missing line is restored from its run folder, and the ledger can be deleted.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stepscope.errors import RunFolderError, StudyBusy, TrialError
from stepscope.records.codec import dumps, from_json, loads, to_json
from stepscope.records.facts import ProcessIdentity
from stepscope.runs.facts import identity_of_self
from stepscope.runs.files import (
    JSON_LIMIT,
    open_own,
    open_regular,
    read_json,
    read_regular,
    refuse_link,
    replace_atomically,
    write_json,
)
from stepscope.studies.results import Attempt, Result
from stepscope.trials.locks import locked

FORMAT = 1
DEFAULT_FOLDER = "studies"
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
"""Errors of file systems without hard links. A claim may be torn there; then it does not count."""


class StudyPaths:
    """The files of a study."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.design = folder / "design.yaml"
        self.study_json = folder / "study.json"
        self.lock = folder / "runner.lock"
        self.now = folder / "now.json"
        self.ledger = folder / "ledger"
        self.machines = folder / "machines"
        """The source studies of a merged study, a folder each."""
        self.report = folder / "derived" / "report.html"

    def spec(self, key: str) -> Path:
        return self.folder / key / "spec.json"

    def run(self, place: str) -> Path:
        return self.folder / place

    def claim(self, place: str) -> Path:
        return self.folder / f"{place}.claim"


@dataclass(frozen=True)
class StudyFacts:
    """The contents of `study.json`. A merged study sets only some of them."""

    format: int = FORMAT
    name: str = ""
    started: float = 0.0
    """Seconds since 1970."""
    machine: str = ""
    host: str = ""
    stepscope: str = ""
    file: str = ""
    unavailable: Mapping[str, str] = field(default_factory=dict)
    """Why the machine cannot run some configurations, by the keys of their specs."""
    code: Mapping[str, list[str]] = field(default_factory=dict)
    """Digests of all versions of the files of custom workloads, by model."""
    merged: Mapping[str, str] = field(default_factory=dict)
    """The machines of a merged study, by folder."""


@dataclass(frozen=True)
class Claim(ProcessIdentity):
    """The process that runs a trial or a study, and its start time."""

    at: float = 0.0


@dataclass(frozen=True)
class StudyProgress:
    """The contents of `now.json`: the progress of the running trial."""

    pid: int = 0
    at: float = 0.0
    trial: str = "starting"
    phase: str = ""
    share: float | None = None


class DamagedStudy(RunFolderError):
    """A damaged study.json. Running the study writes a new one."""


def is_study(folder: Path) -> bool:
    return os.path.exists(StudyPaths(folder).study_json)


def read_study_facts(paths: StudyPaths) -> StudyFacts:
    hint = "Run the study again with its design file; its trials are kept"
    for inner in (paths.ledger, paths.machines, paths.report.parent):
        refuse_link(inner)
    try:
        plain = read_json(paths.study_json)
    except FileNotFoundError:
        problem = f"No such study folder: {paths.folder}"
        if paths.folder.is_dir():
            problem = f"{paths.folder} is not a study: it has no study.json"
        raise RunFolderError(problem, "Pass a design file, or the folder of a study") from None
    except (OSError, ValueError) as error:
        raise DamagedStudy(f"Cannot read {paths.study_json}: {error}", hint) from None
    try:
        given = {key: value for key, value in plain.items() if value is not None}
        facts = from_json(StudyFacts, {"format": None, **given})
    except (AttributeError, ValueError):
        raise DamagedStudy(f"{paths.study_json} does not describe a study", hint) from None
    if any(folder in (".", "..") or "/" in folder for folder in facts.merged):
        raise DamagedStudy(f"{paths.study_json} refers to a folder outside the study", hint)
    if facts.format > FORMAT:
        raise RunFolderError(
            f"{paths.study_json} has format {facts.format}, but this version of stepscope reads "
            f"formats up to {FORMAT}",
            "Install a newer version of stepscope",
        )
    return facts


def write_study_facts(paths: StudyPaths, facts: StudyFacts) -> None:
    write_json(paths.study_json, {"format": FORMAT, **to_json(facts, omit_defaults=True)})


def running_now(paths: StudyPaths) -> StudyProgress | None:
    """Return the progress of a running study; None if no process runs it."""
    runner = runner_of(paths)
    if runner is None:
        return None
    try:
        return loads(StudyProgress, read_regular(paths.now, JSON_LIMIT))
    except (OSError, ValueError):
        return StudyProgress(runner.pid, runner.at)


def claim(paths: StudyPaths, attempt: Attempt, settings: Mapping[str, Any]) -> bool:
    """Claim an attempt atomically; return False if another process has claimed it."""
    place = paths.claim(attempt.place)
    place.parent.mkdir(exist_ok=True)
    spec = paths.spec(attempt.key)
    if not spec.exists():
        write_json(spec, {"format": FORMAT, "settings": settings}, None, paths.folder)
    draft = place.with_name(f".{place.name}.{secrets.token_hex(8)}.tmp")
    replace_atomically(draft, _own_claim() + "\n", paths.folder)
    try:
        os.link(draft, place)
        return True
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        with contextlib.suppress(FileExistsError), place.open("x") as file:
            file.write(_own_claim())
            return True
        return False
    finally:
        draft.unlink(missing_ok=True)


def _own_claim() -> str:
    return dumps({**to_json(identity_of_self()), "at": time.time()})


class Ledger:
    """The ledger file of this process. Each line is written with a single write."""

    def __init__(self, paths: StudyPaths) -> None:
        self._folder = paths.ledger
        own = identity_of_self()
        name = f"{own.host}-{own.pid}-{own.started_ticks}"
        self._path = paths.ledger / f"{re.sub(r'[^A-Za-z0-9.-]+', '-', name)}.jsonl"

    def add(self, result: Result) -> None:
        line = dumps(result, omit_defaults=True) + "\n"
        try:
            self._folder.mkdir(exist_ok=True)
            flags = os.O_WRONLY | os.O_APPEND
            with os.fdopen(open_own(self._path, flags, self._folder.parent), "ab", 0) as file:
                file.write(line.encode())
        except OSError as error:
            raise TrialError(
                f"Cannot write the list of results ({self._path}): {error.strerror}",
                "Free some space, then run the study again to resume",
            ) from None


@contextlib.contextmanager
def exclusive_run(paths: StudyPaths) -> Iterator[None]:
    """Hold the lock of a study; raise StudyBusy if another process holds it.

    The kernel releases the lock when this process exits, even if it is killed.
    """
    with contextlib.ExitStack() as stack:
        try:
            # Retries, because `runner_of` in another process holds the lock for a moment.
            stack.enter_context(locked(paths.lock))
            with os.fdopen(open_own(paths.lock, os.O_WRONLY | os.O_TRUNC), "w") as file:
                file.write(_own_claim())
        except BlockingIOError:
            runner = runner_of(paths) or Claim()
            details = ""
            if runner.pid > 0:
                since = time.strftime("%H:%M:%S", time.localtime(runner.at))
                details = f" (PID {runner.pid} on {runner.host}, since {since})"
            raise StudyBusy(
                f"The study in {paths.folder} is already running{details}",
                f"Run `stepscope study show {paths.folder}` to see its progress",
            ) from None
        except OSError as error:
            raise write_error(paths, error) from None
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                paths.now.unlink(missing_ok=True)


def runner_of(paths: StudyPaths) -> Claim | None:
    """Return the process that runs the study; None if there is none."""
    try:
        lock = open_regular(paths.lock, JSON_LIMIT)
    except OSError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return None
    except BlockingIOError:
        with contextlib.suppress(ValueError):
            return loads(Claim, lock.read())
        return Claim()
    except OSError:  # a file system without locks
        return None
    finally:
        lock.close()


def write_error(paths: StudyPaths, error: OSError) -> TrialError:
    is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    return TrialError(
        f"Cannot write the study to {paths.folder}: {error.strerror}",
        "Free some space, then run the study again to resume"
        if is_full
        else "Choose another folder with --out DIR",
    )
