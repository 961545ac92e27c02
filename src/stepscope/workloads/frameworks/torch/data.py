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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset, Subset, TensorDataset

from stepscope.errors import BadWorkload
from stepscope.sensors import procfs
from stepscope.workloads.datasets import pagecache, video
from stepscope.workloads.datasets.cifar import Images, read_cifar
from stepscope.workloads.datasets.locate import labelled_files, locate
from stepscope.workloads.datasets.store import about_of
from stepscope.workloads.frameworks.torch.models import Shape
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
"""The first of them is taken where none is named."""
_KIND_NAMES = {"image": "images", "clip": "clips", "tokens": "texts"}
_IN_MEMORY = ("random", "text")
_COLD, _WARM = 0.01, 0.99
"""Up to which, and from which share in the page cache files are called so."""


@dataclass(frozen=True)
class Data:
    """A data set, what can be said of it, and the files that it reads."""

    dataset: Dataset[Any]
    facts: dict[str, Any] = field(default_factory=dict)
    """For the record: name, samples, where from, generated or not."""
    files: tuple[Path, ...] = ()
    collate: Callable[[list[Any]], Any] | None = None


def build_data(workload: Workload, shape: Shape) -> Data:
    suits = _SUITS[shape.kind]
    name = workload.data_name or suits[0]
    if name not in suits:
        raise BadWorkload(
            f"{workload.model} takes {_KIND_NAMES[shape.kind]}, and {name} has none",
            f"Data that suits it: {', '.join(suits)}",
        )
    if name in _IN_MEMORY:
        if workload.data_path is not None:
            others = [f"--data {other}" for other in suits if other not in _IN_MEMORY]
            raise BadWorkload(
                f"{name} data is read from no folder, but --data-path was given",
                f"Give {' or '.join(others)}" if others else "Leave --data-path out",
            )
        return _in_memory(workload, shape, name)
    place = locate(workload)
    assert place is not None, name
    read = {"jpeg": _jpeg, "cifar100": _cifar, "video": _video}[name]
    dataset, classes = read(place.path, shape)
    all_of = len(dataset)  # type: ignore[arg-type]
    of = workload.samples or all_of
    if of > all_of:
        raise BadWorkload(
            f"{option_name('samples')} {of} is more than there is in {place.path.name}: {all_of}",
            "Give fewer, or leave it out",
        )
    chosen = choose_part(all_of, of, workload)
    facts: dict[str, Any] = {"name": name, "samples": len(chosen), "of": of}
    facts["source"] = "generated" if place.generated else "folder"
    facts["path"] = place.path.name
    if size := about_of(place.path).get("bytes"):
        facts["bytes"] = size
    if classes > shape.classes:
        facts["note"] = f"its {classes} classes are taken modulo {shape.classes}"
    with torch.random.fork_rng(devices=[]):
        dataset[chosen[0]]  # what cannot be read is told here, not by a worker; no seed is spent
    files: tuple[Path, ...] = ()
    samples = getattr(dataset, "samples", ())
    if samples and workload.cache != "as-is":  # else left out: a million paths take memory
        files = tuple(Path(samples[index][0]) for index in chosen)
    return Data(dataset if len(chosen) == all_of else Subset(dataset, chosen), facts, files)


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
    if share is None:
        note = "the kernel tells only of the user's own files what is in memory"
        return {"state": "unknown", "resident_share": None, "note": note}
    state = "cold" if share <= _COLD else "warm" if share >= _WARM else "partly"
    facts = {"state": state, "resident_share": share}
    if state == workload.cache:
        return facts
    if workload.cache == "warm":
        return facts | {"note": f"only {share:.0%} of the files stayed in memory"}
    in_use = "others use it, or its disk is memory"
    return facts | {"note": f"{share:.0%} of the files is still in memory: {in_use}"}


def _in_memory(workload: Workload, shape: Shape, name: str) -> Data:
    is_text = shape.kind == "tokens"
    sizes = shape.batch_sizes(1)[1:]
    bytes_each = math.prod(sizes) * (8 if is_text else 4)
    least = workload.global_batch
    of = workload.samples or max(min(DEFAULT_COUNT, DEFAULT_BYTES // bytes_each), least)
    count = max(1, round(of * workload.fraction))
    # Refused before the machine begins to swap, or to kill. A trial's own limit is not looked at:
    # to run into that is a result. Every rank has a copy, and another's may be there already.
    needed, memory = count * bytes_each, procfs.meminfo()
    free, total = memory.available or needed, memory.total or needed
    if needed > free or needed * workload.ranks > total:
        sizes_text = [f"{size / 2**30:.1f} GiB" for size in (needed, free, total)]
        copies = f" in each of {workload.ranks} ranks" if workload.ranks > 1 else ""
        raise BadWorkload(
            f"This data takes {sizes_text[0]}{copies}, and the machine has {sizes_text[1]} free "
            f"of {sizes_text[2]}",
            "Give fewer --samples, a --fraction of them, or smaller ones",
        )
    random = torch.Generator().manual_seed(workload.seed)
    inputs = (
        torch.randint(shape.vocabulary, (count, *sizes), generator=random)
        if is_text
        else torch.rand((count, *sizes), generator=random)
    )
    labels = torch.randint(shape.classes, (count,), generator=random)
    facts = {"name": name, "samples": count, "of": of, "source": "memory"}
    facts["bytes"] = inputs.nbytes + labels.nbytes
    if workload.samples is None and of != DEFAULT_COUNT:
        facts["note"] = f"{of:,} samples, not {DEFAULT_COUNT:,}, to take about 1 GiB"
    return Data(TensorDataset(inputs, labels), facts)


Read = tuple[Dataset[Any], int]
"""A data set that reads files, and how many classes the files have."""


def choose_part(count: int, of: int, workload: Workload) -> Sequence[int]:
    """Which of `count` samples are used, where `of` them were asked for: the beginning of a
    permutation, so that a smaller part lies within a larger one."""
    kept = max(1, round(of * workload.fraction))
    if kept == count:
        return range(count)
    random = torch.Generator().manual_seed(workload.seed)
    chosen: list[int] = torch.randperm(count, generator=random)[:kept].tolist()
    return chosen


def _transform(colours: tuple[tuple[float, ...], tuple[float, ...]], *augment: Any) -> Any:
    from torchvision.transforms import v2

    steps = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(*colours)]
    return v2.Compose([*augment, *steps])


def _jpeg(folder: Path, shape: Shape) -> Read:
    from torchvision.datasets import ImageFolder
    from torchvision.transforms import v2

    crop = v2.RandomResizedCrop(shape.size, antialias=True)
    transform = _transform(_IMAGENET, crop, v2.RandomHorizontalFlip())
    try:
        images = ImageFolder(str(folder), transform, partial(_within, shape.classes), _open_image)
    except OSError as error:
        raise BadWorkload(
            f"{folder} cannot be used: {error}", "Every folder in it is a class, with images"
        ) from error
    return images, len(images.classes)


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
    crop = v2.RandomCrop(side, padding=4)
    transform = _transform(_CIFAR100, crop, v2.RandomHorizontalFlip(), *resize)
    return Pictures(images, shape.classes, transform), int(images.labels.max()) + 1


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
    augment = [v2.Resize(resized, antialias=True), v2.RandomCrop(shape.size)]
    augment += [v2.RandomHorizontalFlip(), v2.ToDtype(torch.float32, scale=True)]
    transform = v2.Compose([*augment, v2.Normalize(*_KINETICS)])
    classes = max(label for _, label in samples) + 1
    return Clips(samples, shape.frames, shape.classes, transform), classes
