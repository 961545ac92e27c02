"""A study as a whole: its design and its folder brought together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from stepscope.errors import BadDesign, RunFolderError
from stepscope.runs.paths import slug
from stepscope.studies.design.file import read_design
from stepscope.studies.design.points import default_reference, points_of
from stepscope.studies.design.records import Design, DesignPoints, SkippedPoint
from stepscope.studies.folder import DEFAULT_FOLDER, StudyPaths, is_study, read_study_facts
from stepscope.studies.planner import GridPlanner
from stepscope.studies.results import Result, Results
from stepscope.studies.scan import StudyScan, look
from stepscope.studies.trial_spec import TrialSpec

if TYPE_CHECKING:
    from stepscope.studies.machine import MachineInfo


@dataclass(frozen=True)
class Study:
    """A design, and the folder that its trials go to."""

    design: Design
    paths: StudyPaths
    unavailable: Mapping[str, str] | None = None
    """What could not be had where it was run, by the keys of specs; None: see this machine."""

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
        facts = read_study_facts(paths)
        if paths.machines.is_dir():
            raise RunFolderError(
                f"{folder} was merged of several studies", "Show it, or make its report"
            )
        design = read_design(paths.design, is_kept=True)
        file = Path(facts.file or paths.design)
        return cls(replace(design, name=facts.name or design.name, file=file), paths, facts.lacked)

    def to_run(self) -> Study:
        """As it would be run now: with what this machine has, whatever another one lacked."""
        return self if self.unavailable is None else replace(self, unavailable=None)

    @cached_property
    def points(self) -> DesignPoints:
        return points_of(self.design)

    @cached_property
    def machine(self) -> MachineInfo:
        # Loads the driver's library, which only who runs the study needs.
        from stepscope.studies.machine import MachineInfo

        return MachineInfo.look()

    @cached_property
    def grid(self) -> GridPlanner:
        return GridPlanner(self.design, self.points.chosen, self.lacks)

    def grid_to_run(self) -> GridPlanner:
        """The planner of the design; BadDesign if this machine can run nothing of it."""
        if not self.grid.planned:
            raise BadDesign(
                f"Nothing of {self.design.name} can be tried on this machine: "
                f"{self.grid.skipped(Results())[0].why}",
                f"See all reasons: stepscope study plan {self.design.file or ''}".rstrip(),
            )
        return self.grid

    def lacks(self, spec: TrialSpec) -> str:
        """Why a trial cannot be had; nothing if it can."""
        if self.unavailable is None:
            return self.machine.lacks(spec)
        return self.unavailable.get(spec.key, "")

    def scan(self) -> ScannedStudy:
        """Read what is known of its trials from its folder."""
        found = StudyScan([], [], set(), [], [])
        if self.paths.folder.is_dir():
            found = look(self.paths, _measured)
        results = Results(self.design.reruns)
        for result in sorted(found.results, key=lambda result: (result.began, result.place)):
            results.add(result)
        for attempt in found.attempts:
            results.begun(attempt)
        running = {(each.key, each.repeat) for each in found.running if not each.is_reference}
        results.claimed_by_others = running
        return ScannedStudy(self, found, results)


@dataclass(frozen=True)
class ScannedStudy:
    """A study, and what is known of its trials; who runs it adds to the results."""

    study: Study
    scan: StudyScan
    results: Results

    @cached_property
    def reference(self) -> TrialSpec | None:
        """The reference trial: the one that blocks began with so far, unless the design names
        another or no longer has it."""
        study = self.study
        if not study.design.with_reference or not study.grid.planned:
            return None
        chosen = default_reference(study.design, study.points, study.lacks)
        if study.design.reference:
            return chosen
        used = Counter(result.key for result in self.results.results if result.is_reference)
        so_far = [key for key, _ in used.most_common(1)]
        return next((spec for spec in study.points.chosen if spec.key in so_far), chosen)

    def skipped(self) -> list[SkippedPoint]:
        """What is not tried: by the design, by this machine, by what was found out."""
        return [*self.study.points.skipped, *self.study.grid.skipped(self.results)]


def _measured(folder: Path, blank: Result) -> Result:
    # Run folders that the ledger does not have are few: loaded only when needed.
    from stepscope.studies.measure import measure_trial

    return measure_trial(folder, blank).result


def find_folder(target: str | Path, out: str | Path = DEFAULT_FOLDER) -> Path:
    """The folder of a study, by itself, by its name or by its design."""
    path = Path(target)
    if path.is_dir():
        return path
    named = Path(out) / slug(str(target))
    if not path.exists() and is_study(named):
        return named
    folder = Study.of(path, out).paths.folder
    if not is_study(folder):
        raise RunFolderError(
            f"{path} was not run yet: there is no {folder}", f"Run it: stepscope study run {path}"
        )
    return folder


def code_remarks(paths: StudyPaths) -> list[str]:
    """Which files of the user's were not the same for all trials."""
    return [
        f"{model.rpartition(':')[0]} was changed between runs of the study: its trials are of "
        f"{len(versions)} versions. Delete the folders of those to be tried again"
        for model, versions in read_study_facts(paths).code.items()
        if len(versions) > 1
    ]
