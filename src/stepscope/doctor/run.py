"""Run and monitor the load like any other command, and evaluate the run: which sensors work, what
they cost, and whether they are correct."""

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
from stepscope.analysis.run.summary import summarize
from stepscope.capture.command import monitor_command
from stepscope.capture.request import RunRequest
from stepscope.capture.signals import Signals
from stepscope.doctor import load as self_test
from stepscope.doctor.checks import CheckResult, MeasuredLoad, judge
from stepscope.doctor.machine import MachineRemark, check_machine, nearest_folder
from stepscope.doctor.tasks import tasks_of
from stepscope.errors import MonitorError
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
"""Ctrl-C ends it silently. It imports this package, not another one on the path of its Python."""
_USE_OUT = "Choose another folder with --out DIR"
_IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs")


@dataclass(frozen=True)
class SensorState:
    """State and cost of a sensor in a run, with reasons and hints for missing metrics."""

    name: str  # name of the sensor
    state: Literal["works", "partial", "missing"]  # `works`, `partial` or `missing`
    missing: Mapping[str, str]  # missing metrics, each with its reason
    hints: tuple[str, ...]  # what makes the missing metrics available
    estimated: Mapping[str, str]  # estimated metrics, each with its method
    cost_s: float | None  # CPU seconds per reading
    period_s: float | None  # actual time between readings

    @property
    def share(self) -> float | None:
        """The cost as a share of one core."""
        return self.cost_s / self.period_s if self.cost_s is not None and self.period_s else None


@dataclass(frozen=True)
class DoctorReport:
    """The complete result of `stepscope doctor`."""

    sensors: list[SensorState]  # one object per sensor
    monitor_cores: float | None  # CPU usage of the monitor, in cores
    self_test: tuple[CheckResult, ...]  # one object per check; empty with --quick
    machine: list[MachineRemark]  # one object per property of the machine
    run: Path | None  # the run of the self-test, if kept

    @property
    def passed(self) -> bool:
        return all(result.state != "wrong" for result in self.self_test)


@dataclass(frozen=True)
class DoctorRequest:
    """The options of `stepscope doctor`."""

    out: Path | None
    runs: Path  # the default folder of runs, whose file system is checked
    quick: bool = False
    gpu: bool = True
    keep: bool = False

    @property
    def destination(self) -> Path:
        return self.out or self.runs


def examine(request: DoctorRequest, signals: Signals) -> DoctorReport:
    """Run and monitor the load, and evaluate the readings of the sensors."""
    with _run_folder(request) as out:
        home = os.environ.get("HOME", "/")  # a user in a container may not have one
        disk, filesystem = disk_folder([request.destination, out, Path(home), Path("/var/tmp")])
        where = {"disk": str(disk) if disk else None, "filesystem": filesystem}
        spec = json.dumps({**where, "gpu": request.gpu, "quick": request.quick})
        package = str(Path(stepscope.__file__).parent.parent)
        command = [sys.executable, "-c", _BEGIN, package, spec]
        finished = monitor_command(
            RunRequest("doctor", command, out=out), lambda text: None, signals
        )
        if finished.exit_status.outcome is Outcome.INTERRUPTED:
            raise KeyboardInterrupt
        if finished.exit_status.outcome is not Outcome.OK:
            raise MonitorError(
                f"The self-test failed: {finished.exit_status.reason}",
                "See its output above; use --no-gpu to skip the GPU tests",
            )
        run = open_run(finished.paths.folder)
        data, facts = load(run), run.facts
        if request.keep:
            derive(run, data)
        measured = MeasuredLoad(
            tasks=tasks_of(mark for timeline in data.timelines for mark in timeline.marks),
            series=data.series,
            missing=facts.sensors.missing,
            estimated=facts.sensors.estimated,
            hook_loaded=run.paths.hook_loaded.exists(),
        )
        return DoctorReport(
            sensors=sensor_states(facts.sensors, {metric for metric, _ in data.series}),
            monitor_cores=summarize(data).monitor.get("cores"),
            self_test=() if request.quick else judge(measured),
            machine=check_machine(facts.environment, request.destination),
            run=run.path if request.keep else None,
        )


def sensor_states(facts: SensorFacts, recorded: Collection[str]) -> list[SensorState]:
    """Return the state of every sensor, from the facts and the recorded metrics of a run."""
    known = sensor_metrics()
    read = [name for name in facts.costs if name in known]
    unread = [n for n in known if n not in facts.costs and facts.missing.keys() & {*known[n]}]
    states = []
    for name in read + unread:
        metrics, cost = known[name], facts.costs.get(name)
        missing = {
            metric: facts.missing[metric]
            for metric in metrics
            if metric in facts.missing and metric not in {*recorded, *facts.not_configured}
        }
        hints = dict.fromkeys(facts.hints[metric] for metric in missing if metric in facts.hints)
        states.append(
            SensorState(
                name=name,
                state=_state(len(missing), len(metrics)),
                missing=missing,
                hints=tuple(hints),
                estimated={m: facts.estimated[m] for m in metrics if m in facts.estimated},
                cost_s=cost.cpu_s if cost else None,
                period_s=max(cost.period_s, cost.backoff_period_s) if cost else None,
            )
        )
    return states


def _state(missing: int, metrics: int) -> Literal["works", "partial", "missing"]:
    if not missing:
        return "works"
    return "missing" if missing == metrics else "partial"


def sensor_metrics() -> dict[str, tuple[str, ...]]:
    """Return all imported sensors with their metrics."""

    def subclasses(base: type[Any]) -> Iterator[type[Any]]:
        for child in base.__subclasses__():
            yield child
            yield from subclasses(child)

    return {sensor.name: sensor.metrics for sensor in subclasses(Sensor) if hasattr(sensor, "name")}


@contextlib.contextmanager
def _run_folder(request: DoctorRequest) -> Iterator[Path]:
    """Yield the folder for the run of the self-test, which is removed unless `keep` is set."""
    if request.keep:
        yield request.destination
        return
    if request.out and request.out.exists() and not request.out.is_dir():
        raise MonitorError(f"{request.out} is not a folder", _USE_OUT)
    parent = nearest_folder(request.out) if request.out else Path(tempfile.gettempdir())
    try:
        folder = Path(tempfile.mkdtemp(prefix="stepscope-doctor-", dir=parent))
    except OSError as error:
        raise MonitorError(f"Cannot write to {parent}: {error.strerror}", _USE_OUT) from None
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def disk_folder(candidates: Iterable[Path]) -> tuple[Path | None, str]:
    """Return the first writable folder on a disk and its file system."""
    mounts = procfs.mounts()
    for candidate in candidates:
        folder = nearest_folder(candidate)
        mount = procfs.mount_of(folder.resolve(), mounts)
        filesystem = mount.filesystem if mount else "unknown"
        if filesystem not in _IN_MEMORY:
            with contextlib.suppress(OSError), tempfile.TemporaryFile(dir=folder):
                return folder, filesystem
    return None, ""
