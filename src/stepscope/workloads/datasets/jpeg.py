"""Class folders of JPEGs like those of ImageNet, made once and reused.

Sizes are spread around 500×375, some stand upright, a file has about 110 kB. An image depends on
its number, its class and the seed alone, so a data set of another count shares its files.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from stepscope.workloads.datasets.store import Recipe, made_before, reuse_or_make
from stepscope.workloads.datasets.textures import (
    Fields,
    Plane,
    Random,
    make_fields,
    mixed,
    piece,
)

DEFAULT_COUNT = 1024
CLASSES = 10
_VERSION = 1
_QUALITY = 95
_FILE_BYTES = 110_000


def generated_jpegs(count: int = DEFAULT_COUNT, classes: int = CLASSES, seed: int = 0) -> Path:
    """A folder with so many images, equally many of each class."""
    classes = min(classes, count)
    family = f"jpeg-v{_VERSION}-seed{seed}-{classes}classes-"
    recipe = Recipe(
        f"{family}{count}",
        f"{count} generated JPEG images in {classes} class folders",
        _VERSION,
        count,
        count * _FILE_BYTES,
    )
    return reuse_or_make(recipe, lambda folder: _make(folder, count, classes, seed, family))


def _make(folder: Path, count: int, classes: int, seed: int, family: str) -> None:
    earlier = made_before(family)
    for label in range(classes):
        (folder / _class_name(label)).mkdir()
    for number, name in enumerate(_names(count, classes)):
        if not _linked(earlier, name, folder):
            _save(draw(seed, number, number % classes), folder / name)


def _names(count: int, classes: int) -> Iterator[Path]:
    return (Path(_class_name(n % classes)) / f"{n:07d}.jpg" for n in range(count))


def _class_name(label: int) -> str:
    return f"class{label:04d}"


def _linked(earlier: list[Path], name: Path, folder: Path) -> bool:
    """Whether a folder of another count has the file, and the file system shares files."""
    for other in earlier:
        try:
            os.link(other / name, folder / name)
            return True
        except OSError:
            continue
    return False


def draw(seed: int, number: int, label: int) -> tuple[Plane, Plane, Plane]:
    """Light and the two colours of one image: shapes before a ground, each with its own grain."""
    random, fields = Random([seed, 2, number]), make_fields(seed)
    height, width = _size(random)
    rough = piece(random, fields.rough, height, width)
    shapes = piece(random, fields.smooth, height, width) > random.randint(100, 156)
    front, ground = (_lit(random, fields, rough) for _ in range(2))
    blue = piece(random, fields.smooth, height, width) // 6 + rough // 16
    red = piece(random, fields.smooth, height, width) // 6 + rough // 16
    hue = label * 37 % 64 // 4
    return (
        np.where(shapes, front, ground),
        blue + np.uint8(96 + hue),
        red + np.where(shapes, np.uint8(92), np.uint8(108)),
    )


def _size(random: Random) -> tuple[int, int]:
    """Height and width; every fourth stands upright."""
    long = int(500 + random.randint(-60, 61) + random.randint(-60, 61))
    short = long * int(random.randint(60, 91)) // 100
    return (long, short) if random.randint(4) == 0 else (short, long)


def _lit(random: Random, fields: Fields, rough: Plane) -> Plane:
    return mixed(piece(random, fields.smooth, *rough.shape), rough, int(random.randint(64, 256)))


def _save(planes: tuple[Plane, Plane, Plane], path: Path) -> None:
    from PIL import Image

    image = Image.merge("YCbCr", [Image.fromarray(np.ascontiguousarray(p)) for p in planes])
    image.save(path, "JPEG", quality=_QUALITY)
