"""Where the files of a workload are: the user's own, or generated ones, made now where needed.

No framework is imported here, so the files can be made before a trial begins and its time, memory
and page cache begin to count.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from stepscope.errors import BadWorkload
from stepscope.workloads.datasets import cifar, jpeg, video
from stepscope.workloads.spec import Workload

_PARTS = {"train", "val", "valid", "validation", "test"}


@dataclass(frozen=True)
class DataLocation:
    """A folder with data in it."""

    path: Path
    generated: bool


def locate(workload: Workload) -> DataLocation | None:
    """The folder that the data is read from; None where it is in memory."""
    name, given = workload.data_name, workload.data_path
    if name == "cifar100":
        real = cifar.find_cifar(given)
        return DataLocation(real or cifar.generated_cifar(), generated=real is None)
    if name not in ("jpeg", "video"):
        return None
    if given is not None:
        what = "images" if name == "jpeg" else "videos"
        return DataLocation(class_folders(given, what), generated=False)
    usual = jpeg.DEFAULT_COUNT if name == "jpeg" else video.DEFAULT_COUNT
    count = workload.samples or max(usual, workload.global_batch)  # at least enough for a step
    make = jpeg.generated_jpegs if name == "jpeg" else video.generated_clips
    return DataLocation(make(count), generated=True)


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
