"""Class folders of a user: found, or an error that says what was expected."""

from __future__ import annotations

import os
from pathlib import Path

from stepscope.errors import BadWorkload

_PARTS = {"train", "val", "valid", "validation", "test"}


def class_folders(given: str, what: str) -> Path:
    """The folder whose folders are the classes: the given one, or its `train`.

    `what` is what the class folders hold, for the error.
    """
    wanted = f"It takes a folder that has a folder of {what} for each class"
    place = Path(given).expanduser()
    if not place.exists():
        raise BadWorkload(f"There is no folder {place}", wanted)
    if not place.is_dir():
        raise BadWorkload(f"{place} is a file", wanted)
    try:
        inside = _folders(place)
        if "train" in inside and inside <= _PARTS and _folders(place / "train"):
            return place / "train"
    except OSError as error:
        raise BadWorkload(f"{place} cannot be read: {error.strerror}", wanted) from error
    if not inside:
        raise BadWorkload(f"{place} has no folders in it", wanted)
    return place


def labelled_files(root: Path, suffixes: tuple[str, ...]) -> list[tuple[str, int]]:
    """The files below each class folder, with the number of their class, in a fixed order."""
    return [
        (os.path.join(place, name), label)
        for label, folder in enumerate(sorted(_folders(root)))
        for place, _, names in sorted(os.walk(root / folder))
        for name in sorted(names)
        if name.lower().endswith(suffixes)
    ]


def _folders(place: Path) -> set[str]:
    return {entry.name for entry in os.scandir(place) if entry.is_dir()}
