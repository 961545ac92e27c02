"""The folder of a study: what is on disk, and how it stays true when everything dies at once.

    <study>/
      design.yaml                 the design as it was when the study was last run
      study.json                  format, name, the machine
      runner.lock                 held by the process that runs the study, whose claim it has
      now.json                    what is running now, replaced about every second
      <key of a spec>/
        spec.json                 its settings
        r<repeat>a<attempt>.claim its claim: made whole or not at all, by one process only
        r<repeat>a<attempt>/      its run folder; of reference trials s<number>a<attempt>
      ledger/<runner>.jsonl       a line for each trial that is over
      derived/                    tables and the report

The run folders are the truth. The ledger only saves reading thousands of them: a line that is torn
or missing is made again from its run folder, and all of it can be deleted.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stepscope.errors import CannotTry, RunFolderError, StudyBusy
from stepscope.records.codec import dumps, from_json, loads, to_json
from stepscope.records.facts import ProcessIdentity
from stepscope.runs.facts import identity_of_self
from stepscope.runs.paths import write_json
from stepscope.studies.results import Attempt, Result
from stepscope.trials.state import locked

FORMAT = 1
DEFAULT_FOLDER = "studies"
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
"""What file systems without links say: there a claim may be torn, and a torn one does not count."""


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
        """Of a merged study: a folder for each of those that it was made of."""
        self.report = folder / "derived" / "report.html"

    def spec(self, key: str) -> Path:
        return self.folder / key / "spec.json"

    def run(self, place: str) -> Path:
        return self.folder / place

    def claim(self, place: str) -> Path:
        return self.folder / f"{place}.claim"


@dataclass(frozen=True)
class StudyFacts:
    """`study.json`. A merged study has fewer of them."""

    format: int = FORMAT
    name: str = ""
    begun: float = 0.0
    """Seconds since 1970."""
    machine: str = ""
    host: str = ""
    stepscope: str = ""
    file: str = ""
    lacked: Mapping[str, str] = field(default_factory=dict)
    """What the machine could not run, and why, by the keys of specs."""
    code: Mapping[str, list[str]] = field(default_factory=dict)
    """The versions of the user's own files, as digests, by the model that they define."""
    merged: Mapping[str, str] = field(default_factory=dict)
    """The machines of a merged study, by their folders."""


@dataclass(frozen=True)
class Claim(ProcessIdentity):
    """The process that runs a trial, or a study, and since when."""

    at: float = 0.0


@dataclass(frozen=True)
class StudyProgress:
    """`now.json`: what is running now."""

    pid: int = 0
    at: float = 0.0
    trial: str = "starting"
    phase: str = ""
    share: float | None = None


class DamagedStudy(RunFolderError):
    """A study.json that cannot be read: running the study makes it anew."""


def is_study(folder: Path) -> bool:
    return StudyPaths(folder).study_json.exists()


def read_study_facts(paths: StudyPaths) -> StudyFacts:
    again = "Run the study again with its design file: its trials are still there"
    try:
        plain = json.loads(paths.study_json.read_bytes())
    except FileNotFoundError:
        raise RunFolderError(
            f"{paths.folder} is not a study: it has no study.json",
            "Give a design file, or the folder that `stepscope study run` named",
        ) from None
    except (OSError, ValueError) as error:
        raise DamagedStudy(f"{paths.study_json} cannot be read: {error}", again) from None
    try:
        given = {key: value for key, value in plain.items() if value is not None}
        facts = from_json(StudyFacts, {"format": None, **given})
    except (AttributeError, ValueError):
        raise DamagedStudy(f"{paths.study_json} does not describe a study", again) from None
    if facts.format > FORMAT:
        raise RunFolderError(
            f"{paths.study_json} has format {facts.format}, and this stepscope reads up to "
            f"{FORMAT}",
            "Upgrade with: pip install -U stepscope",
        )
    return facts


def write_study_facts(paths: StudyPaths, facts: StudyFacts) -> None:
    write_json(paths.study_json, {"format": FORMAT, **to_json(facts, omit_defaults=True)})


def running_now(paths: StudyPaths) -> StudyProgress | None:
    """What runs now, as its runner last wrote it down; None if nobody runs the study."""
    runner = runner_of(paths)
    if runner is None:
        return None
    try:
        return loads(StudyProgress, paths.now.read_bytes())
    except (OSError, ValueError):
        return StudyProgress(runner.pid, runner.at)


def claim(paths: StudyPaths, attempt: Attempt, settings: Mapping[str, Any]) -> bool:
    """Claim an attempt: whole or not at all, and only one gets it. False: somebody else has it."""
    place = paths.claim(attempt.place)
    place.parent.mkdir(exist_ok=True)
    spec = paths.spec(attempt.key)
    if not spec.exists():
        write_json(spec, {"format": FORMAT, "settings": settings}, indent=None)
    draft = place.with_name(f".{place.name}.{os.getpid()}.tmp")
    draft.write_text(_own_claim() + "\n")
    try:
        os.link(draft, place)
        return True
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        with contextlib.suppress(FileExistsError), place.open("x") as file:
            file.write(draft.read_text())
            return True
        return False
    finally:
        draft.unlink(missing_ok=True)


def _own_claim() -> str:
    return dumps({**to_json(identity_of_self()), "at": time.time()})


class Ledger:
    """The lines of one runner. A line is one write: it is there or it is not."""

    def __init__(self, paths: StudyPaths) -> None:
        self._folder = paths.ledger
        me = identity_of_self()
        name = f"{me.host}-{me.pid}-{me.started_ticks}"
        self._path = paths.ledger / f"{re.sub(r'[^A-Za-z0-9.-]+', '-', name)}.jsonl"

    def add(self, result: Result) -> None:
        line = dumps(result, omit_defaults=True) + "\n"
        try:
            self._folder.mkdir(exist_ok=True)
            with self._path.open("ab", buffering=0) as file:
                file.write(line.encode())
        except OSError as error:
            raise CannotTry(
                f"The ledger of the study cannot be written in {self._folder}: {error.strerror}",
                "Make room, then run the study again: it goes on from here",
            ) from None


@contextlib.contextmanager
def alone(paths: StudyPaths) -> Iterator[None]:
    """Run a study as the only one. The kernel lets go of the lock when we die, however that is."""
    with contextlib.ExitStack() as held:
        try:
            # Who only looks whether somebody runs the study holds the lock for a moment.
            held.enter_context(locked(paths.lock))
            paths.lock.write_text(_own_claim())
        except BlockingIOError:
            runner = runner_of(paths) or Claim()
            since = time.strftime("%H:%M:%S", time.localtime(runner.at)) if runner.at else "a while"
            by = f" by process {runner.pid} on {runner.host}" if runner.pid > 0 else ""
            raise StudyBusy(
                f"{paths.folder} is being run already{by}, since {since}",
                f"See how far it is: stepscope study show {paths.folder}",
            ) from None
        except OSError as error:
            raise unwritable(paths, error) from None
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                paths.now.unlink(missing_ok=True)


def runner_of(paths: StudyPaths) -> Claim | None:
    """Who runs the study now; None if nobody does."""
    try:
        lock = os.open(paths.lock, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return None
    except BlockingIOError:
        with contextlib.suppress(ValueError):
            return loads(Claim, os.pread(lock, 65536, 0))
        return Claim()
    except OSError:  # a file system without locks
        return None
    finally:
        os.close(lock)


def unwritable(paths: StudyPaths, error: OSError) -> CannotTry:
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    return CannotTry(
        f"The study cannot be written in {paths.folder}: {error.strerror}",
        "Make room, then run it again: it goes on" if full else "Choose another place: --out DIR",
    )
