"""The folder of a study: what is on disk, and how it stays true when everything dies at once.

    <study>/
      design.yaml                 the design as it was when the study was last run
      study.json                  format, name, the machine
      runner.lock                 held by who runs the study; says who that is
      now.json                    what is running now, replaced about every second
      <key of a spec>/
        spec.json                 its settings
        r<repeat>a<attempt>.claim who took it up: made whole or not at all, by one only
        r<repeat>a<attempt>/      its run folder; of sentinels s<number>a<attempt>
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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from stepscope.errors import CannotTry, StepscopeError, StudyBusy
from stepscope.records import Outcome
from stepscope.runs import runfile
from stepscope.runs.paths import replace_atomically
from stepscope.studies.result import Result, Role, place_of

FORMAT = 1
DEFAULT_FOLDER = "studies"

_KEY = re.compile(r"[0-9a-f]{12}")
_PLACE = re.compile(r"([rs])(\d+)a(\d+)(\.claim)?")
DAMAGED = (
    StepscopeError, OSError, EOFError, ArithmeticError,
    AttributeError, LookupError, TypeError, ValueError,
)  # fmt: skip
"""What reading a run comes to where its files do not hold what they must."""
_OTHERS_LOOK_S = 0.5
"""Who only looks whether somebody runs the study holds its lock for a moment."""
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
"""What file systems say that know no links: there a claim may be torn, which is none."""
_LEDGER_LINE = re.compile(rb"[^\n]+\n")


@dataclass(frozen=True)
class StudyPaths:
    """The files of a study."""

    folder: Path

    @property
    def design(self) -> Path:
        return self.folder / "design.yaml"

    @property
    def study_json(self) -> Path:
        return self.folder / "study.json"

    @property
    def lock(self) -> Path:
        return self.folder / "runner.lock"

    @property
    def now(self) -> Path:
        return self.folder / "now.json"

    @property
    def ledger(self) -> Path:
        return self.folder / "ledger"

    @property
    def machines(self) -> Path:
        """Of a merged study: a folder for each of those that it was made of."""
        return self.folder / "machines"

    @property
    def derived(self) -> Path:
        return self.folder / "derived"

    @property
    def report(self) -> Path:
        return self.derived / "report.html"

    def spec(self, key: str) -> Path:
        return self.folder / key / "spec.json"

    def run(self, place: str) -> Path:
        return self.folder / place

    def claim(self, place: str) -> Path:
        return self.folder / f"{place}.claim"


class Attempt(NamedTuple):
    """A place where a trial was begun, or may have been."""

    key: str
    role: Role
    repeat: int
    number: int

    @property
    def place(self) -> str:
        return place_of(self.key, self.role, self.repeat, self.number)


@dataclass
class Found:
    """What a look at a study's folder found."""

    results: list[Result]
    """By the ledger, or from run folders that it does not have."""
    unwritten: list[Result]
    """Those of them that belong into the ledger."""
    attempts: set[Attempt]
    """All that were ever begun."""
    running: list[Attempt]
    """Whose runner lives."""
    remarks: list[str]


def is_study(folder: Path) -> bool:
    return StudyPaths(folder).study_json.exists()


def look(paths: StudyPaths, measure: Callable[[Path, Result], Result]) -> Found:
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
    return Found(list(results.values()), unwritten, attempts | written, running, remarks)


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
            role: Role = "sentinel" if named[1] == "s" else "trial"
            attempt = Attempt(entry.name, role, int(named[2]), int(named[3]))
            every.add(attempt)
            if not named[4]:
                folders.add(attempt)
    return every, folders


def _read_ledger(folder: Path) -> tuple[list[Result], list[str]]:
    """The lines of all runners. One that is torn or no result is left out: it is made again."""
    results, damaged = [], 0
    for path in sorted(folder.glob("*.jsonl")) if folder.is_dir() else ():
        for line in _LEDGER_LINE.findall(path.read_bytes()):
            try:
                results.append(Result.from_dict(json.loads(line)))
            except (ValueError, KeyError, TypeError, OverflowError):
                damaged += 1
    several = "1 line" if damaged == 1 else f"{damaged} lines"
    told = f"{several} of the ledger cannot be read: the run folders tell instead"
    return results, [told] if damaged else []


def _recover(
    paths: StudyPaths,
    attempt: Attempt,
    measure: Callable[[Path, Result], Result],
    remarks: list[str],
) -> Result | None:
    """What became of an attempt that the ledger does not have; None while its runner lives."""
    blank = Result(
        attempt.key,
        _settings(paths, attempt.key),
        attempt.role,
        attempt.repeat,
        attempt.number,
        block=0,
        outcome=Outcome.LOST,
        reason="who ran it was killed, or the machine went down, before it was over",
        began=_began(paths, attempt),
    )
    folder = paths.run(attempt.place)
    blank = replace(blank, seconds=max(0.0, _last_written(folder) - blank.began))
    if not folder.is_dir():
        return None if _owner_lives(paths.claim(attempt.place), folder) else blank
    try:
        facts = runfile.read_facts(folder)
        ending = runfile.ending_of(facts, folder)
        if ending.outcome is Outcome.RUNNING:
            return None
        if ending.outcome is Outcome.LOST:
            return blank
        return measure(folder, blank)
    except DAMAGED as error:
        if _owner_lives(paths.claim(attempt.place), folder):
            return None
        if (folder / "run.json").exists():
            said = getattr(error, "message", f"{folder} cannot be understood: {error}")
            remarks.append(f"{said}: the trial counts as lost, and is tried again")
        return blank


def _settings(paths: StudyPaths, key: str) -> Mapping[str, Any]:
    try:
        told = json.loads(paths.spec(key).read_bytes())
        return dict(told["settings"])
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _began(paths: StudyPaths, attempt: Attempt) -> float:
    for path in (paths.claim(attempt.place), paths.run(attempt.place)):
        with contextlib.suppress(OSError):
            return path.stat().st_mtime
    return 0.0


def _last_written(folder: Path) -> float:
    """When it was last heard of."""
    with contextlib.suppress(OSError):
        return max((entry.stat().st_mtime for entry in os.scandir(folder)), default=0.0)
    return 0.0


def _owner_lives(claim: Path, folder: Path) -> bool:
    try:
        owner = json.loads(claim.read_bytes())
        return isinstance(owner, dict) and runfile.watcher_lives(owner, folder)
    except (OSError, ValueError, TypeError):
        return False


def take(paths: StudyPaths, attempt: Attempt, settings: Mapping[str, Any]) -> bool:
    """Claim an attempt: whole or not at all, and one only gets it. False: somebody else has it."""
    place = paths.claim(attempt.place)
    place.parent.mkdir(exist_ok=True)
    spec = paths.spec(attempt.key)
    if not spec.exists():
        replace_atomically(spec, json.dumps({"format": FORMAT, "settings": settings}) + "\n")
    mine = {**runfile.identity_of_self(), "at": time.time()}
    draft = place.with_name(f".{place.name}.{os.getpid()}.tmp")
    draft.write_text(json.dumps(mine) + "\n")
    try:
        return _made(draft, place)
    finally:
        draft.unlink(missing_ok=True)


def _made(draft: Path, place: Path) -> bool:
    try:
        os.link(draft, place)
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        with contextlib.suppress(FileExistsError), place.open("x") as file:
            file.write(draft.read_text())
            return True
        return False
    return True


class Ledger:
    """The lines of one runner. A line is one write: it is there or it is not."""

    def __init__(self, paths: StudyPaths) -> None:
        self._folder = paths.ledger
        me = runfile.identity_of_self()
        name = f"{me['host']}-{me['pid']}-{me['started_ticks']}"
        self._path = paths.ledger / f"{re.sub(r'[^A-Za-z0-9.-]+', '-', name)}.jsonl"

    def add(self, result: Result) -> None:
        line = json.dumps(result.as_dict(), allow_nan=False) + "\n"
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        try:
            self._folder.mkdir(exist_ok=True)
            descriptor = os.open(self._path, flags, 0o644)
            try:
                os.write(descriptor, line.encode())
            finally:
                os.close(descriptor)
        except OSError as error:
            raise CannotTry(
                f"The ledger of the study cannot be written in {self._folder}: {error.strerror}",
                "Make room, then run the study again: it goes on from here",
            ) from None


@contextlib.contextmanager
def alone(paths: StudyPaths) -> Iterator[None]:
    """Run a study as the only one. The kernel lets go of the lock when we die, however that is."""
    me = json.dumps({**runfile.identity_of_self(), "at": time.time()})
    try:
        paths.folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(paths.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise unwritable(paths, error) from None
    try:
        try:
            _lock(paths, lock)
            os.ftruncate(lock, 0)
            os.pwrite(lock, me.encode(), 0)
        except OSError as error:
            raise unwritable(paths, error) from None
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                paths.now.unlink(missing_ok=True)
    finally:
        os.close(lock)


def _lock(paths: StudyPaths, lock: int) -> None:
    until = time.monotonic() + _OTHERS_LOOK_S
    while True:
        try:
            return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > until:
                raise busy(paths) from None
            time.sleep(0.01)


def unwritable(paths: StudyPaths, error: OSError) -> CannotTry:
    """What to do about a study that cannot be written."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    return CannotTry(
        f"The study cannot be written in {paths.folder}: {error.strerror}",
        "Make room, then run it again: it goes on" if full else "Choose another place: --out DIR",
    )


def runner_of(paths: StudyPaths) -> Mapping[str, Any] | None:
    """Who runs the study now; None if nobody does."""
    try:
        lock = os.open(paths.lock, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return None
    except BlockingIOError:
        try:
            told = json.loads(os.pread(lock, 65536, 0))
        except ValueError:
            told = None
        return told if isinstance(told, dict) else {}
    except OSError:  # a file system without locks
        return None
    finally:
        os.close(lock)


def busy(paths: StudyPaths) -> StudyBusy:
    who = runner_of(paths) or {}
    since = time.strftime("%H:%M:%S", time.localtime(who["at"])) if who.get("at") else "a while"
    by = f" by process {who['pid']} on {who.get('host')}" if who.get("pid") else ""
    return StudyBusy(
        f"{paths.folder} is being run already{by}, since {since}",
        f"See how far it is: stepscope study show {paths.folder}",
    )
