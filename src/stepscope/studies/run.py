"""Runs a study here: alone, from what its folder has to the end of its plan or of its budget."""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass

from stepscope import __version__
from stepscope.errors import CannotTry
from stepscope.runs.paths import replace_atomically
from stepscope.studies import folder
from stepscope.studies.engine import Engine, ProgressListener, StopReason
from stepscope.studies.launchers.contract import Launcher
from stepscope.studies.planner import Planner
from stepscope.studies.results import Result
from stepscope.studies.study import ScannedStudy, Study, code_remarks


@dataclass(frozen=True)
class StudyRun:
    """Why a run of a study stopped, how many trials it took up, and all that is known then."""

    stop_reason: StopReason
    trials: int
    scanned: ScannedStudy


def run_study(
    study: Study,
    planner: Planner,
    launcher: Launcher,
    listener: ProgressListener,
    again: bool = False,
) -> StudyRun:
    """Run what a planner still wants of a study, as the only one.

    With `again`, what crashed or took too long before is tried again.
    """
    with folder.alone(study.paths):
        scanned = study.scan()
        write_down(study, scanned.scan.results)
        scanned.results.retry_failed(crashed=again)
        listener.begins(scanned)
        for remark in code_remarks(study.paths):
            listener.tell(remark)
        ledger = folder.Ledger(study.paths)
        for result in scanned.scan.unwritten:
            ledger.add(result)
        engine = Engine(
            paths=study.paths,
            planner=planner,
            launcher=launcher,
            results=scanned.results,
            listener=listener,
            design=study.design,
            reference=scanned.reference,
        )
        return StudyRun(engine.run(), engine.launched, scanned)


def write_down(study: Study, results: Sequence[Result]) -> None:
    """The design as it is now, and which machine this is: a study belongs to one."""
    design, paths, machine = study.design, study.paths, study.machine.machine
    before = folder.StudyFacts()
    if folder.is_study(paths.folder):
        with contextlib.suppress(folder.DamagedStudy):  # then it is made anew
            before = folder.read_study_facts(paths)
    # Studies whose names lead to the same folder, or that have the same name in two projects, are
    # not mixed up.
    is_moved = before.file and design.file and before.file != str(design.file.absolute())
    known = {result.key for result in results}
    is_other = is_moved and known and known.isdisjoint(spec.key for spec in study.points.chosen)
    if before.name not in ("", design.name) or is_other:
        raise CannotTry(
            f"{paths.folder} is of another study, {before.name!r}"
            + (f" by {before.file}" if is_other else ""),
            "Give this one another name, or another place with --out DIR",
        )
    if before.machine not in ("", machine) and results:
        raise CannotTry(
            f"This study was begun on another machine ({before.machine}; this is {machine})",
            "Run it here with --out in a folder of its own, then: stepscope study merge",
        )
    code = dict(before.code)
    for model in sorted({s.workload.model for s in study.points.chosen if s.workload.is_own}):
        file = design.base / model.rpartition(":")[0]
        if file.is_file():
            digest = hashlib.sha256(file.read_bytes()).hexdigest()[:12]
            code[model] = list(dict.fromkeys([*code.get(model, ()), digest]))
    facts = folder.StudyFacts(
        name=design.name,
        begun=before.begun or time.time(),
        machine=machine,
        host=os.uname().nodename,
        stepscope=__version__,
        file=str((design.file or paths.design).absolute()),
        lacked=study.grid.unavailable,
        code=code,
    )
    try:
        replace_atomically(paths.design, design.text)
        folder.write_study_facts(paths, facts)
    except OSError as error:
        raise folder.unwritable(paths, error) from None
