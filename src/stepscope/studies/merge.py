"""Merges the studies of several machines into one, in which the machine is a factor."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from stepscope import __version__
from stepscope.errors import RunFolderError, StepscopeError
from stepscope.runs.files import (
    EVENTS_LIMIT,
    LINES_LIMIT,
    entries_in,
    open_regular,
    refuse_link,
)
from stepscope.runs.paths import slug
from stepscope.studies.folder import (
    StudyFacts,
    StudyPaths,
    read_study_facts,
    runner_of,
    write_study_facts,
)
from stepscope.studies.study import Study

_MAX_DEPTH = 8
"""Levels of folders in a study, which has four."""


def merge_studies(folders: Sequence[Path], out: Path) -> dict[str, int]:
    """Merge studies into `out`; return the number of trials by machine."""
    if len(folders) < 2:
        raise RunFolderError(
            "Merging needs at least two studies", "Pass the folders of two or more studies"
        )
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise RunFolderError("The same study was passed twice", "Pass each folder once")
    studies = [Study.in_folder(folder) for folder in folders]
    _check(studies, out)
    names = _machine_names(studies)
    places = [f"{number}-{slug(name)}" for number, name in enumerate(names, 1)]
    draft = out.with_name(f".{out.name}.{secrets.token_hex(8)}.tmp")
    try:
        for study, place in zip(studies, places, strict=True):
            _copy(study.paths.folder, StudyPaths(draft).machines / place)
        facts = StudyFacts(
            name=studies[0].design.name,
            merged=dict(zip(places, names, strict=True)),
            started=time.time(),
            stepscope=__version__,
        )
        write_study_facts(StudyPaths(draft), facts)
        trials: Counter[str] = Counter()
        for name, study in zip(names, studies, strict=True):
            trials[name] += study.scan().results.tried
        os.replace(draft, out)
    except OSError as error:
        raise StepscopeError(
            f"Cannot write the merged study to {out}: {error.strerror or error}",
            "Choose another folder with --out DIR",
        ) from None
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return dict(trials)


def parts_of(paths: StudyPaths) -> Iterator[tuple[str, Study]]:
    """Yield the studies of a folder with their machine; the name is empty if it is not merged."""
    merged = read_study_facts(paths).merged
    if not merged:
        yield "", Study.in_folder(paths.folder)
    for folder, machine in merged.items():
        refuse_link(paths.machines / folder)
        yield machine, Study.in_folder(paths.machines / folder)


def _check(studies: Sequence[Study], out: Path) -> None:
    if out.exists():
        hint = "Remove it, or choose another folder with --out DIR"
        raise RunFolderError(f"{out} already exists", hint)
    first, factors = studies[0].paths.folder, {each.name for each in studies[0].design.factors}
    for study in studies:
        folder = study.paths.folder
        if folder.resolve() in out.resolve().parents:
            raise RunFolderError(
                f"{out} is inside {folder}", "Choose a folder outside the studies with --out DIR"
            )
        if runner_of(study.paths) is not None:
            raise RunFolderError(
                f"The study in {folder} is running", "Wait until it has finished, or interrupt it"
            )
        if factors.isdisjoint(factor.name for factor in study.design.factors):
            raise RunFolderError(
                f"{folder} has no factor in common with {first}", "Merge studies of the same design"
            )


def _machine_names(studies: Sequence[Study]) -> list[str]:
    """Return the hardware of each study, with the host where several hosts have the same.

    Two studies of one host have the same machine.
    """
    facts = [read_study_facts(study.paths) for study in studies]
    named = [(each.machine or "unknown", each.host or "unknown host") for each in facts]
    hosts = Counter(name for name, _ in set(named))
    return [f"{name} ({host})" if hosts[name] > 1 else name for name, host in named]


def _copy(folder: Path, copy: Path) -> None:
    """Copy a study without its reports. The copy gets the permissions of the umask: a file of
    somebody else may be executable with the rights of its owner."""
    paths = StudyPaths(folder)
    not_copied = {path.name for path in (paths.lock, paths.now, paths.report.parent)}
    remaining = [(folder, copy)]
    while remaining:
        source, target = remaining.pop()
        if len(source.relative_to(folder).parts) > _MAX_DEPTH:
            hint = "The study is damaged: copy it again"
            raise RunFolderError(f"The folders in {folder} are nested too deeply", hint)
        target.mkdir(parents=True)
        for entry in entries_in(source, folder):
            refuse_link(source / entry.name)
            if entry.name in not_copied:
                continue
            if entry.is_dir(follow_symlinks=False):
                remaining.append((source / entry.name, target / entry.name))
            else:
                _copy_file(source / entry.name, target / entry.name, folder)


def _copy_file(path: Path, target: Path, root: Path) -> None:
    """Copy a file below `root`. Samples and events of this user become hard links where possible:
    finished run folders never change."""
    is_text = path.suffix in (".jsonl", ".json", ".yaml")
    with open_regular(path, LINES_LIMIT if is_text else EVENTS_LIMIT, root) as file:
        status = os.fstat(file.fileno())
        if not is_text and status.st_uid == os.geteuid() and not status.st_mode & 0o7111:
            with contextlib.suppress(OSError):
                # The opened file: somebody may replace the path by a link.
                descriptor = file.fileno()
                os.link(f"/proc/self/fd/{descriptor}", target, src_dir_fd=descriptor)
                return
        with target.open("xb") as copy:
            shutil.copyfileobj(file, copy)
        os.utime(target, ns=(status.st_atime_ns, status.st_mtime_ns))
