"""PyTorch datasets by name, with the usual decoding and augmentation of torchvision.

    name        for           a sample is
    random      all models    a tensor in memory
    jpeg        images        a file, decoded by Pillow, randomly cropped and flipped
    cifar100    images        an image in memory, randomly cropped and flipped
    video       clips         a random window of a file, decoded by PyAV, cropped and flipped
    text        texts         random tokens in memory

A part of a dataset (`samples`, `fraction`) is the beginning of a permutation that depends only on
the seed. A smaller part is thus a subset of a larger one, and all classes are represented.
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

from stepscope.errors import WorkloadError
from stepscope.sensors import procfs
from stepscope.workloads.datasets import pagecache, video
from stepscope.workloads.datasets.cifar import Images, read_cifar
from stepscope.workloads.datasets.locate import labeled_files, locate
from stepscope.workloads.datasets.store import read_about
from stepscope.workloads.frameworks.torch.models import Shape
from stepscope.workloads.spec import Workload

DEFAULT_COUNT = 60_000
"""Number of random samples. DT1 of Torres et al. 2021 has this many 32×32 images."""
DEFAULT_BYTES = 1 << 30
"""Limit of the default random data: there are fewer samples if they are large."""

_IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
_CIFAR100 = ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762))
_KINETICS = ((0.43216, 0.394666, 0.37645), (0.22803, 0.22145, 0.216989))
"""Mean and standard deviation of each color channel."""

_DATA_FOR = {
    "image": ("random", "jpeg", "cifar100"),
    "clip": ("random", "video"),
    "tokens": ("text", "random"),
}
"""Datasets for each kind of input, the default first."""
_KIND_NAMES = {"image": "images", "clip": "clips", "tokens": "texts"}
_IN_MEMORY = ("random", "text")
_COLD, _WARM = 0.01, 0.99
"""Files count as cold up to the first share of cached pages, and as warm from the second."""


@dataclass(frozen=True)
class Data:
    """A dataset with its facts and the files that it reads."""

    dataset: Dataset[Any]
    facts: dict[str, Any] = field(default_factory=dict)
    """Name, number of samples, source and size, for the record of the trial."""
    files: tuple[Path, ...] = ()
    collate: Callable[[list[Any]], Any] | None = None


def build_data(workload: Workload, shape: Shape) -> Data:
    valid = _DATA_FOR[shape.kind]
    name = workload.data_name or valid[0]
    if name not in valid:
        raise WorkloadError(
            f"{workload.model} trains on {_KIND_NAMES[shape.kind]}, which {name} data does not "
            "contain",
            f"Valid values for --data: {', '.join(valid)}",
        )
    if name in _IN_MEMORY:
        if workload.data_path is not None:
            others = [f"--data {other}" for other in valid if other not in _IN_MEMORY]
            raise WorkloadError(
                f"`--data-path` has no effect on {name} data, which is not read from files",
                f"Use {' or '.join(others)}" if others else "Remove --data-path",
            )
        return _in_memory(workload, shape, name)
    location = locate(workload)
    assert location is not None, name
    read = {"jpeg": _jpeg, "cifar100": _cifar, "video": _video}[name]
    dataset, classes = read(location.path, shape)
    total = len(dataset)  # type: ignore[arg-type]
    of = workload.samples or total
    if of > total:
        raise WorkloadError(
            f"`--samples {of}` is more than {location.path.name} has ({total})",
            f"Use at most {total}, or remove --samples",
        )
    chosen = choose_part(total, of, workload)
    facts: dict[str, Any] = {"name": name, "samples": len(chosen), "available_samples": of}
    facts["source"] = "generated" if location.generated else "folder"
    facts["path"] = location.path.name
    if size := read_about(location.path).get("bytes"):
        facts["bytes"] = size
    if classes > shape.classes:
        facts["note"] = f"the labels of the {classes} classes are taken modulo {shape.classes}"
    with torch.random.fork_rng(devices=[]):
        dataset[chosen[0]]  # fail here rather than in a worker, without using random numbers
    files: tuple[Path, ...] = ()
    samples = getattr(dataset, "samples", ())
    if samples and workload.page_cache != "as-is":  # a million paths take memory
        files = tuple(Path(samples[index][0]) for index in chosen)
    return Data(dataset if len(chosen) == total else Subset(dataset, chosen), facts, files)


def prepare_cache(workload: Workload, data: Data) -> dict[str, Any]:
    """Evict the files from the page cache or read them into it, and return the measured state."""
    if workload.page_cache == "as-is":
        return {"state": "as-is"}
    if not data.files:
        return {"state": "none", "note": "training does not read this data from files"}
    try:
        (pagecache.evict if workload.page_cache == "cold" else pagecache.warm)(data.files)
        share = pagecache.resident_share(data.files)
    except OSError as error:
        raise WorkloadError(f"Cannot read {error.filename}: {error.strerror}") from error
    if share is None:
        note = "the kernel reports cached pages only for files that the user owns"
        return {"state": "unknown", "resident_share": None, "note": note}
    state = "cold" if share <= _COLD else "warm" if share >= _WARM else "partly"
    facts = {"state": state, "resident_share": share}
    if state == workload.page_cache:
        return facts
    if workload.page_cache == "warm":
        return facts | {"note": f"only {share:.0%} of the file contents stayed in memory"}
    reason = "another process uses the files, or the file system is in memory"
    return facts | {"note": f"{share:.0%} of the file contents is still in memory: {reason}"}


def _in_memory(workload: Workload, shape: Shape, name: str) -> Data:
    is_text = shape.kind == "tokens"
    sizes = shape.batch_sizes(1)[1:]
    bytes_each = math.prod(sizes) * (8 if is_text else 4)
    least = workload.global_batch
    of = workload.samples or max(min(DEFAULT_COUNT, DEFAULT_BYTES // bytes_each), least)
    count = max(1, round(of * workload.fraction))
    # An error before the machine swaps or kills processes. The limit of the trial is not checked,
    # since exceeding it is a result. Every rank has a copy, and some may already be allocated.
    needed, memory = count * bytes_each, procfs.meminfo()
    free, total = memory.available or needed, memory.total or needed
    if needed > free or needed * workload.ranks > total:
        sizes_text = [f"{size / 2**30:.1f} GiB" for size in (needed, free, total)]
        copies = f" in each of {workload.ranks} ranks" if workload.ranks > 1 else ""
        raise WorkloadError(
            f"The data needs {sizes_text[0]}{copies}, but the machine has {sizes_text[1]} free "
            f"of {sizes_text[2]}",
            "Reduce --samples, --fraction or the size of a sample",
        )
    random = torch.Generator().manual_seed(workload.seed)
    inputs = (
        torch.randint(shape.vocabulary, (count, *sizes), generator=random)
        if is_text
        else torch.rand((count, *sizes), generator=random)
    )
    labels = torch.randint(shape.classes, (count,), generator=random)
    facts = {"name": name, "samples": count, "available_samples": of, "source": "memory"}
    facts["bytes"] = inputs.nbytes + labels.nbytes
    if workload.samples is None and of != DEFAULT_COUNT:
        facts["note"] = f"{of:,} samples instead of {DEFAULT_COUNT:,}, to use about 1 GiB"
    return Data(TensorDataset(inputs, labels), facts)


Read = tuple[Dataset[Any], int]
"""A dataset that reads files, and its number of classes."""


def choose_part(count: int, of: int, workload: Workload) -> Sequence[int]:
    """Indices of the samples to use: a fraction of `of` out of `count` samples.

    They are the beginning of a permutation, so that a smaller part is a subset of a larger one.
    """
    kept = max(1, round(of * workload.fraction))
    if kept == count:
        return range(count)
    random = torch.Generator().manual_seed(workload.seed)
    chosen: list[int] = torch.randperm(count, generator=random)[:kept].tolist()
    return chosen


def _transform(colors: tuple[tuple[float, ...], tuple[float, ...]], *augment: Any) -> Any:
    from torchvision.transforms import v2

    steps = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(*colors)]
    return v2.Compose([*augment, *steps])


def _jpeg(folder: Path, shape: Shape) -> Read:
    from torchvision.datasets import ImageFolder
    from torchvision.transforms import v2

    crop = v2.RandomResizedCrop(shape.size, antialias=True)
    transform = _transform(_IMAGENET, crop, v2.RandomHorizontalFlip())
    try:
        images = ImageFolder(str(folder), transform, partial(_within, shape.classes), _open_image)
    except OSError as error:
        raise WorkloadError(
            f"Cannot read images from {folder}: {error}",
            "The folder must contain a folder of images for each class",
        ) from error
    return images, len(images.classes)


def _open_image(path: str) -> Any:
    """Like the default loader of ImageFolder, with an error that names the file."""
    from torchvision.datasets.folder import pil_loader

    try:
        return pil_loader(path)
    except Exception as error:  # the decoders of Pillow raise many types
        raise WorkloadError(
            f"Cannot decode {path} as an image: {error}",
            "Remove or replace the file",
        ) from error


def _within(classes: int, label: int) -> int:
    return label % classes


class ImagesInMemory(Dataset[Any]):
    """Images in memory, augmented on access."""

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
    return ImagesInMemory(images, shape.classes, transform), int(images.labels.max()) + 1


class Clips(Dataset[Any]):
    """Random windows of video files, as color × time × height × width."""

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
        window = video.read_window(path, self._frames, _random_index)
        clip = self._transform(torch.from_numpy(window).permute(0, 3, 1, 2))
        return clip.permute(1, 0, 2, 3), label % self._classes


def _random_index(count: int) -> int:
    """Uses torch's generator, which the loader seeds differently in each worker."""
    return int(torch.randint(count, ()))


def _video(folder: Path, shape: Shape) -> Read:
    from torchvision.transforms import v2

    samples = labeled_files(folder, video.SUFFIXES)
    if not samples:
        raise WorkloadError(
            f"No videos found in the class folders of {folder}",
            f"Supported suffixes: {', '.join(video.SUFFIXES)}",
        )
    resized = [round(side * shape.size / 112) for side in (128, 171)]
    augment = [v2.Resize(resized, antialias=True), v2.RandomCrop(shape.size)]
    augment += [v2.RandomHorizontalFlip(), v2.ToDtype(torch.float32, scale=True)]
    transform = v2.Compose([*augment, v2.Normalize(*_KINETICS)])
    classes = max(label for _, label in samples) + 1
    return Clips(samples, shape.frames, shape.classes, transform), classes
