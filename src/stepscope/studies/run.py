"""Runs a study on this machine until its plan is finished or its budget is used up."""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass

from stepscope import __version__
from stepscope.errors import TrialError
from stepscope.runs.files import replace_atomically
from stepscope.studies import folder
from stepscope.studies.engine import Engine, ProgressListener, StopReason
from stepscope.studies.launchers.contract import Launcher
from stepscope.studies.planner import Planner
from stepscope.studies.results import Result
from stepscope.studies.study import ScannedStudy, Study, code_remarks


@dataclass(frozen=True)
class StudyRun:
    """The end of a run: why it stopped, how many trials it started, and all results."""

    stop_reason: StopReason
    trials: int
    scanned: ScannedStudy


def run_study(
    study: Study,
    planner: Planner,
    launcher: Launcher,
    listener: ProgressListener,
    retry_failed: bool = False,
) -> StudyRun:
    """Run the remaining trials of a study; raise StudyBusy if another process runs it.

    With `retry_failed`, trials that crashed or timed out are retried.
    """
    with folder.exclusive_run(study.paths):
        scanned = study.scan()
        write_study_files(study, scanned.scan.results)
        scanned.results.retry_failed(crashed=retry_failed)
        listener.study_started(scanned)
        for remark in code_remarks(study.paths):
            listener.notify(remark)
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


def write_study_files(study: Study, results: Sequence[Result]) -> None:
    """Write the current design and study.json; raise TrialError if the folder is not of this study.

    A folder belongs to one study on one machine.
    """
    design, paths, machine = study.design, study.paths, study.machine.machine
    before = folder.StudyFacts()
    if folder.is_study(paths.folder):
        with contextlib.suppress(folder.DamagedStudy):  # it is replaced below
            before = folder.read_study_facts(paths)
    # Two studies can share a folder name: their names differ only in special characters, or two
    # projects use the same name.
    is_moved = before.file and design.file and before.file != str(design.file.absolute())
    known = {result.key for result in results}
    is_other = is_moved and known and known.isdisjoint(spec.key for spec in study.points.chosen)
    if before.name not in ("", design.name) or is_other:
        raise TrialError(
            f"{paths.folder} contains another study, {before.name!r}"
            + (f" from {before.file}" if is_other else ""),
            "Change the name of this study, or choose another folder with --out DIR",
        )
    if before.machine not in ("", machine) and results:
        raise TrialError(
            f"This study was started on another machine ({before.machine}; this one is {machine})",
            "Run it here with another --out DIR, then merge both with `stepscope study merge`",
        )
    code = dict(before.code)
    for model in sorted({s.workload.model for s in study.points.chosen if s.workload.is_custom}):
        file = design.base / model.rpartition(":")[0]
        if file.is_file():
            digest = hashlib.sha256(file.read_bytes()).hexdigest()[:12]
            code[model] = list(dict.fromkeys([*code.get(model, ()), digest]))
    facts = folder.StudyFacts(
        name=design.name,
        started=before.started or time.time(),
        machine=machine,
        host=os.uname().nodename,
        stepscope=__version__,
        file=str((design.file or paths.design).absolute()),
        unavailable=study.grid.unavailable,
        code=code,
    )
    try:
        replace_atomically(paths.design, design.text)
        folder.write_study_facts(paths, facts)
    except OSError as error:
        raise folder.write_error(paths, error) from None
