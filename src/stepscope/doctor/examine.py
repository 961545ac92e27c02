"""Runs the load under watch, as any command would be, and asks the run what the sensors saw of it:
which work, at what cost, and whether they tell the truth."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import stepscope
from stepscope.analysis.run.summary import summarise
from stepscope.capture.command import monitor_command
from stepscope.capture.request import RunRequest
from stepscope.capture.signals import Signals
from stepscope.doctor import load as self_test
from stepscope.doctor.checks import CheckResult, MeasuredLoad, judge
from stepscope.doctor.surroundings import Condition, look_around, nearest_folder
from stepscope.doctor.tasks import tasks_of
from stepscope.errors import CannotWatch
from stepscope.records import Outcome
from stepscope.records.facts import SensorFacts
from stepscope.report.run.derive import derive
from stepscope.runs.load import load
from stepscope.runs.reader import open_run
from stepscope.sensors import procfs
from stepscope.sensors.contract import Sensor

_BEGIN = (
    "import signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); "
    f"sys.path.insert(0, sys.argv.pop(1)); from {self_test.__name__} import main; main()"
)
"""Ctrl-C ends it without a word. It needs this very package, wherever its Python would look."""
_OTHER_PLACE = "Choose another place with --out DIR"
_IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs")


@dataclass(frozen=True)
class SensorState:
    """A sensor as it was in a run: whether it works, why not and what would help, what it costs."""

    name: str
    state: Literal["works", "in part", "missing"]
    missing: Mapping[str, str]  # metric to the reason, where that is a loss
    hints: tuple[str, ...]
    estimated: Mapping[str, str]
    cost_s: float | None  # CPU seconds per reading
    period_s: float | None  # how often it was read, slowed down or not

    @property
    def share(self) -> float | None:
        """Of one core."""
        return self.cost_s / self.period_s if self.cost_s is not None and self.period_s else None


@dataclass(frozen=True)
class DoctorReport:
    """All that the doctor has to say."""

    sensors: list[SensorState]
    watcher_cores: float | None  # what monitoring cost in all, of one core
    verdicts: tuple[CheckResult, ...]
    surroundings: list[Condition]
    run: Path | None  # the run of the self-test, where it was kept

    @property
    def truthful(self) -> bool:
        return all(verdict.state != "wrong" for verdict in self.verdicts)


@dataclass(frozen=True)
class Examination:
    """What to examine: where runs go, and how much of it."""

    out: Path | None
    runs: Path  # where runs go when nothing else is said: its file system is looked at
    quick: bool = False
    gpu: bool = True
    keep: bool = False

    @property
    def destination(self) -> Path:
        return self.out or self.runs


def examine(asked: Examination, signals: Signals) -> DoctorReport:
    """Run the load under watch and judge what the sensors saw."""
    with _run_folder(asked) as out:
        home = os.environ.get("HOME", "/")  # a container's user may have none
        disk, filesystem = disk_folder([asked.destination, out, Path(home), Path("/var/tmp")])
        where = {"disk": str(disk) if disk else None, "filesystem": filesystem}
        spec = json.dumps({**where, "gpu": asked.gpu, "quick": asked.quick})
        package = str(Path(stepscope.__file__).parent.parent)
        request = RunRequest("doctor", [sys.executable, "-c", _BEGIN, package, spec], out=out)
        finished = monitor_command(request, lambda text: None, signals)
        if finished.ending.outcome is Outcome.INTERRUPTED:
            raise KeyboardInterrupt
        if finished.ending.outcome is not Outcome.OK:
            raise CannotWatch(
                f"The self-test did not come to its end: {finished.ending.reason}",
                "What it says above tells why; --no-gpu leaves the GPU out",
            )
        run = open_run(finished.paths.folder)
        data, facts = load(run), run.facts
        if asked.keep:
            derive(run, data)
        measured = MeasuredLoad(
            tasks=tasks_of(mark for timeline in data.timelines for mark in timeline.marks),
            series=data.series,
            missing=facts.sensors.missing,
            estimated=facts.sensors.estimated,
            hook_loaded=run.paths.hello.exists(),
        )
        return DoctorReport(
            sensors=sensor_states(facts.sensors, {metric for metric, _ in data.series}),
            watcher_cores=summarise(data).watcher.get("cores"),
            verdicts=() if asked.quick else judge(measured),
            surroundings=look_around(facts.environment, asked.destination),
            run=run.path if asked.keep else None,
        )


def sensor_states(facts: SensorFacts, recorded: Collection[str]) -> list[SensorState]:
    """Every sensor there is, from the facts of a run and the metrics that it recorded."""
    known = sensor_metrics()
    read = [name for name in facts.costs if name in known]
    unread = [n for n in known if n not in facts.costs and facts.missing.keys() & {*known[n]}]
    states = []
    for name in read + unread:
        metrics, cost = known[name], facts.costs.get(name)
        lost = {
            metric: facts.missing[metric]
            for metric in metrics
            if metric in facts.missing and metric not in {*recorded, *facts.unset}
        }
        hints = dict.fromkeys(facts.hints[metric] for metric in lost if metric in facts.hints)
        states.append(
            SensorState(
                name=name,
                state="missing" if len(lost) == len(metrics) else "in part" if lost else "works",
                missing=lost,
                hints=tuple(hints),
                estimated={m: facts.estimated[m] for m in metrics if m in facts.estimated},
                cost_s=cost.cpu_s if cost else None,
                period_s=max(cost.period_s, cost.slowed_to_s) if cost else None,
            )
        )
    return states


def sensor_metrics() -> dict[str, tuple[str, ...]]:
    """The sensors there are, with what each reads: all that the session of a run has imported."""

    def below(base: type[Any]) -> Iterator[type[Any]]:
        for child in base.__subclasses__():
            yield child
            yield from below(child)

    return {sensor.name: sensor.metrics for sensor in below(Sensor) if hasattr(sensor, "name")}


@contextlib.contextmanager
def _run_folder(asked: Examination) -> Iterator[Path]:
    """Where the run of the self-test goes. It is removed again unless it shall be kept."""
    if asked.keep:
        yield asked.destination
        return
    if asked.out and asked.out.exists() and not asked.out.is_dir():
        raise CannotWatch(f"{asked.out} is no folder", _OTHER_PLACE)
    inside = nearest_folder(asked.out) if asked.out else Path(tempfile.gettempdir())
    try:
        folder = Path(tempfile.mkdtemp(prefix="stepscope-doctor-", dir=inside))
    except OSError as error:
        problem = f"Nothing can be written in {inside}: {error.strerror}"
        raise CannotWatch(problem, _OTHER_PLACE) from None
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
