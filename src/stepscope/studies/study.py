"""A study as a whole: its design and its folder brought together, run or read."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from stepscope import __version__
from stepscope.analysis.throughput import Spread
from stepscope.errors import BadDesign, CannotTry, RunFolderError
from stepscope.runs.paths import replace_atomically, slug
from stepscope.studies.design import Design, Left, Points
from stepscope.studies.designfile import read_design
from stepscope.studies.engine import Engine, Moment, Onlooker, Why, trial_text
from stepscope.studies.folder import (
    DEFAULT_FOLDER,
    FORMAT,
    Found,
    Ledger,
    StudyPaths,
    alone,
    is_study,
    look,
    runner_of,
)
from stepscope.studies.grid import Grid
from stepscope.studies.here import Here
from stepscope.studies.known import Known
from stepscope.studies.launchers.local import LocalLauncher
from stepscope.studies.measure import result_of
from stepscope.studies.points import default_sentinel, points_of
from stepscope.studies.result import Result
from stepscope.studies.spec import Spec

_SHOWN_S = 1.0


@dataclass(frozen=True)
class Study:
    """A design, and the folder that its trials go to."""

    design: Design
    paths: StudyPaths
    lacked: Mapping[str, str] | None = None
    """What could not be had where it was run, by the keys of specs; None: see what is here."""

    @classmethod
    def of(cls, target: str | Path, out: str | Path = DEFAULT_FOLDER) -> Study:
        """By the file of its design, or by its folder."""
        path = Path(target)
        if path.is_dir():
            return cls.in_folder(path)
        design = read_design(path)
        return cls(design, StudyPaths(Path(out).absolute() / slug(design.name)))

    @classmethod
    def in_folder(cls, folder: Path) -> Study:
        """One that was run before, as it was then."""
        paths = StudyPaths(folder.absolute())
        told = facts_of(paths)
        if paths.machines.is_dir():
            raise RunFolderError(
                f"{folder} was merged of several studies", "Show it, or make its report"
            )
        design = read_design(paths.design, is_kept=True)
        base = Path(str(told.get("base") or folder))
        name = str(told.get("name") or design.name)
        lacked = told.get("lacked")
        return cls(
            replace(design, name=name, file=base / paths.design.name),
            paths,
            lacked if isinstance(lacked, dict) else {},
        )

    @cached_property
    def points(self) -> Points:
        return points_of(self.design)

    @cached_property
    def sentinel(self) -> Spec | None:
        if not self.design.with_sentinel:
            return None
        return default_sentinel(self.design, self.points, self._lacks)

    @cached_property
    def here(self) -> Here:
        return Here.look()

    @cached_property
    def grid(self) -> Grid:
        return Grid(self.design, self.points.chosen, self._lacks)

    def _lacks(self, spec: Spec) -> str:
        """Why a trial cannot be had; nothing if it can."""
        return self.here.lacks(spec) if self.lacked is None else self.lacked.get(spec.key, "")

    @cached_property
    def found(self) -> Found:
        """What is in its folder now."""
        if not self.paths.folder.is_dir():
            return Found([], [], set(), [], [])
        return look(self.paths, result_of)

    @cached_property
    def known(self) -> Known:
        return known_of(self.found, self.design)

    @property
    def runner(self) -> Mapping[str, Any] | None:
        """Who runs it now."""
        return runner_of(self.paths)

    def skipped(self) -> list[Left]:
        """What is not tried: by the design, by this machine, by what was found out."""
        return [*self.points.skipped, *self.grid.skipped(self.known)]


def find_folder(target: str | Path, out: str | Path = DEFAULT_FOLDER) -> Path:
    """The folder of a study, by itself, by its name or by its design."""
    path = Path(target)
    if path.is_dir():
        return path
    if not path.exists() and is_study(Path(out) / path):
        return Path(out) / path
    folder = Study.of(path, out).paths.folder
    if not is_study(folder):
        raise RunFolderError(
            f"{path} was not run yet: there is no {folder}", f"Run it: stepscope study run {path}"
        )
    return folder


def known_of(found: Found, design: Design) -> Known:
    known = Known(design.reruns, spread_of(found.results))
    for result in sorted(found.results, key=lambda result: (result.began, result.place)):
        known.add(result)
    for attempt in found.attempts:
        known.begun(attempt.key, attempt.role, attempt.repeat, attempt.number)
    known.elsewhere = {(a.key, a.repeat) for a in found.running if a.role == "trial"}
    return known


def spread_of(results: list[Result]) -> Spread | None:
    """How much trials were known to differ on their machine, when the last of them ran."""
    for result in sorted(results, key=lambda result: result.began, reverse=True):
        cv, dof = result.values.get("spread_cv"), result.values.get("spread_dof")
        if cv is not None and dof:
            return Spread(cv, dof, "others")
    return None


def facts_of(paths: StudyPaths) -> dict[str, Any]:
    """What study.json says."""
    try:
        told = json.loads(paths.study_json.read_bytes())
    except FileNotFoundError:
        raise RunFolderError(
            f"{paths.folder} is not a study: it has no study.json",
            "Give a design file, or the folder that `stepscope study run` named",
        ) from None
    except (OSError, ValueError) as error:
        raise RunFolderError(
            f"{paths.study_json} cannot be read: {error}",
            "Run the study again with its design file: its trials are still there",
        ) from None
    if not isinstance(told, dict) or not isinstance(told.get("format"), int):
        raise RunFolderError(f"{paths.study_json} does not describe a study")
    if told["format"] > FORMAT:
        raise RunFolderError(
            f"{paths.study_json} has format {told['format']}, and this stepscope reads up to "
            f"{FORMAT}",
            "Upgrade with: pip install -U stepscope",
        )
    return told


def run_study(study: Study, onlooker: Onlooker, interval_s: float = 0.1) -> Why:
    """Run what is missing of a study, as the only one. BadDesign if nothing of it can be had."""
    study = replace(study, lacked=None)
    design = study.design
    if not study.grid.planned:
        left = study.grid.skipped(Known())
        raise BadDesign(
            f"Nothing of {design.name} can be tried on this machine: {left[0].why}",
            "See all reasons with: stepscope study plan",
        )
    with alone(study.paths):
        write_down(study)
        for remark in study.found.remarks:
            onlooker.tell(remark)
        ledger = Ledger(study.paths)
        for result in study.found.unwritten:
            ledger.add(result)
        watching = _Diary(study, onlooker)
        engine = Engine(
            study.paths,
            design,
            study.grid,
            LocalLauncher(onlooker.tell, interval_s),
            study.known,
            watching,
            study.sentinel,
            study.here,
        )
        return engine.run()


def write_down(study: Study) -> None:
    """The design as it is now, and whose machine this is. A study is of one machine."""
    design, paths = study.design, study.paths
    machine = study.here.machine
    told: dict[str, Any] = {}
    if is_study(paths.folder):
        told = facts_of(paths)
        before = told.get("machine")
        if before and before != machine and study.found.results:
            raise CannotTry(
                f"This study was begun on another machine ({before}; this is {machine})",
                "Run it here with --out in a folder of its own, then: stepscope study merge",
            )
    try:
        replace_atomically(paths.design, design.text)
        told = {
            "begun": time.time(),
            **told,
            "format": FORMAT,
            "name": design.name,
            "machine": machine,
            "host": os.uname().nodename,
            "stepscope": __version__,
            "base": str((design.file or paths.design).absolute().parent),
            "lacked": study.grid.unavailable,
        }
        replace_atomically(paths.study_json, json.dumps(told, indent=1) + "\n")
    except OSError as error:
        raise CannotTry(
            f"The study cannot be written in {paths.folder}: {error.strerror}",
            "Choose another place with --out DIR",
        ) from None


class _Diary:
    """Writes down what runs now, for `study show`, and passes everything on."""

    def __init__(self, study: Study, onlooker: Onlooker) -> None:
        self._study = study
        self._onlooker = onlooker
        self._next = 0.0

    def tell(self, text: str) -> None:
        self._onlooker.tell(text)

    def over(self, result: Result, moment: Moment) -> None:
        self._onlooker.over(result, moment)

    def show(self, moment: Moment) -> None:
        now = time.monotonic()
        if now >= self._next:
            self._next = now + _SHOWN_S
            self._write(moment)
        self._onlooker.show(moment)

    def _write(self, moment: Moment) -> None:
        told = {
            "trial": trial_text(moment.spec, self._study.design),
            "role": moment.role,
            "repeat": moment.repeat,
            "block": moment.block,
            "phase": moment.progress.phase,
            "share": moment.progress.share,
            "elapsed_s": moment.progress.elapsed_s,
            "done": moment.done,
            "to_come": moment.to_come,
            "left_s": moment.left_s,
            "at": time.time(),
        }
        try:
            replace_atomically(self._study.paths.now, json.dumps(told) + "\n")
        except OSError:
            self._next = float("inf")  # a full disk: the study goes on, and nobody is shown it


def running_now(paths: StudyPaths) -> Mapping[str, Any] | None:
    """What runs now, as its runner last wrote it down; None if nobody runs it."""
    who = runner_of(paths)
    if who is None:
        return None
    try:
        told = json.loads(paths.now.read_bytes())
    except (OSError, ValueError):
        told = {}
    return {**who, **(told if isinstance(told, dict) else {})}
