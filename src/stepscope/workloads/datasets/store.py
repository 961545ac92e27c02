"""Where generated data lives, and how it is made once: whole or not at all.

$STEPSCOPE_DATA, else $XDG_CACHE_HOME/stepscope/data, else ~/.cache/stepscope/data
  <name>/               complete: its about.json says what it is, and how much
  .<name>.making/       being made, or left by a maker that was killed
  .<name>.lock          held while it is made, so that a second process waits for the first
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

from stepscope.errors import BadWorkload
from stepscope.records.codec import to_json

VARIABLE = "STEPSCOPE_DATA"
ABOUT = "about.json"
_ELSEWHERE = f"Set {VARIABLE} to a folder with room that you may write"
_FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True)
class Recipe:
    """What is to be made. The name says it all: another recipe has another name."""

    name: str
    what: str
    version: int
    """Of the generator."""
    count: int
    bytes_about: int = 0
    """Room it will take, roughly."""


def data_home() -> Path:
    """The folder that holds generated data."""
    chosen = os.environ.get(VARIABLE)
    if chosen:
        return Path(chosen).expanduser().absolute()
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    try:
        return Path(cache).expanduser().absolute() / "stepscope" / "data"
    except RuntimeError:
        raise BadWorkload("There is no home folder to keep generated data in", _ELSEWHERE) from None


def reuse_or_make(recipe: Recipe, make: Callable[[Path], object]) -> Path:
    """The folder of this recipe; `make` fills one where none is complete.

    It fills a folder beside, which takes its place when it is complete. Of several processes that
    ask at once (ranks, trials) one makes it, and the others wait.
    """
    folder = data_home() / recipe.name
    if is_complete(folder):
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        # The lock goes with the process, however that ends; the file stays.
        with (folder.parent / f".{folder.name}.lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not is_complete(folder):
                _make(folder, recipe, make)
    except OSError as error:
        reason = error.strerror or str(error)
        if error.errno in _FULL:
            needs = f" ({recipe.bytes_about / 1e9:.2g} GB)" if recipe.bytes_about else ""
            reason = f"there is no room for it{needs}"
        raise BadWorkload(
            f"{recipe.what} cannot be kept in {folder.parent}: {reason}", _ELSEWHERE
        ) from error
    return folder


def is_complete(folder: Path) -> bool:
    """Whether all is there that was there when it was made."""
    about = about_of(folder)
    try:
        return bool(about) and _contents(folder) == (about.get("files"), about.get("bytes"))
    except OSError:  # somebody is replacing it just now
        return False


def about_of(folder: Path) -> dict[str, Any]:
    """What a folder says of itself; nothing where it was not made here, or not to the end."""
    try:
        about = json.loads((folder / ABOUT).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return about if isinstance(about, dict) else {}


def made_before(prefix: str) -> list[Path]:
    """Complete folders whose names begin so, largest first."""
    found = [path for path in data_home().glob(f"{prefix}*") if is_complete(path)]
    return sorted(found, key=lambda path: -int(about_of(path).get("count", 0)))


def _make(folder: Path, recipe: Recipe, make: Callable[[Path], object]) -> None:
    """Only whoever holds the lock is here: what lies about is of makers that are dead."""
    making = folder.with_name(f".{folder.name}.making")
    if making.exists():
        shutil.rmtree(making)
    if shutil.disk_usage(folder.parent).free < recipe.bytes_about:  # before it is full for all
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    making.mkdir()
    try:
        make(making)
        files, size = _contents(making)
        about = {**to_json(recipe), "made_by": "stepscope", "files": files, "bytes": size}
        (making / ABOUT).write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
        if folder.exists():
            shutil.rmtree(folder)
        making.rename(folder)
    finally:
        shutil.rmtree(making, ignore_errors=True)


def _contents(folder: Path) -> tuple[int, int]:
    """Files and their bytes, in all folders below, without what they say of themselves."""
    sizes = [
        os.stat(os.path.join(place, name)).st_size
        for place, _, names in os.walk(folder)
        for name in names
        if name != ABOUT
    ]
    return len(sizes), sum(sizes)
