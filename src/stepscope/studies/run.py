"""Runs a study here: alone, from what its folder has to the end of its plan or of its budget."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepscope import __version__
from stepscope.errors import BadDesign, CannotTry
from stepscope.runs.paths import replace_atomically
from stepscope.studies.engine import Engine, Moment, Onlooker, Why, trial_text
from stepscope.studies.folder import FORMAT, Ledger, alone, is_study, unwritable
from stepscope.studies.known import Known
from stepscope.studies.launchers.local import LocalLauncher
from stepscope.studies.result import Result
from stepscope.studies.study import DamagedStudy, Study, code_remarks, facts_of

_SHOWN_S = 1.0


@dataclass(frozen=True)
class Ran:
    """How a run of a study ended, and how many trials it took up."""

    why: Why
    trials: int


def run_study(
    study: Study, onlooker: Onlooker, interval_s: float = 0.1, again: bool = False
) -> Ran:
    """Run what is missing of a study, as the only one. BadDesign if nothing of it can be had.

    With `again`, what crashed or took too long before is missing too.
    """
    design = study.design
    if not study.grid.planned:
        left = study.grid.skipped(Known())
        raise BadDesign(
            f"Nothing of {design.name} can be tried on this machine: {left[0].why}",
            f"See all reasons: stepscope study plan {design.file or ''}".rstrip(),
        )
    with alone(study.paths):
        study.look_again()  # who ran it before may have ended a moment ago
        write_down(study)
        study.known.forgive(crashed=again)
        onlooker.begins(study)
        for remark in code_remarks(study.paths):
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
        return Ran(engine.run(), engine.launched)


def write_down(study: Study) -> None:
    """The design as it is now, and whose machine this is. A study is of one machine."""
    design, paths = study.design, study.paths
    machine = study.here.machine
    told = _facts_before(study)
    _check_same(study, told)
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
            "file": str((design.file or paths.design).absolute()),
            "lacked": study.grid.unavailable,
            "code": _code(study, told.get("code")),
        }
        replace_atomically(paths.study_json, json.dumps(told, indent=1) + "\n")
    except OSError as error:
        raise unwritable(paths, error) from None


def _code(study: Study, before: Any) -> dict[str, list[str]]:
    """The versions that a user's own files had while the study was run, as digests."""
    code = dict(before) if isinstance(before, dict) else {}
    base = study.design.file.parent if study.design.file else Path()
    own = {spec.workload.model for spec in study.points.chosen if spec.workload.is_own}
    for model in sorted(own):
        file = base / model.rpartition(":")[0]
        if file.is_file():
            digest = hashlib.sha256(file.read_bytes()).hexdigest()[:12]
            code[model] = list(dict.fromkeys([*code.get(model, ()), digest]))
    return code


def _facts_before(study: Study) -> dict[str, Any]:
    """What study.json says; nothing if it is not there, or damaged: it is made anew."""
    try:
        return facts_of(study.paths) if is_study(study.paths.folder) else {}
    except DamagedStudy:
        return {}


def _check_same(study: Study, told: Mapping[str, Any]) -> None:
    """Studies whose names come to the same folder, or that have the same in two projects, are not
    mixed up."""
    before, file = told.get("name"), told.get("file")
    is_moved = file and study.design.file and file != str(study.design.file.absolute())
    known = {result.key for result in study.found.results}
    is_other = is_moved and known and known.isdisjoint(spec.key for spec in study.points.chosen)
    if (before and before != study.design.name) or is_other:
        raise CannotTry(
            f"{study.paths.folder} is of another study, {before!r}"
            + (f" by {file}" if is_other else ""),
            "Give this one another name, or another place with --out DIR",
        )


class _Diary:
    """Writes down what runs now, for `study show`, and passes everything on."""

    def __init__(self, study: Study, onlooker: Onlooker) -> None:
        self._study = study
        self._onlooker = onlooker
        self._next = 0.0

    def tell(self, text: str) -> None:
        self._onlooker.tell(text)

    def begins(self, study: Study) -> None:
        self._onlooker.begins(study)

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
