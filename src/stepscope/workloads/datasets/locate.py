"""The files of a workload: the user's, or generated ones, which are generated if necessary.

No framework is imported here, so that files can be generated before a trial starts and before its
time, memory and page cache are measured.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from stepscope.errors import WorkloadError
from stepscope.workloads.datasets import cifar, jpeg, video
from stepscope.workloads.spec import Workload

_SPLITS = {"train", "val", "valid", "validation", "test"}


@dataclass(frozen=True)
class DataLocation:
    path: Path
    generated: bool


def locate(workload: Workload) -> DataLocation | None:
    """The folder of the data, or None if the data is in memory."""
    name, given = workload.data_name, workload.data_path
    if name == "cifar100":
        real = cifar.find_cifar(given)
        return DataLocation(real or cifar.generated_cifar(), generated=real is None)
    if name not in ("jpeg", "video"):
        return None
    if given is not None:
        what = "images" if name == "jpeg" else "videos"
        return DataLocation(class_folders(given, what), generated=False)
    default = jpeg.DEFAULT_COUNT if name == "jpeg" else video.DEFAULT_COUNT
    count = workload.samples or max(default, workload.global_batch)  # enough for one step
    generate = jpeg.generated_jpegs if name == "jpeg" else video.generated_clips
    return DataLocation(generate(count), generated=True)


def class_folders(given: str, what: str) -> Path:
    """The folder that contains the class folders: the given one, or its `train`.

    `what` names the content of the class folders in errors.
    """
    expected = f"Use a folder that contains a folder of {what} for each class"
    path = Path(given).expanduser()
    if not path.exists():
        raise WorkloadError(f"No such folder: {path}", expected)
    if not path.is_dir():
        raise WorkloadError(f"{path} is a file", expected)
    try:
        folders = _folders(path)
        if "train" in folders and folders <= _SPLITS and _folders(path / "train"):
            return path / "train"
    except OSError as error:
        raise WorkloadError(f"Cannot read {path}: {error.strerror}", expected) from error
    if not folders:
        raise WorkloadError(f"{path} contains no folders", expected)
    return path


def labeled_files(root: Path, suffixes: tuple[str, ...]) -> list[tuple[str, int]]:
    """The files in each class folder with the number of their class, in a fixed order."""
    return [
        (os.path.join(parent, name), label)
        for label, folder in enumerate(sorted(_folders(root)))
        for parent, _, names in sorted(os.walk(root / folder))
        for name in sorted(names)
        if name.lower().endswith(suffixes)
    ]


def _folders(path: Path) -> set[str]:
    return {entry.name for entry in os.scandir(path) if entry.is_dir()}
