"""Storage of generated data, which is generated once and is either complete or absent.

$STEPSCOPE_DATA, else $XDG_CACHE_HOME/stepscope/data, else ~/.cache/stepscope/data
  <name>/               complete data; about.json describes it
  .<name>.making/       data that is being generated, or was when the process was killed
  .<name>.lock          held while data is generated, so that a second process waits for the first
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepscope.errors import WorkloadError
from stepscope.records.codec import to_json

VARIABLE = "STEPSCOPE_DATA"
ABOUT = "about.json"
_ELSEWHERE = f"Set {VARIABLE} to a writable folder with enough space"
_FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True)
class Recipe:
    """Description of the data to generate. Different recipes have different names."""

    name: str
    description: str
    version: int
    """Version of the generator."""
    count: int
    estimated_bytes: int = 0


def data_home() -> Path:
    """The folder for generated data."""
    chosen = os.environ.get(VARIABLE)
    if chosen:
        return Path(chosen).expanduser().absolute()
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    try:
        return Path(cache).expanduser().absolute() / "stepscope" / "data"
    except RuntimeError:
        raise WorkloadError(
            "Generated data cannot be stored: there is no home folder", _ELSEWHERE
        ) from None


def reuse_or_generate(recipe: Recipe, generate: Callable[[Path], object]) -> Path:
    """Return the folder of the recipe, and generate it if it is missing or incomplete.

    `generate` fills a temporary folder, which is renamed when it is complete. If several processes
    (ranks, trials) need the data at the same time, one generates it and the rest wait.
    """
    folder = data_home() / recipe.name
    if is_complete(folder):
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        # The kernel releases the lock when the process exits, for whatever reason.
        with (folder.parent / f".{folder.name}.lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not is_complete(folder):
                _generate(folder, recipe, generate)
    except OSError as error:
        reason = error.strerror or str(error)
        if error.errno in _FULL:
            mib = recipe.estimated_bytes / 2**20
            reason = f"no space left ({mib:,.0f} MiB needed)" if mib else "no space left"
        raise WorkloadError(
            f"Generated data ({recipe.description}) cannot be stored in {folder.parent}: {reason}",
            _ELSEWHERE,
        ) from error
    return folder


def is_complete(folder: Path) -> bool:
    """Whether the folder contains everything that was generated."""
    about = read_about(folder)
    try:
        return bool(about) and _contents(folder) == (about.get("files"), about.get("bytes"))
    except OSError:  # another process is replacing it
        return False


def read_about(folder: Path) -> dict[str, Any]:
    """The description in a folder; empty if it was not generated here, or not completely."""
    try:
        about = json.loads((folder / ABOUT).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return about if isinstance(about, dict) else {}


def complete_folders(prefix: str) -> list[Path]:
    """Complete folders whose names start with the prefix, largest first."""
    folders = [path for path in data_home().glob(f"{prefix}*") if is_complete(path)]
    return sorted(folders, key=lambda path: -int(read_about(path).get("count", 0)))


def _generate(folder: Path, recipe: Recipe, generate: Callable[[Path], object]) -> None:
    """Called with the lock held: a temporary folder is from a process that was killed."""
    making = folder.with_name(f".{folder.name}.making")
    if making.exists():
        shutil.rmtree(making)
    if shutil.disk_usage(folder.parent).free < recipe.estimated_bytes:  # do not fill the disk
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    making.mkdir()
    try:
        generate(making)
        files, size = _contents(making)
        about = {**to_json(recipe), "made_by": "stepscope", "files": files, "bytes": size}
        (making / ABOUT).write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
        if folder.exists():
            shutil.rmtree(folder)
        making.rename(folder)
    finally:
        shutil.rmtree(making, ignore_errors=True)


def _contents(folder: Path) -> tuple[int, int]:
    """Number and bytes of all files, without the description."""
    sizes = [
        os.stat(os.path.join(parent, name)).st_size
        for parent, _, names in os.walk(folder)
        for name in names
        if name != ABOUT
    ]
    return len(sizes), sum(sizes)
