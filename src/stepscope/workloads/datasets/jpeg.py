"""Class folders of JPEGs like those of ImageNet, made once and reused.

Sizes are spread around 500×375, some stand upright, a file has about 110 kB. An image depends on
its number, its class and the seed alone, so a data set of another count shares its files.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from stepscope.workloads.datasets.store import Recipe, made_before, reuse_or_make
from stepscope.workloads.datasets.textures import Plane, Random, make_fields, mixed, piece

DEFAULT_COUNT = 1024
CLASSES = 10
_VERSION = 1
_QUALITY = 95
_FILE_BYTES = 110_000


def generated_jpegs(count: int = DEFAULT_COUNT, classes: int = CLASSES, seed: int = 0) -> Path:
    """A folder with so many images, equally many of each class."""
    classes = min(classes, count)
    family = f"jpeg-v{_VERSION}-seed{seed}-{classes}classes-"
    what = f"{count} generated JPEG images in {classes} class folders"
    recipe = Recipe(f"{family}{count}", what, _VERSION, count, count * _FILE_BYTES)
    return reuse_or_make(recipe, lambda folder: _make(folder, count, classes, seed, family))


def _make(folder: Path, count: int, classes: int, seed: int, family: str) -> None:
    from PIL import Image

    earlier = made_before(family)
    for number in range(count):
        label = number % classes
        name = Path(f"class{label:04d}") / f"{number:07d}.jpg"
        (folder / name.parent).mkdir(exist_ok=True)
        for other in earlier:  # a folder of another count has the same file: share it
            try:
                os.link(other / name, folder / name)
                break
            except OSError:
                continue
        else:
            planes = [Image.fromarray(np.ascontiguousarray(p)) for p in draw(seed, number, label)]
            Image.merge("YCbCr", planes).save(folder / name, "JPEG", quality=_QUALITY)


def draw(seed: int, number: int, label: int) -> tuple[Plane, Plane, Plane]:
    """Light and the two colours of one image: shapes before a ground, each with its own grain."""
    random, fields = Random([seed, 2, number]), make_fields(seed)
    long = int(500 + random.randint(-60, 61) + random.randint(-60, 61))
    short = long * int(random.randint(60, 91)) // 100
    height, width = (long, short) if random.randint(4) == 0 else (short, long)  # some upright
    rough = piece(random, fields.rough, height, width)
    shapes = piece(random, fields.smooth, height, width) > random.randint(100, 156)
    front, ground = (
        mixed(piece(random, fields.smooth, height, width), rough, int(random.randint(64, 256)))
        for _ in range(2)
    )
    blue = piece(random, fields.smooth, height, width) // 6 + rough // 16
    red = piece(random, fields.smooth, height, width) // 6 + rough // 16
    hue = label * 37 % 64 // 4
    return (
        np.where(shapes, front, ground),
        blue + np.uint8(96 + hue),
        red + np.where(shapes, np.uint8(92), np.uint8(108)),
    )
