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
        return self if self.lacked is None else replace(self, lacked=None)

    @cached_property
    def points(self) -> DesignPoints:
        return points_of(self.design)

    @cached_property
    def reference(self) -> TrialSpec | None:
        """The reference trial: the one that blocks began with so far, unless the design names
        another or no longer has it."""
        if not self.design.with_reference or not self.grid.planned:
            return None
        chosen = default_reference(self.design, self.points, self._lacks)
        if self.design.reference:
            return chosen
        used = Counter(result.key for result in self.known.results if result.is_reference)
        so_far = [key for key, _ in used.most_common(1)]
        return next((spec for spec in self.points.chosen if spec.key in so_far), chosen)

    @cached_property
    def here(self) -> MachineInfo:
        # Loads the driver's library, which only who runs the study needs.
        from stepscope.studies.machine import MachineInfo

        return MachineInfo.look()

    @cached_property
    def grid(self) -> GridPlanner:
        return GridPlanner(self.design, self.points.chosen, self._lacks)

    def grid_to_run(self) -> GridPlanner:
        """The planner of the design; BadDesign if this machine can run nothing of it."""
        if not self.grid.planned:
            raise BadDesign(
                f"Nothing of {self.design.name} can be tried on this machine: "
                f"{self.grid.skipped(Results())[0].why}",
                f"See all reasons: stepscope study plan {self.design.file or ''}".rstrip(),
            )
        return self.grid

    def _lacks(self, spec: TrialSpec) -> str:
        return self.here.lacks(spec) if self.lacked is None else self.lacked.get(spec.key, "")

    @cached_property
    def found(self) -> StudyScan:
        if not self.paths.folder.is_dir():
            return StudyScan([], [], set(), [], [])

        def measured(folder: Path, blank: Result) -> Result:
            # Run folders that the ledger does not have are few: loaded only when needed.
            from stepscope.studies.measure import measure_trial

            return measure_trial(folder, blank).result

        return look(self.paths, measured)

    @cached_property
    def known(self) -> Results:
        known, found = Results(self.design.reruns), self.found
        for result in sorted(found.results, key=lambda result: (result.began, result.place)):
            known.add(result)
        for attempt in found.attempts:
            known.begun(attempt)
        known.elsewhere = {(a.key, a.repeat) for a in found.running if not a.is_reference}
        return known

    def look_again(self) -> None:
        """Forget what was read of its folder: it is read anew."""
        for name in ("found", "known"):
            self.__dict__.pop(name, None)

    @property
    def was_looked_at(self) -> bool:
        """Whether what is known of it was read: it is ours then, if it is run."""
        return "known" in self.__dict__

    def skipped(self) -> list[SkippedPoint]:
        """What is not tried: by the design, by this machine, by what was found out."""
        return [*self.points.skipped, *self.grid.skipped(self.known)]


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
