"""A study as a whole: its design and its folder brought together."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepscope.errors import RunFolderError
from stepscope.runs.paths import slug
from stepscope.studies.design import Design, Left, Points
from stepscope.studies.designfile import read_design
from stepscope.studies.folder import (
    DEFAULT_FOLDER,
    FORMAT,
    Found,
    StudyPaths,
    is_study,
    look,
    runner_of,
)
from stepscope.studies.grid import Grid
from stepscope.studies.known import Known
from stepscope.studies.points import default_sentinel, points_of
from stepscope.studies.result import Result
from stepscope.studies.spec import Spec

if TYPE_CHECKING:
    from stepscope.studies.here import Here


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
        file = Path(str(told.get("file") or paths.design))
        name = str(told.get("name") or design.name)
        lacked = told.get("lacked")
        return cls(
            replace(design, name=name, file=file),
            paths,
            lacked if isinstance(lacked, dict) else {},
        )

    def to_run(self) -> Study:
        """As it would be run now: with what this machine has, whatever another one lacked."""
        return self if self.lacked is None else replace(self, lacked=None)

    @cached_property
    def points(self) -> Points:
        return points_of(self.design)

    @cached_property
    def sentinel(self) -> Spec | None:
        """What blocks begin with: the one they began with so far, unless the design says another
        or cannot have it any more."""
        if not self.design.with_sentinel or not self.grid.planned:
            return None
        chosen = default_sentinel(self.design, self.points, self._lacks)
        return chosen if self.design.sentinel else (self._sentinel_so_far() or chosen)

    def _sentinel_so_far(self) -> Spec | None:
        used = Counter(result.key for result in self.known.results if result.role == "sentinel")
        for key, _ in used.most_common(1):
            return next((spec for spec in self.points.chosen if spec.key == key), None)
        return None

    @cached_property
    def here(self) -> Here:
        from stepscope.studies.here import Here  # the driver's library: only who runs needs it

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
        return look(self.paths, _measured)

    @cached_property
    def known(self) -> Known:
        return known_of(self.found, self.design)

    def look_again(self) -> None:
        """Forget what was read of its folder: it is read anew."""
        for name in ("found", "known"):
            self.__dict__.pop(name, None)

    @property
    def was_looked_at(self) -> bool:
        """Whether what is known of it was read: it is ours then, if it is run."""
        return "known" in self.__dict__

    @property
    def runner(self) -> Mapping[str, Any] | None:
        """Who runs it now."""
        return runner_of(self.paths)

    def skipped(self) -> list[Left]:
        """What is not tried: by the design, by this machine, by what was found out."""
        return [*self.points.skipped, *self.grid.skipped(self.known)]


def _measured(folder: Path, blank: Result) -> Result:
    """Run folders that the ledger does not have are few: what reads them is loaded when needed."""
    from stepscope.studies.measure import result_of

    return result_of(folder, blank)


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


def known_of(found: Found, design: Design) -> Known:
    known = Known(design.reruns)
    for result in sorted(found.results, key=lambda result: (result.began, result.place)):
        known.add(result)
    for attempt in found.attempts:
        known.begun(attempt.key, attempt.role, attempt.repeat, attempt.number)
    known.elsewhere = {(a.key, a.repeat) for a in found.running if a.role == "trial"}
    return known


class DamagedStudy(RunFolderError):
    """A study.json that cannot be read: running the study makes it anew."""


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
        raise DamagedStudy(
            f"{paths.study_json} cannot be read: {error}",
            "Run the study again with its design file: its trials are still there",
        ) from None
    if not isinstance(told, dict) or not isinstance(told.get("format"), int):
        raise DamagedStudy(
            f"{paths.study_json} does not describe a study",
            "Run the study again with its design file: its trials are still there",
        )
    if told["format"] > FORMAT:
        raise RunFolderError(
            f"{paths.study_json} has format {told['format']}, and this stepscope reads up to "
            f"{FORMAT}",
            "Upgrade with: pip install -U stepscope",
        )
    return told


def code_remarks(paths: StudyPaths) -> list[str]:
    """Which files of the user's were not the same for all trials."""
    code = facts_of(paths).get("code")
    return [
        f"{model.rpartition(':')[0]} was changed between runs of the study: its trials are of "
        f"{len(versions)} versions. Delete the folders of those to be tried again"
        for model, versions in (code.items() if isinstance(code, dict) else ())
        if isinstance(versions, list) and len(versions) > 1
    ]


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
