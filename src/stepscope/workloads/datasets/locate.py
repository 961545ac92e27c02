"""Where the files of a workload are: the user's own, or generated ones, made now where needed.

No framework is imported here, so the files can be made before a trial begins and its time, memory
and page cache begin to count.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from stepscope.workloads.datasets import cifar, jpeg, video
from stepscope.workloads.datasets.folders import class_folders
from stepscope.workloads.spec import Workload


@dataclass(frozen=True)
class Place:
    """A folder with data in it."""

    path: Path
    generated: bool


def locate(workload: Workload) -> Place | None:
    """The folder that the data is read from; None where it is in memory."""
    find = _FINDERS.get(workload.data_name)
    return find(workload) if find else None


def _jpeg(workload: Workload) -> Place:
    if workload.data_path is not None:
        return Place(class_folders(workload.data_path, "images"), generated=False)
    return Place(jpeg.generated_jpegs(_count(workload, jpeg.DEFAULT_COUNT)), generated=True)


def _cifar(workload: Workload) -> Place:
    real = cifar.find_cifar(workload.data_path)
    return Place(real or cifar.generated_cifar(), generated=real is None)


def _video(workload: Workload) -> Place:
    if workload.data_path is not None:
        return Place(class_folders(workload.data_path, "videos"), generated=False)
    return Place(video.generated_clips(_count(workload, video.DEFAULT_COUNT)), generated=True)


_FINDERS: dict[str, Callable[[Workload], Place]] = {
    "jpeg": _jpeg,
    "cifar100": _cifar,
    "video": _video,
}


def _count(workload: Workload, default: int) -> int:
    """As many as were asked for; unsaid, at least enough for a step."""
    return workload.samples or max(default, workload.global_batch)
