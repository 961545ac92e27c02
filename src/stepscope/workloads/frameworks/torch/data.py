"""Data sets as PyTorch takes them: decoding and augmentation are what people use, from torchvision.

    name        suits         what a sample is
    random      everything    a tensor that is held in memory
    jpeg        images        a file, decoded by Pillow, cropped and flipped at random
    cifar100    images        a row of the file, held in memory, cropped and flipped at random
    video       clips         a random window of a file, decoded by PyAV, cropped and flipped
    text        texts         random tokens, held in memory

A part of a data set (`samples`, `fraction`) is the beginning of a permutation that the seed fixes,
so that a smaller part lies within a larger one and all classes have their share.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset, Subset, TensorDataset

from stepscope.errors import BadWorkload
from stepscope.workloads.datasets import pagecache, video
from stepscope.workloads.datasets.cifar import Images, read_cifar
from stepscope.workloads.datasets.folders import labelled_files
from stepscope.workloads.datasets.locate import Place, locate
from stepscope.workloads.datasets.store import about_of
from stepscope.workloads.frameworks.torch.parts import Data, Shape
from stepscope.workloads.spec import Workload, option_name

DEFAULT_COUNT = 60_000
"""Of random samples: DT1 of the 2021 paper is as many images of 32×32."""
DEFAULT_BYTES = 1 << 30
"""Larger random samples are fewer, so that they take no more than this."""

_IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
_CIFAR100 = ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762))
_KINETICS = ((0.43216, 0.394666, 0.37645), (0.22803, 0.22145, 0.216989))
"""Mean and standard deviation of the colours."""

_SUITS = {
    "image": ("random", "jpeg", "cifar100"),
    "clip": ("random", "video"),
    "tokens": ("text", "random"),
}
_DEFAULTS = {"image": "random", "clip": "random", "tokens": "text"}
_KIND_NAMES = {"image": "images", "clip": "clips", "tokens": "texts"}
_IN_MEMORY = ("random", "text")
_COLD, _WARM = 0.01, 0.99
"""Up to which, and from which share in the page cache files are called so."""


def build_data(workload: Workload, shape: Shape) -> Data:
    """The data set that was asked for, in the shape that the model takes."""
    name = workload.data_name or _DEFAULTS[shape.kind]
    _check_suits(workload, shape, name)
    if name in _IN_MEMORY:
        return _in_memory(workload, shape, name)
    place = locate(workload)
    assert place is not None, name
    dataset, notes = _READERS[name](place.path, shape)
    return _data(workload, name, place, dataset, notes)


def prepare_cache(workload: Workload, data: Data) -> dict[str, Any]:
    """Put the files out of the page cache, or into it, and say what came of that.

    The state is what was measured afterwards, not what was asked for.
    """
    if workload.cache == "as-is":
        return {"state": "as-is"}
    if not data.files:
        return {"state": "none", "note": "this data is read from no file while it trains"}
    try:
        (pagecache.evict if workload.cache == "cold" else pagecache.warm)(data.files)
        share = pagecache.resident_share(data.files)
    except OSError as error:
        raise BadWorkload(f"{error.filename} cannot be read: {error.strerror}") from error
    state = _cache_state(share)
    facts = {"state": state, "resident_share": share}
    return facts if state == workload.cache else facts | {"note": _cache_note(workload, share)}


def _cache_state(share: float | None) -> str:
    if share is None:
        return "unknown"
    return "cold" if share <= _COLD else "warm" if share >= _WARM else "partly"


def _cache_note(workload: Workload, share: float | None) -> str:
    if share is None:
        return "the kernel tells only of the user's own files what is in memory"
    if workload.cache == "warm":
        return f"only {share:.0%} of the files stayed in memory"
    return f"{share:.0%} of the files is still in memory: others use it, or its disk is memory"


def _check_suits(workload: Workload, shape: Shape, name: str) -> None:
    suits = _SUITS[shape.kind]
    if name not in suits:
        raise BadWorkload(
            f"{workload.model} takes {_KIND_NAMES[shape.kind]}, and {name} has none",
            f"Data that suits it: {', '.join(suits)}",
        )
    if workload.data_path is not None and name in _IN_MEMORY:
        others = [f"--data {other}" for other in suits if other not in _IN_MEMORY]
        raise BadWorkload(
            f"{name} data is read from no folder, but --data-path was given",
            f"Give {' or '.join(others)}" if others else "Leave --data-path out",
        )


def _in_memory(workload: Workload, shape: Shape, name: str) -> Data:
    """Random tensors in one allocation. Only the part that is used is ever there."""
    sizes, bytes_each = _sample_sizes(shape)
    least = workload.global_batch
    of = workload.samples or max(min(DEFAULT_COUNT, DEFAULT_BYTES // bytes_each), least)
    count = _part_of(of, workload.fraction)
    _check_memory(count * bytes_each, workload)
    random = torch.Generator().manual_seed(workload.seed)
    inputs = (
        torch.randint(shape.vocabulary, (count, *sizes), generator=random)
        if shape.kind == "tokens"
        else torch.rand((count, *sizes), generator=random)
    )
    labels = torch.randint(shape.classes, (count,), generator=random)
    facts = {"name": name, "samples": count, "of": of, "source": "memory"}
    facts["bytes"] = inputs.nbytes + labels.nbytes
    if workload.samples is None and of != DEFAULT_COUNT:
        facts["note"] = f"{of:,} samples, not {DEFAULT_COUNT:,}, to take about 1 GiB"
    return Data(TensorDataset(inputs, labels), facts)


def _sample_sizes(shape: Shape) -> tuple[tuple[int, ...], int]:
    """The sizes of one sample, and its bytes."""
    if shape.kind == "tokens":
        return (shape.length,), 8 * shape.length
    image = (shape.size, shape.size)
    sizes = (3, *image) if shape.kind == "image" else (3, shape.frames, *image)
    return sizes, 4 * math.prod(sizes)


def _check_memory(needed: int, workload: Workload) -> None:
    """Before the machine begins to swap, or to kill. A trial's own limit is not looked at: to run
    into that is a result. Every rank has a copy, and another's may be there already."""
    memory = {
        name: 1024 * int(kib)
        for name, kib in re.findall(r"(\w+): +(\d+) kB", Path("/proc/meminfo").read_text())
    }
    free, total = memory.get("MemAvailable", needed), memory.get("MemTotal", needed)
    if needed > free or needed * workload.ranks > total:
        copies = f" in each of {workload.ranks} ranks" if workload.ranks > 1 else ""
        raise BadWorkload(
            f"This data takes {_gib(needed)}{copies}, and the machine has {_gib(free)} free "
            f"of {_gib(total)}",
            "Give fewer --samples, a --fraction of them, or smaller ones",
        )


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"


Read = tuple[Dataset[Any], list[str]]
"""A data set that reads files, and what is to be noted of it."""


def _data(
    workload: Workload, name: str, place: Place, dataset: Dataset[Any], notes: list[str]
) -> Data:
    """The part that is used of what is in a folder, described."""
    of, all_of = workload.samples, len(dataset)  # type: ignore[arg-type]
    if of is not None and of > all_of:
        raise BadWorkload(
            f"{option_name('samples')} {of} is more than there is in {place.path.name}: {all_of}",
            "Give fewer, or leave it out",
        )
    of = of or all_of
    chosen = _chosen(all_of, _part_of(of, workload.fraction), workload.seed)
    facts: dict[str, Any] = {
        "name": name,
        "samples": len(chosen),
        "of": of,
        "source": "generated" if place.generated else "folder",
        "path": place.path.name,
    }
    if size := about_of(place.path).get("bytes"):
        facts["bytes"] = size
    if notes:
        facts["note"] = "; ".join(notes)
    _try_one(dataset, chosen[0])
    files = _files(dataset, chosen) if workload.cache != "as-is" else ()
    return Data(dataset if len(chosen) == all_of else Subset(dataset, chosen), facts, files)


def _try_one(dataset: Dataset[Any], index: int) -> None:
    """What cannot be read at all is told here, rather than by a worker, and no seed is spent."""
    with torch.random.fork_rng(devices=[]):
        dataset[index]


def _part_of(count: int, fraction: float) -> int:
    return max(1, round(count * fraction))


def _chosen(count: int, kept: int, seed: int) -> range | list[int]:
    if kept == count:
        return range(count)
    random = torch.Generator().manual_seed(seed)
    chosen: list[int] = torch.randperm(count, generator=random)[:kept].tolist()
    return chosen


def _files(dataset: Any, chosen: range | list[int]) -> tuple[Path, ...]:
    """Listed only where the page cache is to be prepared: a million paths take memory."""
    samples = getattr(dataset, "samples", ())
    return tuple(Path(samples[index][0]) for index in chosen) if samples else ()


def _jpeg(folder: Path, shape: Shape) -> Read:
    from torchvision.datasets import ImageFolder
    from torchvision.transforms import v2

    transform = v2.Compose(
        [
            v2.RandomResizedCrop(shape.size, antialias=True),
            v2.RandomHorizontalFlip(),
            v2.ToImage(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(*_IMAGENET),
        ]
    )
    try:
        images = ImageFolder(str(folder), transform, partial(_within, shape.classes), _open_image)
    except OSError as error:
        raise BadWorkload(
            f"{folder} cannot be used: {error}", "Every folder in it is a class, with images"
        ) from error
    return images, _too_many(len(images.classes), shape.classes)


def _open_image(path: str) -> Any:
    """As ImageFolder does it; a file that is no image is named."""
    from torchvision.datasets.folder import pil_loader

    try:
        return pil_loader(path)
    except Exception as error:  # Pillow raises whatever its decoders do
        raise BadWorkload(
            f"{path} cannot be read as an image: {error}",
            "Take it out of the folder, or put a whole one there",
        ) from error


def _within(classes: int, label: int) -> int:
    return label % classes


def _too_many(classes: int, told_apart: int) -> list[str]:
    if classes <= told_apart:
        return []
    return [f"its {classes} classes are taken modulo {told_apart}"]


class Pictures(Dataset[Any]):
    """Images that are held in memory as bytes, augmented as they are taken."""

    def __init__(self, images: Images, classes: int, transform: Callable[[Any], Any]) -> None:
        self._pixels, self._labels = images.pixels, images.labels % classes
        self._transform = transform

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        from PIL import Image

        image = Image.fromarray(self._pixels[index])
        return self._transform(image), int(self._labels[index])


def _cifar(folder: Path, shape: Shape) -> Read:
    from torchvision.transforms import v2

    images = read_cifar(folder)
    side = images.pixels.shape[1]
    resize = [v2.Resize(shape.size, antialias=True)] if shape.size != side else []
    transform = v2.Compose(
        [
            v2.RandomCrop(side, padding=4),
            v2.RandomHorizontalFlip(),
            *resize,
            v2.ToImage(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(*_CIFAR100),
        ]
    )
    notes = _too_many(int(images.labels.max()) + 1, shape.classes)
    return Pictures(images, shape.classes, transform), notes


class Clips(Dataset[Any]):
    """Video files, of which a random window is decoded each time, as colour × time × image."""

    def __init__(
        self,
        samples: list[tuple[str, int]],
        frames: int,
        classes: int,
        transform: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        self.samples = samples
        self._frames, self._classes, self._transform = frames, classes, transform

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        path, label = self.samples[index]
        window = video.read_window(path, self._frames, _any_of)
        clip = self._transform(torch.from_numpy(window).permute(0, 3, 1, 2))
        return clip.permute(1, 0, 2, 3), label % self._classes


def _any_of(count: int) -> int:
    """From torch's generator, which the loader seeds differently in each worker."""
    return int(torch.randint(count, ()))


def _video(folder: Path, shape: Shape) -> Read:
    from torchvision.transforms import v2

    samples = labelled_files(folder, video.SUFFIXES)
    if not samples:
        raise BadWorkload(
            f"There is no video in the class folders of {folder}",
            f"It takes files that end in {', '.join(video.SUFFIXES)}",
        )
    resized = [round(side * shape.size / 112) for side in (128, 171)]
    transform = v2.Compose(
        [
            v2.Resize(resized, antialias=True),
            v2.RandomCrop(shape.size),
            v2.RandomHorizontalFlip(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(*_KINETICS),
        ]
    )
    classes = max(label for _, label in samples) + 1
    return Clips(samples, shape.frames, shape.classes, transform), _too_many(classes, shape.classes)


_READERS: dict[str, Callable[[Path, Shape], Read]] = {
    "jpeg": _jpeg,
    "cifar100": _cifar,
    "video": _video,
}
