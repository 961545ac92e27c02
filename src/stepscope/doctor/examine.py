"""Runs the load under watch, as any command would be, and asks the run what the sensors saw."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import stepscope
from stepscope.capture.command import watch_command
from stepscope.capture.session import Plan
from stepscope.capture.spawn import Signals
from stepscope.doctor.sensors import SensorState, sensor_states
from stepscope.doctor.surroundings import Remark, look_around, nearest_folder
from stepscope.doctor.tasks import tasks_of
from stepscope.doctor.verdicts import Observed, Verdict, judge
from stepscope.errors import CannotWatch
from stepscope.records import Outcome
from stepscope.report.derive import derive
from stepscope.runs.reader import Run, open_run

_NAME = "doctor"
_INTERVAL_S = 0.1
_BEGIN = (
    "import signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); "
    "sys.path.insert(0, sys.argv.pop(1)); from stepscope.doctor.load import main; main()"
)
"""Ctrl-C ends it without a word. It needs this very package, wherever its Python would look."""
_OTHER_PLACE = "Choose another place with --out DIR"
_IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs")


@dataclass(frozen=True)
class Findings:
    """All that the doctor has to say."""

    sensors: list[SensorState]
    watcher_cores: float | None
    """What watching cost in all, of one core."""
    verdicts: tuple[Verdict, ...]
    surroundings: list[Remark]
    run: Path | None
    """The run of the self-test, where it was kept."""

    @property
    def truthful(self) -> bool:
        return all(verdict.state != "wrong" for verdict in self.verdicts)


@dataclass(frozen=True)
class Examination:
    """What to examine: where runs go, and how much of it."""

    out: Path | None
    runs: Path
    """Where runs go when nothing else is said: its file system is looked at."""
    quick: bool = False
    gpu: bool = True
    keep: bool = False


def examine(asked: Examination, signals: Signals) -> Findings:
    """Run the load under watch and judge what the sensors saw."""
    with _folder(asked) as out:
        run = _run_load(asked, out, signals)
        if asked.keep:
            derive(run)
        recorded = run.recorded()
        facts = run.facts
        metrics = {metric for metric, _ in recorded.series}
        return Findings(
            sensors=sensor_states(facts, metrics),
            watcher_cores=run.summary().watcher.get("cores"),
            verdicts=() if asked.quick else judge(observe(run)),
            surroundings=look_around(facts.get("environment") or {}, asked.out or asked.runs),
            run=run.path if asked.keep else None,
        )


def observe(run: Run) -> Observed:
    """What a run of the load did, and what was seen of it."""
    sensors = run.facts.get("sensors") or {}
    return Observed(
        tasks_of(mark for timeline in run.timelines() for mark in timeline.marks),
        run.series(),
        sensors.get("missing") or {},
        sensors.get("estimated") or {},
        run.paths.hello.exists(),
    )


def _run_load(asked: Examination, out: Path, signals: Signals) -> Run:
    home = os.environ.get("HOME", "/")  # a container's user may have none
    disk, filesystem = disk_folder([asked.out or asked.runs, out, Path(home), Path("/var/tmp")])
    spec = {
        "disk": str(disk) if disk else None,
        "filesystem": filesystem,
        "gpu": asked.gpu,
        "quick": asked.quick,
    }
    package = str(Path(stepscope.__file__).parent.parent)
    command = [sys.executable, "-c", _BEGIN, package, json.dumps(spec)]
    watched = watch_command(Plan(_NAME, command, _INTERVAL_S, out), lambda text: None, signals)
    if watched.ending.outcome is Outcome.INTERRUPTED:
        raise KeyboardInterrupt
    if watched.ending.outcome is not Outcome.OK:
        raise CannotWatch(
            f"The self-test did not come to its end: {watched.ending.reason}",
            "What it says above tells why; --no-gpu leaves the GPU out",
        )
    return open_run(watched.paths.folder)


@contextmanager
def _folder(asked: Examination) -> Iterator[Path]:
    """Where the run of the self-test goes. It is removed again unless it shall be kept."""
    if asked.keep:
        yield asked.out or asked.runs
        return
    inside = nearest_folder(asked.out) if asked.out else None
    if asked.out and asked.out.exists() and not asked.out.is_dir():
        raise CannotWatch(f"{asked.out} is no folder", _OTHER_PLACE)
    try:
        folder = Path(tempfile.mkdtemp(prefix="stepscope-doctor-", dir=inside))
    except OSError as error:
        where = inside or tempfile.gettempdir()
        raise CannotWatch(
            f"Nothing can be written in {where}: {error.strerror}", _OTHER_PLACE
        ) from None
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def disk_folder(candidates: Iterable[Path]) -> tuple[Path | None, str]:
    """The first folder on a disk that can be written to, and the file system it is on."""
    mounts = Path("/proc/self/mountinfo").read_text(errors="replace")
    for candidate in candidates:
        folder = nearest_folder(candidate)
        filesystem = filesystem_of(folder.resolve(), mounts)
        if filesystem not in _IN_MEMORY and _is_writable(folder):
            return folder, filesystem
    return None, ""


def filesystem_of(folder: Path, mountinfo: str) -> str:
    """The kind of the innermost mount that holds a folder."""
    best, kind = "", "unknown"
    for line in mountinfo.splitlines():
        place, _, rest = line.partition(" - ")
        point = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), place.split()[4])
        if folder.is_relative_to(point) and len(point) >= len(best):
            best, kind = point, rest.split()[0]
    return kind


def _is_writable(folder: Path) -> bool:
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False
