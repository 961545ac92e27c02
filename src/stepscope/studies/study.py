"""A study: its design together with its folder."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from stepscope.errors import DesignError, RunFolderError
from stepscope.runs.paths import slug
from stepscope.studies.design.file import read_design
from stepscope.studies.design.points import default_reference, points_of
from stepscope.studies.design.records import Design, DesignPoints, SkippedPoint
from stepscope.studies.folder import DEFAULT_FOLDER, StudyPaths, is_study, read_study_facts
from stepscope.studies.planner import GridPlanner
from stepscope.studies.results import Result, Results
from stepscope.studies.scan import StudyScan, scan_folder
from stepscope.studies.trial_spec import TrialSpec

if TYPE_CHECKING:
    from stepscope.studies.machine import MachineInfo


@dataclass(frozen=True)
class Study:
    """A design and the folder of its trials."""

    design: Design
    paths: StudyPaths
    unavailable: Mapping[str, str] | None = None
    """Why trials are not available, by the keys of specs; None: ask this machine."""

    @classmethod
    def of(cls, target: str | Path, out: str | Path = DEFAULT_FOLDER) -> Study:
        """Return a study by its design file or its folder."""
        path = Path(target)
        if path.is_dir():
            return cls.in_folder(path)
        design = read_design(path)
        return cls(design, StudyPaths(Path(out).absolute() / slug(design.name)))

    @classmethod
    def in_folder(cls, folder: Path) -> Study:
        """Return a study that was run before, with the design from its last run."""
        paths = StudyPaths(folder.absolute())
        facts = read_study_facts(paths)
        if paths.machines.is_dir():
            raise RunFolderError(
                f"{folder} is a merged study",
                "Use `stepscope study show` or `stepscope study report` with it",
            )
        design = read_design(paths.design, is_kept=True)
        file = Path(facts.file or paths.design)
        return cls(
            replace(design, name=facts.name or design.name, file=file), paths, facts.unavailable
        )

    def to_run(self) -> Study:
        """Return the study as this machine can run it, whatever another machine lacked."""
        return self if self.unavailable is None else replace(self, unavailable=None)

    @cached_property
    def points(self) -> DesignPoints:
        return points_of(self.design)

    @cached_property
    def machine(self) -> MachineInfo:
        # Imported here: it loads the GPU driver's library, which only running a study needs.
        from stepscope.studies.machine import MachineInfo

        return MachineInfo.detect()

    @cached_property
    def grid(self) -> GridPlanner:
        return GridPlanner(self.design, self.points.chosen, self.unavailable_reason)

    def grid_to_run(self) -> GridPlanner:
        """Return the planner; raise DesignError if this machine can run none of the trials."""
        if not self.grid.planned:
            plan = f"stepscope study plan {self.design.file or ''}".rstrip()
            raise DesignError(
                f"No trial of {self.design.name} can run on this machine: "
                f"{self.grid.skipped(Results())[0].why}",
                f"Run `{plan}` to see all reasons",
            )
        return self.grid

    def unavailable_reason(self, spec: TrialSpec) -> str:
        """Return why a trial cannot run; empty if it can."""
        if self.unavailable is None:
            return self.machine.unavailable_reason(spec)
        return self.unavailable.get(spec.key, "")

    def scan(self) -> ScannedStudy:
        """Read the results in its folder."""
        scan = StudyScan([], [], set(), [], [])
        if self.paths.folder.is_dir():
            scan = scan_folder(self.paths, _measured)
        results = Results(self.design.reruns)
        for result in sorted(scan.results, key=lambda result: (result.started, result.place)):
            results.add(result)
        for attempt in scan.attempts:
            results.add_attempt(attempt)
        running = {(each.key, each.repeat) for each in scan.running if not each.is_reference}
        results.claimed_by_others = running
        return ScannedStudy(self, scan, results)


@dataclass(frozen=True)
class ScannedStudy:
    """A study with its results; a run of the study adds to them."""

    study: Study
    scan: StudyScan
    results: Results

    @cached_property
    def reference(self) -> TrialSpec | None:
        """The reference trial of earlier blocks, unless the design names another or excludes it."""
        study = self.study
        if not study.design.with_reference or not study.grid.planned:
            return None
        chosen = default_reference(study.design, study.points, study.unavailable_reason)
        if study.design.reference:
            return chosen
        used = Counter(result.key for result in self.results.results if result.is_reference)
        so_far = [key for key, _ in used.most_common(1)]
        return next((spec for spec in study.points.chosen if spec.key in so_far), chosen)

    def skipped(self) -> list[SkippedPoint]:
        """Return the combinations that the design, the machine or the results exclude."""
        return [*self.study.points.skipped, *self.study.grid.skipped(self.results)]


def _measured(folder: Path, blank: Result) -> Result:
    # Imported here: only run folders that the ledger misses need it.
    from stepscope.studies.measure import measure_trial

    return measure_trial(folder, blank).result


def find_folder(target: str | Path, out: str | Path = DEFAULT_FOLDER) -> Path:
    """Return the folder of a study, given the folder, the name or the design file."""
    path = Path(target)
    if path.is_dir():
        return path
    named = Path(out) / slug(str(target))
    if not path.exists() and is_study(named):
        return named
    folder = Study.of(path, out).paths.folder
    if not is_study(folder):
        raise RunFolderError(
            f"{path} has not been run yet: there is no study in {folder}",
            f"Run `stepscope study run {path}`",
        )
    return folder


def code_remarks(paths: StudyPaths) -> list[str]:
    """Return a remark for each custom workload whose file changed between trials."""
    return [
        f"{model.rpartition(':')[0]} changed between runs of the study: the trials use "
        f"{len(versions)} versions of it. To rerun trials with the current version, delete their "
        "folders"
        for model, versions in read_study_facts(paths).code.items()
        if len(versions) > 1
    ]
