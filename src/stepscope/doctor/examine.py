"""Runs the load under watch, as any command would be, and asks the run what the sensors saw."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import stepscope
from stepscope.analysis.run.data import RunData
from stepscope.analysis.run.summary import summarise
from stepscope.capture.command import monitor_command
from stepscope.capture.request import RunRequest
from stepscope.capture.signals import Signals
from stepscope.doctor.checks import CheckResult, MeasuredLoad, judge
from stepscope.doctor.sensors import SensorState, sensor_states
from stepscope.doctor.surroundings import Condition, look_around, nearest_folder
from stepscope.doctor.tasks import tasks_of
from stepscope.errors import CannotWatch
from stepscope.records import Outcome
from stepscope.report.run.derive import derive
from stepscope.runs.load import load
from stepscope.runs.reader import Run, open_run
from stepscope.sensors import procfs

_BEGIN = (
    "import signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); "
    "sys.path.insert(0, sys.argv.pop(1)); from stepscope.doctor.load import main; main()"
)
"""Ctrl-C ends it without a word. It needs this very package, wherever its Python would look."""
_OTHER_PLACE = "Choose another place with --out DIR"
_IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs")


@dataclass(frozen=True)
class DoctorReport:
    """All that the doctor has to say."""

    sensors: list[SensorState]
    watcher_cores: float | None
    """What watching cost in all, of one core."""
    verdicts: tuple[CheckResult, ...]
    surroundings: list[Condition]
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


def examine(asked: Examination, signals: Signals) -> DoctorReport:
    """Run the load under watch and judge what the sensors saw."""
    with _folder(asked) as out:
        run = _run_load(asked, out, signals)
        data = load(run)
        if asked.keep:
            derive(run, data)
        metrics = {metric for metric, _ in data.series}
        return DoctorReport(
            sensors=sensor_states(run.facts.sensors, metrics),
            watcher_cores=summarise(data).watcher.get("cores"),
            verdicts=() if asked.quick else judge(measured_load(run, data)),
            surroundings=look_around(run.facts.environment, asked.out or asked.runs),
            run=run.path if asked.keep else None,
        )


def measured_load(run: Run, data: RunData) -> MeasuredLoad:
    """What a run of the load did, and what was seen of it."""
    return MeasuredLoad(
        tasks_of(mark for timeline in data.timelines for mark in timeline.marks),
        data.series,
        run.facts.sensors.missing,
        run.facts.sensors.estimated,
        run.paths.hello.exists(),
    )


def _run_load(asked: Examination, out: Path, signals: Signals) -> Run:
    home = os.environ.get("HOME", "/")  # a container's user may have none
    disk, filesystem = disk_folder([asked.out or asked.runs, out, Path(home), Path("/var/tmp")])
    where = {"disk": str(disk) if disk else None, "filesystem": filesystem}
    spec = {**where, "gpu": asked.gpu, "quick": asked.quick}
    package = str(Path(stepscope.__file__).parent.parent)
    command = [sys.executable, "-c", _BEGIN, package, json.dumps(spec)]
    request = RunRequest("doctor", command, out=out)
    finished = monitor_command(request, lambda text: None, signals)
    if finished.ending.outcome is Outcome.INTERRUPTED:
        raise KeyboardInterrupt
    if finished.ending.outcome is not Outcome.OK:
        raise CannotWatch(
            f"The self-test did not come to its end: {finished.ending.reason}",
            "What it says above tells why; --no-gpu leaves the GPU out",
        )
    return open_run(finished.paths.folder)


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
    mounts = procfs.mounts()
    for candidate in candidates:
        folder = nearest_folder(candidate)
        mount = procfs.mount_of(folder.resolve(), mounts)
        filesystem = mount.filesystem if mount else "unknown"
        if filesystem not in _IN_MEMORY:
            with contextlib.suppress(OSError), tempfile.TemporaryFile(dir=folder):
                return folder, filesystem
    return None, ""
